"""Rank sweeps of S-LoRA's kernels (``loraserve_authors/rank_sweeps.csv``): single requests, BGMV path.

Source: github.com/shashwatj07/S-LoRA. GPU and TP are not in the files: A100 SXM 40 GB and TP 8 are inferred.
The metrics are ratios of prefill times, of a rank over rank 8: TTFT of a request alone, 2,000 prompt tokens.
No coefficient is fitted on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pandas as pd

from benchmarks.measured.case import SLORA, Deployment, ProfileFor
from capplan import Adapter, InfeasibleError, InputError, Lengths, Profile, Workload
from capplan.spec import EngineArgs, allowed_lora_rank
from capplan.twin import build_scenario
from capplan.twin.core import run
from capplan.twin.scenario import draw_for

FILE: Final = "loraserve_authors/rank_sweeps.csv"
PROMPT_TOKENS: Final = 2000
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
    measured: Mapping[str, float]

    def predict(self, profile: Profile) -> Mapping[str, float]:
        """Return the simulated ratios."""
        ranks = sorted(int(metric.removeprefix("prefill_ratio_")) for metric in self.measured)
        base_ms = prefill_ms(profile, 8)
        return {f"prefill_ratio_{rank}": prefill_ms(profile, rank) / base_ms for rank in ranks}


def prefill_ms(profile: Profile, rank: int, prompt_tokens: int = PROMPT_TOKENS) -> float:
    """Return the milliseconds from arrival to first token of a request alone, its adapter resident."""
    adapter = Adapter(name="a", rank=rank, rate_rps=1.0)
    workload = Workload(
        base_model=profile.model.hf_ids[0],
        adapters=[adapter],
        prompt_tokens=Lengths(mean=prompt_tokens),
        output_tokens=Lengths(mean=4),
    )
    args = EngineArgs(
        max_loras=1,
        max_lora_rank=allowed_lora_rank(rank),
        max_num_seqs=16,
        max_num_batched_tokens=4096,
        max_model_len=4096 if profile.model.max_positions is None else min(4096, profile.model.max_positions),
        gpu_memory_utilization=0.9,
    )
    requests = draw_for(workload, profile, 10.0, 0, args.max_model_len)
    one = type(requests)(*(column[:1] for column in requests))
    scenario = build_scenario(workload, profile, args, duration_s=1e3, seed=0, requests=one)
    loads = scenario.costs.load_ns * 0
    trace = run(scenario._replace(costs=scenario.costs._replace(load_ns=loads, disk_ns=loads)))
    return float(trace.first_ns[0] - one.arrival_ns[0]) / 1e6


def ratios_by_tp(
    sweeps: Sequence[RankSweep], methods: Mapping[str, ProfileFor]
) -> Iterator[dict[str, object]]:
    """Yield simulated ratios of prefills at rank 128 over rank 8, by tensor parallelism."""
    for sweep, (method, profile_for) in itertools.product(sweeps, methods.items()):
        line: dict[str, object] = {"model": sweep.deployment.model, "method": method}
        for tp in _TPS:
            try:
                profile = profile_for(replace(sweep.deployment, tp=tp), None)
                line[f"TP {tp}"] = f"{prefill_ms(profile, 128) / prefill_ms(profile, 8):.2f}"
            except (InputError, InfeasibleError):
                line[f"TP {tp}"] = "-"
        yield line


def read(folder: Path) -> list[RankSweep]:
    """Return one sweep per model."""
    table = pd.read_csv(folder / FILE)
    alone = table[(table["req_rate"] == 1) & (table["prompt_tokens"] == PROMPT_TOKENS)]
    sweeps = []
    for (model, tp), rows in alone.groupby(["model", "tp"], sort=False):
        ttft_s = rows.set_index("rank")["ttft_mean_s"]
        measured = {
            f"prefill_ratio_{rank}": float(ttft_s[rank] / ttft_s[8])
            for rank in sorted(ttft_s.index[ttft_s.index > 8])
        }
        deployment = Deployment(_GPU, _MODELS[str(model)], int(tp), SLORA, "float16")
        sweeps.append(RankSweep(f"{PROMPT_TOKENS} tokens", deployment, measured))
    return sweeps
