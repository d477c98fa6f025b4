"""Random clusters with re-balancing, transfers and crashes, and the invariants of what they leave."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from capplan.serving.rebalancing import AdapterDemand, ReplanRequest
from capplan.spec import FORECASTS, RebalanceSettings
from capplan.twin.cluster import Crash, Faults, FleetMoves, Rebalancing, TransferLink
from capplan.twin.cluster._rebalancing import routing_table, shares_of
from capplan.twin.cluster._run import ClusterTrace
from capplan.twin.cluster._scenario import ClusterScenario, MovableAdapters, place
from capplan.twin.instance import _trace as t
from tests.serving.worlds import Choose, seeded
from tests.twin.cluster.scenarios import holding
from tests.twin.pooled import make_pooled
from tests.twin.scenarios import make_scenario

MS = 1_000_000
MOST_ROUNDS = 200
"""Of a drawn cluster; seeds have up to 40,000 idle ones after the last request."""
World = tuple[ClusterScenario, Rebalancing]


def make_movable(choose: Choose) -> World:
    """Return a cluster whose instances know all adapters, and a schedule of changes."""
    make_engine = make_pooled if choose(0, 2) == 0 else make_scenario
    base = make_engine(choose)._replace(buckets=0)
    adapters, count = base.adapters, choose(1, 4)
    ranks = np.array([0, *(choose(1, 4) * 8 for _ in range(adapters))], np.int64)
    everything = np.arange(1, adapters + 1)
    engines = [base, *(make_engine(choose) for _ in range(count - 1))]
    stored = np.zeros((count, adapters + 1), np.int8)
    stored[:, 0] = 1
    for adapter in everything:
        stored[choose(0, count - 1), adapter] = 1
        stored[choose(0, count - 1), adapter] = 1
    has_base_traffic = bool((base.requests.adapter == 0).any())
    sizes = [choose(1, 20) * 1000 for _ in everything]
    demands = [
        AdapterDemand(f"a{number}", int(ranks[number]), float(choose(0, 50)), size, choose(0, 3) or None)
        for number, size in zip(everything.tolist(), sizes, strict=True)
    ]
    if has_base_traffic:
        demands.append(AdapterDemand("base", 0, float(choose(0, 50))))
    movable = MovableAdapters(tuple(demands), stored)
    held = [np.flatnonzero(row[1:]) + 1 for row in stored]
    planned = place(held, [np.array([float(choose(0, 3)) for _ in own]) for own in held], adapters)
    scenario = ClusterScenario(
        engines=tuple(
            holding(each, everything, ranks)._replace(horizon_ns=base.horizon_ns) for each in engines
        ),
        placement=routing_table(shares_of(planned, movable, count), movable, range(count)),
        requests=base.requests,
        rank=ranks,
        horizon_ns=base.horizon_ns,
        link=np.cumsum([choose(0, 1) for _ in engines]),
        shared_prefix_tokens=base.shared_prefix_tokens,
        movable=movable,
    )
    return scenario, _rebalancing(choose, scenario)


def _rebalancing(choose: Choose, scenario: ClusterScenario) -> Rebalancing:
    arrivals_ns = scenario.requests.arrival_ns
    busy_ns = int(arrivals_ns[-1]) if arrivals_ns.size else 0
    ms = max(2, min(scenario.horizon_ns, busy_ns + 20 * MS) // MS)
    settings = RebalanceSettings(
        every_s=choose(1, ms // 2) / 1000,
        forecast=FORECASTS[choose(0, len(FORECASTS) - 1)],  # type: ignore[arg-type]
        permute=choose(0, 3) > 0,
        solver="capplan" if choose(0, 3) == 0 else "loraserve",
    )
    points = {rank: float(choose(1, 2000)) for rank in {0, *scenario.rank.tolist()}}
    link = TransferLink(
        latency_s=choose(0, 3) / 1000,
        bytes_per_s=choose(1, 20) * 1e6,
        location_latency_s=choose(0, 9) / 1000,
        location_bytes_per_s=choose(1, 20) * 1e5,
    )
    crashes = []
    at_ms = 0
    for _ in range(choose(0, 3) if scenario.instances > 1 else 0):
        at_ms += choose(1, max(1, ms // 3))
        for_ms = choose(1, 20)
        crashes.append(Crash(choose(0, scenario.instances - 1), at_ms / 1000, for_ms / 1000))
        at_ms += for_ms
    return Rebalancing(settings, points, link, Faults(tuple(crashes), choose(0, 3) / 5), _turned)


def _turned(request: ReplanRequest) -> list[dict[str, float]]:
    """Give each server the whole adapters of the next one."""
    count = len(request.stored)
    shares: list[dict[str, float]] = [{} for _ in range(count)]
    for number, adapter in enumerate(request.adapters):
        served = [i for i, own in enumerate(request.shares) if own.get(adapter.name, 0.0) > 0.0]
        shares[(served[0] + 1 if served else number) % count][adapter.name] = 1.0
    return shares


@st.composite
def movable_clusters(draw: st.DrawFn) -> World:
    """Return a strategy of clusters with changes, and at most `MOST_ROUNDS` periods to the horizon."""
    scenario, rebalancing = make_movable(lambda low, high: draw(st.integers(low, high)))
    settings, least_ms = rebalancing.settings, -(-scenario.horizon_ns // (MOST_ROUNDS * MS))
    every_s = max(settings.every_s, least_ms / 1000)
    return scenario, replace(rebalancing, settings=settings.replace(every_s=every_s))


def seeded_movable(seed: int) -> World:
    """Return the cluster of a seed."""
    return make_movable(seeded(seed))


def assert_integrity(
    scenario: ClusterScenario, rebalancing: Rebalancing, trace: ClusterTrace
) -> Counter[str]:
    """Assert the invariants of stored adapters, transfers and requests; return how often events occurred."""
    moves = trace.moves
    assert moves is not None
    assert_every_adapter_is_stored(scenario, moves)
    assert_bytes_are_conserved(scenario, rebalancing, moves)
    assert_every_request_has_one_end(scenario, trace)
    counted = Counter(f"transfers {event.kind}" for event in moves.events)
    counted.update({"rounds": len(moves.rounds), "requests that waited for a transfer": moves.waited})
    counted.update({"requests lost": moves.lost})
    counted.update({"requests": scenario.requests.arrival_ns.size})
    return counted + Counter(f"rounds after a {r.reason}" for r in moves.rounds)


def assert_every_adapter_is_stored(scenario: ClusterScenario, moves: FleetMoves) -> None:
    """Assert that each adapter is stored at every instant, and no last copy is removed."""
    assert scenario.movable is not None
    stored = scenario.movable.stored.astype(np.int64)
    assert (stored.sum(axis=0) > 0).all()
    before_ns = 0
    for event in moves.events:
        assert event.at_ns >= before_ns, "events are in the order of time"
        before_ns = event.at_ns
        if event.kind in ("start", "stored"):
            assert stored[event.instance, event.adapter] == 0, "what is stored is not fetched"
        if event.kind == "start" and event.source >= 0:
            assert stored[event.source, event.adapter] == 1, "a source has the adapter"
        if event.kind == "stored":
            stored[event.instance, event.adapter] = 1
        if event.kind == "removed":
            assert stored[event.instance, event.adapter] == 1
            stored[event.instance, event.adapter] = 0
            assert stored[:, event.adapter].sum() > 0, "the last copy stays"


def assert_bytes_are_conserved(
    scenario: ClusterScenario, rebalancing: Rebalancing, moves: FleetMoves
) -> None:
    """Assert that each transfer ends once at most, after the time of its bytes, and that copies add up."""
    assert scenario.movable is not None
    sizes = [0, *(demand.size_bytes for demand in scenario.movable.demands)]
    started = {event.number: event for event in moves.events if event.kind == "start"}
    ended = [event for event in moves.events if event.kind in ("stored", "failed", "aborted")]
    assert len({event.number for event in ended}) == len(ended)
    for event in ended:
        begin = started[event.number]
        assert (begin.adapter, begin.instance, begin.source) == (event.adapter, event.instance, event.source)
        least_ns = rebalancing.link.duration_ns(sizes[event.adapter], event.source)
        assert event.kind == "aborted" or event.at_ns >= begin.at_ns + least_ns
    delivered = sum(sizes[event.adapter] for event in ended if event.kind == "stored")
    assert delivered == moves.transferred_bytes
    assert moves.failed_transfers == sum(event.kind != "stored" for event in ended)
    open_fetches = Counter((each.instance, each.adapter) for each in started.values())
    open_fetches.subtract((each.instance, each.adapter) for each in ended)
    assert set(open_fetches.values()) <= {0, 1}, "requests for an adapter share one transfer"


def assert_every_request_has_one_end(scenario: ClusterScenario, trace: ClusterTrace) -> None:
    """Assert that each request is at one instance, and is finished, rejected, lost, or unfinished there."""
    moves, shared = trace.moves, trace.traces[0]
    assert moves is not None
    arrived = scenario.requests.arrival_ns < scenario.horizon_ns
    assert (trace.instance[arrived] >= 0).all()
    finished = shared.finish_ns != t.NEVER
    rejected = shared.status == t.STATUS_REJECTED
    assert not (finished & rejected).any()
    assert (shared.first_ns[finished] > scenario.requests.arrival_ns[finished]).all()
    assert (shared.finish_ns[finished] >= shared.first_ns[finished]).all()
    assert int(rejected.sum()) == sum(own.counts.rejected for own in trace.traces)
    assert (shared.first_ns[rejected] == t.NEVER).all()
    lost = shared.status == t.STATUS_LOST
    assert moves.lost == int(lost.sum())
    assert not (finished & lost).any()
