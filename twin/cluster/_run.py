"""Simulation of a cluster scenario: calls of the compiled loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.serving import NONE, new_heap
from capplan.serving.pooled import refresh
from capplan.serving.routers import Placement, RoutingRule, carried_credit
from capplan.twin.cluster._layout import FIRST_ROWS, Laid, grow, lay_out
from capplan.twin.cluster._loop import FETCH_DUE, REFRESH_DUE, new_cursor, serve
from capplan.twin.cluster._rebalancing import FleetChanges, FleetMoves, Rebalancing
from capplan.twin.cluster._scenario import ClusterScenario
from capplan.twin.cluster._steps import show_arrivals
from capplan.twin.instance import _trace as t
from capplan.twin.instance._core import record_pool
from capplan.twin.instance._host_link import NEVER_NS, Pauses
from capplan.twin.instance._scenario import NS_PER_S


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
        Called every simulated minute or sooner; an exception that it raises ends the simulation.
    state_period_s
        Time between reports of the instances to the router; 0: it reads their present state.
    rebalancing
        Re-balancing of a scenario that was made for it; None: the placement stays as it is.

    Raises
    ------
    InputError
        For re-balancing with a router that moves requests.
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
