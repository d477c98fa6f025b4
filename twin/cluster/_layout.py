"""Memory layout of a cluster scenario: instances, their requests in flight, and what routers read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.serving import NONE, Limits, State, new_state
from capplan.serving.routers import NEVER_SEEN, Fleet, new_fleet
from capplan.serving.state import POOLED
from capplan.twin.cluster._scenario import ClusterScenario, take_requests
from capplan.twin.cluster._steps import (
    Cluster,
    new_memory,
    new_progress,
    places_by_instance,
    store_member,
)
from capplan.twin.instance import _trace as t
from capplan.twin.instance._clock import TwinClock, new_answered, new_clock
from capplan.twin.instance._core import SimulatedEngine
from capplan.twin.instance._host_link import NEVER_NS, HostLink, new_link
from capplan.twin.instance._scenario import Scenario, new_engine

FIRST_ROWS = 512
"""Initial rows of an instance for requests in flight; a full table is doubled."""


class Laid(NamedTuple):
    """A cluster in memory."""

    engines: tuple[Scenario, ...]
    cluster: Cluster
    members: list[SimulatedEngine]
    answered: np.record


def lay_out(
    scenario: ClusterScenario,
    by_rank: bool,
    first_rows: int = FIRST_ROWS,
    by_adapter: bool = False,
    report_period_ns: int = 0,
) -> Laid:
    """Return the cluster in memory.

    Parameters
    ----------
    by_rank, by_adapter
        Whether the router reads requests by rank, and the state of adapters.
    first_rows, report_period_ns
        As in `run_cluster`.
    """
    requests = scenario.requests
    count = requests.arrival_ns.size
    places = scenario.placement.instance.size if by_adapter else 0
    fleet = new_fleet(scenario.instances, scenario.rank, by_rank, places)
    answered, following = new_answered(), np.zeros(count, np.int64)
    shared = t.new_trace(count, waits=True)
    memory = new_memory(scenario.instances, scenario.engines[0].limits.policy == POOLED)
    neighbours = _neighbours(scenario.link)
    links = {int(first): new_link(int(end - first)) for first, end in neighbours}
    members = []
    for i, engine in enumerate(scenario.engines):
        rows = max(1, min(count, engine.max_in_flight, max(first_rows, engine.limits.max_num_seqs)))
        own = t.new_trace(0)
        own.counts.next_request = count
        member = SimulatedEngine(
            state=new_engine(engine, rows),
            limits=engine.limits,
            costs=engine.costs,
            clock=_idle_clock(engine, i - int(neighbours[i, 0]), links[int(neighbours[i, 0])])._replace(
                following=following, rank_stats=fleet.by_rank[i], answered=answered
            ),
            trace=shared._replace(gaps=own.gaps, counts=own.counts, sums=own.sums, pool=own.pool),
            max_in_flight=engine.max_in_flight,
            shared_prefix_tokens=scenario.shared_prefix_tokens,
        )
        store_member(memory, i, member)
        _describe(fleet, i, member)
        members.append(member)
    stored = np.zeros((0, 0), np.int8) if scenario.movable is None else scenario.movable.stored.copy()
    own_places, own_start = places_by_instance(scenario.placement, fleet)
    cluster = Cluster(
        memory=memory,
        progress=new_progress(scenario.instances),
        fleet=fleet,
        seen=fleet if report_period_ns == 0 else _never_seen(fleet),
        placement=scenario.placement,
        adapter=requests.adapter.copy(),
        rank=scenario.rank,
        stream=take_requests(requests, slice(None)),
        following=following,
        instance=np.full(count, NONE, np.int32),
        neighbours=neighbours,
        stored=stored,
        fetching=np.zeros(stored.shape, np.int32),
        own_places=own_places,
        own_start=own_start,
        horizon_ns=scenario.horizon_ns,
    )
    return Laid(scenario.engines, cluster, members, answered)


def _idle_clock(engine: Scenario, place: int, link: HostLink) -> TwinClock:
    clock = new_clock(engine.adapters)
    clock.at.place = place
    clock.at.idle = 1
    return clock._replace(link=link)


def restart_member(laid: Laid, instance: int) -> None:
    """Empty an instance: its requests, and its adapters in GPU memory."""
    member, engine, cluster = laid.members[instance], laid.engines[instance], laid.cluster
    place = instance - int(cluster.neighbours[instance, 0])
    member.clock.link.prefetches.asked_ns[place] = NEVER_NS
    clock = member.clock
    idle = _idle_clock(engine, place, clock.link)._replace(
        following=clock.following, rank_stats=clock.rank_stats, answered=clock.answered
    )
    laid.members[instance] = member._replace(state=new_engine(engine, member.state.rows.size), clock=idle)
    store_member(cluster.memory, instance, laid.members[instance])
    member.trace.counts.next_request = cluster.following.size
    member.clock.rank_stats[:] = 0
    cluster.fleet.instances[instance] = np.zeros((), cluster.fleet.instances.dtype)
    _describe(cluster.fleet, instance, laid.members[instance])
    progress = cluster.progress[instance]
    progress.handed = member.trace.counts.rejected
    progress.wake_ns = np.iinfo(np.int64).max
    progress.resting = 1
    progress.fetching = progress.fetched_adapters = 0
    if cluster.fetching.size:
        cluster.fetching[instance] = 0


def _never_seen(fleet: Fleet) -> Fleet:
    """Return the state of instances that have not reported yet: their limits, and no request."""
    instances = fleet.instances.copy()
    instances.seen_ns = NEVER_SEEN
    return Fleet(instances, fleet.by_rank.copy(), fleet.ranks, fleet.standing.copy())


def _neighbours(link: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first instance, and the one after the last, on the link of each; links are in order."""
    return np.stack([np.searchsorted(link, link, side) for side in ("left", "right")], axis=1)


def _describe(fleet: Fleet, instance: int, member: SimulatedEngine) -> None:
    record = fleet.instances[instance]
    record.free_blocks = record.blocks = member.state.counters.free_blocks
    record.max_num_seqs = member.limits.max_num_seqs
    record.max_loras = member.limits.max_loras
    record.block_size = member.limits.block_size


def grow(laid: Laid, instance: int) -> None:
    """Double the table of requests in flight of an instance."""
    member = laid.members[instance]
    rows = min(2 * member.state.rows.size, member.max_in_flight)
    laid.members[instance] = member._replace(state=with_rows(member.state, member.limits, rows))
    store_member(laid.cluster.memory, instance, laid.members[instance])


def with_rows(state: State, limits: Limits, rows: int) -> State:
    """Return the state with more rows, in the shape of an empty one; arrays of other sizes are shared.

    The state has rows for `max_num_seqs` requests, or for all.
    """
    before = state.rows.size
    state.counters.n_free_rows += rows - before
    empty = new_state(rows, state.adapters.size - 1, int(state.counters.capacity), limits)
    in_phase = state.in_phase
    if limits.prefix_caching:  # sentinels come behind the rows
        moved = np.where(in_phase >= before, in_phase + (rows - before), in_phase)
        in_phase = empty.in_phase
        in_phase[:, :before] = moved[:, :before]
        in_phase[:, rows:] = moved[:, before:]
    longer: State = _longer(state._replace(in_phase=in_phase), empty)
    return longer


def _longer(part: Any, empty: Any) -> Any:
    """Return a part of a state, with rows as in that of a larger state, which is overwritten."""
    if isinstance(part, tuple):
        return type(part)(*map(_longer, part, empty))
    if isinstance(part, np.ndarray) and part.shape != empty.shape:
        empty[: len(part)] = part
        return empty
    return part
