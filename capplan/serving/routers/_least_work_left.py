"""Least work left: the holder whose expected work grows the least, weighted by the work that it has.

The work left W of an instance is the time that it needs for its present requests, by a linear model of its
steps (`WorkModel`): prompts that are not computed yet, the output tokens that are still expected, and the
adapters of the requests, each for the steps that it is in. A request adds dW: its own work, that which its
rank adds to the work of others where kernels pad, and an adapter if no other request there has it. The
holder with the smallest ``dW * (W + D + dW / 2)`` is chosen. With D = 0 this is the least increase of the sum
of squared work over the instances, as in MaxWeight and workload-based routing with server-dependent service
times (Harchol-Balter, Performance Modeling and Design of Computer Systems, chapter 24: least work left; Xie,
Yekkehkhany, Lu, Scheduling with Multi-level Data Locality, INFOCOM 2016: weighted workload). D is the further
delay of this request there: the load of its adapter if it is not in GPU memory, the wait for a slot if all
are in use, and that for memory or a place in the batch.

Prompts of one batch are padded to the largest rank among them, of which the expected value follows from the
waiting prompts by rank. Work that was reported earlier has decreased by the time since. The score of holders
outside the placement, whose share is 0, is multiplied by `off_plan`, and by `rank_raise` too if the request's
rank is above those of all their requests: dW has the padding of the work that is there, not that of the
requests that follow. If the last report of a holder is older than `max_age_s`, the request is routed by
`smooth_shares`.

Rank turns (`turn_s`): a batch of prompts costs the rank of its largest one, so one request of a rank that few
others have makes prompts of all others slow. Where kernels pad, a request whose rank is above those of most
requests at its instance is sent there at the next multiple of `turn_s`, with the others of its kind, in the
order of ranks. It is not held longer than the work left of the instance lasts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from capplan._jit import inner
from capplan.errors import InputError
from capplan.serving.routers._fleet import (
    ACTIVE,
    AWAITED,
    PRESENT,
    QUEUED,
    QUEUED_TOKENS,
    RESIDENT,
    ArrivingRequest,
    Fleet,
    Placement,
    Router,
    RoutingRule,
    queued_tokens,
)
from capplan.serving.routers._smooth_shares import by_credit

# Columns of the models' array.
STEP = 0
DECODE = 1
DECODE_RANK = 2
KV = 3
TOKEN = 4
TOKEN_RANK = 5
LOAD = 6
BATCH_TOKENS = 7
PADDED = 8
ADAPTER = 9

# Parameters.
OFF_PLAN = 0
MAX_AGE_NS = 1
RANK_RAISE = 2
TURN_NS = 3

MOST = 0.5
"""Share of the requests at an instance with smaller ranks, above which a request waits for its turn."""


@dataclass(frozen=True)
class WorkModel:
    """Linear model of the steps of an instance, in milliseconds."""

    step_ms: float
    """A decode step without requests."""
    decode_ms: float
    """More per request that decodes."""
    decode_ms_per_rank: float
    """More per such request and unit of rank: the largest of the step if padded, else its own."""
    kv_ms_per_token: float
    """More per token with KV."""
    prefill_ms_per_token: float
    prefill_ms_per_rank_token: float
    """More per prompt token and unit of rank."""
    load_ms: float
    """Mean copy of an adapter to GPU memory."""
    batch_tokens: int
    """Most prompt tokens of a step."""
    padded: bool
    """Whether kernels pad to the largest rank of a step."""
    adapter_ms: float = 0.0
    """More per adapter of a decode step, whatever the number of its requests."""

    @property
    def row(self) -> tuple[float, ...]:
        """The numbers in the order of the columns, which is that of the fields."""
        return astuple(self)


@dataclass(frozen=True)
class LeastWorkLeft:
    """The rule's parameters.

    Parameters
    ----------
    off_plan
        Factor on the score of holders whose share is 0; infinity: they get no request.
    rank_raise
        Further factor on such holders if the rank of the request is above those of all their requests.
    max_age_s
        Age of the last report of a holder beyond which requests are routed by the shares.
    models
        One per instance, or one for all; None: fitted to what each profile predicts.
    turn_s
        Time between turns of the requests with ranks above those of most others at their instance, where
        kernels pad; at most they wait so long. 0: all requests are sent at once.
    """

    off_plan: float = 1.0
    max_age_s: float = 1.0
    models: WorkModel | Sequence[WorkModel] | None = None
    rank_raise: float = 1.0
    turn_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("off_plan", "rank_raise"):
            if not getattr(self, name) >= 1:
                raise InputError("must be a number >= 1", getattr(self, name), f"LeastWorkLeft.{name}")
        if not 0 < self.max_age_s < float("inf"):
            raise InputError("must be a finite number > 0", self.max_age_s, "LeastWorkLeft.max_age_s")
        if not 0 <= self.turn_s < float("inf"):
            raise InputError("must be a finite number >= 0", self.turn_s, "LeastWorkLeft.turn_s")

    @property
    def parameters(self) -> NDArray[np.float64]:
        """The numbers for compiled code."""
        return np.array([self.off_plan, self.max_age_s * 1e9, self.rank_raise, round(self.turn_s * 1e9)])


@inner
def least_added_work(
    rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, request: ArrivingRequest
) -> int:
    """Return the holder with the lowest score; of several, the one with the largest share."""
    parameters = rule.weights
    if _is_stale(fleet, placement, first, last, request.now_ns, parameters[MAX_AGE_NS]):
        return by_credit(placement, first, last, rule.credit)
    chosen = first
    least = np.inf
    for place in range(first, last):
        instance = placement.instance[place]
        model = rule.models[instance]
        tokens = queued_tokens(fleet, instance)
        standing = fleet.standing[place]
        before_ms, after_ms, largest_rank = _work_ms(fleet, instance, tokens, request, model, standing)
        added_ms = after_ms - before_ms
        elapsed_ms = (request.now_ns - fleet.instances.seen_ns[instance]) * 1e-6
        wait_ms = max(0.0, before_ms - elapsed_ms) + _delay_ms(fleet, place, instance, tokens, request, model)
        score = added_ms * (wait_ms + 0.5 * added_ms)
        if placement.share[place] == 0.0:
            raised = parameters[RANK_RAISE] if request.rank > largest_rank else 1.0
            score *= parameters[OFF_PLAN] * raised
        if score < least or (score == least and placement.share[place] > placement.share[chosen]):
            chosen, least = place, score
    return chosen


@inner
def turn_ns(rule: RoutingRule, fleet: Fleet, instance: int, request: ArrivingRequest) -> int:
    """Return the time at which an instance gets a request that is not among those known there yet.

    Requests of one turn follow each other by rank, a nanosecond apart per unit of rank.
    """
    parameters, model = rule.weights, rule.models[instance]
    now_ns, period_ns = request.now_ns, int(parameters[TURN_NS])
    age_ns = now_ns - fleet.instances.seen_ns[instance]
    if period_ns == 0 or model[PADDED] == 0.0 or age_ns > parameters[MAX_AGE_NS]:
        return int(now_ns)
    below = requests = 0
    for k in range(fleet.ranks.size):
        own = fleet.ranks[k]
        requests += fleet.by_rank[instance, PRESENT, own]
        if own < request.rank:
            below += fleet.by_rank[instance, PRESENT, own]
    due_ns = (now_ns // period_ns + 1) * period_ns
    left_ms = _work_ms(fleet, instance, queued_tokens(fleet, instance), request, model, 0)[0]
    left_ms -= age_ns * 1e-6
    if below <= MOST * (requests + 1) or (due_ns - now_ns) * 1e-6 > left_ms:
        return int(now_ns)
    return int(due_ns + request.rank)


@inner
def _is_stale(
    fleet: Fleet, placement: Placement, first: int, last: int, now_ns: int, max_age_ns: float
) -> bool:
    """Return whether the state of a holder is too old to compare it with others."""
    for place in range(first, last):
        if now_ns - fleet.instances.seen_ns[placement.instance[place]] > max_age_ns:
            return True
    return False


@inner
def _work_ms(
    fleet: Fleet,
    instance: int,
    queued: int,
    request: ArrivingRequest,
    model: NDArray[np.float64],
    standing: int,
) -> tuple[float, float, int]:
    """Return the work left of an instance with `queued` prompt tokens, without and with the request.

    The third number is the largest rank of its requests. `standing` is that of the request's adapter there.
    """
    record = fleet.instances[instance]
    counts = fleet.by_rank[instance]
    padded = model[PADDED] > 0.0
    prompt = request.prompt_tokens
    log_before, log_after = _log_other(queued, model), _log_other(queued + prompt, model)
    outside_before = outside_after = 1.0
    mean_before = mean_after = sum_before = sum_after = 0.0
    largest_before = largest_after = 0
    for k in range(fleet.ranks.size):  # from the largest rank on
        own = fleet.ranks[k]
        is_own = own == request.rank
        present, waiting = counts[PRESENT, own], counts[QUEUED, own]
        if present == 0 and not is_own:
            continue
        if present > 0:
            largest_before = max(largest_before, own)
        largest_after = max(largest_after, own)
        half = 0.5 * (present - waiting)
        sum_before += own * (half + waiting)
        sum_after += own * (half + waiting + is_own)
        if padded:
            left = outside_before * _none_in_batch(log_before, waiting)
            mean_before += own * (outside_before - left)
            outside_before = left
            left = outside_after * _none_in_batch(log_after, waiting + is_own)
            mean_after += own * (outside_after - left)
            outside_after = left
        else:
            tokens = counts[QUEUED_TOKENS, own]
            if waiting > 0:
                mean_before += own * tokens / float(queued)
            if waiting + is_own > 0:
                mean_after += own * (tokens + is_own * prompt) / float(queued + prompt)
    running, waiting = record.running, record.queued
    answers = request.mean_answer
    rank_answers = (0.5 * running + waiting) * largest_before if padded else sum_before
    adapters = 0.5 * record.active_adapters + record.queued_adapters
    before_ms = _sum_ms(record, queued, waiting, mean_before, rank_answers, answers, model, adapters)
    rank_answers = (0.5 * running + waiting + 1) * largest_after if padded else sum_after
    adapters += _added_adapters(request.rank, standing)
    after_ms = _sum_ms(
        record, queued + prompt, waiting + 1, mean_after, rank_answers, answers, model, adapters
    )
    return before_ms, after_ms, int(largest_before)


@inner
def _added_adapters(rank: int, standing: int) -> float:
    """Return the answers for which a request keeps an adapter in the batch that others do not keep there."""
    if rank == 0 or standing & AWAITED:
        return 0.0
    return 0.5 if standing & ACTIVE else 1.0


@inner
def _log_other(tokens: int, model: NDArray[np.float64]) -> float:
    """Return the logarithm of the probability that a waiting prompt is in another batch; 0: there is one."""
    if tokens <= model[BATCH_TOKENS]:
        return 0.0
    return math.log(1.0 - model[BATCH_TOKENS] / float(tokens))


@inner
def _none_in_batch(log_other: float, prompts: int) -> float:
    """Return the probability that none of some waiting prompts is in a batch."""
    if prompts == 0:
        return 1.0
    return math.exp(log_other * prompts) if log_other < 0.0 else 0.0


@inner
def _sum_ms(
    record: np.record,
    tokens: int,
    queued: int,
    mean_rank: float,
    rank_answers: float,
    mean_answer: float,
    model: NDArray[np.float64],
    adapters: float,
) -> float:
    """Return the time of prompts and of answers; running requests have half of their answers left."""
    prefill_ms = model[TOKEN] + model[TOKEN_RANK] * mean_rank
    prefill_ms *= tokens + record.partial_tokens
    answers = 0.5 * record.running + queued
    kv_tokens = 0.5 * record.running_tokens + tokens + 0.5 * mean_answer * queued
    decode_ms = model[DECODE] * answers + model[DECODE_RANK] * rank_answers + model[KV] * kv_tokens
    decode_ms += model[ADAPTER] * adapters
    return float(prefill_ms + mean_answer * decode_ms)


@inner
def _delay_ms(
    fleet: Fleet, place: int, instance: int, queued: int, request: ArrivingRequest, model: NDArray[np.float64]
) -> float:
    """Return the time that a request waits for more than the work before it."""
    record = fleet.instances[instance]
    running = max(1, record.running)
    step_ms = model[STEP] + running * model[DECODE] + record.running_tokens * model[KV]
    step_ms += record.active_adapters * model[ADAPTER]
    answer_ms = 0.5 * request.mean_answer * step_ms  # until the end of a running request, on average
    missing = queued + request.prompt_tokens - record.free_blocks * record.block_size
    ends = max(0.0, missing * running / max(1, record.running_tokens))  # of requests, until there is room
    ends = max(ends, float(record.running + record.queued + 1 - record.max_num_seqs))
    wait_ms = ends * answer_ms / running
    standing = fleet.standing[place]
    if request.rank > 0 and not standing & (ACTIVE | RESIDENT):
        wait_ms += model[LOAD]
        active = record.active_adapters + record.queued_adapters
        if active >= record.max_loras and not standing & AWAITED:
            wait_ms += (active + 1 - record.max_loras) * answer_ms / max(1, record.max_loras)
    return float(wait_ms)


ROUTERS = {
    "least-work-left": Router(
        least_added_work,
        "the holder whose expected work grows the least, weighted by the work that it has; without recent "
        "state `smooth-shares` (`LeastWorkLeft(...)`)",
        "Harchol-Balter, Performance Modeling and Design of Computer Systems, 2013, chapter 24",
        reads_ranks=True,
        reads_adapter=True,
        keeps_credit=True,
        sent_ns=turn_ns,
    )
}
