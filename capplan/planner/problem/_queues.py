"""Queues by request size with token quotas (Chameleon, section 4.3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from capplan.planner.problem._execution import interrupt_at
from capplan.planner.problem._problem import Assignment, Problem
from capplan.serving.pooled import PoolSetup, RequestSample, design_queues
from capplan.spec import Queues, Slo, Workload
from capplan.twin import RequestTable, SimulationResult
from capplan.twin.instance import (
    REJECTED,
    Scenario,
    detailed_result,
    result_of,
    run,
    scenario_of,
    with_buckets,
)

_QUEUE_SEED: Final = 11
_SAMPLE_REQUESTS: Final = 4000
"""Approximate number of simulated requests; the 99.9th percentile of lengths needs a thousand."""
_MIN_DURATION_S: Final = 300.0
"""Chameleon's window (section 4.3.4)."""
_MAX_DURATION_S: Final = 86_400.0
_BOUND_OVER_ISOLATED: Final = 5.0
"""Time by which quotas are weighed without a bound on E2E, over the mean time of a request alone (Chameleon,
section 5.1)."""


def with_queues(problem: Problem, assignment: Assignment) -> Assignment:
    """Return an instance with its initial queues, as it is simulated and planned.

    Raises
    ------
    OutOfTimeError
        If the deadline of the problem passes.
    """
    if assignment.queues is not None:
        return assignment
    known = problem.known_queues
    if assignment not in known:
        known[assignment] = group_queues(problem, assignment)
    return replace(assignment, queues=known[assignment])


def group_queues(problem: Problem, assignment: Assignment) -> Queues | None:
    """Return the initial queues of one instance; None without queues or requests.

    They are those of a simulation that begins with one queue, and share its tokens. Minimum quotas can only
    be missing for a bound on E2E of the user.
    """
    pair = problem.workload.scheduling
    rate_rps = sum(share.rate_rps for share in assignment.shares)
    if pair is None or not pair[0].has_queues or rate_rps == 0.0:
        return None
    scheduler = pair[0]
    config = scheduler.queues
    workload = problem.subworkload(assignment.shares).model_copy(update={"slo": Slo()})
    sample = _simulate(problem, assignment, workload, rate_rps)
    pool = sample.scenario.pool
    if pool is None or np.isnan(sample.requests.isolated_s).all():
        return None
    stated_s = stated_bound_s(problem.workload.slo)
    isolated_s = float(np.nanmean(sample.requests.isolated_s))
    queues = design_queues(
        _sample(sample, pool),
        rate_rps=rate_rps,
        kv_tokens=sample.result.kv_tokens,
        bound_s=_BOUND_OVER_ISOLATED * isolated_s if stated_s is None else stated_s,
        config=config,
        static=scheduler.policy == "static",
    )
    return queues.replace(missing_tokens=None) if stated_s is None else queues


def stated_bound_s(slo: Slo) -> float | None:
    """Return the tightest bound on E2E; None without one."""
    bounds = [bound for name, bound in slo.latency_bounds().items() if name.startswith("e2e")]
    return min(bounds, default=None)


class _SampleRun(NamedTuple):
    """Simulation that the queues are designed from."""

    scenario: Scenario
    result: SimulationResult
    requests: RequestTable


def _simulate(problem: Problem, assignment: Assignment, workload: Workload, rate_rps: float) -> _SampleRun:
    duration_s = min(max(_SAMPLE_REQUESTS / rate_rps, _MIN_DURATION_S), _MAX_DURATION_S)
    length_s = workload.horizon_s(duration_s)
    options = problem.run(assignment, length_s, _QUEUE_SEED)
    profile = problem.pools[assignment.pool].profile
    interrupt = interrupt_at(problem.deadline)
    scenario = with_buckets(scenario_of(workload, profile, problem.engine_args(assignment), options))
    trace = run(scenario, interrupt=interrupt)
    result = result_of(profile, scenario, trace)
    detailed = detailed_result(workload, profile, scenario, trace, result, interrupt)
    return _SampleRun(scenario, result, detailed.requests)


def _sample(sample: _SampleRun, pool: PoolSetup) -> RequestSample:
    """Return the requests that were not rejected, with predicted outputs, as the scheduler sees them."""
    table, requests = sample.requests, sample.scenario.requests
    outputs = requests.predicted_tokens if requests.predicted_tokens.size else requests.output_tokens
    kept = table.status != REJECTED
    return RequestSample(
        prompt_tokens=table.prompt_tokens[kept],
        output_tokens=outputs[kept].astype(np.int64),
        adapter=table.adapter[kept].astype(np.int64),
        execution_s=(table.finish_s - table.admitted_s)[kept],
        adapter_bytes=pool.adapter_bytes,
        adapter_tokens=pool.adapter_tokens,
    )
