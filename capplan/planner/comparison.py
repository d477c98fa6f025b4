"""`compare`: every solver's raw answer to one workload, verified by the twin on the same fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from capplan.errors import CapplanError, InputError
from capplan.planner import SOLVERS
from capplan.planner.api import SolverRun, solve
from capplan.planner.bound import lower_bound_gpus
from capplan.planner.estimate import TwinEstimator
from capplan.planner.evaluate import violated_bounds
from capplan.planner.parallel import Progress, no_progress
from capplan.planner.previous import read_previous
from capplan.planner.problem import Assignment, Problem, make_problem
from capplan.planner.solvers import find_solver
from capplan.planner.solvers.base import DEFAULT_TIME_LIMIT_S, Solver
from capplan.planner.verify import FRESH_SEEDS, InstanceVerification, make_verifier, require_seeds
from capplan.spec import Plan, Profile, Workload
from capplan.spec.display import Displayed
from capplan.twin import SimulationResult

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class SolverResult:
    """How one solver did. Without an answer, numbers are 0 or NaN and `failure` says why."""

    solver: str
    estimator: str = ""
    gpus: int = 0
    """GPUs used, `tp` per instance."""
    instances: int = 0
    starved: int = 0
    """Instances that serve too little on at least one seed."""
    late: int = 0
    """Others that break a latency bound on at least one seed."""
    memory_errors: int = 0
    """Instances that would not start: no room for a request beside the slots, or for adapters on the host."""
    short_of_headroom: int = 0
    """Others that fail at the load over (1 - headroom)."""
    adapters_per_gpu: tuple[int, ...] = ()
    slots_per_gpu: tuple[int, ...] = ()
    served_fraction: float = math.nan
    """Of the instance and seed where it is least."""
    throughput_tok_s: float = math.nan
    """Of all instances, mean over seeds; one that does not start serves nothing."""
    itl_ms_mean: float = math.nan
    """Weighted by the output tokens of each instance, mean over seeds."""
    ttft_s_p99: float = math.nan
    """Of the instance where it is longest, mean over seeds."""
    solve_s: float = math.nan
    """Splitting and placing; neither the verification nor the loading of surrogates."""
    failure: str = ""
    exit_code: int = 0
    """What the command line would exit with for the failure."""

    @property
    def answered(self) -> bool:
        """Whether there is a placement at all."""
        return not self.failure

    @property
    def holds(self) -> bool:
        """Whether every instance starts and keeps every bound at the planned load, on every seed."""
        return self.answered and not (self.starved or self.late or self.memory_errors)


@dataclass(frozen=True, repr=False)
class SolverComparison(Displayed):
    """All rows, and what they share."""

    profile: str
    gpus: int
    """GPUs that could be used."""
    lower_bound_gpus: int
    headroom: float
    adapters: int
    rate_rps: float
    seeds: tuple[int, ...]
    duration_s: float
    rows: tuple[SolverResult, ...]

    def display_facts(self) -> Mapping[str, object]:
        """Return the GPUs of each answer that holds, and the lower bound."""
        holding = {row.solver: row.gpus for row in self.rows if row.holds}
        return {
            "solvers": len(self.rows),
            "gpus_that_hold": holding,
            "lower_bound_gpus": self.lower_bound_gpus,
        }

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per solver."""
        import pandas as pd

        return pd.DataFrame([asdict(row) | {"holds": row.holds} for row in self.rows])


def compare(
    workload: Workload,
    solvers: Sequence[Solver | str] = SOLVERS,
    *,
    gpus: int | None = None,
    profile: Profile | str | None = None,
    estimator: str = "auto",
    seed: int = 0,
    seeds: int = FRESH_SEEDS,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    progress: Progress | None = None,
) -> SolverComparison:
    """Have solvers place the same workload, and the twin say what becomes of each answer as it is.

    Parameters
    ----------
    workload, gpus, profile, estimator, seed, time_limit_s
        As for `plan`. The estimator is for solvers that have none of their own.
    solvers
        Names, or solvers of your own; all of ours unless given.
    seeds
        How many fresh seeds each answer is verified on; a trace is replayed once.
    progress
        Called with (stage, done, total).

    Returns
    -------
    Comparison
        A row per solver, in the order given. One that fails has its reason there.

    Raises
    ------
    InputError
        When a parameter or a wish breaks a rule.
    """
    chosen = [find_solver(solver) for solver in solvers]
    if not chosen:
        raise InputError(f"must name at least one of {', '.join(SOLVERS)}", location="solvers")
    require_seeds(seed, seeds)
    problem = make_problem(workload, gpus, profile)
    terms = _SolverInputs(estimator, seed, seeds, time_limit_s, read_previous(workload))
    report = progress or no_progress
    # Compiled before anyone is timed.
    TwinEstimator(problem, seed)(Assignment(problem.shares[:1], problem.fixed_a_max or 1))
    verifier = make_verifier(problem, TwinEstimator(problem, seed), seed, count=seeds)
    rows = []
    for done, solver in enumerate(chosen):
        report("comparing", done, len(chosen))
        rows.append(_run_solver(problem, solver, terms))
    report("comparing", len(chosen), len(chosen))
    return SolverComparison(
        profile=", ".join(dict.fromkeys(pool.profile.name for pool in problem.pools)),
        gpus=sum(pool.instances * pool.profile.tp for pool in problem.pools),
        lower_bound_gpus=lower_bound_gpus(problem),
        headroom=workload.headroom,
        adapters=len(workload.adapters),
        rate_rps=workload.total_rate_rps,
        seeds=verifier.seeds,
        duration_s=verifier.duration_s,
        rows=tuple(rows),
    )


@dataclass(frozen=True)
class _SolverInputs:
    """What all solvers are given alike."""

    estimator: str
    seed: int
    seeds: int
    time_limit_s: float
    previous: Plan | None


def _run_solver(problem: Problem, solver: Solver, terms: _SolverInputs) -> SolverResult:
    exact = TwinEstimator(problem, terms.seed)
    own = "auto" if solver.estimator != "auto" else terms.estimator
    try:
        answer = solve(
            problem,
            solver,
            exact,
            estimator=own,
            seed=terms.seed,
            time_limit_s=terms.time_limit_s,
            previous=terms.previous,
        )
        fits = [problem.fits_in_memory(each) for each in answer.assignments]
        starting = [each for each, fit in zip(answer.assignments, fits, strict=True) if fit]
        verifier = make_verifier(answer.problem, exact, terms.seed, count=terms.seeds)
        # A plan with an instance that does not start is no cluster; the others are judged one by one.
        verdicts = verifier.whole(starting) if all(fits) else verifier(starting)
    except CapplanError as error:
        return SolverResult(solver.name, failure=str(error), exit_code=error.exit_code)
    return _summarize(answer, solver, starting, verdicts)


def _summarize(
    answer: SolverRun,
    solver: Solver,
    starting: Sequence[Assignment],
    verdicts: Sequence[InstanceVerification],
) -> SolverResult:
    slo = answer.problem.workload.slo
    starved = [any(r.served_fraction < slo.served_fraction for r in v.results) for v in verdicts]
    broken = [any(violated_bounds(slo, r) for r in v.results) for v in verdicts]
    by_seed = list(zip(*(verdict.results for verdict in verdicts), strict=True))
    everyone = answer.assignments
    return SolverResult(
        solver=solver.name,
        estimator=answer.estimator,
        gpus=sum(answer.problem.pools[each.pool].profile.tp for each in everyone),
        instances=len(everyone),
        starved=sum(starved),
        late=sum(broken) - sum(starved),
        memory_errors=len(everyone) - len(starting),
        short_of_headroom=sum(not v.ok for v in verdicts) - sum(broken),
        adapters_per_gpu=tuple(len({share.name for share in each.shares}) for each in everyone),
        slots_per_gpu=tuple(each.a_max for each in everyone),
        served_fraction=min((r.served_fraction for v in verdicts for r in v.results), default=0.0),
        throughput_tok_s=_mean([sum(r.throughput_tok_s for r in results) for results in by_seed], 0.0),
        itl_ms_mean=_mean([_mean_itl_ms(results) for results in by_seed]),
        ttft_s_p99=_mean([_max_known([r.ttft_s_p99 for r in results]) for results in by_seed]),
        solve_s=answer.solve_s,
    )


def _mean_itl_ms(results: Sequence[SimulationResult]) -> float:
    known = [(r.itl_ms_mean, r.output_tok_s) for r in results if not math.isnan(r.itl_ms_mean)]
    tokens = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / tokens if tokens else math.nan


def _max_known(values: Sequence[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _mean(values: Sequence[float], nothing: float = math.nan) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else nothing
