"""Operator tables: latencies that the package ``aiconfigurator-core`` holds of GPUs under vLLM.

The package (Apache-2.0) ships parquet tables of single operators, measured per GPU type and vLLM version, and
a compiled estimator of whole models. Its Python functions no longer answer for a single operator, so the
tables are read here, and the estimator serves as a comparison (``benchmarks.measured_check``).
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from capplan.datasets import GpuSheet, find_gpu, gpu_sheet, other_gpu
from capplan.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

PACKAGE: Final = "aiconfigurator_core"

FLASHINFER_EXPERTS: Final = "w4a8_mxfp4_mxfp8"
"""MXFP4 weights with MXFP8 activations, measured for gpt-oss under SGLang alone."""


@dataclass(frozen=True)
class System:
    """GPU type with measured operators."""

    key: str
    """Name of its folder in the package."""
    sheet_key: str
    """Name of its data sheet, see `capplan.datasets._catalog.gpu_sheet`."""
    fuses_all_reduce: bool = False
    """Whether vLLM's all-reduces are FlashInfer's: TensorRT-LLM's, with the norm that follows in them."""

    @property
    def sheet(self) -> GpuSheet:
        """Data sheet of the GPU."""
        return gpu_sheet(self.sheet_key)


SYSTEMS: Final = (
    System("a100_sxm", "a100-80g"),
    System("h100_sxm", "h100-80g"),
    System("h200_sxm", "h200"),
    System("l40s", "l40s"),
    System("b200_sxm", "b200", fuses_all_reduce=True),
    System("rtx_pro_6000_server", "rtx-pro-6000"),
)


def system_of(gpu: str) -> System:
    """Return the measured GPU type of a name: the package's, or one that `gpu_sheet` knows."""
    sheet = find_gpu(gpu)
    for system in SYSTEMS:
        if gpu.lower() == system.key or (sheet is not None and sheet.key == system.sheet_key):
            return system
    known = ", ".join(f"{each.sheet_key} ({each.key})" for each in SYSTEMS)
    raise InputError(f"must be a GPU with measured operators: {known}; {other_gpu(gpu)}", gpu, "--gpu")


@dataclass(frozen=True)
class OperatorTables:
    """Measured operators of one GPU type, in milliseconds; see `operator_tables`."""

    system: System
    version: str
    """vLLM version of the matrix products and of attention."""
    gemm: pd.DataFrame
    """Columns ``gemm_dtype``, ``m``, ``n``, ``k``, ``latency``."""
    prefill: pd.DataFrame
    """Attention of whole prompts: ``batch_size``, ``isl``, ``num_heads``, ``num_key_value_heads``,
    ``head_dim``, ``kv_cache_dtype``.
    """
    decode: pd.DataFrame
    """Attention of one token per request: the same with ``step``, the tokens of context."""
    all_reduce: pd.DataFrame
    """Columns ``num_gpus``, ``message_size`` (elements), ``latency``, in CUDA graphs; see `System`."""
    experts: pd.DataFrame
    """Products of experts: ``moe_dtype``, ``num_tokens``, sizes, ``moe_tp_size``, ``moe_ep_size``,
    ``distribution``, ``latency``.
    """
    quantize: pd.DataFrame
    """Quantization of activations to FP8: ``m``, ``k``, ``latency``; empty where not measured."""

    @property
    def source(self) -> str:
        """Source of the tables, in words."""
        package = f"operator tables of aiconfigurator-core {package_version()}"
        return f"{package}: {self.system.key}, vLLM {self.version}"


def package_version() -> str:
    """Return the version of the installed package of tables."""
    from importlib.metadata import version

    return version("aiconfigurator-core")


@functools.cache
def operator_tables(gpu: str) -> OperatorTables:
    """Return the measured operators of a GPU type, of the newest vLLM version in the package.

    Raises
    ------
    InputError
        For a GPU without tables, or if the package is not installed.
    """
    system = system_of(gpu)
    folder = _data_folder() / system.key
    gemm, version = _newest(folder / "gemm" / "vllm", "gemm_perf")
    prefill, _ = _newest(folder / "attention" / "vllm", "context_attention_perf")
    decode, _ = _newest(folder / "attention" / "vllm", "generation_attention_perf")
    experts = _experts(folder / "moe")
    all_reduce, _ = _newest(
        folder / "comm" / ("trtllm" if system.fuses_all_reduce else "vllm"), "custom_allreduce_perf"
    )
    if not system.fuses_all_reduce:
        all_reduce = all_reduce[all_reduce["backend"] == "vllm_graph"]
    return OperatorTables(
        system=system,
        version=version,
        gemm=_fastest(gemm, ["gemm_dtype", "m", "n", "k"]),
        prefill=_full_attention(prefill, "isl"),
        decode=_full_attention(decode, "step"),
        all_reduce=_fastest(all_reduce, ["num_gpus", "message_size"]),
        experts=experts,
        quantize=_quantize(folder / "quantize" / "vllm"),
    )


def _data_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        rule = "needs the operator tables: pip install '.[measured]', in the checkout"
        raise InputError(rule, location="capplan profile compose")
    return Path(spec.submodule_search_locations[0]) / "systems" / "data"


def _newest(folder: Path, name: str) -> tuple[pd.DataFrame, str]:
    import pandas as pd

    files = sorted(folder.glob(f"*/{name}.parquet"), key=lambda file: _release(file.parent.name))
    if not files:
        raise InputError(
            "must hold tables of vLLM", location=f"{PACKAGE}: {folder.parent.parent.name}/{name}"
        )
    return pd.read_parquet(files[-1]), files[-1].parent.name


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def _fastest(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return one row per shape: the fastest of the kernels that were measured, which an engine selects."""
    return table.groupby(keys, as_index=False).agg({"latency": "min"})


def _full_attention(table: pd.DataFrame, length: str) -> pd.DataFrame:
    """Return attention without a window; a window is a shorter context, see `ForwardPass`."""
    chosen = table[table["window_size"] == 0] if "window_size" in table else table
    heads = ["kv_cache_dtype", "head_dim", "num_heads", "num_key_value_heads"]
    return _fastest(chosen, [*heads, "batch_size", length])


def _experts(folder: Path) -> pd.DataFrame:
    """Return experts under vLLM, and under SGLang where both call the same kernel of FlashInfer."""
    import pandas as pd

    under_vllm, _ = _newest(folder / "vllm", "moe_perf")
    if not (folder / "sglang").is_dir():
        return under_vllm
    others, _ = _newest(folder / "sglang", "moe_perf")
    shared = others[others["moe_dtype"] == FLASHINFER_EXPERTS]
    return pd.concat([under_vllm, shared], ignore_index=True)


def _quantize(folder: Path) -> pd.DataFrame:
    import pandas as pd

    if not folder.is_dir():
        return pd.DataFrame({"m": np.empty(0), "k": np.empty(0), "latency": np.empty(0)})
    parts = [_newest(folder, name)[0] for name in ("computescale_perf", "scale_matrix_perf")]
    both = pd.concat(_fastest(part, ["m", "k"]) for part in parts)
    return both.groupby(["m", "k"], as_index=False).agg({"latency": "sum"})
