"""The loop of the cluster twin in Python: for routers written in Python, and as a yardstick.

The instances are those of the compiled twin; the order of events and what a router sees are told here in
plain words, without any of the counts that the compiled loop keeps. An arrival takes some hundred
microseconds per candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from capplan.compile import jit
from capplan.errors import InputError
from capplan.serving import NONE, State
from capplan.serving.state import CAPACITY, ENDING, FREE_BLOCKS, LOADING, RUN_HEAD
from capplan.twin import trace as t
from capplan.twin.cluster.member import load_member
from capplan.twin.cluster.run import ClusterTrace, Laid, grow, lay_out, routing_key, trace_of
from capplan.twin.cluster.scenario import ClusterScenario
from capplan.twin.cluster.steps import Cluster, go_on, hand_over, lacks_rows
from capplan.twin.core import mark_running
from capplan.twin.scenario import NS_PER_S
from capplan.workload.sampling import uniform


@dataclass(frozen=True)
class RoutedRequest:
    """A request that has just arrived."""

    number: int
    """From 0, in order of arrival."""
    arrival_s: float
    adapter: int
    """1 + position in ``workload.adapters``; 0: the base model."""
    rank: int
    """Of its adapter; 0: the base model."""
    prompt_tokens: int
    draw: float
    """A number drawn for this request, uniform in [0, 1)."""
    mean_answer_tokens: float
    """Mean output of the requests that have finished so far, and of one of the workload's mean."""


@dataclass(frozen=True)
class Candidate:
    """An instance that holds the request's adapter, as it is at this moment."""

    instance: int
    share: float
    """Share of the adapter's requests that is meant for it."""
    running: tuple[int, ...]
    """Ranks of the requests that run there."""
    queued: tuple[int, ...]
    """Ranks of the requests that wait there, also those that its scheduler has not seen yet."""
    queued_tokens: int
    """Their prompt tokens."""
    free_tokens: int
    """KV tokens that nobody holds."""
    kv_tokens: int
    """KV tokens in all."""
    max_num_seqs: int
    max_loras: int
    active_adapters: int
    """Adapters of running requests."""
    queued_adapters: int
    """Adapters of waiting requests, as far as the scheduler has seen them, and adapters on their way."""
    is_active: bool
    """Whether requests of the same adapter run there; never so for the base model, as for the gateway."""
    is_queued: bool
    """Whether requests of the same adapter wait there, as far as the scheduler has seen them."""


PythonRouter: TypeAlias = Callable[[RoutedRequest, Sequence[Candidate]], int]
"""Returns the position of the candidate that gets the request; candidates come in order of instances."""


def run_with(scenario: ClusterScenario, router: PythonRouter, seed: int) -> ClusterTrace:
    """Simulate a cluster to its horizon as `run_cluster` does, with a router written in Python.

    Raises
    ------
    InputError
        When the router returns anything but the position of a candidate.
    """
    laid = lay_out(scenario, by_rank=False)
    key = routing_key(seed)
    outputs = scenario.requests.output_tokens
    first_answer = float(outputs.mean()) if outputs.size else 1.0
    for number, arrival_ns in enumerate(scenario.requests.arrival_ns.tolist()):
        adapter = int(scenario.requests.adapter[number])
        start, end = scenario.placement.start[adapter : adapter + 2].tolist()
        _go_on(laid.cluster, start, end, min(arrival_ns, scenario.horizon_ns))
        request = RoutedRequest(
            number=number,
            arrival_s=arrival_ns / NS_PER_S,
            adapter=adapter,
            rank=int(scenario.rank[adapter]),
            prompt_tokens=int(scenario.requests.prompt_tokens[number]),
            draw=uniform(key, number),
            mean_answer_tokens=_mean_answer(scenario, laid, first_answer),
        )
        candidates = [see(laid, place) for place in range(start, end)]
        chosen = router(request, candidates)
        if not isinstance(chosen, int | np.integer) or not 0 <= chosen < len(candidates):
            raise InputError(f"must return a position from 0 to {len(candidates) - 1}", chosen, "router")
        if _lacks_rows(laid.cluster, candidates[chosen].instance):
            grow(laid, candidates[chosen].instance)
        _hand_over(laid.cluster, start + chosen, number, arrival_ns)
    _go_on(laid.cluster, 0, scenario.instances, scenario.horizon_ns)  # the base model is everywhere
    for member in laid.members:
        _mark_running(member.state, member.trace)
    return trace_of(laid, migrations=0)


def see(laid: Laid, place: int) -> Candidate:
    """Return what a router sees of the instance at a place, counted request by request."""
    cluster, placement = laid.cluster, laid.cluster.placement
    instance, local = int(placement.instance[place]), int(placement.local[place])
    state, limits, costs = laid.members[instance][:3]
    rows, adapters = state.rows, state.adapters
    running = [row for row in _follow(state, state.counters[RUN_HEAD]) if rows.since[row] != ENDING]
    queues = [list(_follow(state, head)) for head in adapters.queue_head]
    waiting = [int(rows.request[row]) for queue in queues for row in queue]
    waiting += unseen_requests(laid, instance)
    awaited = {adapter for adapter, queue in enumerate(queues) if queue or adapters.claim[adapter] == LOADING}
    prompts, rank = cluster.stream.prompt_tokens, cluster.rank
    return Candidate(
        instance=instance,
        share=float(placement.share[place]),
        running=tuple(int(costs.rank[rows.adapter[row]]) for row in running),
        queued=tuple(int(rank[cluster.adapter[request]]) for request in waiting),
        queued_tokens=sum(int(prompts[request]) for request in waiting),
        free_tokens=int(state.counters[FREE_BLOCKS]) * limits.block_size,
        kv_tokens=int(state.counters[CAPACITY]) * limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_loras=limits.max_loras,
        active_adapters=len({int(rows.adapter[row]) for row in running} - {0}),
        queued_adapters=len(awaited - {0}),
        is_active=local > 0 and any(rows.adapter[row] == local for row in running),
        is_queued=local > 0 and bool(queues[local]),
    )


def _follow(state: State, row: int) -> Iterator[int]:
    while row != NONE:
        yield int(row)
        row = state.rows.following[row]


def unseen_requests(laid: Laid, instance: int) -> list[int]:
    """Return the requests handed to an instance that its scheduler has not seen yet."""
    request = int(laid.members[instance].trace.counts[t.NEXT_REQUEST])
    found = []
    while request < laid.cluster.following.size:
        found.append(request)
        request = int(laid.cluster.following[request])
    return found


def _mean_answer(scenario: ClusterScenario, laid: Laid, first_answer: float) -> float:
    """Return the mean output of the requests that have finished, and of one more."""
    finish_ns = laid.members[0].trace.finish_ns
    done = finish_ns != t.NEVER
    limits = np.array([engine.limits.max_model_len for engine in scenario.engines])
    room = limits[laid.cluster.instance[done]] - scenario.requests.prompt_tokens[done]
    answers = np.minimum(scenario.requests.output_tokens[done], room)
    return float((first_answer + int(answers.sum())) / (1.0 + answers.size))


@jit
def _go_on(cluster: Cluster, first: int, last: int, until_ns: int) -> None:
    for place in range(first, last):
        instance = cluster.placement.instance[place]
        if cluster.progress.wake_ns[instance] < until_ns:
            go_on(cluster, instance, until_ns)


@jit
def _lacks_rows(cluster: Cluster, instance: int) -> bool:
    return lacks_rows(cluster, instance, load_member(cluster.memory, instance), 1)


@jit
def _hand_over(cluster: Cluster, place: int, request: int, at_ns: int) -> None:
    member = load_member(cluster.memory, cluster.placement.instance[place])
    hand_over(cluster, place, request, at_ns, member)


@jit
def _mark_running(state: State, trace: t.Trace) -> None:
    mark_running(state, trace)
