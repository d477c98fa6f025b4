"""Evaluation of instances in the twin: one instance, a cluster, and the bottleneck of an instance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.planner.problem._execution import NEVER, Deadline, OutOfTimeError, interrupt_at, parallel_until
from capplan.planner.problem._problem import Assignment, Problem, distinct_adapters
from capplan.planner.problem._settings import with_queues
from capplan.spec import (
    PLAN_ROUTER,
    STABLE_TTFT_P99_S,
    STATE_PERIOD_S,
    Binds,
    Slo,
    Workload,
    describe_latency,
)
from capplan.twin import SimulationResult
from capplan.twin.cluster import (
    ClusterResult,
    Instance,
    Rebalancing,
    served_router,
    simulate_cluster,
)
from capplan.twin.instance import (
    LOST,
    NS_PER_S,
    REJECTED,
    WAITING,
    Attainment,
    bound_value,
    request_status,
    result_of,
    run,
    scenario_of,
    tpt_attainment,
)
from capplan.twin.instance import NEVER as NEVER_NS

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
        cls,
        workload: Workload,
        result: SimulationResult,
        requests: SimulatedRequests,
        good: Attainment | None = None,
    ) -> Self:
        """Return the evaluation of a result, its requests, and the attainment of ``tpt_over_base``."""
        slo = workload.slo
        starving = starving_adapters(workload, requests)
        starves = bool(starving) or result.served_fraction < slo.served_fraction
        relative = () if good is None else _violated_attainment(slo, good)
        growing = growing_queue(slo, requests)
        return cls(result, (*violated_bounds(slo, result), *relative, *growing, *starving), starves)


def evaluate(
    problem: Problem,
    assignment: Assignment,
    seed: int,
    scale: float = 1.0,
    deadline: Deadline = NEVER,
    duration_s: float | None = None,
) -> Evaluation:
    """Simulate one instance with every rate times `scale`; of a trace, the busiest window.

    `duration_s` replaces the simulated time of the problem. Raises `InfeasibleError` if the instance does not
    start, and `OutOfTimeError` at the deadline, or that of the problem.
    """
    interrupt = interrupt_at(problem.deadline, deadline)
    slo = problem.workload.slo
    workload = problem.subworkload(assignment.shares, scale)
    profile = problem.pools[assignment.pool].profile
    length_s = workload.horizon_s(problem.duration_s if duration_s is None else duration_s)
    options = problem.run(assignment, length_s, seed)
    scenario = scenario_of(workload, profile, problem.engine_args(assignment), options)
    trace = run(scenario, interrupt=interrupt)
    result = result_of(profile, scenario, trace)
    status = request_status(trace, scenario.horizon_ns)
    good = None
    if slo.tpt_over_base is not None:
        overhead_s = profile.host.value("request_ms") / 1e3
        good = tpt_attainment(scenario, trace, status, overhead_s, slo.tpt_over_base, interrupt)
    first_s = np.where(trace.first_ns == NEVER_NS, np.inf, trace.first_ns / NS_PER_S)
    columns = scenario.requests.adapter, scenario.requests.arrival_ns / NS_PER_S, first_s, status
    return Evaluation.of(workload, result, SimulatedRequests(*columns, length_s), good)


class SimulatedRequests(NamedTuple):
    """Requests of an instance at the end of a simulation, as columns."""

    adapter: NDArray[np.int32]
    """1 + position in ``workload.adapters``; 0: the base model."""
    arrival_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    """Infinite without a first token."""
    status: NDArray[np.int8]
    """Position in `capplan.twin.instance.STATUSES`."""
    duration_s: float


_FEW_REQUESTS: Final = 3
"""Unserved requests of an adapter that are not starvation yet."""


def starving_adapters(workload: Workload, requests: SimulatedRequests) -> tuple[str, ...]:
    """Return, as text, the adapters that starve on an instance that does not starve as a whole.

    An adapter without a slot waits while others are served, and the mean over all hides it. Of the requests
    that arrive in the first `served_fraction` of the time, an instance that serves this fraction in order of
    arrival leaves none. An adapter starves if it leaves more than 1 - `served_fraction` of its own. If queues
    are stable, no request waits longer than the longest bound at the end, but for one in a hundred. Adapters
    with too few requests for a verdict on each are judged together.
    """
    slo, fraction = workload.slo, workload.slo.served_fraction
    until_s = fraction * requests.duration_s
    if slo.stable:
        until_s = max(until_s, requests.duration_s - slo.longest_wait_s)
        fraction = max(fraction, SAFE_SERVED_FRACTION)
    early = requests.arrival_s < until_s
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


_GROWTH_POINTS: Final = (0.5, 0.75, 1.0)
"""Shares of the simulated time at which waiting requests are counted."""


def growing_queue(slo: Slo, requests: SimulatedRequests) -> tuple[str, ...]:
    """Return, as text, that the waiting requests grow throughout the second half of a simulation.

    At the end they must be more than arrive in 30 s: smaller queues change at random.
    """
    arrived = requests.status != REJECTED
    arrival_s, first_s = requests.arrival_s[arrived], requests.first_token_s[arrived]
    if not slo.stable or not arrival_s.size:
        return ()
    times_s = requests.duration_s * np.array(_GROWTH_POINTS)
    first_s = np.sort(first_s)
    waiting = np.searchsorted(np.sort(arrival_s), times_s) - np.searchsorted(first_s, times_s)
    few = STABLE_TTFT_P99_S * arrival_s.size / requests.duration_s
    if waiting[-1] <= max(few, _FEW_REQUESTS) or not (np.diff(waiting) > 0).all():
        return ()
    counts = ", ".join(f"{each:,}" for each in waiting.tolist())
    return (f"the queue grows: {counts} requests wait after 50, 75 and 100 % of the time",)


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
    for name, bound in slo.latency_limits().items():
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
    limits = slo.latency_limits()
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


NOTHING_BREAKS: Final = "no bound breaks on one seed of the twin"


def describe_failure(problem: Problem, assignment: Assignment) -> str:
    """Return the result of `failure_of` as text, also if nothing breaks."""
    return failure_of(problem, assignment) or NOTHING_BREAKS


def failure_of(problem: Problem, assignment: Assignment) -> str:
    """Return the bound that an instance breaks by the twin at the load over (1 - headroom), as text.

    Empty if nothing breaks on one seed. Raises `OutOfTimeError` at the deadline of the problem.
    """
    planned, scale = with_queues(problem, assignment), problem.load_with_headroom
    evaluation = evaluate(problem.pessimistic, planned, 0, scale)
    return describe_violation(problem, evaluation)


def equal_instances(problem: Problem, assignments: Sequence[Assignment]) -> list[Assignment]:
    """Return the instances with the settings with which they run: equal ones if they are re-balanced.

    Those are the settings of the instance with the most slots, as any adapter may come to any instance.
    """
    if problem.workload.rebalance is None:
        return list(assignments)
    largest = max(assignments, key=problem.slots)
    return [replace(each, a_max=largest.a_max, knobs=largest.knobs) for each in assignments]


def evaluate_cluster(
    problem: Problem,
    assignments: Sequence[Assignment],
    seed: int,
    scale: float = 1.0,
    deadline: Deadline = NEVER,
    rebalance: Rebalancing | None = None,
    duration_s: float | None = None,
) -> list[Evaluation]:
    """Simulate all instances under one clock, with requests routed as `capplan serve PLAN` does.

    Instances to re-balance have equal settings, as `capplan serve PLAN` starts them. The other options are
    those of `evaluate`.
    """
    workload = problem.busiest_workload.at_load(scale)
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
    length_s = workload.horizon_s(problem.duration_s if duration_s is None else duration_s)
    interrupt = interrupt_at(problem.deadline, deadline)
    options: dict[str, Any] = {"seed": seed, "duration_s": length_s, "interrupt": interrupt}
    router = served_router(problem.workload.router or PLAN_ROUTER, problem.workload.router_options)
    options |= {"router": router, "state_period_s": STATE_PERIOD_S, "gpus_per_link": problem.gpus_per_link}
    cluster = simulate_cluster(workload, instances, rebalance=rebalance, **options)
    return evaluations_of(workload, cluster, length_s)


def evaluations_of(workload: Workload, cluster: ClusterResult, duration_s: float) -> list[Evaluation]:
    """Return the evaluation of each instance of a simulated cluster."""
    evaluations = []
    for number, result in enumerate(cluster.instances):
        routed, own = cluster.requests, cluster.requests.instance == number
        first_s = np.nan_to_num(routed.arrival_s[own] + routed.ttft_s[own], nan=np.inf)
        columns = routed.adapter[own], routed.arrival_s[own], first_s, routed.status[own]
        good = next(iter(cluster.tpt_over_base[number:]), None)
        evaluations.append(Evaluation.of(workload, result, SimulatedRequests(*columns, duration_s), good))
    return evaluations


def simulate_instances(
    problem: Problem,
    assignments: Sequence[Assignment],
    seed: int,
    deadline: Deadline = NEVER,
    rebalance: Rebalancing | None = None,
) -> list[SimulationResult]:
    """Simulate the instances of a plan as its verification does, without a judgement of bounds."""
    unbounded = replace(problem, workload=problem.workload.model_copy(update={"slo": Slo()}))
    if len(assignments) == 1:
        return [evaluate(unbounded, assignments[0], seed, deadline=deadline).result]
    evaluations = evaluate_cluster(unbounded, assignments, seed, deadline=deadline, rebalance=rebalance)
    return [each.result for each in evaluations]


def known_value(value: float) -> float | None:
    """Return a simulated value; None for NaN, which stands for no request."""
    return None if math.isnan(value) else float(value)


def known_values(values: Iterable[float]) -> list[float]:
    """Return the values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


_LARGEST_SCALE = 16.0
_BISECTIONS = 6
_EXHAUSTED = 0.95
"""Share of a resource in use, averaged over time, from which it counts as exhausted."""


Bottleneck: TypeAlias = tuple[Binds | None, float | None]
"""Bottleneck of an instance, and its load over the largest load that it sustains; None if unknown."""
_UNKNOWN: Final[Bottleneck] = (None, None)


def find_bottlenecks(
    problem: Problem, assignments: Sequence[Assignment], seed: int, holds: float = 0.0
) -> list[Bottleneck]:
    """Return the bottleneck of each instance.

    All rates are scaled up together until a bound breaks, with the simulated time and the criteria of the
    verification, and the seed of its estimate with headroom. The bottleneck is the exhausted resource there.
    It is None if the largest scale breaks no bound or there is no load, and unknown where the deadline of the
    problem ends the search. Instances that store all adapters are simulated together behind their router, and
    have one load. `holds` is the multiple of the load that is known to hold.
    """
    if problem.workload.stores_everywhere and len(assignments) > 1:
        try:
            load = _largest_load(lambda scale: evaluate_cluster(problem, assignments, seed, scale), holds)
        except OutOfTimeError:
            return [_UNKNOWN] * len(assignments)
        return [_bottleneck_at(problem, each, load, number) for number, each in enumerate(assignments)]

    def find(assignment: Assignment) -> Bottleneck:
        if sum(share.rate_rps for share in assignment.shares) == 0.0:
            return _UNKNOWN
        load = _largest_load(lambda scale: [evaluate(problem, assignment, seed, scale)], holds)
        return _bottleneck_at(problem, assignment, load, 0)

    return [each or _UNKNOWN for each in parallel_until(find, assignments, problem.deadline)]


class _LargestLoad(NamedTuple):
    """Result of scaling the load of one or several instances."""

    holds: float
    """Largest multiple that holds."""
    fails: float
    """Next one that fails, if there are evaluations."""
    failing: Sequence[Evaluation]
    """Evaluations of the instances there; empty if the largest multiple tried holds."""


def _largest_load(run_at: Callable[[float], Sequence[Evaluation]], holds: float) -> _LargestLoad:
    """Return the largest multiple of the load that holds, by doubling and bisection from one that holds."""

    def breaks(evaluations: Sequence[Evaluation]) -> bool:
        return any(each.violations for each in evaluations)

    fails = max(1.0, 2.0 * holds)
    failing = run_at(fails)
    while not breaks(failing):
        if fails == _LARGEST_SCALE:
            return _LargestLoad(fails, fails, ())
        holds, fails = fails, min(2.0 * fails, _LARGEST_SCALE)
        failing = run_at(fails)
    for _ in range(_BISECTIONS):
        middle = (holds + fails) / 2.0
        evaluations = run_at(middle)
        if breaks(evaluations):
            fails, failing = middle, evaluations
        else:
            holds = middle
    return _LargestLoad(holds, fails, failing)


def _bottleneck_at(
    problem: Problem, assignment: Assignment, largest: _LargestLoad, number: int
) -> tuple[Binds | None, float]:
    """Return the bottleneck of an instance: its own if it fails, else that of the first one that does."""
    load = 1.0 / max(largest.holds, 1e-3)
    if not largest.failing:
        return None, load
    own = largest.failing[number]
    failing = own if own.violations else next(each for each in largest.failing if each.violations)
    resource, value, words = _bottleneck(problem, assignment, failing)
    note = f"at {largest.fails:.2f}x {words}"
    return Binds(resource=resource, value=load if value is None else value, note=note), load


def kv_share(problem: Problem, assignment: Assignment, result: SimulationResult) -> float:
    """Return the mean share of the KV tokens in use; a cached prefix counts once for each adapter."""
    prefix = problem.cached_prefix_tokens(assignment.pool)
    shared = max(0.0, result.running_mean - result.adapters_mean) * prefix
    return max(0.0, result.kv_tokens_mean - shared) / result.kv_tokens


def _bottleneck(
    problem: Problem, assignment: Assignment, evaluation: Evaluation
) -> tuple[Literal["kv", "slots", "compute", "slo"], float | None, str]:
    """Return the resource that runs out on a failing instance, its use (None: a latency), and words."""
    violation = describe_violation(problem, evaluation)
    result, slo = evaluation.result, problem.workload.slo
    late = any(bound_value(result, name) > bound for name, bound in slo.latency_bounds().items())
    if result.served_fraction >= slo.served_fraction and (late or slo.tpt_over_base is not None):
        return "slo", None, violation
    kv_use = kv_share(problem, assignment, result)
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
