"""Tables of a simulated fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from capplan.reports._console import GIB, Table, counted, number, percent

if TYPE_CHECKING:
    from capplan.planner.verification import DegradedResult, RankMetrics, SimulatedFleet, StoredAdapters
    from capplan.spec import Slo
    from capplan.twin.cluster import ClusterResult


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
