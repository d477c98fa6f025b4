"""Lower bound on the GPUs of any plan that keeps the bounds and the headroom.

Relaxation: requests are divisible, every instance has all adapters at no cost, batches are full, no request
waits, and a shared prefix is always cached if the engine caches prefixes. The remaining cost is the time that
the step model charges for tokens, for reading KV, and for its base once per batch of decodes. Step tables
count as straight lines below them. Only `served_fraction` of the load is served, cheapest tokens first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from capplan.models import ADDITIVE, TABLE, StepFeatures, coefficient_array, step_ms
from capplan.planner.problem._problem import Problem
from capplan.planner.problem._settings import max_running_requests
from capplan.spec import TABLE_AXES, FittedModel, Lengths
from capplan.workload import Requests, draw_requests

_SAMPLE = 2**16
_SAMPLE_ERROR = 0.01
"""Relative sampling error of mean costs, by which the bound is lowered."""
_MAX_DURATION_S = 1e9
_FAR = 1e3
"""Multiple of the last point of a table that stands for infinity."""


@dataclass(frozen=True)
class LowerBound:
    """Lower bounds; 0 if unknown."""

    gpus: float
    usd_per_hour: float


def lower_bound_instances(problem: Problem) -> int:
    """Return the lower bound in instances, at least 1."""
    largest = max(pool.profile.tp for pool in problem.pools)
    return max(1, math.ceil(lower_bound(problem).gpus / largest - 1e-9))


def lower_bound_gpus(problem: Problem) -> int:
    """Return the lower bound in GPUs, at least one instance."""
    smallest = min(pool.profile.tp for pool in problem.pools)
    whole = math.ceil(lower_bound(problem).gpus - 1e-9)
    if len(problem.pools) == 1:
        whole = smallest * math.ceil(whole / smallest)
    return max(smallest, whole)


def lower_bound(problem: Problem) -> LowerBound:
    """Return the least GPUs and, separately, the least price over all divisions of the load among pools."""
    tokens, busy = _busy_by_kind(problem)
    tp = np.array([pool.profile.tp for pool in problem.pools], float)
    price = np.array([pool.usd_per_hour or 0.0 for pool in problem.pools])
    return LowerBound(
        _min_weighted_sum(problem, tokens, busy, tp), _min_weighted_sum(problem, tokens, busy, price)
    )


def busy_gpus(problem: Problem) -> float:
    """Return the least number of busy instances of the only pool.

    0 if the step model is neither additive nor of tables, or has a negative coefficient.
    """
    tokens, busy = _busy_by_kind(problem)
    return _min_busy(problem.workload.slo.served_fraction, tokens, busy[0])


def _busy_by_kind(problem: Problem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the load by kind, which is the adapters with equal lengths.

    The arrays are tokens, shape (kinds,), and busy instances of a pool that serves all of a kind, shape
    (pools, kinds).
    """
    requests, duration_s, error = _draw_sample(problem)
    kind = _kinds(problem)[requests.adapter]
    per_second = (1.0 - error) / (1.0 - problem.workload.headroom) / 1e3 / duration_s
    prompt = requests.prompt_tokens.astype(np.float64)
    room = np.maximum(problem.engine.max_model_len - prompt, 1.0)
    output = np.minimum(requests.output_tokens, room)
    busy_ms = (_busy_ms(problem, pool, prompt, output) for pool in range(len(problem.pools)))
    busy = np.array([np.bincount(kind, each) * per_second for each in busy_ms])
    return np.bincount(kind, prompt + output).astype(np.float64), busy


def _min_weighted_sum(
    problem: Problem, tokens: NDArray[np.float64], busy: NDArray[np.float64], weight: NDArray[np.float64]
) -> float:
    """Return the least weighted sum of busy instances that serves the required fraction.

    This is a linear program. The sum is 0 if it is infeasible: then no plan exists.
    """
    fraction = problem.workload.slo.served_fraction
    if len(problem.pools) == 1:
        return float(weight[0] * _min_busy(fraction, tokens, busy[0]))
    pools, kinds = busy.shape
    if tokens.sum() == 0.0 or not busy.all():
        return 0.0
    once = np.tile(np.eye(kinds), pools)
    available = np.kron(np.eye(pools), np.ones(kinds)) * busy.ravel()
    served = -np.tile(tokens / tokens.sum(), pools)
    answer = linprog(
        np.repeat(weight, kinds) * busy.ravel(),
        A_ub=np.vstack([once, available, served]),
        b_ub=np.concatenate([np.ones(kinds), [pool.instances for pool in problem.pools], [-fraction]]),
        method="highs",
    )
    return float(answer.fun) if answer.success and answer.fun is not None else 0.0


def _draw_sample(problem: Problem) -> tuple[Requests, float, float]:
    """Return a sample of requests, its mean duration in seconds, and the relative sampling error."""
    workload, rate_rps = problem.workload, problem.workload.total_rate_rps
    if workload.trace is not None:
        workload = problem.busiest_workload
    if workload.trace is not None:
        duration_s = workload.trace.duration_s
    else:
        duration_s = min(_MAX_DURATION_S, _SAMPLE / rate_rps) if rate_rps > 0.0 else 1.0
    requests = draw_requests(workload, duration_s, 0, problem.engine.max_model_len)
    if workload.trace is not None:
        return requests, duration_s, 0.0
    # So many requests take this long on average; none of a rare kind may come in the longest time.
    mean_s = requests.arrival_ns.size / rate_rps if rate_rps > 0.0 else 0.0
    return requests, mean_s or duration_s, _SAMPLE_ERROR


def _busy_ms(
    problem: Problem, pool: int, prompt: NDArray[np.float64], output: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the least time that each request takes of an instance; 0 if unknown."""
    step = problem.pools[pool].profile.step_latency
    value = {name: each.value for name, each in step.coefficients.items()}
    if step.form not in (ADDITIVE.name, TABLE.name) or min(value.values(), default=0.0) < 0.0:
        return np.zeros(prompt.size)
    decodes = output - 1.0  # the last token is never fed back, and the first comes from the prompt
    kv_read = output * prompt + decodes * output / 2.0
    steps = decodes / max_running_requests(problem, pool)
    # A cached prefix is read, not computed; the last token of a prompt always is.
    computed = np.maximum(prompt - problem.cached_prefix_tokens(pool), 1.0) + decodes
    busy_ms: NDArray[np.float64] = (
        value.get("ms_per_ktoken", 0.0) * computed / 1e3
        + value.get("ms_per_kv_ktoken", 0.0) * kv_read / 1e3
        + value.get("base_ms", 0.0) * steps
    )
    if step.form == TABLE.name:
        tokens_ms, kv_tokens_ms = _table_lines(step)
        busy_ms += _largest_line(tokens_ms, steps, computed)
        busy_ms += _largest_line(kv_tokens_ms, steps, kv_read)
    busy_ms[prompt >= problem.engine.max_model_len] = 0.0  # rejected
    return busy_ms


def _table_lines(step: FittedModel) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return lines below the tables over tokens and over KV tokens, of as few requests as the table has."""
    tables = step.replace(coefficients={})
    k = coefficient_array(tables)
    none = StepFeatures(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)

    def lines(table: str, axis: int, constant_ms: float) -> NDArray[np.float64]:
        name, points = TABLE_AXES[table][axis], tables.tables[table].axes[axis].points
        amounts = np.array([0.0, *points, _FAR * points[-1]])
        values = [step_ms(TABLE.code, k, none._replace(**{name: each})) for each in amounts.tolist()]
        return _lines_below(amounts, np.array(values) - constant_ms)

    return lines("tokens_ms", 0, 0.0), lines("requests_ms", 1, step_ms(TABLE.code, k, none))


def _lines_below(amounts: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return constant and slope, none negative, of lines that no value is below: the lower convex hull.

    Shape (lines, 2). The hull ends with the line through 0 and the point of the least value per amount.
    """
    hull: list[int] = []
    for at in range(amounts.size):
        while len(hull) > 1 and _slope(amounts, values, hull[-2], at) <= _slope(amounts, values, *hull[-2:]):
            hull.pop()
        hull.append(at)
    slopes = np.array([_slope(amounts, values, *pair) for pair in pairwise(hull)])
    constants = values[hull[:-1]] - slopes * amounts[hull[:-1]]
    rising = constants >= 0.0
    least = np.min(values[1:] / np.maximum(amounts[1:], 1e-9))
    return np.vstack([np.column_stack([constants, slopes])[rising], [0.0, least]])


def _slope(amounts: NDArray[np.float64], values: NDArray[np.float64], first: int, second: int) -> float:
    return float((values[second] - values[first]) / max(amounts[second] - amounts[first], 1e-9))


def _largest_line(
    lines: NDArray[np.float64], steps: NDArray[np.float64], amounts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the milliseconds of each request by the line that charges most for all of them."""
    charged = lines[:, :1] * steps + lines[:, 1:] * amounts
    largest: NDArray[np.float64] = charged[np.argmax(charged.sum(axis=1))]
    return largest


def _kinds(problem: Problem) -> NDArray[np.int64]:
    """Return the kind of the base model (0) and of each adapter; equal for equal lengths."""
    workload = problem.workload
    numbers: dict[tuple[Lengths, Lengths], int] = {}
    kinds = [numbers.setdefault(workload.lengths_of(a), len(numbers)) for a in workload.adapters]
    base = 0
    if workload.base is not None:
        base = numbers.setdefault(workload.lengths_of(workload.base), len(numbers))
    return np.array([base, *kinds], dtype=np.int64)


def _min_busy(fraction: float, tokens: NDArray[Any], busy: NDArray[Any]) -> float:
    """Return the least busy instances that serve a fraction of all tokens, cheapest kinds first."""
    present = tokens > 0.0
    if not present.any():
        return 0.0
    tokens, busy = tokens[present], busy[present]
    order = np.argsort(busy / tokens, kind="stable")
    reached = np.cumsum(np.concatenate([[0.0], tokens[order]]))
    spent = np.cumsum(np.concatenate([[0.0], busy[order]]))
    return float(np.interp(fraction * reached[-1], reached, spent))
