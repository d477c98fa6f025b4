"""Load stages of vLLM 0.15.1 without adapters (``dense_stages.csv``): open loop, Poisson, ten minutes each.

Source: github.com/inference-sim/sim-to-real-accuracy-validation. Requests of a stage number 600 s times its
rate. E2E, TTFT and output tokens of every row give its ITL as ``(E2E - TTFT) / output tokens``, so the ITL of
a simulation is computed alike. The prompts are 45 texts: all but the last block of a prompt hits the prefix
cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pandas as pd

from benchmarks.measured.case import Deployment, gpu_key
from capplan import Lengths, Profile, Workload, simulate

FILE: Final = "dense_stages.csv"
VERSION: Final = "0.15.1"
STAGE_S: Final = 600.0
_COMPUTED_TOKENS: Final = 16
"""Prompt tokens that no cached block holds."""
_MAX_NUM_SEQS: Final = 1024
"""vLLM's default on GPUs of 70 GiB and more; never reached in these stages."""


@dataclass(frozen=True)
class Stage:
    """One row: a constant rate on one server."""

    name: str
    deployment: Deployment
    rate_rps: float
    prompt_tokens: float
    output_tokens: float
    max_num_batched_tokens: int
    measured: Mapping[str, float]

    def workload(self, model: str) -> Workload:
        """Return the traffic of the stage on a model by its Hugging Face id."""
        return Workload(
            base_model=model,
            adapters=[],
            base_rate_rps=self.rate_rps,
            prompt_tokens=Lengths(mean=round(self.prompt_tokens)),
            output_tokens=Lengths(mean=round(self.output_tokens)),
            shared_prefix_tokens=round(self.prompt_tokens) - _COMPUTED_TOKENS,
        )

    def predict(self, profile: Profile) -> Mapping[str, float]:
        """Return the simulated latencies, with the source's definition of ITL."""
        found = simulate(
            self.workload(profile.model.hf_ids[0]),
            profile,
            a_max=0,
            s_max=0,
            duration_s=STAGE_S,
            max_num_seqs=_MAX_NUM_SEQS,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        decoding_ms = 1e3 * (found.e2e_s_mean - found.ttft_s_mean)
        return {
            "itl_ms": decoding_ms / round(self.output_tokens),
            "ttft_ms": 1e3 * found.ttft_s_mean,
            "ttft_p90_ms": 1e3 * found.ttft_s_p90,
            "ttft_p99_ms": 1e3 * found.ttft_s_p99,
            "e2e_ms": 1e3 * found.e2e_s_mean,
        }


def read(folder: Path) -> list[Stage]:
    """Return the stages of the table in the order of its rows."""
    return [_stage(row) for row in pd.read_csv(folder / FILE).to_dict("records")]


def _stage(row: Mapping[str, object]) -> Stage:
    number = {name: float(str(value)) for name, value in row.items() if name not in _TEXTS}
    tp, budget = int(number["tp"]), int(number["max_num_batched_tokens"])
    measured = {
        "itl_ms": number["itl_ms_mean"],
        "ttft_ms": number["ttft_ms_mean"],
        "ttft_p90_ms": number["ttft_ms_p90"],
        "ttft_p99_ms": number["ttft_ms_p99"],
        "e2e_ms": number["e2e_ms_mean"],
    }
    name = f"{row['workload']} {number['rate_rps']:g} rps, budget {budget}, run {row['exp_id']}"
    return Stage(
        name=name,
        deployment=Deployment(gpu_key(str(row["hardware"])), str(row["model"]), tp, VERSION),
        rate_rps=number["rate_rps"],
        prompt_tokens=number["prompt_tokens"],
        output_tokens=number["output_tokens"],
        max_num_batched_tokens=budget,
        measured=measured,
    )


_TEXTS: Final = frozenset({"hardware", "model", "workload"})
