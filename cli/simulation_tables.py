"""What a simulation says, as tables for the terminal and as documents for machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from capplan.cli.console import DASH, number, percent, table
from capplan.errors import InfeasibleError

if TYPE_CHECKING:
    from rich.table import Table

    from capplan.twin import DetailedResult, SimulationResult

Outcomes: TypeAlias = "Mapping[int, SimulationResult | InfeasibleError]"
"""What came of each number of slots."""
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
    ("completed", "completed requests", 0),
    ("submitted", "submitted requests", 0),
    ("rejected", "rejected requests", 0),
    ("preemptions", "preemptions", 0),
    ("adapter_loads", "adapter loads", 0),
    ("running_mean", "running, mean", 1),
    ("waiting_mean", "waiting, mean", 1),
    ("kv_tokens", "KV capacity, tokens", 0),
)


def metrics_table(outcomes: Outcomes, details: Details) -> Table:
    """Return the metrics, one column per number of slots; those of the details last, where there are any."""
    rows = table("metric", *(f"a_max {slots}" for slots in outcomes), numbers_from=1)

    def add(name: str, cell: Callable[[SimulationResult], str]) -> None:
        cells = (DASH if isinstance(each, InfeasibleError) else cell(each) for each in outcomes.values())
        rows.add_row(name, *cells)

    def add_detail(name: str, cell: Callable[[DetailedResult], str]) -> None:
        rows.add_row(name, *(cell(details[slots]) if slots in details else DASH for slots in outcomes))

    for metric, name, decimals in _ROWS:
        add(name, lambda result, m=metric, d=decimals: number(getattr(result, m), d))  # type: ignore[misc]
    add("served", lambda result: percent(result.served_fraction))
    add("starved", lambda result: "yes" if result.starved else "no")
    if details:
        add_detail("slowdown p50", lambda each: number(each.overall.slowdown.p50, 2))
        add_detail("slowdown p99", lambda each: number(each.overall.slowdown.p99, 2))
        add_detail("queueing p99, s", lambda each: number(each.overall.queue_s.p99, 3))
        add_detail("wait for loads p99, s", lambda each: number(each.overall.load_wait_s.p99, 3))
        add_detail("adapter was resident", lambda each: share(each.overall.hit_rate))
    return rows


def ranks_table(details: Details) -> Table:
    """Return what the requests of each rank got."""
    names = ("finished", "served", "tok/s", "TTFT p50, s", "TTFT p99, s", "TPOT p50, ms", "slowdown p50")
    rows = table("a_max", "rank", *names, "resident", numbers_from=0)
    for slots, detail in details.items():
        for rank, got in detail.by_rank.items():
            rows.add_row(
                str(slots),
                str(rank),
                number(got.finished),
                percent(got.served_fraction),
                number(got.throughput_tok_s),
                number(got.ttft_s.p50, 3),
                number(got.ttft_s.p99, 3),
                number(got.tpot_ms.p50, 2),
                number(got.slowdown.p50, 2),
                share(got.hit_rate),
            )
    return rows


def slo_table(details: Details) -> Table | None:
    """Return which share of requests kept each latency bound; None without bounds."""
    bounds = next(iter(details.values())).slo
    if not bounds:
        return None
    rows = table("requests that keep", *(f"a_max {slots}" for slots in details), numbers_from=1)
    for at, bound in enumerate(bounds):
        rows.add_row(
            bound_text(bound.bound, bound.limit), *(share(d.slo[at].share) for d in details.values())
        )
    return rows


def bound_text(bound: str, limit: float) -> str:
    """Return a bound of the SLO in words."""
    if bound == "all":
        return "all of these"
    if bound == "tpt_over_base":
        return f"tpt_over_base: TPT <= {limit:.4g} ms"
    kind, _, unit = bound.split("_")
    return f"{bound}: {kind.upper()} <= {limit:g} {unit}"


def share(fraction: float) -> str:
    """Return a share as a percentage, a dash when there is none."""
    return percent(None if fraction != fraction else fraction)


def documents(outcomes: Outcomes, details: Details) -> list[dict[str, Any]]:
    """Return everything as JSON data, one document per number of slots."""
    found = []
    for slots, outcome in outcomes.items():
        if isinstance(outcome, InfeasibleError):
            found.append({"a_max": slots, "infeasible": str(outcome)})
        else:
            found.append({"a_max": slots, **asdict(outcome), **_detail(details.get(slots))})
    return found


def _detail(detail: DetailedResult | None) -> dict[str, Any]:
    if detail is None:
        return {}
    series = {field.name: getattr(detail.series, field.name) for field in fields(detail.series)}
    return {
        "overall": asdict(detail.overall),
        "by_rank": {str(rank): asdict(got) for rank, got in detail.by_rank.items()},
        "by_adapter": {name: asdict(got) for name, got in detail.by_adapter.items()},
        "slo": [{**asdict(bound), "share": bound.share} for bound in detail.slo],
        "series": {name: v if isinstance(v, float) else v.tolist() for name, v in series.items()},
    }
