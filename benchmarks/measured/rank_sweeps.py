"""Rank sweeps of S-LoRA's kernels (``loraserve_authors/rank_sweeps.csv``): single requests, BGMV path.

Source: github.com/shashwatj07/S-LoRA. GPU and TP are not in the files: A100 SXM 40 GB and TP 8 are inferred;
Llama-30B counts at TP 4, since 8 does not divide its 52 heads. The metrics are ratios of prefill times, of a
rank over rank 8: TTFT of a request alone, 2,000 prompt tokens. No coefficient is fitted on them. The time at
rank 8 is that of an engine whose host takes most of it; it comes from a line through shorter prompts at rank
8. The rank term of a profile adds the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import pandas as pd

from benchmarks.measured.case import SLORA, Deployment, ProfileFor
from capplan import InfeasibleError, InputError, Profile
from capplan.datasets import model_arch

FILE: Final = "loraserve_authors/rank_sweeps.csv"
PROMPT_TOKENS: Final = 2000
COLD_START_TOKENS: Final = 100
"""Prompts up to which the first request of a run was measured, with its start-up."""
_MODELS: Final = MappingProxyType(
    {
        "llama-7b": "huggyllama/llama-7b",
        "llama-30b": "huggyllama/llama-30b",
        "llama-70b": "meta-llama/Llama-2-70b-hf",
    }
)
_GPU: Final = "a100-40g"
_TPS: Final = (1, 2, 4, 8)


@dataclass(frozen=True)
class RankSweep:
    """The ranks of one model."""

    name: str
    deployment: Deployment
    rank_8_ms: float
    """Prefill at rank 8, by a line through shorter prompts."""
    measured: Mapping[str, float]

    def predict(self, profile: Profile) -> Mapping[str, float]:
        """Return the ratios by the rank term of a profile."""
        ms_per_rank = profile.step_latency.value("ms_per_prefill_krank") * PROMPT_TOKENS / 1e3
        return {
            metric: 1.0 + ms_per_rank * (int(metric.removeprefix("prefill_ratio_")) - 8) / self.rank_8_ms
            for metric in self.measured
        }


def ratios_by_tp(
    sweeps: Sequence[RankSweep], methods: Mapping[str, ProfileFor]
) -> Iterator[dict[str, object]]:
    """Yield ratios of prefills at rank 128 over rank 8, by tensor parallelism of the adapters."""
    for sweep, (method, profile_for) in itertools.product(sweeps, methods.items()):
        line: dict[str, object] = {"model": sweep.deployment.model, "method": method}
        for tp in _TPS:
            try:
                profile = profile_for(replace(sweep.deployment, tp=tp), None)
                line[f"TP {tp}"] = f"{sweep.predict(profile)['prefill_ratio_128']:.2f}"
            except (InputError, InfeasibleError):
                line[f"TP {tp}"] = "-"
        yield line


def read(folder: Path) -> list[RankSweep]:
    """Return one sweep per model."""
    table = pd.read_csv(folder / FILE)
    alone = table[(table["req_rate"] == 1) & (table["prompt_tokens"] > COLD_START_TOKENS)]
    sweeps = []
    for (model, tp), rows in alone.groupby(["model", "tp"], sort=False):
        longest = rows[rows["prompt_tokens"] == PROMPT_TOKENS].set_index("rank")["ttft_mean_s"]
        measured = {
            f"prefill_ratio_{rank}": float(longest[rank] / longest[8])
            for rank in sorted(longest.index[longest.index > 8])
        }
        shorter = rows[(rows["rank"] == 8) & (rows["prompt_tokens"] < PROMPT_TOKENS)]
        line = np.polyfit(shorter["prompt_tokens"], shorter["ttft_mean_s"], 1)
        rank_8_ms = 1e3 * float(np.polyval(line, PROMPT_TOKENS))
        hf_id = _MODELS[str(model)]
        fitting = max(each for each in _TPS if each <= tp and model_arch(hf_id).heads % each == 0)
        deployment = Deployment(_GPU, hf_id, fitting, SLORA, "float16")
        sweeps.append(RankSweep(f"{PROMPT_TOKENS} tokens", deployment, rank_8_ms, measured))
    return sweeps
