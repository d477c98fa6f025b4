"""The published hour-long vLLM runs: what a planner would have known of each, and what was measured.

Source: runs.csv, extracted from the artefacts of Agullo et al. (arXiv 2508.08343). A planner knows adapters,
ranks, rates and the mean and spread of lengths; it does not know the arrivals, the lengths themselves, or
which rank got which rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from capplan.spec import Adapter, Lengths, Profile, Workload
from capplan.twin.core import run
from capplan.twin.result import SimulationResult
from capplan.twin.scenario import Scenario
from capplan.twin.simulate import simulate
from capplan.twin.trace import Trace

GROUPS = ("dt_real_results", "ml_test_dataset")
MAX_NUM_SEQS = 2048
TOKEN_BUDGET = 2048
CLIENT_MAX_IN_FLIGHT = 25_000
"""Connections that the client of those runs could hold open."""

_KV_FULL = 0.97

LENGTHS = {
    "llama-3.1-8b-instruct": (Lengths(mean=223, std=245), Lengths(mean=194, std=206)),
    "qwen-2.5-7b-instruct": (Lengths(mean=223, std=245), Lengths(mean=190.5, std=206)),
}
"""Prompt and completed-output lengths over all runs of a model."""


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
    starved: bool
    itl_ms_mean: float
    itl_is_reliable: bool
    """False where the median ITL is under 1 ms: the client read tokens in bursts."""
    ttft_s_p50: float
    ttft_s_mean_charged: float
    """Unfinished requests charged the whole run; NaN where requests were not counted as they were sent."""
    mean_running: float
    mean_waiting: float
    kv_bound: bool
    """Whether the KV cache was ever full."""
    client_bound: bool
    """Whether the client ran out of connections, so that requests failed without reaching the engine."""

    @property
    def queued(self) -> bool:
        """Whether requests waited, most of the time."""
        return self.mean_waiting >= 1.0

    def simulate(
        self,
        profile: Profile,
        seed: int = 0,
        duration_s: float = 3600.0,
        length_correlation: float | None = None,
        runner: Callable[[Scenario], Trace] = run,
    ) -> SimulationResult:
        """Return what the twin predicts for this run; lengths as the profile correlates them, unless told."""
        return simulate(
            self.workload.model_copy(update={"length_correlation": length_correlation}),
            profile,
            a_max=self.a_max,
            s_max=self.s_max,
            duration_s=duration_s,
            seed=seed,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=TOKEN_BUDGET,
            max_in_flight=CLIENT_MAX_IN_FLIGHT,
            runner=runner,
        )


def published_runs(reference: Path, model: str, groups: tuple[str, ...] = GROUPS) -> list[PublishedRun]:
    """Return the undisturbed finished runs of a model, in the order of the table.

    Parameters
    ----------
    reference
        Folder with runs.csv.
    model
        Its key in the table.
    groups
        Groups of runs to take.
    """
    table = pd.read_csv(reference / "runs.csv")
    kept = (
        (table.status == "ok")
        & (table.model == model)
        & table.group.isin(groups)
        & ~table.anomalies.fillna("").str.contains("exclude", regex=False)
    )
    return [_run(row) for _, row in table[kept].iterrows()]


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
    """Ranks go round the adapters in turn; rates are dealt to them at random, as the server's shuffle did."""
    counts = [int(count) for count in row.rate_counts.split()]
    rates = np.repeat([float(rate) for rate in row.rate_values.split()], counts)
    np.random.default_rng(int(row.run_idx)).shuffle(rates)
    ranks = [int(rank) for rank in row.rank_list.split()]
    prompt, output = LENGTHS[row.model]
    adapters = [
        Adapter(name=f"dummy-{i}", rank=ranks[i % len(ranks)], rate_rps=float(rate))
        for i, rate in enumerate(rates)
    ]
    return Workload(
        base_model=row.model, adapters=tuple(adapters), prompt_tokens=prompt, output_tokens=output
    )
