"""Tables of simulations of one GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from capplan.errors import InfeasibleError
from capplan.reports._console import DASH, Table, number, percent
from capplan.reports.tables._scheduling import pool_rows
from capplan.spec import describe_latency

if TYPE_CHECKING:
    from capplan.spec import Cache, Scheduler
    from capplan.twin import DetailedResult, SimulationResult


Outcomes: TypeAlias = "Mapping[int, SimulationResult | InfeasibleError]"
"""Result of each number of slots."""


Details: TypeAlias = "Mapping[int, DetailedResult]"
"""Details of each number of slots that fits."""


_ROWS: Final = (  # metric of the result, its name with unit, decimals
    ("throughput_tok_s", "throughput, tok/s", 0),
    ("offered_tok_s", "offered, tok/s", 0),
    ("input_tok_s", "input, tok/s", 0),
    ("output_tok_s", "output, tok/s", 0),
    ("ttft_s_mean", "TTFT mean, s", 3),
    ("ttft_s_p50", "TTFT p50, s", 3),
    ("ttft_s_p90", "TTFT p90, s", 3),
    ("ttft_s_p99", "TTFT p99, s", 3),
    ("tpot_ms_mean", "TPOT mean, ms", 2),
    ("tpot_ms_p99", "TPOT p99, ms", 2),
    ("itl_ms_mean", "ITL mean, ms", 2),
    ("itl_ms_p99", "ITL p99, ms", 2),
    ("e2e_s_p99", "E2E p99, s", 2),
    ("tpt_ms_mean", "TPT mean, ms", 2),
    ("interruption_count_p50", "interruptions p50", 0),
    ("interruption_share_mean", "interrupted share of E2E, mean", 3),
    ("completed", "completed requests", 0),
    ("submitted", "submitted requests", 0),
    ("rejected", "rejected requests", 0),
    ("preemptions", "preemptions", 0),
    ("adapter_loads", "adapter loads", 0),
    ("running_mean", "running, mean", 1),
    ("waiting_mean", "waiting, mean", 1),
    ("kv_tokens", "KV capacity, tokens", 0),
)


_DETAIL_ROWS: Final = (  # metric of all requests, statistic, its name with unit, decimals
    ("slowdown", "p50", "slowdown p50", 2),
    ("slowdown", "p99", "slowdown p99", 2),
    ("queue_s", "p99", "queueing p99, s", 3),
    ("load_wait_s", "p99", "wait for loads p99, s", 3),
)


def metrics_table(
    outcomes: Outcomes,
    details: Details,
    names: Mapping[int, str],
    pair: tuple[Scheduler, Cache] | None = None,
) -> Table:
    """Return the metrics, one column per number of slots with its name; those of the details last.

    `pair` are scheduler and cache, if they take the place of slots.
    """

    def cells(cell: Callable[[SimulationResult], str]) -> list[str]:
        return [DASH if isinstance(each, InfeasibleError) else cell(each) for each in outcomes.values()]

    rows = [
        (name, *cells(lambda result, m=metric, d=decimals: number(getattr(result, m), d)))  # type: ignore[misc]
        for metric, name, decimals in _ROWS
    ]
    rows.append(("served", *cells(lambda result: percent(result.served_fraction))))
    rows.append(("starved", *cells(lambda result: "yes" if result.starved else "no")))
    if details:
        for metric, statistic, name, decimals in _DETAIL_ROWS:
            values = {slots: getattr(getattr(d.overall, metric), statistic) for slots, d in details.items()}
            rows.append((name, *(number(values.get(slots), decimals) for slots in outcomes)))
        hits = {slots: detail.overall.hit_rate for slots, detail in details.items()}
        rows.append(("adapter was resident", *(percent(hits.get(slots)) for slots in outcomes)))
    rows += pool_rows(
        [None if isinstance(each, InfeasibleError) else each.pool for each in outcomes.values()], pair
    )
    return Table(("metric", *(names[slots] for slots in outcomes)), rows)


def bound_text(bound: str, limit: float) -> str:
    """Return a bound of the SLO in words."""
    if bound == "all":
        return "all of these"
    if bound == "tpt_over_base":
        return f"tpt_over_base: TPT <= {limit:.4g} ms"
    latency, unit = describe_latency(bound)
    return f"{bound}: {latency.split()[0]} <= {limit:g} {unit}"
