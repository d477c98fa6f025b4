"""A lower bound on GPUs: a plan that keeps the bounds and the headroom does not use fewer.

Relaxation: requests are divisible, adapters are free and everywhere, batches are as large as they may be,
nobody waits. What remains is the time that the step model charges for tokens, for reading KV, and for its
base once per batch of decodes. Of the load only `served_fraction` has to be served: the cheapest tokens.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capplan.models.step_latency import ADDITIVE
from capplan.planner.problem import Problem
from capplan.spec import Lengths
from capplan.workload import Requests, draw_requests

_SAMPLE = 2**16
_SAMPLE_ERROR = 0.01
"""Mean costs of that many requests are surely this near to their expectation; the bound is lowered by it."""
_LONGEST_S = 1e9


def lower_bound_gpus(problem: Problem) -> int:
    """Return the bound, in instances of the profile's `tp` GPUs; 1 where nothing better is known."""
    return max(1, math.ceil(busy_gpus(problem) - 1e-9))


def busy_gpus(problem: Problem) -> float:
    """Return the seconds per second that instances are busy at the very least.

    0 where the profile's step model is of another form than ours, or a step gets cheaper by holding more.
    """
    workload, step = problem.workload, problem.profile.step_latency
    if step.form != ADDITIVE.name or min(c.value for c in step.coefficients.values()) < 0.0:
        return 0.0
    requests, duration_s, error = _sample(problem)
    if requests.arrival_ns.size == 0:
        return 0.0
    tokens, busy_ms = _costs(problem, requests)
    kind = _kinds(problem)[requests.adapter]
    least_ms = _cheapest(workload.slo.served_fraction, np.bincount(kind, tokens), np.bincount(kind, busy_ms))
    return least_ms / 1e3 / duration_s * (1.0 - error) / (1.0 - workload.headroom)


def _sample(problem: Problem) -> tuple[Requests, float, float]:
    """Return requests, the seconds in which so many arrive on average, and the sampling error."""
    workload = problem.workload
    if workload.trace is not None:
        duration_s = workload.trace.duration_s
        return draw_requests(workload, duration_s, 0, problem.engine.max_model_len), duration_s, 0.0
    rate_rps = workload.total_rate_rps
    duration_s = min(_LONGEST_S, _SAMPLE / rate_rps) if rate_rps > 0.0 else 1.0
    requests = draw_requests(workload, duration_s, 0, problem.engine.max_model_len)
    return requests, requests.arrival_ns.size / rate_rps if rate_rps > 0.0 else 1.0, _SAMPLE_ERROR


def _costs(problem: Problem, requests: Requests) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the tokens of every request, and the milliseconds of busy GPU that it costs at least."""
    value, room = problem.profile.step_latency.value, problem.engine.max_model_len
    prompt = requests.prompt_tokens.astype(np.float64)
    output = np.minimum(requests.output_tokens, np.maximum(room - prompt, 1.0))
    decodes = output - 1.0  # the last token is never fed back, and the first comes from the prompt
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


def _cheapest(fraction: float, tokens: NDArray[Any], busy_ms: NDArray[Any]) -> float:
    """Return the least time that serves this fraction of all tokens, the kinds cheapest per token first."""
    asked = tokens > 0.0
    tokens, busy_ms = tokens[asked], busy_ms[asked]
    order = np.argsort(busy_ms / tokens, kind="stable")
    reached = np.cumsum(np.concatenate([[0.0], tokens[order]]))
    spent = np.cumsum(np.concatenate([[0.0], busy_ms[order]]))
    return float(np.interp(fraction * reached[-1], reached, spent))
