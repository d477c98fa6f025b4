"""Engine settings of an instance: adapter slots (A_max), knobs, and queues by request size.

Knobs are tokens per step and running requests. A smaller token budget shortens the steps that carry prefills,
and with them TPOT and ITL; a larger one prefills sooner, which shortens TTFT. Fewer running requests shorten
every step and leave more KV memory; more take waiting requests. Without a latency bound none of this matters,
and the defaults are kept. Queues have token quotas (Chameleon, section 4.3).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from capplan.planner.problem._execution import interrupt_at
from capplan.planner.problem._problem import (
    GRID,
    AdapterShare,
    Assignment,
    Estimate,
    Estimator,
    KnobSearch,
    Problem,
    distinct_adapters,
    estimate_all,
)
from capplan.serving.pooled import PoolSetup, RequestSample, design_queues
from capplan.spec import EngineArgs, EngineConfig, Profile, Queues, Slo, Workload
from capplan.twin import RequestTable, SimulationResult
from capplan.twin.instance import (
    MODELS,
    REJECTED,
    SLACK,
    Scenario,
    detailed_result,
    result_of,
    run,
    scenario_of,
    with_buckets,
)
from capplan.workload import Requests

_TWIN_CANDIDATES = 4
"""Numbers of slots that the twin simulates per instance."""
_THROUGHPUT_TOLERANCE = 0.02
"""Relative difference in throughput below the resolution of the estimators."""
_TIME_TOLERANCE = 0.03
"""Relative difference in request time within which more slots are preferred, for bursts."""


def choose_slots(
    problem: Problem,
    shares: Sequence[AdapterShare],
    estimator: Estimator,
    twin: Estimator,
    like: Assignment | None = None,
) -> int | None:
    """Return the best number of slots with which an instance holds these shares; None if there is none.

    `like` is an instance with its pool and other engine settings; None: the first pool and the problem's.

    An instance that keeps up serves the offered load with any number of slots. Among those that serve as
    much, the shortest mean time from arrival to last token decides: with too few slots requests wait, with
    too many every step is slow.
    """
    instance = replace(like or Assignment((), 1), shares=tuple(shares))
    promising = list(rank_slots(problem, instance, estimator))[:_TWIN_CANDIDATES]
    return best_slots(_estimates(instance, promising, twin))


def best_slots(estimates: Mapping[int, Estimate]) -> int | None:
    """Return the best number of slots among those with which the instance holds; None if there is none."""
    holding = {value: estimate for value, estimate in estimates.items() if not estimate.starved}
    return _rank(holding)[0] if holding else None


def rank_slots(
    problem: Problem, instance: Assignment, estimator: Estimator, near: int | None = None
) -> dict[int, Estimate]:
    """Return the estimates of an instance with all numbers of slots that fit in memory, best first.

    Those that starve come last. With `near`, only the neighbouring numbers are tried: for shares that differ
    little from others with that number.
    """
    shares = instance.shares
    values = slot_grid(problem, shares) if near is None else neighbouring_slots(problem, shares, near)
    fitting = [value for value in values if problem.fits_in_memory(replace(instance, a_max=value))]
    estimates = _estimates(instance, fitting, estimator)
    holding = {value: estimate for value, estimate in estimates.items() if not estimate.starved}
    starving = {value: estimate for value, estimate in estimates.items() if estimate.starved}
    return {value: estimates[value] for value in _rank(holding) + _rank(starving)}


def slot_grid(problem: Problem, shares: Sequence[AdapterShare]) -> list[int]:
    """Return the numbers of slots to try: the grid up to one per adapter, which is all without slots."""
    if problem.fixed_a_max is not None:
        return [problem.fixed_a_max]
    distinct = distinct_adapters(shares)
    if not problem.has_slots:
        return [distinct]
    return sorted({value for value in GRID if value < distinct} | {distinct})


def neighbouring_slots(problem: Problem, shares: Sequence[AdapterShare], slots: int) -> list[int]:
    """Return a number of slots, or the next larger in the grid, with its two neighbours."""
    values = slot_grid(problem, shares)
    at = bisect_left(values, slots)
    return values[max(0, at - 1) : at + 2] or values[-1:]


def _estimates(instance: Assignment, values: Sequence[int], estimator: Estimator) -> dict[int, Estimate]:
    assignments = [replace(instance, a_max=value) for value in values]
    return dict(zip(values, estimate_all(estimator, assignments), strict=True))


def _rank(estimates: Mapping[int, Estimate]) -> list[int]:
    """Sort numbers of slots: those that serve most by request time, then the rest by throughput."""
    if not estimates:
        return []
    most = max(estimate.throughput_tok_s for estimate in estimates.values())
    equal = [
        v
        for v, estimate in estimates.items()
        if estimate.throughput_tok_s >= most * (1.0 - _THROUGHPUT_TOLERANCE)
    ]
    shortest = min(estimates[v].e2e_s_mean for v in equal)

    def merit(value: int) -> tuple[bool, bool, float, int]:
        estimate = estimates[value]
        if value not in equal:
            return True, False, -estimate.throughput_tok_s, -value
        slow = estimate.e2e_s_mean > shortest * (1.0 + _TIME_TOLERANCE)
        return False, slow, estimate.e2e_s_mean if slow else 0.0, -value

    return sorted(estimates, key=merit)


def most_slots(problem: Problem, shares: Sequence[AdapterShare]) -> int:
    """Return the fixed number of slots, or one per adapter as far as memory allows, but not none."""
    if problem.fixed_a_max is not None:
        return problem.fixed_a_max
    distinct = distinct_adapters(shares)
    return max(min(1, distinct), max_fitting_slots(problem, Assignment(tuple(shares), 1), distinct))


def max_fitting_slots(problem: Problem, assignment: Assignment, limit: int) -> int:
    """Return the largest number of slots up to a limit that fits in memory; 0 if none does."""

    def is_too_large(a_max: int) -> bool:
        return not problem.fits_in_memory(replace(assignment, a_max=a_max))

    return bisect_left(range(1, limit + 1), True, key=is_too_large)


TOKEN_BUDGETS: Final = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Values of max_num_batched_tokens to try."""
RUNNING_REQUESTS: Final = (64, 128, 256, 512, 1024)
"""Values of max_num_seqs to try."""
_FALLBACKS: Final = (128, 512)
"""Values of max_num_seqs to try before an instance is refused."""
KNOBS: Final = ("max_num_batched_tokens", "max_num_seqs")
_ROUNDS: Final = 2
"""Passes over both knobs."""


KnobGrid: TypeAlias = Mapping[str, tuple[int, ...]]
"""Values of each knob to try, ascending; one value if the knob is fixed."""


def has_open_knobs(problem: Problem, pool: int) -> bool:
    """Return whether a knob of instances of a pool has several values to try."""
    return any(len(values) > 1 for values in knob_grid(problem, pool).values())


def knobs_of(args: EngineArgs) -> EngineConfig:
    """Return the knobs of engine settings."""
    return EngineConfig(**{name: getattr(args, name) for name in KNOBS})


def knob_grid(problem: Problem, pool: int) -> KnobGrid:
    """Return the values of the knobs that instances of a pool may have."""
    fixed, engine = problem.workload.engine, problem.engine
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    if problem.knobs is KnobSearch.DEFAULT or not problem.bounds_latency:
        return {"max_num_batched_tokens": (tokens,), "max_num_seqs": (seqs,)}
    most_tokens, most_seqs = float(TOKEN_BUDGETS[-1]), float(RUNNING_REQUESTS[-1])
    if problem.knobs is KnobSearch.FITTED:
        profile = problem.pools[pool].profile
        most_tokens = _fitted_limit(profile, ("max_num_batched_tokens", "tokens"), tokens)
        most_seqs = _fitted_limit(profile, ("max_num_seqs", "requests"), seqs)
    budgets, requests = _up_to(TOKEN_BUDGETS, most_tokens, tokens), _up_to(RUNNING_REQUESTS, most_seqs, seqs)
    return {
        "max_num_batched_tokens": budgets if fixed.max_num_batched_tokens is None else (tokens,),
        "max_num_seqs": requests if fixed.max_num_seqs is None else (seqs,),
    }


def fallback_running_requests(problem: Problem) -> tuple[int, ...]:
    """Return other values of max_num_seqs to try before an instance is refused, also without a grid."""
    if problem.workload.engine.max_num_seqs is not None or problem.knobs is KnobSearch.DEFAULT:
        return ()
    return tuple(value for value in _FALLBACKS if value <= problem.engine.max_num_batched_tokens)


def max_running_requests(problem: Problem, pool: int) -> int:
    """Return the largest max_num_seqs that an instance of a pool may get."""
    return max(*knob_grid(problem, pool)["max_num_seqs"], *fallback_running_requests(problem), 1)


def _up_to(grid: Sequence[int], most: float, default: int) -> tuple[int, ...]:
    return tuple(sorted({value for value in grid if value <= most} | {default}))


def _fitted_limit(profile: Profile, quantities: tuple[str, ...], default: int) -> float:
    """Return the largest value of a knob inside the fitted ranges of quantities that it limits.

    Smaller values need no measurement of their own: they only make steps with fewer tokens and requests. A
    profile without such a range was measured at the default.
    """
    ranges = [getattr(profile, model).fitted_range for model in MODELS]
    ends = [fitted[quantity][1] for fitted in ranges for quantity in quantities if quantity in fitted]
    return (1.0 + SLACK) * min(ends, default=default)


class TunedInstance(NamedTuple):
    """Instance with the values of its knobs, and its estimate."""

    assignment: Assignment
    estimate: Estimate


def tune_knobs(
    problem: Problem, assignment: Assignment, estimator: Estimator, *, until_it_holds: bool = False
) -> TunedInstance:
    """Return an instance with the knobs of the least utilization, one knob after the other.

    All values of a knob are tried, side by side, since the utilization is flat where steps do not reach the
    token budget. Among equal values the current one stays. With `until_it_holds`, knobs are tuned only while
    the instance does not hold.
    """
    best = TunedInstance(assignment, estimator(assignment))
    for _ in range(_ROUNDS):
        before = best
        for knob in KNOBS:
            if not (until_it_holds and not best.estimate.starved):
                others = knob_variants(problem, best.assignment, knob)
                tried = map(TunedInstance, others, estimate_all(estimator, others))
                best = min((best, *tried), key=lambda each: each.estimate.utilization)
        if best is before:
            break
    return best


def knob_variants(problem: Problem, assignment: Assignment, knob: str) -> list[Assignment]:
    """Return the instance with each other value of a knob, ascending, as far as it starts with them."""
    current = getattr(problem.engine_args(assignment), knob)
    others = (value for value in knob_grid(problem, assignment.pool)[knob] if value != current)
    variants = (with_knob(assignment, knob, value) for value in others)
    return [each for each in variants if _starts(problem, each)]


def with_knob(assignment: Assignment, knob: str, value: int) -> Assignment:
    """Return an instance with another value of a knob, with which it may not start."""
    return replace(assignment, knobs=assignment.knobs.model_copy(update={knob: value}))


def _starts(problem: Problem, assignment: Assignment) -> bool:
    args = problem.engine_args(assignment)
    return args.max_num_seqs <= args.max_num_batched_tokens and problem.fits_in_memory(assignment)


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

    Raises `OutOfTimeError` at the deadline of the problem.
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
    scenario, result, requests = _simulate(problem, assignment, workload, rate_rps)
    if scenario.pool is None or np.isnan(requests.isolated_s).all():
        return None
    stated_s = stated_bound_s(problem.workload.slo)
    isolated_s = float(np.nanmean(requests.isolated_s))
    queues = design_queues(
        _sample(scenario.requests, requests, scenario.pool),
        rate_rps=rate_rps,
        kv_tokens=result.kv_tokens,
        bound_s=_BOUND_OVER_ISOLATED * isolated_s if stated_s is None else stated_s,
        config=config,
        static=scheduler.policy == "static",
    )
    return queues.replace(missing_tokens=None) if stated_s is None else queues


def stated_bound_s(slo: Slo) -> float | None:
    """Return the tightest bound on E2E; None without one."""
    bounds = [bound for name, bound in slo.latency_bounds().items() if name.startswith("e2e")]
    return min(bounds, default=None)


def _simulate(
    problem: Problem, assignment: Assignment, workload: Workload, rate_rps: float
) -> tuple[Scenario, SimulationResult, RequestTable]:
    """Return the simulation that the queues are designed from."""
    duration_s = min(max(_SAMPLE_REQUESTS / rate_rps, _MIN_DURATION_S), _MAX_DURATION_S)
    length_s = workload.horizon_s(duration_s)
    options = problem.run(assignment, length_s, _QUEUE_SEED)
    profile = problem.pools[assignment.pool].profile
    interrupt = interrupt_at(problem.deadline)
    scenario = with_buckets(scenario_of(workload, profile, problem.engine_args(assignment), options))
    trace = run(scenario, interrupt=interrupt)
    result = result_of(profile, scenario, trace)
    detailed = detailed_result(workload, profile, scenario, trace, result, interrupt)
    return scenario, result, detailed.requests


def _sample(requests: Requests, table: RequestTable, pool: PoolSetup) -> RequestSample:
    """Return the requests that were not rejected, with predicted outputs, as the scheduler sees them."""
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
