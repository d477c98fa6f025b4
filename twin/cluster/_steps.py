"""A cluster in memory, and operations on its instances: advance, observe, hand over a request.

Memory has one line for each instance, with the arguments of the compiled loop. All instances have one type,
whatever the sizes of their arrays.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference, inner, jit
from capplan.serving import NONE, Limits, Records, State, int_fields, new_state
from capplan.serving.pooled import has_pool, with_pool
from capplan.serving.routers import (
    ACTIVE,
    AWAITED,
    NEVER_SEEN,
    RESIDENT,
    Fleet,
    Placement,
    add_waiting,
    new_fleet,
)
from capplan.serving.state import LOADING, NO_CLAIM, POOLED, VLLM
from capplan.serving.stored import is_pooled, line_access, new_lines
from capplan.twin.cluster._scenario import ClusterScenario, take_requests
from capplan.twin.instance import _trace as t
from capplan.twin.instance._clock import (
    NEVER_NS,
    HostLink,
    TwinClock,
    count_present,
    count_queued,
    keeps_stats,
    new_answered,
    new_clock,
    new_link,
)
from capplan.twin.instance._core import SimulatedEngine, advance, next_event_ns, take_arrivals_before
from capplan.twin.instance._scenario import Costs, Scenario, new_engine
from capplan.twin.instance._trace import new_trace
from capplan.workload import Requests

_typeof: Any = numba.typeof


@functools.cache
def _member_type(pooled: bool) -> Any:
    """Return the compiled type of every member of a cluster."""
    numbers = np.zeros(1, np.int64)
    limits = Limits(1, 1, 1, 1, 1, 1, 0, 0, 0, policy=POOLED if pooled else VLLM)
    costs = Costs(0, np.zeros(1), 1, 1, 1.0, 1, numbers, numbers, numbers, False, False, numbers)
    return _typeof(
        SimulatedEngine(new_state(1, 0, 1, limits), limits, costs, new_clock(0), new_trace(1), 1, 0)
    )


if TYPE_CHECKING:

    def load_member(memory: NDArray[np.int64], slot: int) -> SimulatedEngine:
        """Return the member in a line; for compiled functions only."""

    def _store(memory: NDArray[np.int64], slot: int, member: SimulatedEngine) -> None: ...

    def _size(memory: NDArray[np.int64]) -> int: ...

else:
    load_member, _store, _size = line_access(_member_type)


@jit
def _write(memory: NDArray[np.int64], slot: int, member: SimulatedEngine) -> None:
    _store(memory, slot, member)


@jit
def _bytes(memory: NDArray[np.int64]) -> int:
    return _size(memory)


def new_memory(members: int, pooled: bool = False) -> NDArray[np.int64]:
    """Return memory for members, shape (members, words); `pooled`: under the rules for one pool."""
    return new_lines(members, pooled, _bytes)


def store_member(memory: NDArray[np.int64], slot: int, member: SimulatedEngine) -> None:
    """Store a member; its arrays must stay alive while `memory` is used, and be writable."""
    if _typeof(member) != _member_type(is_pooled(memory)):
        raise TypeError(f"not the type of a member: {_typeof(member)}")
    _write(memory, slot, member)


_PROGRESS = int_fields(
    "handed",  # requests handed over so far
    "tail",  # the last one that the scheduler has not seen
    "wake_ns",  # time of the next event
    "resting",  # 1: idle until then
    "fetching",  # requests that wait for the transfer of their adapter
    "fetched_adapters",  # and their adapters
)


@by_reference
class Cluster(NamedTuple):
    """Instances under one clock, and their requests."""

    memory: NDArray[np.int64]
    """The members, as `capplan.twin.cluster._steps` stores them."""
    progress: Records
    """Shape (instances,); fields as in `_PROGRESS`."""
    fleet: Fleet
    """Present state of the instances."""
    seen: Fleet
    """State that the router reads: `fleet` itself, or an older one with what the router has sent since."""
    placement: Placement
    adapter: NDArray[np.int32]
    """Adapter of each request, numbered over the whole cluster."""
    rank: NDArray[np.int64]
    """Rank of each adapter, shape (adapters + 1,)."""
    stream: Requests
    """The requests as instances receive them: ``arrival_ns`` is the time of the hand-over, ``adapter`` the
    number at the instance."""
    following: NDArray[np.int64]
    """Linked lists of the requests handed to an instance that its scheduler has not seen. A list begins at
    `TwinTrace.counts.next_request` and ends with the number of requests."""
    instance: NDArray[np.int32]
    """Instance of each request; NONE before it arrives."""
    neighbours: NDArray[np.int64]
    """Shape (instances, 2): the first instance on the link of each, and the one after the last."""
    stored: NDArray[np.int8]
    """Whether an instance stores an adapter, shape (instances, adapters + 1); empty without transfers."""
    fetching: NDArray[np.int32]
    """Requests that wait at an instance for the transfer of an adapter, shape of `stored`."""
    own_places: NDArray[np.int64]
    """Places of the placement in the order of their instances; none for routers that do not read adapters."""
    own_start: NDArray[np.int64]
    """Shape (instances + 1,): those of instance i are own_places[own_start[i]] .. [own_start[i + 1] - 1]."""
    horizon_ns: int


def new_progress(instances: int) -> Records:
    """Return the progress of idle instances."""
    progress = np.zeros(instances, _PROGRESS).view(np.recarray)
    progress.wake_ns = np.iinfo(np.int64).max
    progress.resting = 1
    return progress


def places_by_instance(placement: Placement, fleet: Fleet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return `Cluster.own_places` and `Cluster.own_start` of a placement."""
    instances = fleet.instances.size
    if fleet.standing.size == 0:
        return np.zeros(0, np.int64), np.zeros(instances + 1, np.int64)
    counts = np.bincount(placement.instance, minlength=instances)
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return np.argsort(placement.instance, kind="stable").astype(np.int64), start


@inner
def advance_to(cluster: Cluster, instance: int, until_ns: int) -> None:
    """Advance an instance to a time, and those on its link in the order of their steps.

    Loads begin with a step, so the link gets them in the order of time.
    """
    while True:
        first, limit_ns = _first_to_step(cluster, instance, until_ns)
        if first == NONE:
            return
        _advance_member(cluster, first, limit_ns)


@inner
def _first_to_step(cluster: Cluster, instance: int, until_ns: int) -> tuple[int, int]:
    """Return the instance on a link with the first step before `until_ns`, or NONE, and its limit of time.

    Up to the limit its steps come before those of the others; at equal times those of lower numbers do.
    """
    wake_ns = cluster.progress.wake_ns
    start, end = cluster.neighbours[instance, 0], cluster.neighbours[instance, 1]
    chosen, first_ns = NONE, until_ns
    for other in range(start, end):
        if end - start > 1:
            _update_wake(cluster, other)
        if wake_ns[other] < first_ns:
            chosen, first_ns = other, wake_ns[other]
    limit_ns = until_ns
    for other in range(start, end):
        if other != chosen:
            limit_ns = min(limit_ns, wake_ns[other] + (other > chosen))
    return chosen, limit_ns


@inner
def _update_wake(cluster: Cluster, instance: int) -> None:
    """Update the next event of an idle instance, whose prefetch others may have delayed."""
    progress = cluster.progress[instance]
    if progress.resting:
        member = load_member(cluster.memory, instance)
        progress.wake_ns = next_event_ns(member, cluster.stream)


@inner
def _advance_member(cluster: Cluster, instance: int, until_ns: int) -> None:
    """Advance an instance with work before `until_ns` to that time."""
    progress = cluster.progress[instance]
    member = load_member(cluster.memory, instance)
    counts = member.trace.counts
    advance(member, cluster.stream, until_ns, True)
    progress.resting = counts.now_ns < until_ns
    progress.wake_ns = counts.now_ns
    if progress.resting:
        progress.wake_ns = next_event_ns(member, cluster.stream)
    observe(cluster, instance, member)


@jit
def advance_instances(cluster: Cluster, first: int, last: int, until_ns: int) -> None:
    """Advance the instances `first` to `last` - 1 to a time."""
    for instance in range(first, last):
        advance_to(cluster, instance, until_ns)


@jit
def lacks_row(cluster: Cluster, instance: int) -> bool:
    """Return whether an instance needs a larger table for another request."""
    return lacks_rows(cluster, instance, load_member(cluster.memory, instance), 1)


@jit
def hand_to(cluster: Cluster, instance: int, local: int, request: int, at_ns: int) -> None:
    """Hand a request to an instance."""
    hand_over(cluster, instance, local, request, at_ns, load_member(cluster.memory, instance))


@jit
def start_wait(cluster: Cluster, instance: int, request: int) -> None:
    """Let a request wait at an instance for the transfer of its adapter."""
    _change_wait(cluster, instance, request, 1)


@jit
def end_wait(cluster: Cluster, instance: int, request: int) -> None:
    """End the wait of a request for the transfer of its adapter."""
    _change_wait(cluster, instance, request, -1)


@inner
def _change_wait(cluster: Cluster, instance: int, request: int, change: int) -> None:
    adapter = cluster.adapter[request]
    progress = cluster.progress[instance]
    waited = cluster.fetching[instance, adapter] > 0
    cluster.fetching[instance, adapter] += change
    adapters = int(cluster.fetching[instance, adapter] > 0) - int(waited)
    progress.fetching += change
    progress.fetched_adapters += adapters
    cluster.fleet.instances.queued_adapters[instance] += adapters
    prompt_tokens = change * cluster.stream.prompt_tokens[request]
    add_waiting(cluster.fleet, instance, cluster.rank[adapter], change, prompt_tokens)


@jit
def show_arrivals(cluster: Cluster, instance: int, at_ns: int) -> None:
    """Submit the requests handed to an instance before a refresh."""
    member = load_member(cluster.memory, instance)
    take_arrivals_before(member, cluster.stream, at_ns)
    observe(cluster, instance, member)


@inner
def unseen(cluster: Cluster, instance: int, member: SimulatedEngine) -> int:
    """Return the number of requests handed over that the scheduler has not seen."""
    seen = member.state.counters.submitted + member.trace.counts.rejected
    return int(cluster.progress.handed[instance] - seen)


@inner
def observe(cluster: Cluster, instance: int, member: SimulatedEngine) -> None:
    """Record the state of an instance for routers."""
    c = member.state.counters
    record = cluster.fleet.instances[instance]
    progress = cluster.progress[instance]
    record.running = c.n_running - c.n_ending
    record.queued = c.n_waiting - c.n_gone + unseen(cluster, instance, member) + progress.fetching
    record.free_blocks = c.free_blocks + _idle_blocks(member.state)
    record.partial_tokens = _partial_tokens(member.state)
    record.running_tokens = c.kv_tokens + record.partial_tokens
    record.active_adapters = c.n_active - c.n_claimed
    record.queued_adapters = member.state.hot.size[0] + member.state.cold.size[0] + member.clock.at.n_copies
    if member.state.adapters.queue_head[0] != NONE:
        record.queued_adapters -= 1
    record.queued_adapters += progress.fetched_adapters


@with_pool(0)
def _idle_blocks(state: State) -> int:
    """Return the blocks of cached adapters that no running request uses."""
    return int(state.counters.adapter_pages - state.pooled.counts.pinned_pages)


@inner
def _partial_tokens(state: State) -> int:
    """Return the tokens of the prompts of running requests that are not computed yet."""
    tokens = 0
    for i in range(state.counters.n_partial):
        row = state.lists.partial[i]
        tokens += max(0, state.rows.prompt[row] - state.rows.computed[row])
    return int(tokens)


@inner
def observe_adapter(cluster: Cluster, place: int) -> None:
    """Record the state of the adapter at a place for routers."""
    instance = cluster.placement.instance[place]
    local = cluster.placement.local[place]
    member = load_member(cluster.memory, instance)
    adapters = member.state.adapters
    if has_pool(member.state):  # which has no heaps of waiting adapters
        fetched = cluster.progress.fetched_adapters[instance]
        cluster.fleet.instances.queued_adapters[instance] = _awaited_adapters(member) + fetched
    standing = 0
    if local > 0 and adapters.users[local] > 0 and adapters.claim[local] == NO_CLAIM:
        standing |= ACTIVE
    is_fetched = cluster.fetching.size > 0 and cluster.fetching[instance, local] > 0
    if local > 0 and (adapters.queue_head[local] != NONE or is_fetched):
        standing |= AWAITED
    if local == 0 or (adapters.resident[local] == 1 and adapters.claim[local] != LOADING):
        standing |= RESIDENT
    cluster.fleet.standing[place] = standing


@inner
def report_state(cluster: Cluster, instance: int, at_ns: int) -> None:
    """Copy the present state of an instance, which has run up to now, to that which the router reads."""
    fleet, seen = cluster.fleet, cluster.seen
    if seen.standing.size > 0:
        for k in range(cluster.own_start[instance], cluster.own_start[instance + 1]):
            place = cluster.own_places[k]
            observe_adapter(cluster, place)
            seen.standing[place] = fleet.standing[place]
    seen.instances[instance] = fleet.instances[instance]
    seen.instances.seen_ns[instance] = at_ns
    if seen.by_rank.shape[2] > 0:
        for kind in range(seen.by_rank.shape[1]):
            for k in range(seen.ranks.size):
                rank = seen.ranks[k]
                seen.by_rank[instance, kind, rank] = fleet.by_rank[instance, kind, rank]


@inner
def _awaited_adapters(member: SimulatedEngine) -> int:
    """Return the number of adapters that are being loaded or have waiting requests."""
    adapters = member.state.adapters
    awaited = 0
    for adapter in range(1, adapters.size):
        awaited += adapters.claim[adapter] == LOADING or adapters.queue_head[adapter] != NONE
    return awaited


@inner
def lacks_rows(cluster: Cluster, instance: int, member: SimulatedEngine, requests: int) -> bool:
    """Return whether an instance needs a larger table for this number of further requests."""
    free = member.state.counters.n_free_rows - unseen(cluster, instance, member)
    return bool(free < requests and member.state.rows.size < member.max_in_flight)


@inner
def hand_over(
    cluster: Cluster, instance: int, local: int, request: int, at_ns: int, member: SimulatedEngine
) -> None:
    """Hand a request to a member, where its adapter has number `local`; its scheduler sees it at `at_ns`."""
    stream = cluster.stream
    stream.arrival_ns[request] = at_ns
    stream.adapter[request] = local
    cluster.instance[request] = instance
    _queue(cluster, instance, request, member.trace.counts)
    progress = cluster.progress[instance]
    progress.handed += 1
    if progress.resting:
        progress.wake_ns = min(progress.wake_ns, at_ns)
    cluster.fleet.instances.queued[instance] += 1
    if keeps_stats(member.clock):
        rank = cluster.rank[cluster.adapter[request]]
        count_present(member.clock, rank, 1)
        count_queued(member.clock, rank, 1, stream.prompt_tokens[request])


@inner
def _queue(cluster: Cluster, instance: int, request: int, counts: np.record) -> None:
    """Insert a request into an instance's list of unseen requests, which is in order of time."""
    following, arrival_ns = cluster.following, cluster.stream.arrival_ns
    progress = cluster.progress[instance]
    end = following.size
    behind = end
    if counts.next_request < end:
        if arrival_ns[progress.tail] <= arrival_ns[request]:
            behind = progress.tail
        else:  # moved and held requests arrive later
            other = counts.next_request
            while arrival_ns[other] <= arrival_ns[request]:
                behind = other
                other = following[other]
    if behind < end:
        following[request] = following[behind]
        following[behind] = request
    else:
        following[request] = counts.next_request
        counts.next_request = request
    if following[request] == end:
        progress.tail = request


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

    The router reads requests by rank if `by_rank`, and the state of adapters if `by_adapter`. `first_rows`
    and `report_period_ns` are as in `run_cluster`.
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
