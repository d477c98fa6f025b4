"""Tables of simulations: of one GPU, and of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from capplan.errors import InfeasibleError
from capplan.reports._console import DASH, GIB, Table, counted, number, percent
from capplan.reports.tables._scheduling import pool_rows
from capplan.spec import describe_latency

if TYPE_CHECKING:
    from capplan.planner.verification import DegradedResult, RankMetrics, SimulatedFleet, StoredAdapters
    from capplan.spec import Cache, Scheduler, Slo
    from capplan.twin import DetailedResult, SimulationResult
    from capplan.twin.cluster import ClusterResult


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
    pair: tuple[Scheduler, Cache] | None,
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


_MOST_UNSERVED: Final = 10
"""Unserved adapters with a line of their own."""


METRICS: Final = (  # metric of the result, its name with unit, decimals
    ("throughput_tok_s", "throughput, tok/s", 0),
    ("offered_tok_s", "offered, tok/s", 0),
    ("ttft_s_mean", "TTFT mean, s", 3),
    ("ttft_s_p50", "TTFT p50, s", 3),
    ("ttft_s_p95", "TTFT p95, s", 3),
    ("ttft_s_p99", "TTFT p99, s", 3),
    ("tpot_ms_mean", "TPOT mean, ms", 2),
    ("tpot_ms_p99", "TPOT p99, ms", 2),
    ("tpt_ms_mean", "TPT mean, ms", 2),
    ("e2e_s_p99", "E2E p99, s", 2),
    ("completed", "completed requests", 0),
    ("submitted", "submitted requests", 0),
    ("preemptions", "preemptions", 0),
    ("adapter_loads", "adapter loads", 0),
    ("load_s", "steps held up by loads, s", 2),
)


def moves_lines(fleet: SimulatedFleet, result: ClusterResult) -> list[str]:
    """Return lines on re-balancings and transfers; none without re-balancing."""
    moves = result.moves
    if moves is None or fleet.rebalance is None:
        return []
    planned = sum(each.moved_bytes for each in moves.rounds)
    unpermuted = sum(each.unpermuted_bytes for each in moves.rounds)
    lines = [
        f"re-balancing every {fleet.rebalance.settings.every_s:g} s: "
        f"{counted(len(moves.rounds), 'round')}; new placements lack {planned / GIB:.2f} GiB "
        f"({unpermuted / GIB:.2f} GiB without permutation)",
        f"{counted(moves.transfers, 'transfer')} of {moves.transferred_bytes / GIB:.2f} GiB in "
        f"{moves.transfer_s:.2f} s; {counted(moves.waited, 'request')} waited for one; adapters stored per "
        f"instance: {moves.stored_mean:.1f} on average",
    ]
    if moves.lost:
        lines.append(f"crashes: {counted(moves.lost, 'request')} lost")
    overloaded = [each for each in moves.rounds if each.target > 1.0]
    if overloaded:
        worst = max(each.target for each in overloaded)
        lines.append(
            f"alert: {counted(len(overloaded), 'round')} with more demand than the instances sustain, up to "
            f"{100.0 * worst:.0f} %"
        )
    return lines


def degraded_lines(failure: DegradedResult, failed: Sequence[str], slo: Slo) -> list[str]:
    """Return the effect of failed instances: requests served, bounds that break, unserved adapters."""
    result, submitted = failure.result, failure.submitted
    limit_s = slo.latency_limits().get("ttft_p99_s")
    bound = "no bound" if limit_s is None else f"bound {limit_s:g} s"
    lines = [
        f"without {', '.join(failed)}: {result.completed:,} of {counted(submitted, 'request')} served, "
        f"TTFT p99 {number(result.ttft_s_p99, 2)} s ({bound})"
    ]
    lines += [f"breaks: {each}" for each in failure.broken] or ["no bound breaks"]
    shown = list(failure.unserved.items())[:_MOST_UNSERVED]
    if shown:
        total = sum(failure.unserved.values())
        lines.append(
            f"unserved: {counted(len(failure.unserved), 'adapter')} on no other instance, "
            f"{percent(total / max(1, submitted))} of the requests"
        )
    lines += [f"  {name}: {counted(n, 'request')}, {percent(n / max(1, submitted))}" for name, n in shown]
    if len(failure.unserved) > len(shown):
        lines.append(f"  and {len(failure.unserved) - len(shown):,} more; --json lists all")
    return lines


def cluster_table(fleet: SimulatedFleet, result: ClusterResult) -> Table:
    """Return the metrics over all requests."""
    head = ("cluster", f"{counted(len(fleet.instances), 'instance')}\n{fleet.router}")
    rows = [(name, number(getattr(result, metric), decimals)) for metric, name, decimals in METRICS]
    rows.append(("served", percent(result.served_fraction)))
    return Table(head, rows)


def instances_table(fleet: SimulatedFleet, result: ClusterResult, held: Sequence[StoredAdapters]) -> Table:
    """Return one row per instance."""
    head = (
        *("instance", "requests", "tok/s", "TTFT p95, s", "TTFT p99, s", "TPOT mean, ms", "busy", "served"),
        *("preemptions", "adapter\nloads", "held up by\nloads, s", "adapters\nstored", "stored,\nGiB"),
    )
    rows = [
        (
            name,
            number(routed),
            number(own.throughput_tok_s),
            number(own.ttft_s_p95, 3),
            number(own.ttft_s_p99, 3),
            number(own.tpot_ms_mean, 2),
            percent(own.busy_fraction),
            percent(own.served_fraction),
            number(own.preemptions),
            number(own.adapter_loads),
            number(own.load_s, 2),
            number(store.count),
            number(store.bytes / GIB, 2),
        )
        for name, routed, own, store in zip(
            fleet.names, result.requests_per_instance, result.instances, held, strict=True
        )
    ]
    return Table(head, rows)


def ranks_table(ranks: Sequence[RankMetrics]) -> Table:
    """Return one row per rank."""
    head = (
        *("rank", "requests", "finished", "without\na token", "queue\np50, s", "queue\np95, s"),
        *("TTFT\np50, s", "TTFT\np95, s", "TTFT\np99, s", "TPT\nmean, ms", "TPT\np99, ms"),
    )
    rows = [
        (
            str(each.rank) if each.rank else "base model",
            *(number(count) for count in (each.submitted, each.finished, each.waiting)),
            *(number(value, 3) for value in (each.queue_s.p50, each.queue_s.p95)),
            *(number(value, 3) for value in (each.ttft_s.p50, each.ttft_s.p95, each.ttft_s.p99)),
            *(number(value, 2) for value in (each.tpt_ms.mean, each.tpt_ms.p99)),
        )
        for each in ranks
    ]
    return Table(head, rows)


def storage_line(fleet: SimulatedFleet, held: Sequence[StoredAdapters]) -> str:
    """Return the mean number of adapters per instance against all on every instance."""
    total = len(fleet.workload.adapters)
    mean = sum(each.count for each in held) / len(held)
    factor = "" if not 0 < mean < total else f", {total / mean:.1f} x fewer than all on every instance"
    return f"adapters stored per instance: {mean:.1f} of {total}{factor}"
