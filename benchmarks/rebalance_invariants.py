"""Invariants of re-balancing: ``python -m benchmarks.rebalance_invariants [--cases N] [--first-seed N]``.

Every case is a small random cluster in the twin: engines of all serving rules, all routers, a schedule of
re-balancing, transfers that fail, and crashes. Checked over all events: each adapter is stored at every
instant, no last copy is removed, a source has what it sends, nothing stored is fetched, each transfer ends
once at most and after the time of its bytes, copied bytes add up, and each request is finished, rejected,
lost, or unfinished at one instance. Every tenth case is repeated by the reference loop, which must leave the
same record. Failing seeds are printed.
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np

from benchmarks.common import play_cases
from capplan.serving.routers import ROUTERS
from capplan.twin.cluster import MODELLED, served_router
from capplan.twin.cluster._python_loop import run_with
from capplan.twin.cluster._routers import build_rule
from capplan.twin.cluster._run import run_cluster
from tests.oracle.routers import reference_router

_REFERENCE_EVERY = 10
_STATE_PERIODS_S = (0.0, 0.003, 0.02)


def play(seed: int) -> Counter[str]:
    """Check one case; return how often each event occurred."""
    from tests.twin.cluster.movable import assert_integrity, seeded_movable

    scenario, rebalancing = seeded_movable(seed)
    name = list(ROUTERS)[seed % len(ROUTERS)]
    period_s = _STATE_PERIODS_S[seed % len(_STATE_PERIODS_S)]
    rule = build_rule(served_router(name), scenario)
    trace = run_cluster(scenario, rule, seed, state_period_s=period_s, rebalancing=rebalancing)
    events = assert_integrity(scenario, rebalancing, trace)
    if seed % _REFERENCE_EVERY == 0 and name not in MODELLED:
        router = reference_router(name, scenario.instances)
        readable = run_with(scenario, router, seed, period_s, rebalancing)
        assert readable.moves == trace.moves, "moves differ from those of the reference"
        np.testing.assert_array_equal(readable.instance, trace.instance)
        events["cases repeated by the reference"] += 1
    return events


def main() -> int:
    return play_cases(__doc__, play, 1000)


if __name__ == "__main__":
    sys.exit(main())
