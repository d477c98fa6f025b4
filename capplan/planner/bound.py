"""A lower bound on GPUs: a plan that keeps the bounds and the headroom does not use fewer.

Relaxation: requests are divisible, adapters are free and everywhere, batches are as large as they may be,
nobody waits. What remains is the time that the step model charges for tokens, for reading KV, and for its
base once per batch of decodes. Of the load only `served_fraction` has to be served: the cheapest tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from capplan.models.step_latency import ADDITIVE
from capplan.planner.problem import Problem
from capplan.spec import Lengths, Profile
from capplan.workload import Requests, draw_requests

_SAMPLE = 2**16
_SAMPLE_ERROR = 0.01
"""Mean costs of that many requests are surely this near to their expectation; the bound is lowered by it."""
_MAX_DURATION_S = 1e9


def lower_bound_instances(problem: Problem) -> int:
    """Return the bound in instances; 1 where nothing better is known."""
    largest = max(pool.profile.tp for pool in problem.pools)
    return max(1, math.ceil(lower_bound(problem).gpus / largest - 1e-9))


@dataclass(frozen=True)
class LowerBound:
    """What no plan does with less; 0 where nothing is known."""

    gpus: float
    usd_per_hour: float


def lower_bound_gpus(problem: Problem) -> int:
    """Return the bound in GPUs; 1, or the GPUs of an instance, where nothing better is known."""
    smallest = min(pool.profile.tp for pool in problem.pools)
    whole = math.ceil(lower_bound(problem).gpus - 1e-9)
    if len(problem.pools) == 1:
        whole = smallest * math.ceil(whole / smallest)
    return max(smallest, whole)


def lower_bound(problem: Problem) -> LowerBound:
    """Return the least GPUs and the least price on which the load can be spread, each for itself.

    The load of every kind of adapter is divided over pools as is best, up to the instances there are.
    """
    tokens, busy = busy_by_kind(problem)
    tp = np.array([pool.profile.tp for pool in problem.pools], float)
    price = np.array([pool.usd_per_hour or 0.0 for pool in problem.pools])
    return LowerBound(
        _min_weighted_sum(problem, tokens, busy, tp), _min_weighted_sum(problem, tokens, busy, price)
    )


def busy_gpus(problem: Problem) -> float:
    """Return the seconds per second that instances of the only pool are busy at the very least.

    0 where the profile's step model is of another form than ours, or a step gets cheaper by holding more.
    """
    tokens, busy = busy_by_kind(problem)
    return _min_busy(problem.workload.slo.served_fraction, tokens, busy[0])


def busy_by_kind(problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the tokens of adapters with the same lengths, and how busy they keep each pool.

    Returns
    -------
    tuple of ndarray
        Tokens, shape (kinds,); instances of a pool that all of a kind keeps busy, shape (pools, kinds).
    """
    requests, duration_s, error = _draw_sample(problem)
    kind = _kinds(problem)[requests.adapter]
    per_second = (1.0 - error) / (1.0 - problem.workload.headroom) / 1e3 / duration_s
    tokens: NDArray[np.float64] = np.zeros(0)
    busy = []
    for pool in problem.pools:
        each, busy_ms = _costs(problem, pool.profile, requests)
        tokens = np.bincount(kind, each).astype(np.float64)
        busy.append(np.bincount(kind, busy_ms) * per_second)
    return tokens, np.array(busy)


def _min_weighted_sum(
    problem: Problem, tokens: NDArray[np.float64], busy: NDArray[np.float64], weight: NDArray[np.float64]
) -> float:
    """Return the least weighted sum of busy instances that serves the fraction asked for (a linear program).

    Nothing is known, hence 0, of more load than the instances carry: then there is no plan at all.
    """
    fraction = problem.workload.slo.served_fraction
    if len(problem.pools) == 1:
        return float(weight[0] * _min_busy(fraction, tokens, busy[0]))
    pools, kinds = busy.shape
    if tokens.sum() == 0.0 or not busy.all():
        return 0.0
    once = np.tile(np.eye(kinds), pools)
    seats = np.kron(np.eye(pools), np.ones(kinds)) * busy.ravel()
    served = -np.tile(tokens / tokens.sum(), pools)
    answer = linprog(
        np.repeat(weight, kinds) * busy.ravel(),
        A_ub=np.vstack([once, seats, served]),
        b_ub=np.concatenate([np.ones(kinds), [pool.instances for pool in problem.pools], [-fraction]]),
        method="highs",
    )
    return float(answer.fun) if answer.success and answer.fun is not None else 0.0


def _draw_sample(problem: Problem) -> tuple[Requests, float, float]:
    """Return requests, the seconds in which so many arrive on average, and the sampling error."""
    workload = problem.workload
    if workload.trace is not None:
        duration_s = workload.trace.duration_s
        return draw_requests(workload, duration_s, 0, problem.engine.max_model_len), duration_s, 0.0
    rate_rps = workload.total_rate_rps
    duration_s = min(_MAX_DURATION_S, _SAMPLE / rate_rps) if rate_rps > 0.0 else 1.0
    requests = draw_requests(workload, duration_s, 0, problem.engine.max_model_len)
    return requests, requests.arrival_ns.size / rate_rps if rate_rps > 0.0 else 1.0, _SAMPLE_ERROR


def _costs(
    problem: Problem, profile: Profile, requests: Requests
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the tokens of every request, and the milliseconds of a busy instance that it costs at least.

    Nothing, where the step model is of another form than ours, or a step gets cheaper by holding more.
    """
    step, room = profile.step_latency, problem.engine.max_model_len
    value = step.value
    prompt = requests.prompt_tokens.astype(np.float64)
    output = np.minimum(requests.output_tokens, np.maximum(room - prompt, 1.0))
    decodes = output - 1.0  # the last token is never fed back, and the first comes from the prompt
    if step.form != ADDITIVE.name or min(c.value for c in step.coefficients.values()) < 0.0:
        return prompt + output, np.zeros(prompt.size)
    kv_read = output * prompt + decodes * output / 2.0
    busy_ms = (
        value("ms_per_ktoken") * (prompt + decodes) / 1e3
        + value("ms_per_kv_ktoken") * kv_read / 1e3
        + value("base_ms") * decodes / problem.engine.max_num_seqs
    )
    busy_ms[prompt >= room] = 0.0  # refused
    return prompt + output, busy_ms


def _kinds(problem: Problem) -> NDArray[np.int64]:
    """Return which adapters have the same lengths: a number for each, with the base model's before them."""
    workload = problem.workload
    numbers: dict[tuple[Lengths, Lengths], int] = {}
    kinds = [
        numbers.setdefault(
            workload.lengths_of(a),
            len(numbers),
        )
        for a in workload.adapters
    ]
    return np.array([0, *kinds], dtype=np.int64)


def _min_busy(fraction: float, tokens: NDArray[Any], busy_ms: NDArray[Any]) -> float:
    """Return the least time that serves this fraction of all tokens, the kinds cheapest per token first."""
    asked = tokens > 0.0
    if not asked.any():
        return 0.0
    tokens, busy_ms = tokens[asked], busy_ms[asked]
    order = np.argsort(busy_ms / tokens, kind="stable")
    reached = np.cumsum(np.concatenate([[0.0], tokens[order]]))
    spent = np.cumsum(np.concatenate([[0.0], busy_ms[order]]))
    return float(np.interp(fraction * reached[-1], reached, spent))
