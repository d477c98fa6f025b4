"""The routing rules as one would tell them, from what there is to see of each candidate.

Compared with the compiled rules of `capplan.serving.routing`, and examples of routers written in Python. They
remember what they must, so every simulation needs new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from capplan.errors import InputError
from capplan.serving.routing import Gateway, Performance
from capplan.twin.cluster.readable import Candidate, PythonRouter, RoutedRequest

Candidates = Sequence[Candidate]


def load(candidate: Candidate) -> int:
    """Return the requests at an instance."""
    return len(candidate.running) + len(candidate.queued)


def fits(request: RoutedRequest, candidate: Candidate) -> bool:
    """Tell whether the memory for a prompt is left once those who wait have taken theirs."""
    return candidate.queued_tokens + request.prompt_tokens <= candidate.free_tokens


@dataclass
class Rotating:
    """Chooses the candidate with the smallest key, of several the first one behind the last choice."""

    instances: int
    key: Callable[[RoutedRequest, Candidate], tuple[float, ...]]
    last: int = -1

    def __call__(self, request: RoutedRequest, candidates: Candidates) -> int:
        """Return the position of the chosen one."""

        def order(at: int) -> tuple[float, ...]:
            behind = (candidates[at].instance - self.last - 1) % self.instances
            return (*self.key(request, candidates[at]), behind)

        chosen = min(range(len(candidates)), key=order)
        self.last = candidates[chosen].instance
        return chosen


def plan_shares(request: RoutedRequest, candidates: Candidates) -> int:
    """Draw a candidate with the shares of the plan."""
    upto = 0.0
    for at, candidate in enumerate(candidates):
        upto += candidate.share
        if request.draw < upto:
            return at
    return max(at for at, candidate in enumerate(candidates) if candidate.share > 0)


def random_holder(request: RoutedRequest, candidates: Candidates) -> int:
    """Draw a candidate."""
    return int(request.draw * len(candidates))


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
        """Return the position of the first that fits."""
        for at, candidate in enumerate(candidates):
            if load(candidate) < candidate.max_num_seqs and fits(request, candidate):
                self.otherwise.last = candidate.instance
                return at
        return self.otherwise(request, candidates)


def affinity(candidate: Candidate) -> float:
    """Return the inference gateway's score for affinity."""
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
        """Return the key of a candidate, the smallest of which wins."""
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


def readable_router(name: str, instances: int, rank_aware: RankAware | None = None) -> PythonRouter:
    """Return the rule of a name, with nothing to remember yet.

    Parameters
    ----------
    name
        As in `capplan.serving.routing.ROUTERS`; dLoRA without its migrations.
    instances
        How many there are.
    rank_aware
        Toppings' models.

    Raises
    ------
    InputError
        For a name that there is no readable rule for.
    """
    least_loaded = Rotating(instances, lambda _, candidate: (load(candidate),))
    rules: dict[str, PythonRouter] = {
        "plan-shares": plan_shares,
        "smooth-shares": SmoothShares(),
        "random": random_holder,
        "round-robin": Rotating(instances, lambda *_: ()),
        "least-loaded": least_loaded,
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
