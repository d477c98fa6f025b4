"""Milliseconds of the experts of one layer, between and beyond the measured numbers of tokens.

A table holds each model's own shape: the routed products of all experts that a GPU has, for so many tokens of
the whole batch. Tokens are routed unevenly, by a power law, as in served models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.models.compose._tables import FLASHINFER_EXPERTS

if TYPE_CHECKING:
    import pandas as pd

    from capplan.spec import Experts

Floats = NDArray[np.float64]

ROUTING: Final = "power_law_1.01"
"""Distribution of tokens over experts; the table also has an even one and a steeper power law."""

SPREADS: Final = {"GptOssForCausalLM": 0.45}
"""Of models whose tokens pass fewer different experts than those of the table. Fitted on rows of gpt-oss-120b
on H100s (``benchmarks.measured_check --only silicon_moe``); rows of MiniMax-M2.5 need none.
"""

EXPERTS_ERROR: Final = (
    "mean TPOT of mixtures of experts: median error 5.8 %, 90th percentile 18 %, on 202 closed loops of "
    "MiniMax-M2.5 and gpt-oss-120b under vLLM 0.11 to 0.19, of which 46 fix one number of gpt-oss"
)
"""``benchmarks.measured_check --only silicon_moe``: rows that name a version, without those of Qwen3-235B."""

_SPREAD_TOKENS: Final = (256.0, 2048.0)
"""Batches up to which the spread holds, and from which all experts are in use."""

DTYPES: Final = {"mxfp4": "w4a16_mxfp4", "mxfp4_mxfp8": FLASHINFER_EXPERTS, "int4": "int4_wo"}
"""Names of dtypes in the table, if they are others."""


@dataclass(frozen=True)
class ExpertTimes:
    """Times of the experts of one layer on one GPU."""

    log_tokens: Floats
    log_ms: Floats
    spread: float = 1.0
    """Tokens of the table that pass as many different experts, per token of a small batch; see `SPREADS`."""

    def ms(self, tokens: Floats) -> Floats:
        """Return milliseconds for `tokens`, of their shape; beyond the measured ones in proportion."""
        log = np.log(np.maximum(np.asarray(tokens, dtype=float), 1.0))
        few, many = np.log(_SPREAD_TOKENS)
        log = np.maximum(0.0, log + np.log(self.spread) * np.clip((many - log) / (many - few), 0.0, 1.0))
        beyond = np.maximum(log - self.log_tokens[-1], 0.0)
        return np.asarray(np.exp(np.interp(log, self.log_tokens, self.log_ms) + beyond))


def expert_times(
    table: pd.DataFrame,
    experts: Experts,
    hidden_size: int,
    dtype: str,
    tp: int,
    *,
    expert_parallel: bool = False,
    spread: float = 1.0,
) -> ExpertTimes:
    """Return the times of a model's experts from an operator table.

    Parameters
    ----------
    dtype
        Of their weights.
    tp
        GPUs per copy of the model, which share each expert, or the experts if `expert_parallel`.
    spread
        See `ExpertTimes`.

    Raises
    ------
    InputError
        If experts of these sizes, dtype and `tp` were not measured on this GPU.
    """
    shape = {
        "hidden_size": hidden_size,
        "inter_size": experts.intermediate_size,
        "topk": experts.per_token,
        "num_experts": experts.number,
    }
    of_shape = table
    for name, value in shape.items():
        of_shape = of_shape[of_shape[name] == value]
    if of_shape.empty:
        rule = "must have experts of a shape with measured products on this GPU"
        raise InputError(rule, ", ".join(f"{name} {value}" for name, value in shape.items()), "--model")
    measured = of_shape[of_shape["moe_dtype"] == DTYPES.get(dtype, dtype)]
    if measured.empty:
        known = ", ".join(sorted(of_shape["moe_dtype"].unique()))
        raise InputError(f"must be a dtype with measured experts on this GPU: {known}", dtype, "--dtype")
    shares = (1, tp) if expert_parallel else (tp, 1)
    rows = measured[(measured["moe_tp_size"] == shares[0]) & (measured["moe_ep_size"] == shares[1])]
    fastest = rows[rows["distribution"] == ROUTING].groupby("num_tokens")["latency"].min().sort_index()
    if fastest.empty:
        raise InputError("must have experts that were measured on this GPU", tp, "--tp")
    ms = np.maximum.accumulate(fastest.to_numpy(dtype=float))
    return ExpertTimes(np.log(fastest.index.to_numpy(dtype=float)), np.log(ms), spread)
