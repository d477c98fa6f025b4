"""Latencies of a plan: the bounded statistics, or else the 99th percentiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.reports.console import number
from capplan.spec.slo import describe_latency

if TYPE_CHECKING:
    from capplan.spec import Group, Plan

_DEFAULTS: Final = ("ttft_p99_s", "tpot_p99_ms")
_ORDER: Final = ("ttft", "tpot", "e2e", "tpt", "itl")
_DECIMALS: Final = {"s": 2, "ms": 1}


def shown_latencies(plan: Plan) -> tuple[str, ...]:
    """Return the latencies to show, named as bounds.

    These are the bounded ones, and the 99th percentiles of TTFT and TPOT if these have no bound.
    """
    shown = list(plan.slo.latency_bounds())
    metrics = {name.split("_")[0] for name in shown}
    shown += [name for name in _DEFAULTS if name.split("_")[0] not in metrics]
    return tuple(sorted(shown, key=lambda name: _ORDER.index(name.split("_")[0])))


def latency_heads(plan: Plan, separator: str) -> tuple[str, ...]:
    """Return the heads of the columns of these latencies."""
    return tuple(separator.join(describe_latency(name)) for name in shown_latencies(plan))


def latency_cells(plan: Plan, group: Group) -> tuple[str, ...]:
    """Return the cells of these latencies, of one instance of a group."""
    return tuple(
        number(group.predicted.latency(name), _DECIMALS[name.rsplit("_", 1)[1]])
        for name in shown_latencies(plan)
    )


def worst_latency(plan: Plan, bound: str) -> float | None:
    """Return the largest latency of all groups."""
    known = (group.predicted.latency(bound) for group in plan.groups)
    return max((value for value in known if value is not None), default=None)
