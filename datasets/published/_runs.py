"""The published hour-long vLLM runs: workload and settings of each run, and its measurements.

Source: runs.csv (see `capplan.datasets.published`). The workload holds what a planner would have known:
adapters, ranks, rates, and mean and spread of the lengths. Arrivals, lengths of single requests and the
assignment of rates to ranks were not published.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pandas as pd

from capplan.datasets._profile_files import load_profile
from capplan.spec import Adapter, Lengths, ModelArch, Workload

GROUPS: Final = ("dt_real_results", "ml_test_dataset")
MAX_NUM_SEQS: Final = 2048
TOKEN_BUDGET: Final = 2048
UTILIZATION: Final = 0.9
CLIENT_MAX_IN_FLIGHT: Final = 25_000
"""Connections that the client of the runs could hold open."""

LENGTHS: Final = MappingProxyType(
    {
        "llama-3.1-8b-instruct": (Lengths(mean=223, std=245), Lengths(mean=194, std=206)),
        "qwen-2.5-7b-instruct": (Lengths(mean=223, std=245), Lengths(mean=190.5, std=206)),
    }
)
"""Prompt and completed-output lengths over all runs of a model."""

PROMPT_TOKENS: Final = (4, 1024)
"""Shortest and longest prompt: the client of the runs kept conversations of these lengths."""

_KV_FULL: Final = 0.97


@dataclass(frozen=True)
class PublishedModel:
    """One of the two measured models."""

    key: str
    """Name in the tables."""
    profile: str
    """Name of the shipped profile."""

    @property
    def arch(self) -> ModelArch:
        """Architecture, as in the shipped profile."""
        return load_profile(self.profile).model


PUBLISHED: Final = (
    PublishedModel(key="llama-3.1-8b-instruct", profile="h100-64g/llama-3.1-8b/vllm-0.8.5"),
    PublishedModel(key="qwen-2.5-7b-instruct", profile="h100-64g/qwen2.5-7b/vllm-0.8.5"),
)


@dataclass(frozen=True)
class PublishedRun:
    """One measured run."""

    index: int
    group: str
    model: str
    workload: Workload
    a_max: int
    s_max: int
    throughput_tok_s: float
    offered_tok_s: float
    sent_share: float
    """Requests sent over those expected at the nominal rates; NaN if they were not counted."""
    starved: bool
    itl_ms_mean: float
    itl_is_reliable: bool
    """False if the median ITL is under 1 ms: the client read tokens in bursts."""
    ttft_s_p50: float
    ttft_s_mean_charged: float
    """Unfinished requests charged the whole run; NaN if sent requests were not counted."""
    mean_running: float
    mean_waiting: float
    kv_bound: bool
    """Whether the KV cache was ever full."""
    client_bound: bool
    """Whether the client ran out of connections, so that requests failed before reaching the engine."""

    @property
    def queued(self) -> bool:
        """Whether requests waited most of the time."""
        return self.mean_waiting >= 1.0

    @property
    def settings(self) -> dict[str, Any]:
        """Engine settings, as arguments of `simulate`."""
        return {
            "a_max": self.a_max,
            "s_max": self.s_max,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "max_in_flight": CLIENT_MAX_IN_FLIGHT,
        }


def undisturbed_runs(
    reference: Path, model: PublishedModel, groups: tuple[str, ...] = GROUPS
) -> pd.DataFrame:
    """Return the rows of runs.csv of a model, without runs that disturbed each other, by ``run_idx``."""
    table = pd.read_csv(reference / "runs.csv").set_index("run_idx", drop=False)
    disturbed = table.anomalies.fillna("").str.contains("exclude", regex=False)
    return table[(table.model == model.key) & table.group.isin(groups) & ~disturbed]


def published_runs(
    reference: Path, model: PublishedModel, groups: tuple[str, ...] = GROUPS
) -> list[PublishedRun]:
    """Return the undisturbed finished runs of a model, in the order of the table.

    Parameters
    ----------
    reference
        Folder with runs.csv.
    model
        The model.
    groups
        Groups of runs.
    """
    table = undisturbed_runs(reference, model, groups)
    return [_run(row) for _, row in table[table.status == "ok"].iterrows()]


def _run(row: pd.Series) -> PublishedRun:
    return PublishedRun(
        index=int(row.run_idx),
        group=row.group,
        model=row.model,
        workload=_workload(row),
        a_max=int(row.a_max),
        s_max=int(row.s_max),
        throughput_tok_s=float(row.total_throughput),
        offered_tok_s=float(row.offered_tok_s),
        sent_share=float(row.arrivals_sent) / float(row.arrivals_expected),
        starved=bool(row.starved),
        itl_ms_mean=float(row.itl_mean_ms),
        itl_is_reliable=bool(row.itl_median_ms >= 1.0),
        ttft_s_p50=float(row.ttft_median_ms) / 1e3,
        ttft_s_mean_charged=float(row.ttft_mean_authors_def_ms) / 1e3,
        mean_running=float(row.mean_running),
        mean_waiting=float(row.mean_waiting),
        kv_bound=bool(row.max_kv_usage > _KV_FULL),
        client_bound="client_port_exhaustion" in str(row.anomalies),
    )


def _workload(row: pd.Series) -> Workload:
    """Ranks cycle over the adapters; rates are assigned at random, like the server's shuffle did."""
    counts = [int(count) for count in row.rate_counts.split()]
    rates = np.repeat([float(rate) for rate in row.rate_values.split()], counts)
    np.random.default_rng(int(row.run_idx)).shuffle(rates)
    ranks = [int(rank) for rank in row.rank_list.split()]
    prompt, output = LENGTHS[row.model]
    adapters = tuple(
        Adapter(name=f"dummy-{i}", rank=ranks[i % len(ranks)], rate_rps=float(rate))
        for i, rate in enumerate(rates)
    )
    return Workload(base_model=row.model, adapters=adapters, prompt_tokens=prompt, output_tokens=output)
