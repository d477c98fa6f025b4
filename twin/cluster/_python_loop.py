"""Reference loop of the cluster twin in Python, for routers written in Python.

The instances are those of the compiled twin. The order of events and what a router reads are computed here
without any of the counts that the compiled loop keeps. An arrival takes some hundred microseconds per
candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from capplan.errors import InputError
from capplan.serving import NONE, State
from capplan.serving.routers import Placement, adapter_of_places
from capplan.serving.state import ENDING, LOADING, POOLED
from capplan.twin.cluster._rebalancing import FleetChanges, Rebalancing
from capplan.twin.cluster._run import (
    ClusterTrace,
    next_refresh_ns,
    refresh_members,
    report_period_ns,
    routing_key,
    trace_of,
)
from capplan.twin.cluster._scenario import ClusterScenario
from capplan.twin.cluster._steps import Laid, advance_instances, grow, hand_to, lacks_row, lay_out
from capplan.twin.instance import _trace as t
from capplan.twin.instance._clock import NEVER_NS
from capplan.twin.instance._core import mark_running
from capplan.twin.instance._scenario import NS_PER_S
from capplan.workload import uniform


@dataclass(frozen=True)
class RoutedRequest:
    """An arriving request."""

    number: int
    """From 0, in order of arrival."""
    arrival_s: float
    adapter: int
    """1 + position in ``workload.adapters``; 0: the base model."""
    rank: int
    """Rank of its adapter; 0: the base model."""
    prompt_tokens: int
    draw: float
    """Random number of this request, uniform in [0, 1)."""
    mean_answer_tokens: float
    """Mean output of the finished requests and one request of the workload's mean."""


@dataclass(frozen=True)
class Candidate:
    """Current state of an instance that holds the request's adapter."""

    instance: int
    share: float
    """Planned share of the adapter's requests."""
    running: tuple[int, ...]
    """Ranks of the running requests."""
    queued: tuple[int, ...]
    """Ranks of the waiting requests, including those that its scheduler has not seen, and those that wait
    for the transfer of their adapter."""
    queued_tokens: int
    """Their prompt tokens."""
    free_tokens: int
    """Free KV tokens, and those in place of cached adapters that no running request uses."""
    kv_tokens: int
    """KV capacity in tokens."""
    max_num_seqs: int
    max_loras: int
    active_adapters: int
    """Loaded adapters of running requests."""
    queued_adapters: int
    """Adapters of waiting requests that the scheduler has seen, and adapters being loaded or fetched."""
    is_active: bool
    """Whether requests of the same adapter run; false for the base model, as for the gateway."""
    is_queued: bool
    """Whether requests of the same adapter wait that the scheduler has seen, or for its transfer."""
    running_tokens: int = 0
    """KV tokens of the running requests, and tokens of their prompts that are not computed yet."""
    partial_tokens: int = 0
    """Tokens of the prompts of running requests that are not computed yet."""
    queued_prompts: tuple[int, ...] = ()
    """Prompt tokens of the waiting requests, in the order of `queued`."""
    is_resident: bool = False
    """Whether the adapter is in GPU memory."""
    age_ns: int = 0
    """Time since the instance reported this state; `NEVER_NS` before its first report."""


Waiting: TypeAlias = Mapping[tuple[int, int], Sequence[int]]

PythonRouter: TypeAlias = Callable[[RoutedRequest, Sequence[Candidate]], int]
"""Returns the position of the chosen candidate; candidates are in order of instances."""


class _Reports:
    """What the router knows of the instances if they report their state from time to time.

    An instance reports every `period_ns`; 0: the router reads the present state. `waiting` are the requests
    that wait for a transfer, by instance and adapter.
    """

    def __init__(self, laid: Laid, period_ns: int, waiting: Waiting) -> None:
        self._laid = laid
        self._period_ns = period_ns
        self._waiting = waiting
        self._count = 0
        self._seen_ns: list[int | None] = [None] * len(laid.members)
        places = laid.cluster.placement.instance.size if period_ns else 0
        self._known = [self._observe(place) for place in range(places)]

    def _observe(self, place: int) -> Candidate:
        return observe_candidate(self._laid, place, self._waiting)

    @property
    def next_ns(self) -> int:
        """Time of the next report; NEVER_NS if there is none before the horizon."""
        instances = len(self._seen_ns)
        lap, at = divmod(self._count, instances)
        next_ns = lap * self._period_ns + at * self._period_ns // instances
        return next_ns if self._period_ns and next_ns < self._laid.cluster.horizon_ns else NEVER_NS

    @property
    def next_instance(self) -> int:
        """The instance that reports next: they take turns."""
        return self._count % len(self._seen_ns)

    def swap(self, laid: Laid, before: Placement, now_ns: int) -> None:
        """Keep what is known at the places of a new routing table; read instances that are back."""
        self._laid = laid
        if not self._period_ns:
            return
        former = list(zip(adapter_of_places(before).tolist(), self._known, strict=True))
        by_pair = {(adapter, known.instance): known for adapter, known in former}
        by_instance = {known.instance: known for _, known in former}
        after = laid.cluster.placement
        self._known = []
        for place, adapter in enumerate(adapter_of_places(after).tolist()):
            instance, share = int(after.instance[place]), float(after.share[place])
            if instance not in by_instance:
                self._known.append(self._observe(place))
                self._seen_ns[instance] = now_ns
                continue
            unknown = replace(by_instance[instance], is_active=False, is_queued=False, is_resident=False)
            self._known.append(replace(by_pair.get((adapter, instance), unknown), share=share))

    def report(self) -> None:
        """Report the state of the next instance, which has run up to now."""
        instance = self.next_instance
        for place in np.flatnonzero(self._laid.cluster.placement.instance == instance).tolist():
            self._known[place] = self._observe(place)
        self._seen_ns[instance] = self.next_ns
        self._count += 1

    def candidates(self, start: int, end: int, now_ns: int) -> list[Candidate]:
        """Return what the router knows of the holders of an adapter."""
        if not self._period_ns:
            return [self._observe(place) for place in range(start, end)]
        return [
            replace(known, age_ns=NEVER_NS if seen_ns is None else now_ns - seen_ns)
            for known in self._known[start:end]
            for seen_ns in (self._seen_ns[known.instance],)
        ]

    def note_sent(self, place: int, rank: int, prompt_tokens: int) -> None:
        """Add a request that the router has sent to an instance."""
        if not self._period_ns:
            return
        chosen = self._known[place]
        is_new = rank > 0 and not (chosen.is_active or chosen.is_queued)
        for other, known in enumerate(self._known):
            if known.instance == chosen.instance:
                self._known[other] = replace(
                    known,
                    queued=(*known.queued, rank),
                    queued_prompts=(*known.queued_prompts, prompt_tokens),
                    queued_tokens=known.queued_tokens + prompt_tokens,
                    queued_adapters=known.queued_adapters + is_new,
                    is_queued=known.is_queued or (other == place and rank > 0),
                )


def run_with(
    scenario: ClusterScenario,
    router: PythonRouter,
    seed: int,
    state_period_s: float = 0.0,
    rebalancing: Rebalancing | None = None,
) -> ClusterTrace:
    """Simulate a cluster to its horizon as `run_cluster` does, with a router written in Python.

    If adapters are re-balanced, a router with a method `swap` gets the placements before and after each time.
    A router with a method `sent_ns` returns the time at which the chosen candidate gets a request. Raise
    `InputError` if the router returns no position of a candidate.
    """
    if rebalancing is None:
        scenario = replace(scenario, movable=None)
    laid = lay_out(scenario, by_rank=False, by_adapter=True)
    changes = None if rebalancing is None else FleetChanges(scenario, laid, rebalancing, seed)
    loop = _Loop(scenario, laid, router, seed, report_period_ns(state_period_s), changes)
    for number, arrival_ns in enumerate(scenario.requests.arrival_ns.tolist()):
        loop.pass_time(min(arrival_ns, scenario.horizon_ns))
        loop.route(number, arrival_ns)
    loop.pass_time(scenario.horizon_ns)
    laid = loop.laid
    advance_instances(laid.cluster, 0, scenario.instances, scenario.horizon_ns)
    for member in laid.members:
        mark_running(member.state, member.trace)
    moves = None if changes is None else changes.moves(scenario.horizon_ns)
    return replace(trace_of(laid, migrations=0), moves=moves)


class _Loop:
    """The events of a cluster in the order of time."""

    def __init__(
        self,
        scenario: ClusterScenario,
        laid: Laid,
        router: PythonRouter,
        seed: int,
        report_period_ns: int,
        changes: FleetChanges | None,
    ) -> None:
        self._scenario = scenario
        self._laid = laid
        self._router = router
        self._changes = changes
        self._key = routing_key(seed)
        self._reports = _Reports(laid, report_period_ns, {} if changes is None else changes.waiting)
        outputs = scenario.requests.output_tokens
        self._prior_output_tokens = float(outputs.mean()) if outputs.size else 1.0
        self._refresh_ns = next_refresh_ns(laid, 0)
        if changes is not None:
            changes.route = self.route
            changes.on_swap = self._on_swap

    @property
    def laid(self) -> Laid:
        """The cluster in memory."""
        return self._laid if self._changes is None else self._changes.laid

    def pass_time(self, until_ns: int) -> None:
        """Do the reports and refreshes up to a time, and the changes before it; the latter come last."""
        while True:
            change_ns = NEVER_NS if self._changes is None else self._changes.next_ns
            now_ns = min(self._refresh_ns, self._reports.next_ns)
            if now_ns <= min(until_ns, change_ns):
                if self._reports.next_ns == now_ns:
                    instance = self._reports.next_instance
                    advance_instances(self.laid.cluster, instance, instance + 1, now_ns)
                    self._reports.report()
                else:
                    advance_instances(self.laid.cluster, 0, len(self.laid.members), now_ns)
                    refresh_members(self.laid, now_ns)
                    self._refresh_ns = next_refresh_ns(self.laid, now_ns)
            elif self._changes is not None and change_ns < until_ns:
                self._changes.apply(change_ns)
            else:
                return

    def route(self, number: int, now_ns: int) -> None:
        """Hand a request to the instance that the router chooses, or let it wait there for its adapter."""
        laid, scenario = self.laid, self._scenario
        placement = laid.cluster.placement
        adapter = int(scenario.requests.adapter[number])
        start, end = placement.start[adapter : adapter + 2].tolist()
        for place in range(start, end):
            instance = int(placement.instance[place])
            advance_instances(laid.cluster, instance, instance + 1, min(now_ns, scenario.horizon_ns))
        request = RoutedRequest(
            number=number,
            arrival_s=now_ns / NS_PER_S,
            adapter=adapter,
            rank=int(scenario.rank[adapter]),
            prompt_tokens=int(scenario.requests.prompt_tokens[number]),
            draw=uniform(self._key, number),
            mean_answer_tokens=_mean_answer(scenario, laid, self._prior_output_tokens),
        )
        candidates = self._reports.candidates(start, end, now_ns)
        chosen = self._router(request, candidates)
        if not isinstance(chosen, int | np.integer) or not 0 <= chosen < len(candidates):
            raise InputError(f"must return a position from 0 to {len(candidates) - 1}", chosen, "router")
        instance = candidates[chosen].instance
        if self._changes is not None and not laid.cluster.stored[instance, adapter]:
            self._changes.fetch(number, instance, now_ns)
        else:
            if lacks_row(laid.cluster, instance):
                grow(laid, instance)
            sent_ns = getattr(self._router, "sent_ns", None)
            at_ns = now_ns if sent_ns is None else sent_ns(request, candidates[chosen], now_ns)
            hand_to(laid.cluster, instance, int(placement.local[start + chosen]), number, at_ns)
        self._reports.note_sent(start + chosen, request.rank, request.prompt_tokens)

    def _on_swap(self, before: Placement, now_ns: int) -> None:
        """Use the places of a new routing table."""
        self._reports.swap(self.laid, before, now_ns)
        swap = getattr(self._router, "swap", None)
        if swap is not None:
            swap(before, self.laid.cluster.placement)


def observe_candidate(laid: Laid, place: int, fetching: Waiting = MappingProxyType({})) -> Candidate:
    """Return the state of the instance at a place for a router, counted request by request.

    `fetching` are the requests that wait for a transfer, by instance and adapter.
    """
    cluster, placement = laid.cluster, laid.cluster.placement
    instance, local = int(placement.instance[place]), int(placement.local[place])
    state, limits, costs = laid.members[instance][:3]
    rows, adapters = state.rows, state.adapters
    running = [row for row in _follow(state, state.counters.run_head) if rows.since[row] != ENDING]
    queues = [list(_follow(state, head)) for head in adapters.queue_head]
    waiting = [int(rows.request[row]) for queue in queues for row in queue]
    waiting += unseen_requests(laid, instance)
    fetched = {adapter: requests for (at, adapter), requests in fetching.items() if at == instance}
    waiting += [request for requests in fetched.values() for request in requests]
    awaited = {adapter for adapter, queue in enumerate(queues) if queue or adapters.claim[adapter] == LOADING}
    awaited |= fetched.keys()
    loaded = {int(rows.adapter[row]) for row in running if adapters.claim[rows.adapter[row]] != LOADING}
    idle = (adapters.resident == 1) & (adapters.users == 0) & (adapters.claim != LOADING)
    idle_blocks = int(adapters.pages[idle].sum()) if limits.policy == POOLED else 0
    prompts, rank = cluster.stream.prompt_tokens, cluster.rank
    return Candidate(
        instance=instance,
        share=float(placement.share[place]),
        running=tuple(int(costs.rank[rows.adapter[row]]) for row in running),
        queued=tuple(int(rank[cluster.adapter[request]]) for request in waiting),
        queued_tokens=sum(int(prompts[request]) for request in waiting),
        running_tokens=sum(max(int(rows.prompt[row]), _computed_tokens(state, row)) for row in running),
        partial_tokens=sum(max(0, int(rows.prompt[row]) - _computed_tokens(state, row)) for row in running),
        queued_prompts=tuple(int(prompts[request]) for request in waiting),
        is_resident=local == 0 or (adapters.resident[local] == 1 and adapters.claim[local] != LOADING),
        free_tokens=(int(state.counters.free_blocks) + idle_blocks) * limits.block_size,
        kv_tokens=int(state.counters.capacity) * limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_loras=limits.max_loras,
        active_adapters=len(loaded - {0}),
        queued_adapters=len(awaited - {0}),
        is_active=local > 0 and local in loaded,
        is_queued=local > 0 and (bool(queues[local]) or local in fetched),
    )


def _follow(state: State, row: int) -> Iterator[int]:
    while row != NONE:
        yield int(row)
        row = state.rows.following[row]


def _computed_tokens(state: State, row: int) -> int:
    """Return the tokens with KV of a running request."""
    since = int(state.rows.since[row])
    return int(state.rows.computed[row]) + (int(state.counters.tick) - since if since >= 0 else 0)


def unseen_requests(laid: Laid, instance: int) -> list[int]:
    """Return the requests handed to an instance that its scheduler has not seen."""
    request = int(laid.members[instance].trace.counts.next_request)
    found = []
    while request < laid.cluster.following.size:
        found.append(request)
        request = int(laid.cluster.following[request])
    return found


def _mean_answer(scenario: ClusterScenario, laid: Laid, prior_output_tokens: float) -> float:
    """Return the mean output of the finished requests and one of `prior_output_tokens` tokens."""
    finish_ns = laid.members[0].trace.finish_ns
    done = finish_ns != t.NEVER
    limits = np.array([engine.limits.max_model_len for engine in scenario.engines])
    room = limits[laid.cluster.instance[done]] - scenario.requests.prompt_tokens[done]
    answers = np.minimum(scenario.requests.output_tokens[done], room)
    return float((prior_output_tokens + int(answers.sum())) / (1.0 + answers.size))
