"""Reference loop of the cluster twin in Python, for routers written in Python, and reference routers.

The instances are those of the compiled twin. The order of events and what a router reads are computed here
without any of the counts that the compiled loop keeps. An arrival takes some hundred microseconds per
candidate. The reference routers are compared with the compiled rules of `capplan.serving.routers`, and are
examples of routers written in Python. They have state, so every simulation needs new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import TypeAlias

import numpy as np

from capplan.compile import jit
from capplan.errors import InputError
from capplan.serving import NONE, State
from capplan.serving.routers import Gateway, Performance
from capplan.serving.state import ENDING, LOADING, POOLED
from capplan.twin import trace as t
from capplan.twin.cluster.member import load_member
from capplan.twin.cluster.run import (
    ClusterTrace,
    Laid,
    grow,
    lay_out,
    next_refresh_ns,
    refresh_members,
    routing_key,
    trace_of,
)
from capplan.twin.cluster.scenario import ClusterScenario
from capplan.twin.cluster.steps import Cluster, advance_to, hand_over, lacks_rows
from capplan.twin.core import mark_running
from capplan.twin.scenario import NS_PER_S
from capplan.workload.sampling import uniform


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
    """Ranks of the waiting requests, including those that its scheduler has not seen."""
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
    """Adapters of waiting requests that the scheduler has seen, and adapters being loaded."""
    is_active: bool
    """Whether requests of the same adapter run; false for the base model, as for the gateway."""
    is_queued: bool
    """Whether requests of the same adapter wait that the scheduler has seen."""
    running_tokens: int = 0
    """KV tokens of the running requests, and tokens of their prompts that are not computed yet."""


PythonRouter: TypeAlias = Callable[[RoutedRequest, Sequence[Candidate]], int]
"""Returns the position of the chosen candidate; candidates are in order of instances."""


def run_with(scenario: ClusterScenario, router: PythonRouter, seed: int) -> ClusterTrace:
    """Simulate a cluster to its horizon as `run_cluster` does, with a router written in Python.

    Raises
    ------
    InputError
        If the router returns no position of a candidate.
    """
    laid = lay_out(scenario, by_rank=False)
    key = routing_key(seed)
    outputs = scenario.requests.output_tokens
    first_answer = float(outputs.mean()) if outputs.size else 1.0
    refresh_ns = next_refresh_ns(laid, 0)
    for number, arrival_ns in enumerate(scenario.requests.arrival_ns.tolist()):
        adapter = int(scenario.requests.adapter[number])
        start, end = scenario.placement.start[adapter : adapter + 2].tolist()
        refresh_ns = _refresh_until(laid, refresh_ns, arrival_ns)
        _advance(laid.cluster, start, end, min(arrival_ns, scenario.horizon_ns))
        request = RoutedRequest(
            number=number,
            arrival_s=arrival_ns / NS_PER_S,
            adapter=adapter,
            rank=int(scenario.rank[adapter]),
            prompt_tokens=int(scenario.requests.prompt_tokens[number]),
            draw=uniform(key, number),
            mean_answer_tokens=_mean_answer(scenario, laid, first_answer),
        )
        candidates = [observe_candidate(laid, place) for place in range(start, end)]
        chosen = router(request, candidates)
        if not isinstance(chosen, int | np.integer) or not 0 <= chosen < len(candidates):
            raise InputError(f"must return a position from 0 to {len(candidates) - 1}", chosen, "router")
        if _lacks_rows(laid.cluster, candidates[chosen].instance):
            grow(laid, candidates[chosen].instance)
        _hand_over(laid.cluster, start + chosen, number, arrival_ns)
    _refresh_until(laid, refresh_ns, scenario.horizon_ns)
    _advance(laid.cluster, 0, scenario.instances, scenario.horizon_ns)  # the base model is everywhere
    for member in laid.members:
        _mark_running(member.state, member.trace)
    return trace_of(laid, migrations=0)


def _refresh_until(laid: Laid, refresh_ns: int, until_ns: int) -> int:
    """Do the refreshes from `refresh_ns` to `until_ns`, and return the time of the next one."""
    while refresh_ns <= until_ns:
        _advance(laid.cluster, 0, len(laid.members), refresh_ns)  # the base model is everywhere
        refresh_members(laid, refresh_ns)
        refresh_ns = next_refresh_ns(laid, refresh_ns)
    return refresh_ns


def observe_candidate(laid: Laid, place: int) -> Candidate:
    """Return the state of the instance at a place for a router, counted request by request."""
    cluster, placement = laid.cluster, laid.cluster.placement
    instance, local = int(placement.instance[place]), int(placement.local[place])
    state, limits, costs = laid.members[instance][:3]
    rows, adapters = state.rows, state.adapters
    running = [row for row in _follow(state, state.counters.run_head) if rows.since[row] != ENDING]
    queues = [list(_follow(state, head)) for head in adapters.queue_head]
    waiting = [int(rows.request[row]) for queue in queues for row in queue]
    waiting += unseen_requests(laid, instance)
    awaited = {adapter for adapter, queue in enumerate(queues) if queue or adapters.claim[adapter] == LOADING}
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
        free_tokens=(int(state.counters.free_blocks) + idle_blocks) * limits.block_size,
        kv_tokens=int(state.counters.capacity) * limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_loras=limits.max_loras,
        active_adapters=len(loaded - {0}),
        queued_adapters=len(awaited - {0}),
        is_active=local > 0 and local in loaded,
        is_queued=local > 0 and bool(queues[local]),
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


def _mean_answer(scenario: ClusterScenario, laid: Laid, first_answer: float) -> float:
    """Return the mean output of the finished requests and one of `first_answer` tokens."""
    finish_ns = laid.members[0].trace.finish_ns
    done = finish_ns != t.NEVER
    limits = np.array([engine.limits.max_model_len for engine in scenario.engines])
    room = limits[laid.cluster.instance[done]] - scenario.requests.prompt_tokens[done]
    answers = np.minimum(scenario.requests.output_tokens[done], room)
    return float((first_answer + int(answers.sum())) / (1.0 + answers.size))


@jit
def _advance(cluster: Cluster, first: int, last: int, until_ns: int) -> None:
    for place in range(first, last):
        advance_to(cluster, cluster.placement.instance[place], until_ns)


@jit
def _lacks_rows(cluster: Cluster, instance: int) -> bool:
    return lacks_rows(cluster, instance, load_member(cluster.memory, instance), 1)


@jit
def _hand_over(cluster: Cluster, place: int, request: int, at_ns: int) -> None:
    member = load_member(cluster.memory, cluster.placement.instance[place])
    hand_over(cluster, place, request, at_ns, member)


@jit
def _mark_running(state: State, trace: t.TwinTrace) -> None:
    mark_running(state, trace)


Candidates = Sequence[Candidate]


def load(candidate: Candidate) -> int:
    """Return the requests at an instance."""
    return len(candidate.running) + len(candidate.queued)


def fits(request: RoutedRequest, candidate: Candidate) -> bool:
    """Return whether free memory suffices for a prompt after those of the waiting requests."""
    return candidate.queued_tokens + request.prompt_tokens <= candidate.free_tokens


@dataclass
class Rotating:
    """The candidate with the smallest key; of several, the first one after the last choice."""

    instances: int
    key: Callable[[RoutedRequest, Candidate], tuple[float, ...]]
    last: int = -1

    def __call__(self, request: RoutedRequest, candidates: Candidates) -> int:
        """Return the position of the chosen candidate."""

        def order(at: int) -> tuple[float, ...]:
            behind = (candidates[at].instance - self.last - 1) % self.instances
            return (*self.key(request, candidates[at]), behind)

        chosen = min(range(len(candidates)), key=order)
        self.last = candidates[chosen].instance
        return chosen


def plan_shares(request: RoutedRequest, candidates: Candidates) -> int:
    """Draw a candidate by the shares of the plan."""
    upto = 0.0
    for at, candidate in enumerate(candidates):
        upto += candidate.share
        if request.draw < upto:
            return at
    return max(at for at, candidate in enumerate(candidates) if candidate.share > 0)


def random_holder(request: RoutedRequest, candidates: Candidates) -> int:
    """Draw a candidate."""
    return int(request.draw * len(candidates))


def two_choices(request: RoutedRequest, candidates: Candidates) -> int:
    """Draw an ordered pair of candidates; return the less loaded one, the first of equal ones."""
    pairs = list(permutations(range(len(candidates)), 2)) or [(0, 0)]
    return min(pairs[int(request.draw * len(pairs))], key=lambda at: load(candidates[at]))


@dataclass
class SmoothShares:
    """Smooth weighted round robin."""

    credit: dict[tuple[int, int], float] = field(default_factory=dict)

    def __call__(self, request: RoutedRequest, candidates: Candidates) -> int:
        """Return the position of the candidate with most credit."""
        holders = len(candidates)
        keys = [(request.adapter, candidate.instance) for candidate in candidates]
        for at, (key, candidate) in enumerate(zip(keys, candidates, strict=True)):
            first = candidate.share * ((at - request.adapter) % holders / holders)
            self.credit[key] = self.credit.get(key, first) + candidate.share
        chosen = max(range(len(keys)), key=lambda at: self.credit[keys[at]])
        self.credit[keys[chosen]] -= 1.0
        return chosen


@dataclass
class FirstFit:
    """The first candidate with room, else the least loaded one."""

    otherwise: Rotating

    def __call__(self, request: RoutedRequest, candidates: Candidates) -> int:
        """Return the position of the first candidate with room."""
        for at, candidate in enumerate(candidates):
            if load(candidate) < candidate.max_num_seqs and fits(request, candidate):
                self.otherwise.last = candidate.instance
                return at
        return self.otherwise(request, candidates)


def affinity(candidate: Candidate) -> float:
    """Return the inference gateway's affinity score."""
    if candidate.is_active:
        return 1.0
    if candidate.active_adapters + candidate.queued_adapters < candidate.max_loras:
        return 0.8
    return 0.6 if candidate.is_queued else 0.0


@dataclass
class WeightedScores:
    """The inference gateway's sum of scores."""

    instances: int
    gateway: Gateway = field(default_factory=Gateway)
    last: int = -1

    def __call__(self, request: RoutedRequest, candidates: Candidates) -> int:
        """Return the position of the candidate with the highest score."""
        queues = [len(candidate.queued) for candidate in candidates]
        shortest, longest = min(queues), max(queues)

        def key(_: RoutedRequest, candidate: Candidate) -> tuple[float, ...]:
            idle = 1.0
            if longest > shortest:
                idle = (longest - len(candidate.queued)) / (longest - shortest)
            free = candidate.free_tokens / candidate.kv_tokens
            weights = self.gateway
            score = weights.queue * idle + weights.kv_cache * free + weights.lora * affinity(candidate)
            return (-score,)

        rotating = Rotating(self.instances, key, self.last)
        chosen = rotating(request, candidates)
        self.last = rotating.last
        return chosen


@dataclass(frozen=True)
class RankAware:
    """Toppings' key of a candidate."""

    kernel: str
    models: Sequence[Performance]
    slo_ms: float

    def __call__(self, request: RoutedRequest, candidate: Candidate) -> tuple[float, ...]:
        """Return the key of a candidate; the smallest is chosen."""
        model = self.models[candidate.instance]
        prefill = model.prefill_alpha_ms, model.prefill_beta_ms
        decode = model.decode_alpha_ms, model.decode_beta_ms
        queued, everybody = candidate.queued, (*candidate.running, *candidate.queued)
        new = request.rank
        with_it_ms = self._perf((*everybody, new), *decode)
        prefill_ms = self._perf((*queued, new), *prefill) + model.prefill_ms_per_token * request.prompt_tokens
        prefill_ms -= self._perf(queued, *prefill)
        cost = with_it_ms - self._perf(everybody, *decode) + prefill_ms / request.mean_answer_tokens
        requests = len(everybody)
        return not fits(request, candidate), with_it_ms > self.slo_ms, cost * requests, requests, cost

    def _perf(self, ranks: Sequence[int], alpha: float, beta: float) -> float:
        """Return eq. 2 for requests of these ranks, 0 for those of the base model."""
        if not ranks:
            return 0.0
        adapters = [rank for rank in ranks if rank > 0]
        if self.kernel == "mbgmv":
            return alpha * sum(adapters) + beta
        return alpha * (len(adapters) * max(adapters, default=0)) + beta


def reference_router(name: str, instances: int, rank_aware: RankAware | None = None) -> PythonRouter:
    """Return a new reference router.

    Parameters
    ----------
    name
        Name in `capplan.serving.routers.ROUTERS`; dLoRA is without its migrations.
    instances
        Number of instances.
    rank_aware
        Key of Toppings' router, which requires it.
    """
    least_loaded = Rotating(instances, lambda _, candidate: (load(candidate),))
    rules: dict[str, PythonRouter] = {
        "plan-shares": plan_shares,
        "smooth-shares": SmoothShares(),
        "random": random_holder,
        "round-robin": Rotating(instances, lambda *_: ()),
        "least-loaded": least_loaded,
        "least-tokens": Rotating(instances, lambda _, seen: (seen.running_tokens + seen.queued_tokens,)),
        "two-choices": two_choices,
        "first-fit": FirstFit(least_loaded),
        "lora-affinity": Rotating(instances, lambda _, seen: (-affinity(seen), len(seen.queued))),
        "inference-gateway": WeightedScores(instances),
        "dlora": least_loaded,
    }
    if rank_aware is not None:
        rules["toppings"] = Rotating(instances, rank_aware)
    if name not in rules:
        raise InputError(f"must be one of {', '.join(rules)}", name, "router")
    return rules[name]
