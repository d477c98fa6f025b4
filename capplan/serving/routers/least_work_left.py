"""Least work left: the holder whose expected work grows the least, weighted by the work that it has.

The work left W of an instance is the time that it needs for its present requests, by a linear model of its
steps (`WorkModel`): prompts that are not computed yet, and the output tokens that are still expected. A
request adds dW: its own work, and that which its rank adds to the work of others where kernels pad. The
holder with the smallest ``dW * (W + D + dW / 2)`` is chosen. With D = 0 this is the least increase of the sum
of squared work over the instances, as in MaxWeight and workload-based routing with server-dependent service
times (Harchol-Balter, Performance Modeling and Design of Computer Systems, chapter 24: least work left; Xie,
Yekkehkhany, Lu, Scheduling with Multi-level Data Locality, INFOCOM 2016: weighted workload). D is the further
delay of this request there: the load of its adapter if it is not in GPU memory, the wait for a slot if all
are in use, and that for memory or a place in the batch.

Prompts of one batch are padded to the largest rank among them, of which the expected value follows from the
waiting prompts by rank. Work that was reported earlier has decreased by the time since. The score of holders
outside the placement, whose share is 0, is multiplied by `off_plan`. If the last report of a holder is older
than `max_age_s`, the request is routed by `smooth_shares`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capplan.compile import inner
from capplan.errors import InputError
from capplan.serving.routers.fleet import (
    ACTIVE,
    AWAITED,
    PRESENT,
    QUEUED,
    QUEUED_TOKENS,
    RESIDENT,
    ArrivingRequest,
    Fleet,
    Placement,
)
from capplan.serving.routers.smooth_shares import by_credit

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

# Parameters.
OFF_PLAN = 0
MAX_AGE_NS = 1


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

    @property
    def row(self) -> tuple[float, ...]:
        """The numbers in the order of the columns."""
        return (
            *(self.step_ms, self.decode_ms, self.decode_ms_per_rank, self.kv_ms_per_token),
            *(self.prefill_ms_per_token, self.prefill_ms_per_rank_token, self.load_ms),
            *(float(self.batch_tokens), float(self.padded)),
        )


@dataclass(frozen=True)
class LeastWorkLeft:
    """The rule's parameters.

    Parameters
    ----------
    off_plan
        Factor on the score of holders whose share is 0; infinity: they get no request.
    max_age_s
        Age of the last report of a holder beyond which requests are routed by the shares.
    models
        One per instance, or one for all; None: fitted to what each profile predicts.
    """

    off_plan: float = 1.0
    max_age_s: float = 5.0
    models: WorkModel | Sequence[WorkModel] | None = None

    def __post_init__(self) -> None:
        if not self.off_plan >= 1:
            raise InputError("must be a number >= 1", self.off_plan, "LeastWorkLeft.off_plan")
        if not 0 < self.max_age_s < float("inf"):
            raise InputError("must be a finite number > 0", self.max_age_s, "LeastWorkLeft.max_age_s")

    @property
    def parameters(self) -> NDArray[np.float64]:
        """The numbers for compiled code."""
        return np.array([self.off_plan, self.max_age_s * 1e9])


@inner
def least_added_work(
    fleet: Fleet,
    placement: Placement,
    first: int,
    last: int,
    request: ArrivingRequest,
    models: NDArray[np.float64],
    parameters: NDArray[np.float64],
    credit: NDArray[np.float64],
) -> int:
    """Return the holder with the lowest score; of several, the one with the largest share."""
    if _is_stale(fleet, placement, first, last, request.now_ns, parameters[MAX_AGE_NS]):
        return by_credit(placement, first, last, credit)
    chosen = first
    least = np.inf
    for place in range(first, last):
        instance = placement.instance[place]
        model = models[instance]
        before_ms = _work_ms(fleet, instance, -1, 0, request.mean_answer, model)
        added_ms = _work_ms(fleet, instance, request.rank, request.prompt_tokens, request.mean_answer, model)
        added_ms -= before_ms
        elapsed_ms = (request.now_ns - fleet.instances.seen_ns[instance]) * 1e-6
        wait_ms = max(0.0, before_ms - elapsed_ms) + _delay_ms(fleet, instance, place, request, model)
        score = added_ms * (wait_ms + 0.5 * added_ms)
        if placement.share[place] == 0.0:
            score *= parameters[OFF_PLAN]
        if score < least or (score == least and placement.share[place] > placement.share[chosen]):
            chosen, least = place, score
    return chosen


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
    fleet: Fleet, instance: int, rank: int, prompt: int, mean_answer: float, model: NDArray[np.float64]
) -> float:
    """Return the work left of an instance with a further request of this rank; -1: without any."""
    record = fleet.instances[instance]
    counts = fleet.by_rank[instance]
    further = 1 if rank >= 0 else 0
    queued = record.queued + further
    tokens = float(prompt)
    for k in range(fleet.ranks.size):
        tokens += counts[QUEUED_TOKENS, fleet.ranks[k]]
    # The probability that no one of n waiting prompts is in a batch is other_batch ** n.
    log_other = 0.0
    if tokens > model[BATCH_TOKENS]:
        log_other = math.log(1.0 - model[BATCH_TOKENS] / tokens)
    outside = 1.0
    mean_rank = rank_sum = 0.0
    largest = 0
    for k in range(fleet.ranks.size):  # from the largest rank on
        own = fleet.ranks[k]
        more = further if own == rank else 0
        present, waiting = counts[PRESENT, own] + more, counts[QUEUED, own] + more
        if present > 0:
            largest = max(largest, own)
            rank_sum += own * (0.5 * (present - waiting) + waiting)
        if waiting > 0 and model[PADDED] > 0.0:
            left = outside * math.exp(log_other * waiting) if log_other < 0.0 else 0.0
            mean_rank += own * (outside - left)
            outside = left
        elif waiting > 0:
            extra = prompt if more else 0
            mean_rank += own * (counts[QUEUED_TOKENS, own] + extra) / tokens
    prefill_ms = model[TOKEN] + model[TOKEN_RANK] * mean_rank
    prefill_ms *= tokens + record.partial_tokens
    # Running requests have half of their answers left.
    answers = 0.5 * record.running + queued
    rank_answers = answers * largest if model[PADDED] > 0.0 else rank_sum
    kv_tokens = 0.5 * record.running_tokens + tokens + 0.5 * mean_answer * queued
    decode_ms = model[DECODE] * answers + model[DECODE_RANK] * rank_answers + model[KV] * kv_tokens
    return float(prefill_ms + mean_answer * decode_ms)


@inner
def _delay_ms(
    fleet: Fleet, instance: int, place: int, request: ArrivingRequest, model: NDArray[np.float64]
) -> float:
    """Return the time that a request waits for more than the work before it."""
    record = fleet.instances[instance]
    running = max(1, record.running)
    step_ms = model[STEP] + running * model[DECODE] + record.running_tokens * model[KV]
    answer_ms = 0.5 * request.mean_answer * step_ms  # until the end of a running request, on average
    tokens = request.prompt_tokens
    for k in range(fleet.ranks.size):
        tokens += fleet.by_rank[instance, QUEUED_TOKENS, fleet.ranks[k]]
    missing = tokens - record.free_blocks * record.block_size
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
