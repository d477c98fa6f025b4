"""Queues by request size with token quotas (Chameleon, section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from capplan.errors import InfeasibleError
from capplan.planner.problem import Assignment, Problem, horizon_s
from capplan.serving.memory import adapter_bytes, kv_bytes_per_token, lora_elements_per_rank
from capplan.serving.queue_design import RequestSample, design_queues, with_base_model
from capplan.spec import ModelArch, Queues, Slo, Workload
from capplan.twin import RequestTable, SimulationResult, simulate_detailed
from capplan.twin.per_request import REJECTED
from capplan.twin.simulate import keywords_of

_QUEUE_SEED: Final = 11
_SAMPLE_REQUESTS: Final = 4000
"""Approximate number of simulated requests; the 99.9th percentile of lengths needs a thousand."""
_MIN_DURATION_S: Final = 300.0
"""Chameleon's window (section 4.3.4)."""
_MAX_DURATION_S: Final = 86_400.0
_BOUND_OVER_ISOLATED: Final = 5.0
"""Default bound on E2E, relative to the mean time of a request alone (Chameleon, section 5.1)."""


def group_queues(
    problem: Problem, assignment: Assignment, results: Sequence[SimulationResult]
) -> Queues | None:
    """Return the queues of one instance; None if the workload has none, or the instance no requests.

    The quotas share the KV tokens of the first of its simulations.

    Raises
    ------
    InfeasibleError
        If the minimum quotas do not fit.
    """
    config = problem.workload.queues
    rate_rps = sum(share.rate_rps for share in assignment.shares)
    if config is None or rate_rps == 0.0:
        return None
    workload = problem.subworkload(assignment.shares).model_copy(update={"slo": Slo()})
    requests = _simulate_requests(problem, assignment, workload, rate_rps)
    if np.isnan(requests.isolated_s).all():
        return None
    profile = problem.pools[assignment.pool].profile
    try:
        return design_queues(
            _sample(requests, workload, profile.model, profile.tp),
            rate_rps=rate_rps,
            kv_tokens=results[0].kv_tokens,
            bound_s=time_bound_s(problem.workload.slo, float(np.nanmean(requests.isolated_s))),
            config=config,
        )
    except InfeasibleError as error:
        names = [f"adapter {adapter.name}" for adapter in workload.adapters] or ["the base model"]
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        hint = "" if config.quota_size == "mean" else "; queues.quota_size p99 or mean asks for less"
        raise InfeasibleError(
            f"{error.message}, on the GPU of {names[0]}{others}{hint}", error.reason
        ) from None


def time_bound_s(slo: Slo, isolated_s: float) -> float:
    """Return the tightest bound on E2E, or a multiple of the time of a request alone."""
    bounds = [bound for name, bound in slo.latency_bounds().items() if name.startswith("e2e")]
    return min(bounds, default=_BOUND_OVER_ISOLATED * isolated_s)


def _simulate_requests(
    problem: Problem, assignment: Assignment, workload: Workload, rate_rps: float
) -> RequestTable:
    duration_s = min(max(_SAMPLE_REQUESTS / rate_rps, _MIN_DURATION_S), _MAX_DURATION_S)
    length_s = horizon_s(workload, duration_s)
    settings = keywords_of(problem.engine_args(assignment))
    profile = problem.pools[assignment.pool].profile
    return simulate_detailed(workload, profile, seed=_QUEUE_SEED, duration_s=length_s, **settings).requests


def _sample(requests: RequestTable, workload: Workload, arch: ModelArch, tp: int) -> RequestSample:
    ranks = np.array([adapter.rank for adapter in workload.adapters], np.int64)
    tokens_per_rank = arch.dtype_bytes * lora_elements_per_rank(arch, tp) / kv_bytes_per_token(arch, tp)
    sizes, tokens = with_base_model(
        np.array([adapter_bytes(arch, int(rank)) for rank in ranks], np.int64),
        np.ceil(ranks * tokens_per_rank).astype(np.int64),
    )
    kept = requests.status != REJECTED
    return RequestSample(
        prompt_tokens=requests.prompt_tokens[kept],
        output_tokens=requests.output_tokens[kept],
        adapter=requests.adapter[kept].astype(np.int64),
        execution_s=(requests.finish_s - requests.admitted_s)[kept],
        adapter_bytes=sizes,
        adapter_tokens=tokens,
    )
