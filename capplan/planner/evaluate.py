"""Evaluation of instances in the twin: one instance, a cluster, and the bottleneck of an instance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError
from capplan.planner.deadline import NEVER, Deadline, interrupt_at
from capplan.planner.problem import SIMULATED_S, Assignment, Problem, distinct_adapters
from capplan.planner.queues import with_queues
from capplan.spec import Binds, Slo, Workload
from capplan.spec.routing import PLAN_ROUTER, STATE_PERIOD_S
from capplan.spec.slo import describe_latency
from capplan.twin import SimulationResult, simulate
from capplan.twin.cluster import Instance, Rebalancing, served_router, simulate_cluster
from capplan.twin.core import run
from capplan.twin.group_metrics import Attainment
from capplan.twin.metrics import bound_value
from capplan.twin.per_request import LOST, REJECTED, WAITING, request_status
from capplan.twin.scenario import NS_PER_S, Scenario
from capplan.twin.simulate import keywords_of, tpt_attainment
from capplan.twin.trace import TwinTrace

SAFE_SERVED_FRACTION: Final = 0.99
"""Served fraction from which simulations of an instance differ little by seed."""


@dataclass(frozen=True)
class Evaluation:
    """Simulated performance of one instance."""

    result: SimulationResult
    violations: tuple[str, ...]
    """Broken bounds, as text."""
    starves: bool
    """Whether too little is served: of all requests, or of those of an adapter."""

    @classmethod
    def of(
        cls, slo: Slo, result: SimulationResult, starving: Sequence[str], relative: Sequence[str] = ()
    ) -> Self:
        """Return the evaluation of a result; `starving` adapters and broken `relative` bounds as text."""
        starves = bool(starving) or result.served_fraction < slo.served_fraction
        return cls(result, (*violated_bounds(slo, result), *relative, *starving), starves)


def evaluate(
    problem: Problem,
    assignment: Assignment,
    seed: int,
    duration_s: float,
    scale: float = 1.0,
    deadline: Deadline = NEVER,
) -> Evaluation:
    """Simulate one instance with every rate times `scale`; a trace is replayed as a whole.

    Raises
    ------
    InfeasibleError
        If the instance does not start.
    OutOfTimeError
        If the deadline passes, or that of the problem.
    """
    interrupt = interrupt_at(problem.deadline, deadline)
    slo = problem.workload.slo
    workload = problem.subworkload(assignment.shares, scale)
    profile = problem.pools[assignment.pool].profile
    settings = keywords_of(problem.engine_args(assignment))
    length_s = workload.horizon_s(duration_s)
    runs: list[tuple[Scenario, TwinTrace]] = []

    def observed_run(scenario: Scenario) -> TwinTrace:
        trace = run(scenario, interrupt=interrupt)
        runs.append((scenario, trace))
        return trace

    options: dict[str, Any] = {"seed": seed, "duration_s": length_s, "runner": observed_run}
    result = simulate(workload, profile, **options, **settings, **problem.scheduling(assignment))
    scenario, trace = runs[0]
    status = request_status(trace, scenario.horizon_ns)
    relative: tuple[str, ...] = ()
    if slo.tpt_over_base is not None:
        overhead_s = profile.host.value("request_ms") / 1e3
        good = tpt_attainment(scenario, trace, status, overhead_s, slo.tpt_over_base, interrupt)
        relative = _violated_attainment(slo, good)
    columns = scenario.requests.adapter, scenario.requests.arrival_ns / NS_PER_S, status
    starving = starving_adapters(workload, SimulatedRequests(*columns, length_s))
    return Evaluation.of(slo, result, starving, relative)


class SimulatedRequests(NamedTuple):
    """Requests of an instance at the end of a simulation, as columns."""

    adapter: NDArray[np.int32]
    """1 + position in ``workload.adapters``; 0: the base model."""
    arrival_s: NDArray[np.float64]
    status: NDArray[np.int8]
    """Position in `capplan.twin.per_request.STATUSES`."""
    duration_s: float


_FEW_REQUESTS: Final = 3
"""Unserved requests of an adapter that are not starvation yet."""


def starving_adapters(workload: Workload, requests: SimulatedRequests) -> tuple[str, ...]:
    """Return, as text, the adapters that starve on an instance that does not starve as a whole.

    An adapter without a slot waits while others are served, and the mean over all hides it. Of the requests
    that arrive in the first `served_fraction` of the time, an instance that serves this fraction in order of
    arrival leaves none. An adapter starves if it leaves more than 1 - `served_fraction` of its own. Adapters
    with too few requests for a verdict on each are judged together.
    """
    fraction = workload.slo.served_fraction
    early = requests.arrival_s < fraction * requests.duration_s
    unserved = early & np.isin(requests.status, (WAITING, REJECTED, LOST))
    if np.count_nonzero(unserved) <= _FEW_REQUESTS:
        return ()
    size = len(workload.adapters) + 1
    left = np.bincount(requests.adapter[unserved], minlength=size)
    count = np.bincount(requests.adapter[early], minlength=size)
    allowed = np.maximum(_FEW_REQUESTS, (1.0 - fraction) * count)
    starving = np.flatnonzero(left > allowed)
    if starving.size:
        worst = int(starving[np.argmax(left[starving] / count[starving])])
        name = f"adapter {workload.adapters[worst - 1].name}" if worst else "the base model"
        others = f"{starving.size - 1} other adapter{'' if starving.size == 2 else 's'}"
        more = f", and {others} too many" if starving.size > 1 else ""
        return (f"{name} leaves {left[worst]} of {count[worst]} requests unserved{more}",)
    light = (1.0 - fraction) * count <= _FEW_REQUESTS
    lost, total = int(left[light].sum()), int(count[light].sum())
    if lost <= max(_FEW_REQUESTS, (1.0 - fraction) * total):
        return ()
    return (f"adapters with few requests leave {lost} of {total} requests unserved",)


def _violated_attainment(slo: Slo, good: Attainment) -> tuple[str, ...]:
    if slo.attainment is None or not good.share < slo.attainment:
        return ()
    return (f"attainment {good.share:.3f} < {slo.attainment:g} (TPT within {good.limit:.3g} ms)",)


def violated_bounds(slo: Slo, result: SimulationResult) -> tuple[str, ...]:
    """Return the broken bounds of a simulated instance, as text.

    Latencies are those of completed requests. A percentile of the time to the first or last token is also
    broken if too many requests are still waiting at the end.
    """
    violations = []
    if result.served_fraction < slo.served_fraction:
        violations.append(f"served_fraction {result.served_fraction:.3f} < {slo.served_fraction:g}")
    for name, bound in slo.latency_bounds().items():
        value = bound_value(result, name)
        if value > bound:
            violations.append(f"{name} {value:.3g} > {bound:g}")
        elif _violated_by_waiting(result, name, bound):
            latency, unit = describe_latency(name)
            violations.append(
                f"{latency} exceeds {bound:g} {unit} with the requests that still wait at the end"
            )
    return tuple(violations)


def _violated_by_waiting(result: SimulationResult, name: str, bound: float) -> bool:
    """Tell whether more requests than the percentile allows are late without being completed.

    Of the others, up to `running_max` are in execution, and the last arrivals are still within the bound.
    """
    metric, statistic, _ = name.split("_")
    if metric not in ("ttft", "e2e") or not statistic.startswith("p"):
        return False
    in_time = result.submitted * min(1.0, bound / result.duration_s) + result.running_max
    late = result.submitted - result.completed - in_time
    return late > (1.0 - float(statistic[1:]) / 100.0) * result.submitted


def describe_violation(problem: Problem, evaluation: Evaluation) -> str:
    """Return the broken bound of an instance that is exceeded most, as text; empty if none is broken."""
    slo, result = problem.workload.slo, evaluation.result
    if result.served_fraction < slo.served_fraction:
        limit = 100.0 * slo.served_fraction
        served = told_from(100.0 * result.served_fraction, limit)
        return f"{served} % of the tokens are served (limit {limit:g} %)"
    limits = slo.latency_bounds()
    values = {name: bound_value(result, name) for name in limits}
    broken = [name for name, limit in limits.items() if values[name] > limit]
    if not broken:
        return next(iter(evaluation.violations), "")
    worst = max(broken, key=lambda name: values[name] / limits[name])
    latency, unit = describe_latency(worst)
    return f"{latency} is {told_from(values[worst], limits[worst])} {unit} (limit {limits[worst]:g} {unit})"


def told_from(value: float, limit: float) -> str:
    """Return a value as text, with three digits or as many as tell it from its limit."""
    forms = (f"{value:.{digits}g}" for digits in range(3, 17))
    return next((form for form in forms if float(form) != limit), f"{value:g}")


def describe_failure(problem: Problem, assignment: Assignment) -> str:
    """Return the bound that an instance breaks by the twin at the load over (1 - headroom), as text.

    It may also be that the quotas of its queues do not fit.

    Raises
    ------
    OutOfTimeError
        If the deadline of the problem passes.
    """
    scale = 1.0 / (1.0 - problem.workload.headroom)
    try:
        assignment = with_queues(problem, assignment)
    except InfeasibleError as error:
        return error.message
    evaluation = evaluate(problem.pessimistic, assignment, 0, SIMULATED_S, scale)
    return describe_violation(problem, evaluation) or "no bound breaks on one seed of the twin"


def equal_instances(problem: Problem, assignments: Sequence[Assignment]) -> list[Assignment]:
    """Return the instances with the settings with which they run: equal ones if they are re-balanced.

    Those are the settings of the instance with the most slots, as any adapter may come to any instance.
    """
    if problem.workload.rebalance is None:
        return list(assignments)
    largest = max(assignments, key=problem.slots)
    settings = {name: getattr(largest, name) for name in ("a_max", "max_num_seqs", "max_num_batched_tokens")}
    return [replace(each, **settings) for each in assignments]


def evaluate_cluster(
    problem: Problem,
    assignments: Sequence[Assignment],
    seed: int,
    duration_s: float,
    deadline: Deadline = NEVER,
    rebalance: Rebalancing | None = None,
) -> list[Evaluation]:
    """Simulate all instances under one clock, with requests routed as `capplan serve PLAN` does.

    Instances to re-balance have equal settings, as `capplan serve PLAN` starts them.

    Raises
    ------
    InfeasibleError
        If an instance does not start.
    OutOfTimeError
        If the deadline passes, or that of the problem.
    """
    workload = problem.busiest_workload
    instances = [
        Instance.of(
            problem.pools[each.pool].profile,
            problem.engine_args(each),
            problem.stored(each),
            problem.workload.scheduling,
            each.queues,
        )
        for each in equal_instances(problem, assignments)
    ]
    length_s = workload.horizon_s(duration_s)
    interrupt = interrupt_at(problem.deadline, deadline)
    options: dict[str, Any] = {"seed": seed, "duration_s": length_s, "interrupt": interrupt}
    router = served_router(problem.workload.router or PLAN_ROUTER, problem.workload.router_options)
    options |= {"router": router, "state_period_s": STATE_PERIOD_S, "gpus_per_link": problem.gpus_per_link}
    cluster = simulate_cluster(workload, instances, rebalance=rebalance, **options)
    evaluations = []
    for number, result in enumerate(cluster.instances):
        routed, own = cluster.requests, cluster.requests.instance == number
        columns = routed.adapter[own], routed.arrival_s[own], routed.status[own]
        starving = starving_adapters(workload, SimulatedRequests(*columns, length_s))
        good = cluster.tpt_over_base[number:][:1]
        relative = _violated_attainment(workload.slo, good[0]) if good else ()
        evaluations.append(Evaluation.of(workload.slo, result, starving, relative))
    return evaluations


def simulate_instances(
    problem: Problem,
    assignments: Sequence[Assignment],
    seed: int,
    duration_s: float,
    deadline: Deadline = NEVER,
    rebalance: Rebalancing | None = None,
) -> list[SimulationResult]:
    """Simulate the instances of a plan as its verification does, without a judgement of bounds.

    Raises
    ------
    OutOfTimeError
        If the deadline passes, or that of the problem.
    """
    unbounded = replace(problem, workload=problem.workload.model_copy(update={"slo": Slo()}))
    if len(assignments) == 1:
        return [evaluate(unbounded, assignments[0], seed, duration_s, deadline=deadline).result]
    evaluations = evaluate_cluster(unbounded, assignments, seed, duration_s, deadline, rebalance)
    return [each.result for each in evaluations]


def known_value(value: float) -> float | None:
    """Return a simulated value; None for NaN, which stands for no request."""
    return None if math.isnan(value) else float(value)


def known_values(values: Iterable[float]) -> list[float]:
    """Return the values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


BOTTLENECK_SEED = 7
BOTTLENECK_DURATION_S = 600.0
_LARGEST_SCALE = 16.0
_BISECTIONS = 6
_EXHAUSTED = 0.95
"""Share of a resource in use, averaged over time, from which it counts as exhausted."""


def find_bottleneck(problem: Problem, assignment: Assignment) -> tuple[Binds | None, float | None]:
    """Return the bottleneck of an instance, and its load over the largest load that it sustains.

    All rates are scaled up together until a bound breaks. The bottleneck is the exhausted resource there. It
    is None if the largest scale breaks no bound or there is no load.

    Raises
    ------
    OutOfTimeError
        If the deadline of the problem passes.
    """
    if sum(share.rate_rps for share in assignment.shares) == 0.0:
        return None, None

    def run_at(scale: float) -> Evaluation:
        return evaluate(problem, assignment, BOTTLENECK_SEED, BOTTLENECK_DURATION_S, scale)

    holds, fails = 0.0, 1.0
    failing = run_at(fails)
    while not failing.violations:
        holds, fails = fails, fails * 2.0
        if fails > _LARGEST_SCALE:
            return None, 1.0 / holds
        failing = run_at(fails)
    for _ in range(_BISECTIONS):
        middle = (holds + fails) / 2.0
        evaluation = run_at(middle)
        if evaluation.violations:
            fails, failing = middle, evaluation
        else:
            holds = middle
    load = 1.0 / max(holds, 1e-3)
    resource, value, words = _bottleneck(problem, assignment, failing)
    binds = Binds(resource=resource, value=load if value is None else value, note=f"at {fails:.2f}x {words}")
    return binds, load


def _bottleneck(
    problem: Problem, assignment: Assignment, evaluation: Evaluation
) -> tuple[Literal["kv", "slots", "compute", "slo"], float | None, str]:
    """Return the resource that runs out on a failing instance, its use (None: a latency), and words."""
    violation = describe_violation(problem, evaluation)
    if evaluation.result.served_fraction >= problem.workload.slo.served_fraction:
        return "slo", None, violation
    result = evaluation.result
    kv_use = result.kv_tokens_mean / result.kv_tokens
    slot_use = result.adapters_mean / max(1, assignment.a_max)
    scarce_slots = problem.has_slots and assignment.a_max < distinct_adapters(assignment.shares)
    if kv_use >= _EXHAUSTED or result.preemptions > 0.01 * result.completed:
        words = f"{100.0 * kv_use:.0f} % of {result.kv_tokens:,} KV tokens are in use"
        return "kv", kv_use, f"{words} and {violation}"
    if scarce_slots and slot_use >= _EXHAUSTED:
        words = f"{result.adapters_mean:.1f} of {assignment.a_max} adapter slots are in use"
        return "slots", slot_use, f"{words} and {violation}"
    words = f"steps take all the time with {result.running_mean:.0f} requests running"
    return "compute", result.busy_fraction, f"{words} and {violation}"
