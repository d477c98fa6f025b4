"""Simulation of a cluster scenario: memory layout, and calls of the compiled loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.serving import NONE, Limits, State, new_state
from capplan.serving.refresh import refresh
from capplan.serving.routers.choose import ASK_RANKS, RoutingRule
from capplan.serving.routers.fleet import NEVER_SEEN, Fleet, new_fleet
from capplan.serving.state import POOLED
from capplan.serving.structures import new_heap
from capplan.twin import trace as t
from capplan.twin.clock import new_answered, new_clock
from capplan.twin.cluster.loop import REFRESH_DUE, new_cursor, serve
from capplan.twin.cluster.member import ClusterMember, new_memory, store_member
from capplan.twin.cluster.scenario import ClusterScenario, take_requests
from capplan.twin.cluster.steps import Cluster, new_progress, show_arrivals
from capplan.twin.core import record_pool
from capplan.twin.host_link import NEVER_NS, new_link
from capplan.twin.scenario import NS_PER_S, Scenario, new_engine

FIRST_ROWS = 512
"""Initial rows of an instance for requests in flight; a full table is doubled."""
_PAUSE_NS: Final = 60 * 10**9
"""Simulated time between two calls of an interrupt."""


@dataclass(frozen=True, eq=False)
class ClusterTrace:
    """The record of a cluster."""

    instance: NDArray[np.int32]
    """Last instance of each request; NONE for requests that never arrived."""
    traces: tuple[t.TwinTrace, ...]
    """One per instance, with shared arrays over requests, and separate counts, sums and gaps."""
    migrations: int
    """Number of moves of requests between instances."""


class Laid(NamedTuple):
    """A cluster in memory."""

    engines: tuple[Scenario, ...]
    cluster: Cluster
    members: list[ClusterMember]
    answered: np.record


def run_cluster(
    scenario: ClusterScenario,
    rule: RoutingRule,
    seed: int,
    first_rows: int = FIRST_ROWS,
    interrupt: Callable[[], None] | None = None,
    state_period_s: float = 0.0,
) -> ClusterTrace:
    """Simulate a cluster to its horizon.

    Parameters
    ----------
    rule
        A new router.
    seed
        Seed of the router's random numbers.
    first_rows
        Initial rows of every instance, without effect on the result.
    interrupt
        Called every simulated minute; an exception that it raises ends the simulation.
    state_period_s
        Time between reports of the instances to the router; 0: it reads their present state.
    """
    report_ns = report_period_ns(state_period_s) if rule.looks else 0
    laid = lay_out(scenario, rule.code in ASK_RANKS, first_rows, rule.asks_adapter, report_ns)
    return trace_of(laid, run_laid(laid, rule, seed, interrupt, report_ns))


def report_period_ns(state_period_s: float) -> int:
    """Return the time between reports of the instances to the router, in nanoseconds; 0: no delay."""
    if not 0 <= state_period_s < float("inf"):
        raise InputError("must be a finite number >= 0", state_period_s, "state_period_s")
    return round(state_period_s * NS_PER_S)


def run_laid(
    laid: Laid,
    rule: RoutingRule,
    seed: int,
    interrupt: Callable[[], None] | None = None,
    report_period_ns: int = 0,
) -> int:
    """Simulate a cluster in memory, and return the number of moved requests."""
    cursor = new_cursor(rule.period_ns, report_period_ns)
    cursor.refresh_ns = next_refresh_ns(laid, 0)
    if interrupt is not None:
        cursor.pause_ns = _PAUSE_NS
    count = laid.cluster.following.size if rule.period_ns else 0
    movable, moved = new_heap(count), np.zeros(count, np.int64)
    key = routing_key(seed)
    while (state := serve(laid.cluster, rule, key, laid.answered, cursor, movable, moved)) != NONE:
        if state >= 0:
            grow(laid, state)
        elif state == REFRESH_DUE:
            refresh_members(laid, int(cursor.refresh_ns))
            cursor.refresh_ns = next_refresh_ns(laid, int(cursor.refresh_ns))
        elif interrupt is not None:
            cursor.pause_ns += _PAUSE_NS
            interrupt()
    return int(cursor.migrations)


def next_refresh_ns(laid: Laid, now_ns: int) -> int:
    """Return the time of the first refresh of an instance after `now_ns`; NEVER_NS without any."""
    periods = {each.refreshes_ns.step for each in laid.engines if each.refreshes_ns}
    upcoming = min((now_ns // period + 1) * period for period in periods) if periods else NEVER_NS
    return upcoming if upcoming < laid.cluster.horizon_ns else NEVER_NS


def refresh_members(laid: Laid, at_ns: int) -> None:
    """Refresh the instances for which it is due."""
    for i, (engine, member) in enumerate(zip(laid.engines, laid.members, strict=True)):
        if engine.scheduler is not None and at_ns in engine.refreshes_ns:
            show_arrivals(laid.cluster, i, at_ns)
            refresh(member.state, engine.limits, engine.scheduler, at_ns)


def trace_of(laid: Laid, migrations: int) -> ClusterTrace:
    """Return the record of a simulated cluster."""
    for member in laid.members:
        record_pool(member.state, member.clock, member.trace)
    return ClusterTrace(laid.cluster.instance, tuple(m.trace for m in laid.members), migrations)


def routing_key(seed: int) -> np.uint64:
    """Return the key of the routers' random numbers, independent of those of the requests."""
    return np.uint64(np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1, np.uint64)[0])


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
    shared = t.new_trace(count, waits=any(engine.pool is not None for engine in scenario.engines))
    memory = new_memory(scenario.instances, scenario.engines[0].limits.policy == POOLED)
    neighbours = _neighbours(scenario.link)
    links = {int(first): new_link(int(end - first)) for first, end in neighbours}
    members = []
    for i, engine in enumerate(scenario.engines):
        rows = max(1, min(count, engine.max_in_flight, max(first_rows, engine.limits.max_num_seqs)))
        state = new_engine(engine, rows)
        clock = new_clock(engine.adapters)
        clock.at.place = i - neighbours[i, 0]
        clock.at.idle = 1
        own = t.new_trace(0)
        own.counts.next_request = count
        member = ClusterMember(
            state=state,
            limits=engine.limits,
            costs=engine.costs,
            clock=clock._replace(
                link=links[int(neighbours[i, 0])],
                following=following,
                rank_stats=fleet.by_rank[i],
                answered=answered,
            ),
            trace=shared._replace(gaps=own.gaps, counts=own.counts, sums=own.sums, pool=own.pool),
            max_in_flight=engine.max_in_flight,
        )
        store_member(memory, i, member)
        _describe(fleet, i, member)
        members.append(member)
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
        shared_prefix_tokens=scenario.shared_prefix_tokens,
        horizon_ns=scenario.horizon_ns,
    )
    return Laid(scenario.engines, cluster, members, answered)


def _never_seen(fleet: Fleet) -> Fleet:
    """Return the state of instances that have not reported yet: their limits, and no request."""
    instances = fleet.instances.copy()
    instances.seen_ns = NEVER_SEEN
    return Fleet(instances, fleet.by_rank.copy(), fleet.ranks, fleet.standing.copy())


def _neighbours(link: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first instance, and the one after the last, on the link of each; links are in order."""
    return np.stack([np.searchsorted(link, link, side) for side in ("left", "right")], axis=1)


def _describe(fleet: Fleet, instance: int, member: ClusterMember) -> None:
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
