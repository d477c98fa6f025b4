"""`plan`: place the adapters of a workload on GPUs and verify the placement.

`verify_as_served` verifies a plan as a deployment target serves it: engines lack the plan's scheduler, cache
and re-balancing, and targets may route otherwise, or load every adapter everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from pydantic import JsonValue

from capplan.errors import InfeasibleError, InputError
from capplan.planner._document import build_plan, fleet_totals, move_sizes
from capplan.planner.problem._bound import lower_bound_gpus
from capplan.planner.problem._estimate import TwinEstimator, make_estimator
from capplan.planner.problem._evaluate import evaluate, evaluate_cluster
from capplan.planner.problem._execution import OutOfTimeError, Progress, TimeBudget, no_progress
from capplan.planner.problem._previous import (
    PreviousInstance,
    count_moves,
    name_groups,
    previous_instances,
    read_previous,
)
from capplan.planner.problem._problem import (
    OPEN_FACTOR,
    AdapterShare,
    Assignment,
    Estimator,
    KnobSearch,
    Problem,
    infeasible,
    require_one_kind,
)
from capplan.planner.problem._settings import choose_slots, most_slots
from capplan.planner.problem._setup import make_problem, rebuild, require_folders, search_seed
from capplan.planner.search._local_search import (
    available_gpus,
    fleet_cost,
    fleet_gpus,
    fleet_size_of,
    placement_cost,
)
from capplan.planner.solvers import find_solver
from capplan.planner.solvers._base import DEFAULT_TIME_LIMIT_S, Solver, SolverRun, solve
from capplan.planner.verification._verify import (
    FRESH_SEEDS,
    InstanceVerification,
    RepairResult,
    Verifier,
    evened_out,
    fit_slots_in_memory,
    further_seeds,
    make_verifier,
    repair,
    require_seeds,
)
from capplan.spec import BY_SHARES, Objective, Plan, Profile, RouterOptions, Workload, stores_everywhere


def plan(
    workload: Workload,
    *,
    gpus: int | None = None,
    profile: Profile | str | None = None,
    solver: Solver | str = "capplan",
    estimator: str = "auto",
    seed: int = 0,
    verify: bool = True,
    repair: bool = True,
    seeds: int = FRESH_SEEDS,
    time_limit_s: float | None = None,
    duration_s: float | None = None,
    knobs: KnobSearch | str = KnobSearch.FITTED,
    robust: float | None = None,
    gpus_per_link: int = 1,
    progress: Progress | None = None,
) -> Plan:
    """Place the adapters of a workload on GPUs; the twin verifies every GPU.

    Parameters
    ----------
    workload
        Adapters, traffic, objectives and constraints.
    gpus, profile
        Maximum number of GPUs, and a profile, name of a shipped one or path of a JSON; None: the workload's.
        If the workload leaves the number open, up to 8 times the lower bound are used.
    solver
        A name of `capplan.planner.SOLVERS`, or a solver of your own.
    estimator
        A surrogate (``best``, ``forest`` or ``tree``), the ``twin``, or ``auto``: the best surrogate if it
        covers the workload.
    seed
        Same seed, same plan.
    verify, repair
        Simulate on fresh seeds, and repair GPUs that fail. A plan that is not verified is marked; without
        repair it records the failure.
    seeds
        Number of fresh seeds. The first replays a trace as recorded, the others bootstrap samples of its
        worst window.
    time_limit_s
        Time for search, verification and bottlenecks together, without compilation. At its end the best
        placement found is returned, with the verdict on the seeds simulated by then. None: slow solvers stop
        after 60 s, without an answer (``dlora-proactive``, ``milp``) or with the best so far (``capplan``),
        and nothing else is limited. ``provenance["search"]`` is ``time_limit`` if the search was cut.
    duration_s
        Simulated time of each seed. None: an hour, or as long as slow arrivals take to show, up to a week; if
        that does not decide, the verdict is ``undecided``. Not for a trace, which is replayed.
    knobs
        Values of max_num_batched_tokens and max_num_seqs that may be chosen if the workload leaves them open
        and bounds a latency: ``default`` (none but the defaults), ``fitted`` (inside the fitted range of the
        profile) or ``any``.
    robust
        Quantile of the step times, such as 0.9, at which the bounds must hold; None: the fitted ones. See
        `capplan.models._uncertainty.pessimistic_profile`.
    gpus_per_link
        GPUs that share a link to host memory, in the order of the plan.
    progress
        Called with (stage, done, total).

    Raises
    ------
    InputError
        If a parameter or the workload is invalid.
    InfeasibleError
        If the GPUs do not suffice, or the time limit ends before a placement is found and simulated once; see
        `reason`. The message names the bound that breaks and the number of GPUs that would hold.
    """
    made = make_problem(workload, gpus, profile, duration_s)
    require_folders(made)
    require_one_kind(made)
    problem = replace(made, knobs=KnobSearch.named(knobs), robust=robust, gpus_per_link=gpus_per_link)
    _ = problem.pessimistic  # an invalid quantile is an error before anything is solved
    options = PlanOptions(find_solver(solver), estimator, seed, verify, repair, seeds, time_limit_s)
    return plan_problem(problem, options, read_previous(workload), progress or no_progress)


@dataclass(frozen=True)
class PlanOptions:
    """Options of planning a problem, as for `plan`."""

    solver: Solver
    estimator: str = "auto"
    seed: int = 0
    verify: bool = True
    repair: bool = True
    seeds: int = FRESH_SEEDS
    time_limit_s: float | None = None
    finds_shortage: bool = True
    """Whether an infeasible answer names the number of GPUs that would hold."""

    def __post_init__(self) -> None:
        require_seeds(self.seed, self.seeds)
        if self.time_limit_s is not None and not self.time_limit_s > 0.0:
            raise InputError("must be > 0", self.time_limit_s, "time_limit_s")


def plan_problem(
    problem: Problem,
    options: PlanOptions,
    previous: Plan | None = None,
    progress: Progress = no_progress,
) -> Plan:
    """Plan a problem; errors as for `plan`."""
    progress("placing", 0, 1)
    if options.time_limit_s is not None:
        _compile(problem)
    budget = TimeBudget(options.time_limit_s, options.verify)
    problem = replace(problem, deadline=budget.end)
    twin = TwinEstimator(problem, options.seed, deadline=budget.search)

    def verified(answer: SolverRun) -> VerifiedRun:
        progress("placing", 1, 1)
        return _verified_run(answer, replace(twin, deadline=budget.verification), options, progress)

    try:
        answer = _solve(problem, options, budget, twin, previous)
    except InfeasibleError as error:
        progress("placing on more GPUs", 0, 1)
        raise _with_sufficient_gpus(error, problem, options, budget) from None
    old = () if previous is None else previous_instances(previous)
    alternatives = answer.alternatives if options.verify else ()
    run = verified(answer)
    if previous is not None and run.has_grown:
        run = _cheaper(run, lambda: verified(_solve(problem, options, budget, twin)), old)
    answer, verifier, outcome, _ = run
    choices = verified_choices(verifier, outcome.assignments, alternatives, old, progress)
    drawn = replace(verifier, deadline=budget.end).with_drawn_profiles(
        outcome.assignments,
        outcome.verifications,
        lambda done, total: progress("drawn profiles", done, total),
    )
    return build_plan(
        verifier,
        replace(outcome, verifications=drawn),
        verified=options.verify,
        previous=previous,
        notes={
            "solver": options.solver.name,
            "estimator": answer.estimator,
            "seed": options.seed,
            "repairs": list(outcome.changes),
            "search": "time_limit" if answer.is_cut or run.is_cut else "complete",
            **({} if problem.knobs is KnobSearch.FITTED else {"knobs": problem.knobs.value}),
            **({} if problem.robust is None else {"robust": problem.robust}),
            **({"choices": choices} if choices else {}),
        },
        deadline=budget.end,
    )


def _solve(
    problem: Problem,
    options: PlanOptions,
    budget: TimeBudget,
    twin: TwinEstimator,
    previous: Plan | None = None,
    insufficient_gpus: int = 0,
) -> SolverRun:
    return solve(
        problem,
        options.solver,
        twin,
        estimator=options.estimator,
        seed=options.seed,
        time_limit_s=budget.search_s(DEFAULT_TIME_LIMIT_S),
        previous=previous,
        insufficient_gpus=insufficient_gpus,
    )


class VerifiedRun(NamedTuple):
    """Answer of a solver, its verifier, and the outcome after repairs."""

    answer: SolverRun
    verifier: Verifier
    outcome: RepairResult
    is_cut: bool = False
    """Whether a time limit ended the repair."""

    @property
    def has_grown(self) -> bool:
        """Whether repairs took further instances, or did not suffice."""
        repaired = self.outcome.assignments
        return bool(self.outcome.changes) and (len(repaired) > len(self.answer.assignments) or not self.ok)

    @property
    def ok(self) -> bool:
        """Whether every instance is verified."""
        return all(each.ok for each in self.outcome.verifications)


def _verified_run(
    answer: SolverRun, twin: TwinEstimator, options: PlanOptions, progress: Progress
) -> VerifiedRun:
    """Verify an answer, and repair it if asked."""
    verifier = make_verifier(answer.problem, twin, options.seed, options.verify, options.seeds)
    verifier = replace(verifier, deadline=twin.deadline, further_seeds=further_seeds(verifier.seeds))
    try:
        outcome, is_cut = _verify(answer, verifier, twin, options.verify and options.repair, progress)
        everywhere = answer.problem.workload.stores_everywhere
        if options.verify and options.repair and options.solver.confirms and everywhere:
            outcome = evened_out(
                verifier, outcome, twin, lambda done, total: progress("verifying fewer GPUs", done, total)
            )
    except OutOfTimeError:
        words = f"the time limit ends the verification of {len(answer.assignments)} instance(s) before its"
        raise infeasible("time", f"{words} first seed; a longer one decides") from None
    return VerifiedRun(answer, verifier, outcome, is_cut)


def _cheaper(
    near: VerifiedRun, from_scratch: Callable[[], VerifiedRun], old: Sequence[PreviousInstance]
) -> VerifiedRun:
    """Return the cheaper of a plan near the one in force and a plan from scratch, moves included.

    A repair may take an instance that a search from scratch does not need.
    """
    problem = near.answer.problem
    if problem.workload.objective not in (Objective.MIN_GPUS, Objective.MIN_COST):
        return near
    try:
        scratch = from_scratch()
    except InfeasibleError:
        return near

    def cost(run: VerifiedRun) -> tuple[bool, tuple[float, float, int]]:
        return not run.ok, placement_cost(problem, run.outcome.assignments, old)

    return min(near, scratch, key=cost)


def _compile(problem: Problem) -> None:
    """Simulate a second of an instance and of a cluster, so that no time limit contains compilation."""
    slots = problem.fixed_a_max or 1
    for pool in range(len(problem.pools)):
        instance = Assignment(problem.shares[:1], slots, pool=pool)
        if problem.fits_in_memory(instance):
            evaluate(problem, instance, 0, duration_s=1.0)
            alone = replace(problem, workload=problem.workload.subset(instance.fractions))
            evaluate_cluster(alone, [instance], 0, duration_s=1.0)
            return


def _verify(
    answer: SolverRun, verifier: Verifier, twin: TwinEstimator, repair_failing: bool, report: Progress
) -> tuple[RepairResult, bool]:
    """Return the verified answer, repaired if asked, and whether a time limit ended the repair."""
    problem, assignments = answer.problem, answer.assignments
    changes: tuple[str, ...] = ()
    if repair_failing:
        assignments, changes = fit_slots_in_memory(problem, assignments, twin)
    for number, assignment in enumerate(assignments):
        if not problem.fits_in_memory(assignment):
            raise infeasible(
                "memory",
                f"GPU {number} of the answer would not start: {assignment.a_max} slots of rank "
                f"{problem.s_max(assignment.shares)} leave no room for one request of max_model_len "
                f"{problem.engine.max_model_len}, or its adapters do not fit on the host",
            )

    def verify(assignments: Sequence[Assignment]) -> list[InstanceVerification]:
        return verifier.whole(assignments, lambda done, total: report("verifying", done, total))

    verifications = verify(assignments)
    unrepaired = RepairResult(assignments, tuple(verifications), changes)
    if not repair_failing or all(each.ok for each in verifications):
        return unrepaired, False
    try:
        repaired = repair(verifier, assignments, verifications, twin, changes)
        if repaired.assignments == assignments:
            return repaired, False
        return replace(repaired, verifications=tuple(verify(repaired.assignments))), False
    except OutOfTimeError:
        return unrepaired, True


def _with_sufficient_gpus(
    error: InfeasibleError, problem: Problem, options: PlanOptions, budget: TimeBudget
) -> InfeasibleError:
    """Return the error with the number of GPUs on which the solver finds an answer, as text.

    Unchanged if more GPUs cannot help, or the solver uses all that there are.
    """
    if not options.finds_shortage or error.reason == "memory" or options.solver.uses_all_gpus:
        return error
    available = available_gpus(problem)
    most = max(available, lower_bound_gpus(problem)) * OPEN_FACTOR
    pools = tuple(replace(p, instances=most // p.profile.tp, is_open=True) for p in problem.pools)
    changes = {"objective": Objective.MIN_GPUS, "previous_plan": None, "move_cost": None}
    workload = problem.workload.model_copy(update=changes)
    larger = replace(problem, pools=pools, workload=workload, deadline=budget.shortage)
    twin = TwinEstimator(larger, options.seed, deadline=budget.shortage)
    try:
        answer = _solve(larger, options, budget, twin, insufficient_gpus=available)
    except InputError:  # larger than the solver supports
        return error
    except InfeasibleError as other:
        words = f"no number up to {most} holds"
        if other.reason == "time":
            words = "no number that would hold was found in time"
    else:
        used = fleet_gpus(larger, fleet_size_of(larger, answer.assignments))
        words = f"{used} GPUs would hold"
        if error.reason == "time":
            words = f"on {used} GPUs one was found"
    return InfeasibleError(f"{error.message}; {words}", error.reason)


_DIGITS: Final = 3
"""Digits of a price per move."""


def verified_choices(
    verifier: Verifier,
    plan: Sequence[Assignment],
    alternatives: Iterable[Sequence[Assignment]],
    old: Sequence[PreviousInstance],
    progress: Progress,
) -> list[JsonValue]:
    """Return the alternatives to a plan that are verified, as documents; both are cheapest first.

    ``move_cost`` of an alternative is the price of a move from which it costs less than the plan. One that is
    never the cheapest is left out.
    """
    problem = verifier.problem

    def cost(placement: Sequence[Assignment]) -> float:
        return fleet_cost(problem, fleet_size_of(problem, placement))[0]

    moved, least = count_moves(problem, plan, old), cost(plan)
    found: list[tuple[float, Sequence[Assignment]]] = []
    for number, placement in enumerate(alternatives):
        progress("verifying fewer moves", number, number + 1)
        saved = moved - count_moves(problem, placement, old)
        extra = cost(placement) - least
        if saved > 0 and extra > 0.0 and _is_verified(verifier, placement):
            found = [*(each for each in found if each[0] < extra / saved), (extra / saved, placement)]
    return [
        {
            **fleet_totals(problem, placement).model_dump(exclude_none=True, exclude={"lower_bound_gpus"}),
            **move_sizes(problem, name_groups(problem, placement, old)[1], old),
            "move_cost": _rounded_up(price),
        }
        for price, placement in found
    ]


def _is_verified(verifier: Verifier, placement: Sequence[Assignment]) -> bool:
    try:
        return verifier.verdict(verifier.whole(placement)).verdict == "verified"
    except (InfeasibleError, OutOfTimeError):
        return False


def _rounded_up(price: float) -> float:
    """Return the least number of few digits above a price."""
    unit = 10.0 ** (math.floor(math.log10(price)) + 1 - _DIGITS)
    return float(f"{(math.floor(price / unit) + 1) * unit:.{_DIGITS}g}")


def verify_as_served(
    plan: Plan,
    workload: Workload,
    *,
    router: str | None = None,
    everywhere: bool = False,
    profile: Profile | None = None,
    source: str = "workload",
    progress: Progress | None = None,
) -> Plan:
    """Return a plan with its placement and verification for servers without its scheduler and re-balancing.

    Engines without the scheduler, its queues and its cache have adapter slots: each instance gets the best
    number of slots by the twin. So it does if it gets other adapters than planned.

    Parameters
    ----------
    plan, workload
        Plan, and the workload that it was made for.
    router
        Router in front of the servers, a name in `capplan.serving.routers.ROUTERS`; None: that of the plan.
    everywhere
        Whether every server loads every adapter and gets an equal part of all traffic.
    profile
        Profile of the plan, if it is neither a shipped one nor the workload's.
    source
        Name of the workload in errors.
    progress
        Called with (stage, done, total).

    Raises
    ------
    InputError
        If the workload or the profile is not the plan's, or there is no such router.
    InfeasibleError
        If an instance does not start with slots.
    """
    report = progress or no_progress
    rebuilt = rebuild(plan, workload, profile, source)
    served = rebuilt.problem.workload.model_copy(update=_served(plan, router))
    problem = replace(rebuilt.problem, workload=served)
    needs_slots = everywhere or rebuilt.problem.workload.scheduling is not None
    seed = search_seed(plan)
    twin = TwinEstimator(problem, seed)
    estimator = make_estimator(problem, "auto", twin)
    instances = [each.assignment for each in rebuilt.groups for _ in range(each.group.replicas)]
    if everywhere:
        equal = tuple(AdapterShare.of(each, 1.0 / len(instances)) for each in problem.traffic)
        instances = [replace(each, shares=equal) for each in instances]
    assignments = []
    for number, instance in enumerate(instances):
        report("adapter slots", number, len(instances))
        assignments.append(_with_slots(problem, instance, estimator, twin) if needs_slots else instance)
    count = len(plan.verification.seeds) or FRESH_SEEDS
    verifier = make_verifier(problem, twin, seed, count=count)
    verifications = verifier.whole(assignments, lambda done, total: report("verifying", done, total))
    made = build_plan(
        verifier,
        RepairResult(tuple(assignments), tuple(verifications), ()),
        verified=True,
        previous=plan,
        notes={name: value for name, value in plan.provenance.items() if name in _KEPT},
    )
    # The plan gives the names of the groups; it is not in force, so there is nothing to move from it.
    kept = {name: value for name, value in made.provenance.items() if not name.startswith("moved_")}
    return made.replace(moves=(), provenance=kept)


_KEPT = ("solver", "estimator", "seed", "knobs", "command")
"""Notes of the plan on its placement."""


def _served(plan: Plan, router: str | None) -> dict[str, Any]:
    """Return the settings of the plan's workload that are others as served."""
    left_out: dict[str, Any] = {"scheduler": None, "cache": None, "queues": None, "rebalance": None}
    if router in (None, plan.router):
        return left_out
    # Parameters are those of the plan's router. Servers still store what the plan says, unless shares of 0
    # keep the new router from it.
    stores_all = stores_everywhere(plan.router_options) and router not in BY_SHARES
    options = RouterOptions(holders="all") if stores_all else None
    return {**left_out, "router": router, "router_options": options}


def _with_slots(
    problem: Problem, instance: Assignment, estimator: Estimator, twin: TwinEstimator
) -> Assignment:
    """Return an instance with the best number of slots, or the largest if it holds with none."""
    bare = replace(instance, queues=None)
    slots = choose_slots(problem, bare.shares, estimator, twin, bare)
    return replace(bare, a_max=most_slots(problem, bare.shares) if slots is None else slots)
