"""Queues of one instance of a plan: made for the requests that the twin serves there for a while."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from capplan.errors import InfeasibleError
from capplan.planner.judging import twin_settings
from capplan.planner.problem import Assignment, Problem, replayed_s
from capplan.planner.queues.planning import plan_queues
from capplan.planner.queues.sizes import RequestSample, with_base_model
from capplan.serving.memory import adapter_bytes, kv_bytes_per_token, lora_elements_per_rank
from capplan.spec import ModelArch, Queues, Slo, Workload
from capplan.twin import RequestTable, SimulationResult, simulate_detailed
from capplan.twin.request_table import REJECTED

_SEED: Final = 11
_REQUESTS: Final = 4000
"""Requests to look at, about; the 99.9th percentile of lengths needs a thousand."""
_SHORTEST_S: Final = 300.0
"""Chameleon's window (section 4.3.4)."""
_LONGEST_S: Final = 86_400.0
_BOUND_OVER_ISOLATED: Final = 5.0
"""Bound over the mean time of a request alone, where the workload has none (Chameleon, section 5.1)."""


def group_queues(
    problem: Problem, assignment: Assignment, results: Sequence[SimulationResult]
) -> Queues | None:
    """Return the queues of one instance; None where none are wished for, or it serves no request.

    Parameters
    ----------
    problem, assignment
        What the instance serves, and how it is set.
    results
        What the twin said of it; its KV tokens are what quotas share.

    Raises
    ------
    InfeasibleError
        When the least quotas do not fit.
    """
    wishes = problem.workload.queues
    rate_rps = sum(part.rate_rps for part in assignment.parts)
    if wishes is None or rate_rps == 0.0:
        return None
    workload = problem.subworkload(assignment.parts).model_copy(update={"slo": Slo()})  # nothing to judge
    requests = _observed(problem, assignment, workload, rate_rps)
    if np.isnan(requests.isolated_s).all():
        return None
    profile = problem.pools[assignment.pool].profile
    try:
        return plan_queues(
            _sample(requests, workload, profile.model, profile.tp),
            rate_rps=rate_rps,
            kv_tokens=results[0].kv_tokens,
            bound_s=time_bound_s(problem.workload.slo, float(np.nanmean(requests.isolated_s))),
            wishes=wishes,
        )
    except InfeasibleError as error:
        names = [adapter.name for adapter in workload.adapters]
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        hint = "" if wishes.quota_size == "mean" else "; queues.quota_size p99 or mean asks for less"
        raise InfeasibleError(
            f"{error.message}, on the GPU of adapter {names[0]}{others}{hint}", error.reason
        ) from None


def time_bound_s(slo: Slo, isolated_s: float) -> float:
    """Return the bound on the time of a request: the tightest one on E2E, or else a multiple of it alone."""
    bounds = [bound for name, bound in slo.latency_bounds().items() if name.startswith("e2e")]
    return min(bounds, default=_BOUND_OVER_ISOLATED * isolated_s)


def _observed(problem: Problem, assignment: Assignment, workload: Workload, rate_rps: float) -> RequestTable:
    """Return what the twin does with enough requests, or with the whole trace."""
    duration_s = min(max(_REQUESTS / rate_rps, _SHORTEST_S), _LONGEST_S)
    length_s = replayed_s(workload, duration_s)
    settings = twin_settings(problem, assignment, workload)
    profile = problem.pools[assignment.pool].profile
    return simulate_detailed(workload, profile, seed=_SEED, duration_s=length_s, **settings).requests


def _sample(requests: RequestTable, workload: Workload, arch: ModelArch, tp: int) -> RequestSample:
    ranks = np.array([adapter.rank for adapter in workload.adapters], np.int64)
    tokens_per_rank = arch.dtype_bytes * lora_elements_per_rank(arch, tp) / kv_bytes_per_token(arch, tp)
    weights, tokens = with_base_model(
        np.array([adapter_bytes(arch, int(rank)) for rank in ranks], np.int64),
        np.ceil(ranks * tokens_per_rank).astype(np.int64),
    )
    taken = requests.status != REJECTED
    return RequestSample(
        prompt_tokens=requests.prompt_tokens[taken],
        output_tokens=requests.output_tokens[taken],
        adapter=requests.adapter[taken].astype(np.int64),
        execution_s=(requests.finish_s - requests.admitted_s)[taken],
        adapter_bytes=weights,
        adapter_tokens=tokens,
    )
