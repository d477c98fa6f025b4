"""Simulation of a cluster scenario: the compiled loop of arrivals, routing and migrations, and its calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from capplan._jit import inner, jit
from capplan.errors import InputError
from capplan.serving import (
    NONE,
    Heap,
    State,
    heap_push,
    heap_remove,
    int_fields,
    is_movable,
    new_heap,
    new_record,
    withdraw,
)
from capplan.serving.pooled import refresh
from capplan.serving.routers import (
    ArrivingRequest,
    Placement,
    RoutingRule,
    busiest,
    carried_credit,
    choose_blindly,
    choose_by_state,
    idlest,
    is_excessive,
    load,
    note_waiting,
    report_time_ns,
    sent_ns,
    to_move,
)
from capplan.twin.cluster._rebalancing import FleetChanges, FleetMoves, Rebalancing
from capplan.twin.cluster._scenario import ClusterScenario
from capplan.twin.cluster._steps import (
    FIRST_ROWS,
    Cluster,
    Laid,
    advance_to,
    grow,
    hand_over,
    lacks_rows,
    lay_out,
    load_member,
    observe,
    observe_adapter,
    report_state,
    show_arrivals,
)
from capplan.twin.instance import _trace as t
from capplan.twin.instance._clock import NEVER_NS, count_present, count_queued, keeps_stats
from capplan.twin.instance._core import Pauses, mark_running, record_pool
from capplan.twin.instance._scenario import NS_PER_S
from capplan.workload import uniform

_CURSOR = int_fields(
    "next",  # the next request to route
    "place",  # the place chosen for it, or NONE
    "hand_over_ns",  # time at which the instance there gets it
    "tick_ns",  # time of the next migration
    "migrations",  # requests moved so far
    "pause_ns",  # time after which the loop returns to its caller
    "refresh_ns",  # time of the next refresh of queues, before which all instances are advanced to it
    "report_ns",  # time of the next report of an instance to the router
    "report_period_ns",  # between reports of an instance; 0: the router reads their present state
    "reports",  # reports so far
    "is_single",  # 1: the loop routes this request and returns
)

# Events.
ARRIVAL = 0
TICK = 1
END = 2
REFRESH = 3
REPORT = 4

PAUSED = -2
REFRESH_DUE = -3
FETCH_DUE = -4


def new_cursor(period_ns: int, report_period_ns: int = 0) -> np.record:
    """Return the initial position of the loop, from which it continues after an interruption.

    Requests migrate every `period_ns`; 0: never. An instance reports to the router every `report_period_ns`,
    at the times of `report_time_ns`; 0: it reads their present state.
    """
    cursor = new_record(_CURSOR)
    cursor.place, cursor.tick_ns = NONE, period_ns
    cursor.report_period_ns = report_period_ns
    cursor.pause_ns = cursor.refresh_ns = np.iinfo(np.int64).max
    if report_period_ns == 0:
        cursor.report_ns = np.iinfo(np.int64).max
    return cursor


@jit
def serve(
    cluster: Cluster,
    rule: RoutingRule,
    key: np.uint64,
    answered: np.record,
    cursor: np.record,
    movable: Heap,
    moved: NDArray[np.int64],
) -> int:
    """Route all requests and run to the horizon, or route a single one at the time of its hand-over.

    `key` is the stream of random numbers, one per request; `answered` the record shared by the members'
    clocks; `cursor` the position of the loop; `movable` and `moved` are buffers for the numbers of moved
    requests.

    Return NONE at the end or after the single request, PAUSED at the time of a pause, REFRESH_DUE at that of
    a refresh; FETCH_DUE if the instance of the next request does not store its adapter; else an instance that
    needs more rows before the loop can continue.
    """
    placement = cluster.placement
    while True:
        event, until_ns = _next_event(cluster, rule, cursor)
        if until_ns > cursor.pause_ns:
            return PAUSED
        first, last = _concerned(cluster, rule, key, cursor, event)
        for place in range(first, last):  # the only call: compiled code has a copy of the twin for each
            advance_to(cluster, placement.instance[place], until_ns)
        if event == REPORT:
            _report(cluster, cursor)
            continue
        if event == REFRESH:
            return REFRESH_DUE
        if event == END:
            break
        if event == TICK:
            lacking = _tick(cluster, rule, cursor, movable, moved)
        else:
            lacking = _arrive(cluster, rule, key, answered, cursor)
        if lacking != NONE or cursor.is_single:
            return lacking
    for instance in range(cluster.progress.size):
        member = load_member(cluster.memory, instance)
        mark_running(member.state, member.trace)
    return NONE


@inner
def _report(cluster: Cluster, cursor: np.record) -> None:
    """Let the next instance, which has run up to now, report its state."""
    report_state(cluster, _reporting(cluster, cursor), cursor.report_ns)
    following = int(cursor.reports) + 1
    cursor.reports = following
    cursor.report_ns = report_time_ns(following, cluster.progress.size, cursor.report_period_ns)


@inner
def _reporting(cluster: Cluster, cursor: np.record) -> int:
    return int(cursor.reports % cluster.progress.size)


@inner
def _concerned(
    cluster: Cluster, rule: RoutingRule, key: np.uint64, cursor: np.record, event: int
) -> tuple[int, int]:
    """Return the places, first and one after the last, whose instances are advanced to an event."""
    placement = cluster.placement
    if event == REPORT:
        place = find_place(placement, 0, _reporting(cluster, cursor))
        return place, place + (place != NONE)  # an instance that is down has no place, and nothing to do
    if event != ARRIVAL:
        return int(placement.start[0]), int(placement.start[1])  # the base model is everywhere
    adapter = cluster.adapter[cursor.next]
    if rule.reads_state:
        return int(placement.start[adapter]), int(placement.start[adapter + 1])
    if cursor.place == NONE:
        cursor.place = choose_blindly(rule, cluster.fleet, placement, adapter, uniform(key, cursor.next))
        cursor.hand_over_ns = cluster.stream.arrival_ns[cursor.next]
    return int(cursor.place), int(cursor.place) + 1


@inner
def _next_event(cluster: Cluster, rule: RoutingRule, cursor: np.record) -> tuple[int, int]:
    """Return the next event and its time, up to which instances may run."""
    if cursor.is_single:
        return ARRIVAL, cluster.stream.arrival_ns[cursor.next]
    at_ns = cluster.horizon_ns
    event = END
    if cursor.next < cluster.following.size:
        at_ns = min(at_ns, cluster.stream.arrival_ns[cursor.next])
        event = ARRIVAL
    if cursor.refresh_ns <= at_ns:
        event, at_ns = REFRESH, cursor.refresh_ns
    if cursor.report_ns <= at_ns and cursor.report_ns < cluster.horizon_ns:
        event, at_ns = REPORT, cursor.report_ns
    if rule.period_ns > 0 and cursor.tick_ns <= at_ns and cursor.tick_ns < cluster.horizon_ns:
        return TICK, cursor.tick_ns
    return event, at_ns


@inner
def _arrive(
    cluster: Cluster, rule: RoutingRule, key: np.uint64, answered: np.record, cursor: np.record
) -> int:
    """Hand over the next request; return NONE, FETCH_DUE, or the instance that lacks a row for it."""
    request = cursor.next
    if cursor.place == NONE:
        cursor.place = _observe_and_choose(cluster, rule, key, answered, cursor)
    place = cursor.place
    instance = int(cluster.placement.instance[place])
    adapter = cluster.adapter[request]
    is_stored = cluster.stored.size == 0 or cluster.stored[instance, adapter] > 0
    member = load_member(cluster.memory, instance)
    if is_stored and lacks_rows(cluster, instance, member, 1):
        return instance
    if cursor.report_period_ns > 0:
        rank = cluster.rank[adapter]
        note_waiting(cluster.seen, cluster.placement, place, rank, 1, cluster.stream.prompt_tokens[request])
    if not is_stored:
        return FETCH_DUE
    local = cluster.placement.local[place]
    hand_over(cluster, instance, local, request, cursor.hand_over_ns, member)
    cursor.place = NONE
    cursor.next = request + 1
    return NONE


@inner
def _observe_and_choose(
    cluster: Cluster, rule: RoutingRule, key: np.uint64, answered: np.record, cursor: np.record
) -> int:
    """Return the place that a router chooses by reading the instances, which have run up to now.

    The cursor gets the time of the hand-over.
    """
    adapter = cluster.adapter[cursor.next]
    placement = cluster.placement
    now_ns = cluster.stream.arrival_ns[cursor.next]
    for place in range(placement.start[adapter], placement.start[adapter + 1]):
        if cursor.report_period_ns > 0:
            break
        cluster.fleet.instances.seen_ns[placement.instance[place]] = now_ns
        if rule.reads_adapter:
            observe_adapter(cluster, place)
    request = ArrivingRequest(
        adapter,
        cluster.rank[adapter],
        cluster.stream.prompt_tokens[cursor.next],
        (rule.prior_output_tokens + answered.answer_tokens) / (1.0 + answered.answers),
        uniform(key, cursor.next),
        now_ns,
    )
    place = choose_by_state(rule, cluster.seen, placement, request)
    cursor.hand_over_ns = sent_ns(rule, cluster.seen, placement.instance[place], request)
    return place


@inner
def _tick(
    cluster: Cluster, rule: RoutingRule, cursor: np.record, movable: Heap, moved: NDArray[np.int64]
) -> int:
    """Move requests as dLoRA does periodically; return NONE, or an instance that lacks rows."""
    count, lacking = migrate(cluster, rule, cursor.tick_ns, movable, moved)
    if lacking == NONE:
        cursor.tick_ns += rule.period_ns
        cursor.migrations += count
    return lacking


@inner
def migrate(
    cluster: Cluster, rule: RoutingRule, at_ns: int, movable: Heap, moved: NDArray[np.int64]
) -> tuple[int, int]:
    """Move waiting requests from the busiest to the idlest instance if their loads differ enough.

    Return the number of moved requests, and NONE or an instance that lacks rows; none has moved then.
    """
    here, there = busiest(cluster.fleet), idlest(cluster.fleet)
    if here == there or not is_excessive(cluster.fleet, here, rule.excess):
        return 0, NONE
    wanted = to_move(load(cluster.fleet, here), load(cluster.fleet, there), rule.request_s, rule.migration_s)
    member = load_member(cluster.memory, here)
    _list_movable(cluster, member.state, there, movable)
    count = min(wanted, movable.size[0])
    if count == 0:
        return 0, NONE
    target = load_member(cluster.memory, there)
    if lacks_rows(cluster, there, target, count):
        return 0, there
    for i in range(count - 1, -1, -1):  # from the latest to the earliest
        moved[i] = movable.items.ids[0]
        heap_remove(movable, moved[i])
    for adapter in range(member.state.adapters.size):
        if _place(cluster, member.state, adapter, there) != NONE:
            withdraw(member.state, adapter, moved[0])
    later_ns = at_ns + round(rule.migration_s * 1e9)
    for i in range(count):
        request = moved[i]
        if keeps_stats(member.clock):
            rank = cluster.rank[cluster.adapter[request]]
            count_present(member.clock, rank, -1)
            count_queued(member.clock, rank, -1, -cluster.stream.prompt_tokens[request])
        place = find_place(cluster.placement, cluster.adapter[request], there)
        hand_over(cluster, there, cluster.placement.local[place], request, later_ns, target)
    observe(cluster, here, member)
    return count, NONE


@inner
def find_place(placement: Placement, adapter: int, instance: int) -> int:
    """Return the place where an instance holds an adapter, or NONE."""
    for place in range(placement.start[adapter], placement.start[adapter + 1]):
        if placement.instance[place] == instance:
            return place
    return NONE


@inner
def _place(cluster: Cluster, state: State, local: int, there: int) -> int:
    """Return the place at `there` for the requests of a queue, by its adapter; or NONE."""
    head = state.adapters.queue_head[local]
    if head == NONE:
        return NONE
    return find_place(cluster.placement, cluster.adapter[state.rows.request[head]], there)


@inner
def _list_movable(cluster: Cluster, state: State, there: int, movable: Heap) -> None:
    """Collect the waiting requests that could move to an instance, the latest on top."""
    movable.size[0] = 0
    for adapter in range(state.adapters.size):
        if _place(cluster, state, adapter, there) == NONE:
            continue
        row = state.adapters.queue_head[adapter]
        while row != NONE:
            if is_movable(state, row):
                heap_push(movable, state.rows.request[row], -state.rows.request[row])
            row = state.rows.following[row]


@dataclass(frozen=True, eq=False)
class ClusterTrace:
    """The record of a cluster."""

    instance: NDArray[np.int32]
    """Last instance of each request; NONE for requests that never arrived."""
    traces: tuple[t.TwinTrace, ...]
    """One per instance, with shared arrays over requests, and separate counts, sums and gaps."""
    migrations: int
    """Number of moves of requests between instances."""
    moves: FleetMoves | None = None
    """Re-balancings and transfers; None without re-balancing."""


def run_cluster(
    scenario: ClusterScenario,
    rule: RoutingRule,
    seed: int,
    first_rows: int = FIRST_ROWS,
    interrupt: Callable[[], None] | None = None,
    state_period_s: float = 0.0,
    rebalancing: Rebalancing | None = None,
) -> ClusterTrace:
    """Simulate a cluster to its horizon with a new router.

    `seed` is that of the router's random numbers. Every instance has `first_rows` rows initially, without
    effect on the result. `interrupt` is called every simulated minute or sooner; an exception that it raises
    ends the simulation. Instances report their state to the router every `state_period_s`; 0: it reads their
    present state. Adapters of a scenario made for it are re-balanced, unless that is None. Raise `InputError`
    for re-balancing with a router that moves requests.
    """
    report_ns = report_period_ns(state_period_s) if rule.reads_state else 0
    if rebalancing is None:
        scenario = replace(scenario, movable=None)
    laid = lay_out(scenario, rule.reads_ranks, first_rows, rule.reads_adapter, report_ns)
    if rebalancing is None:
        return trace_of(laid, run_laid(laid, rule, seed, interrupt, report_ns))
    if 0 < rule.period_ns < scenario.horizon_ns:
        raise InputError("must not move requests if adapters are re-balanced", "dlora", "router")
    changes = FleetChanges(scenario, laid, rebalancing, seed)
    run_laid(laid, rule, seed, interrupt, report_ns, changes)
    return replace(trace_of(laid, 0), moves=changes.moves(scenario.horizon_ns))


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
    changes: FleetChanges | None = None,
) -> int:
    """Simulate a cluster in memory, and return the number of moved requests."""
    driver = _Driver(laid, rule, routing_key(seed), new_cursor(rule.period_ns, report_period_ns), changes)
    cursor = driver.cursor
    cursor.refresh_ns = next_refresh_ns(laid, 0)
    count = laid.cluster.following.size if rule.period_ns else 0
    movable, moved = new_heap(count), np.zeros(count, np.int64)
    pauses = Pauses(interrupt)
    while True:
        cursor.pause_ns = min(pauses.next_ns, driver.next_change_ns)
        state = serve(driver.laid.cluster, driver.rule, driver.key, laid.answered, cursor, movable, moved)
        if state == NONE:
            return int(cursor.migrations)
        if state >= 0:
            grow(laid, state)
        elif state == REFRESH_DUE:
            refresh_members(laid, int(cursor.refresh_ns))
            cursor.refresh_ns = next_refresh_ns(laid, int(cursor.refresh_ns))
        elif state == FETCH_DUE:
            driver.fetch(cursor)
            cursor.place, cursor.next = NONE, cursor.next + 1
        elif changes is not None and driver.next_change_ns == cursor.pause_ns:
            changes.apply(int(cursor.pause_ns))
        else:
            pauses.call()


class _Driver:
    """The compiled loop's arguments, which changes of the fleet replace."""

    def __init__(
        self, laid: Laid, rule: RoutingRule, key: np.uint64, cursor: np.record, changes: FleetChanges | None
    ) -> None:
        self.rule = rule
        self.key = key
        self.cursor = cursor
        self._laid = laid
        self._changes = changes
        if changes is not None:
            changes.route = self._route
            changes.on_swap = self._carry_credits

    @property
    def laid(self) -> Laid:
        return self._laid if self._changes is None else self._changes.laid

    @property
    def next_change_ns(self) -> int:
        return NEVER_NS if self._changes is None else self._changes.next_ns

    def fetch(self, cursor: np.record) -> None:
        """Let the request at a cursor wait for its adapter."""
        cluster = self.laid.cluster
        if self._changes is not None:
            now_ns = int(cluster.stream.arrival_ns[cursor.next])
            instance = int(cluster.placement.instance[cursor.place])
            self._changes.fetch(int(cursor.next), instance, now_ns)

    def _route(self, request: int, now_ns: int) -> None:
        """Route a request again."""
        laid = self.laid
        laid.cluster.stream.arrival_ns[request] = now_ns
        cursor = new_cursor(0, int(self.cursor.report_period_ns))
        cursor.next, cursor.is_single = request, 1
        buffers = new_heap(0), np.zeros(0, np.int64)
        while (state := serve(laid.cluster, self.rule, self.key, laid.answered, cursor, *buffers)) >= 0:
            grow(laid, state)
        if state == FETCH_DUE:
            self.fetch(cursor)

    def _carry_credits(self, before: Placement, now_ns: int) -> None:
        """Carry credits over to a new routing table, as the router of a served plan does."""
        if self.rule.credit.size:
            after = self.laid.cluster.placement
            self.rule = self.rule._replace(credit=carried_credit(self.rule.credit, before, after))


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
        record_pool(member)
    return ClusterTrace(laid.cluster.instance, tuple(m.trace for m in laid.members), migrations)


def routing_key(seed: int) -> np.uint64:
    """Return the key of the routers' random numbers, independent of those of the requests."""
    return np.uint64(np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(1, np.uint64)[0])
