"""LoRA terms of a composed profile, carried over from the measured H100 profiles of vLLM 0.8.5.

No table of vLLM's LoRA kernels on other GPUs is known. A kernel's time is split by what it depends on, and
each part is carried over by its own ratio:

- launches and exits of blocks, and work per adapter: the time of dense products of LoRA's shapes (inputs or
  outputs of a rank) on this GPU over those on an H100;
- bytes of A and B: elements per layer and rank of this model on one GPU, over memory bandwidth;
- activations per token: their bytes, over memory bandwidth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from capplan.datasets import GpuSheet, gpu_sheet, model_arch
from capplan.models._roofline import VllmLora, activation_bytes
from capplan.models.compose._tables import OperatorTables, operator_tables
from capplan.serving import lora_elements_per_rank
from capplan.spec import Coefficient, ModelArch

if TYPE_CHECKING:
    import pandas as pd

REFERENCE_GPU: Final = "h100_sxm"
"""GPU with operator tables whose processor is that of the measured profiles; its memory is faster."""

CARRIED_STD_ERROR: Final = 0.3
"""Relative standard error of carried terms. Terms per layer of the two measured profiles, of one GPU and
version, differ by up to 20 %, those of empty slots by more; ratios between GPUs and versions are assumed to
add as much.
"""

_MEASURED_SHEET: Final = "h100-64g"
_MEASURED_MODEL: Final = "llama-3.1-8b"
_RANKS: Final = (32, 64)
_WIDTHS: Final = (1024, 16384)
_ROWS: Final = (1, 64)
_BY_BYTES: Final = frozenset({"us_per_slot_rank16", "us_per_adapter_rank16", "us_per_adapter_small_rank16"})
_BY_HOST: Final = frozenset({"us_per_adapter_queued"})


def small_product_ratio(tables: OperatorTables) -> float:
    """Return the time of products of LoRA's shapes on a GPU over that on an H100: their geometric mean."""
    ratio = _small_products(tables) / _small_products(
        operator_tables(REFERENCE_GPU)
    )  # NaN where one is missing
    return float(np.exp(np.log(ratio).mean()))


def lora_coefficients(
    sheet: GpuSheet, arch: ModelArch, tp: int, small_product_ratio: float
) -> dict[str, Coefficient]:
    """Return LoRA terms of the step model in milliseconds, with standard errors.

    Parameters
    ----------
    sheet
        The GPU.
    arch
        Base model.
    tp
        GPUs per copy of the model.
    small_product_ratio
        Time of products of LoRA's shapes over that on an H100.
    """
    carried, measured = VllmLora(), gpu_sheet(_MEASURED_SHEET)
    bandwidth = measured.bytes_per_s / sheet.bytes_per_s
    elements = _elements_per_layer(arch, tp) / _elements_per_layer(model_arch(_MEASURED_MODEL), 1)
    values = {}
    for name, us in vars(carried).items():
        if not name.startswith("us_"):
            continue
        ratio = (
            elements * bandwidth if name in _BY_BYTES else 1.0 if name in _BY_HOST else small_product_ratio
        )
        values[f"ms_{name.removeprefix('us_')}"] = arch.layers * us * ratio / 1e3
    activations_ms = activation_bytes(arch, tp) / (sheet.bytes_per_s / 1e3)
    values["ms_per_lora_ktoken"] = 1e3 * carried.traffic * activations_ms
    return {name: Coefficient(value=v, std_error=CARRIED_STD_ERROR * v) for name, v in values.items()}


def _small_products(tables: OperatorTables) -> pd.Series[float]:
    """Return the milliseconds of products of LoRA's shapes, by rows, outputs and inputs."""
    table = tables.gemm[tables.gemm["gemm_dtype"] == "bfloat16"]
    shrink = table["n"].isin(_RANKS) & table["k"].between(*_WIDTHS)
    expand = table["k"].isin(_RANKS) & table["n"].between(*_WIDTHS)
    return table[(shrink | expand) & table["m"].between(*_ROWS)].set_index(["m", "n", "k"])["latency"]


def _elements_per_layer(arch: ModelArch, tp: int) -> float:
    """Return what a token's adapter reads in a layer: of experts, those that the token passes."""
    if arch.experts is not None:
        arch = arch.replace(experts=arch.experts.replace(number=arch.experts.per_token))
    return lora_elements_per_rank(arch, tp) / arch.layers
