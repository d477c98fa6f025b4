"""Reference routers in Python.

They are compared with the compiled rules of `capplan.serving.routers`, and are examples of routers written in
Python. They have state, so every simulation needs new ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from capplan.errors import InputError
from capplan.serving.routers import Gateway, LeastWorkLeft, Performance, Placement, WorkModel
from capplan.twin.cluster import Candidate, PythonRouter, RoutedRequest

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

    def swap(self, before: Placement, after: Placement) -> None:
        """Keep the credits of holders that stay; those of other ones begin with the share in `after`."""
        held = {key: self.credit.get(key, first) for key, first in _first_credits(before).items()}
        self.credit = {key: held.get(key, first) for key, first in _first_credits(after).items()}


def _first_credits(placement: Placement) -> dict[tuple[int, int], float]:
    """Return the credit of every adapter and holder before the first request."""
    found = {}
    for adapter in range(placement.start.size - 1):
        first, last = placement.start[adapter : adapter + 2].tolist()
        for at in range(last - first):
            part = (at - adapter) % (last - first) / (last - first)
            share = float(placement.share[first + at])
            found[adapter, int(placement.instance[first + at])] = share * part
    return found


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
        if self.kernel == "blind":
            return alpha * len(adapters) + beta
        if self.kernel == "mbgmv":
            return alpha * sum(adapters) + beta
        return alpha * (len(adapters) * max(adapters, default=0)) + beta


@dataclass
class LeastAddedWork:
    """Least work left."""

    models: Sequence[WorkModel]
    parameters: LeastWorkLeft = field(default_factory=LeastWorkLeft)
    by_shares: SmoothShares = field(default_factory=SmoothShares)

    def __call__(self, request: RoutedRequest, candidates: Candidates) -> int:
        """Return the position of the candidate with the lowest score."""
        if any(candidate.age_ns > self.parameters.max_age_s * 1e9 for candidate in candidates):
            return self.by_shares(request, candidates)
        scores = [self._score(request, candidate) for candidate in candidates]
        return min(range(len(scores)), key=lambda at: (scores[at], -candidates[at].share))

    def swap(self, before: Placement, after: Placement) -> None:
        """Keep the credits of holders that stay."""
        self.by_shares.swap(before, after)

    def sent_ns(self, request: RoutedRequest, chosen: Candidate, now_ns: int) -> int:
        """Return the time at which the chosen candidate gets a request."""
        model, period_ns = self.models[chosen.instance], round(self.parameters.turn_s * 1e9)
        if period_ns == 0 or not model.padded or chosen.age_ns > self.parameters.max_age_s * 1e9:
            return now_ns
        ranks = [*chosen.running, *chosen.queued]
        is_minor = sum(rank < request.rank for rank in ranks) > 0.5 * (len(ranks) + 1)
        queued = list(zip(chosen.queued, chosen.queued_prompts, strict=True))
        left_ms = self._work_ms(chosen, queued, model, request.mean_answer_tokens) - chosen.age_ns * 1e-6
        due_ns = (now_ns // period_ns + 1) * period_ns
        return due_ns + request.rank if is_minor and (due_ns - now_ns) * 1e-6 <= left_ms else now_ns

    def _score(self, request: RoutedRequest, candidate: Candidate) -> float:
        model, mean_answer = self.models[candidate.instance], request.mean_answer_tokens
        queued = list(zip(candidate.queued, candidate.queued_prompts, strict=True))
        before_ms = self._work_ms(candidate, queued, model, mean_answer)
        queued.append((request.rank, request.prompt_tokens))
        adapters = 0.5 if candidate.is_active else 1.0
        if request.rank == 0 or candidate.is_queued:
            adapters = 0.0
        added_ms = self._work_ms(candidate, queued, model, mean_answer, adapters) - before_ms
        wait_ms = max(0.0, before_ms - candidate.age_ns * 1e-6) + self._delay_ms(request, candidate, model)
        factor = 1.0
        if candidate.share == 0:
            ranks = [*candidate.running, *candidate.queued]
            raised = self.parameters.rank_raise if request.rank > max(ranks, default=0) else 1.0
            factor = self.parameters.off_plan * raised
        return added_ms * (wait_ms + 0.5 * added_ms) * factor

    @staticmethod
    def _work_ms(
        candidate: Candidate,
        queued: Sequence[tuple[int, int]],
        model: WorkModel,
        mean_answer: float,
        added_adapters: float = 0.0,
    ) -> float:
        tokens = float(sum(prompt for _, prompt in queued))
        log_other = math.log(1.0 - model.batch_tokens / tokens) if tokens > model.batch_tokens else 0.0
        outside, mean_rank, rank_sum = 1.0, 0.0, 0.0
        ranks = sorted({*candidate.running, *(rank for rank, _ in queued)}, reverse=True)
        for rank in ranks:
            prompts = [prompt for own, prompt in queued if own == rank]
            rank_sum += rank * (0.5 * candidate.running.count(rank) + len(prompts))
            if prompts and model.padded:
                left = outside * math.exp(log_other * len(prompts)) if log_other < 0.0 else 0.0
                mean_rank += rank * (outside - left)
                outside = left
            elif prompts:
                mean_rank += rank * sum(prompts) / tokens
        prefill_ms = model.prefill_ms_per_token + model.prefill_ms_per_rank_token * mean_rank
        prefill_ms *= tokens + candidate.partial_tokens
        answers = 0.5 * len(candidate.running) + len(queued)
        rank_answers = answers * max(ranks, default=0) if model.padded else rank_sum
        kv_tokens = 0.5 * candidate.running_tokens + tokens + 0.5 * mean_answer * len(queued)
        decode_ms = model.decode_ms * answers + model.decode_ms_per_rank * rank_answers
        decode_ms += model.kv_ms_per_token * kv_tokens
        adapters = 0.5 * candidate.active_adapters + candidate.queued_adapters + added_adapters
        return prefill_ms + mean_answer * (decode_ms + model.adapter_ms * adapters)

    @staticmethod
    def _delay_ms(request: RoutedRequest, candidate: Candidate, model: WorkModel) -> float:
        running = max(1, len(candidate.running))
        step_ms = model.step_ms + running * model.decode_ms
        step_ms += candidate.running_tokens * model.kv_ms_per_token
        step_ms += candidate.active_adapters * model.adapter_ms
        answer_ms = 0.5 * request.mean_answer_tokens * step_ms
        missing = candidate.queued_tokens + request.prompt_tokens - candidate.free_tokens
        ends = max(0.0, missing * running / max(1, candidate.running_tokens))
        ends = max(ends, float(load(candidate) + 1 - candidate.max_num_seqs))
        wait_ms = ends * answer_ms / running
        if request.rank > 0 and not (candidate.is_active or candidate.is_resident):
            wait_ms += model.load_ms
            slots, active = candidate.max_loras, candidate.active_adapters + candidate.queued_adapters
            if active >= slots and not candidate.is_queued:
                wait_ms += (active + 1 - slots) * answer_ms / max(1, slots)
        return wait_ms


def reference_router(
    name: str,
    instances: int,
    rank_aware: RankAware | None = None,
    work: LeastAddedWork | None = None,
) -> PythonRouter:
    """Return a new reference router.

    Parameters
    ----------
    name
        Name in `capplan.serving.routers.ROUTERS`; dLoRA is without its migrations.
    instances
        Number of instances.
    rank_aware
        Key of Toppings' router, which requires it.
    work
        The rule of least work left, which requires its models.
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
        rules["toppings"] = rules["toppings-rank-blind"] = Rotating(instances, rank_aware)
    if work is not None:
        rules["least-work-left"] = work
    if name not in rules:
        rule = f"must have its rule in plain Python in `reference_router`, as {', '.join(rules)}"
        raise InputError(rule, name, "router")
    return rules[name]
