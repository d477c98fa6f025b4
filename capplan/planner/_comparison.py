"""`compare`: every solver's raw answer to one workload, verified by the twin on the same fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from capplan.errors import CapplanError, InputError
from capplan.planner import SOLVERS
from capplan.planner.problem._bound import lower_bound_gpus
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._evaluate import known_values
from capplan.planner.problem._execution import Progress, no_progress
from capplan.planner.problem._previous import read_previous
from capplan.planner.problem._problem import Assignment, Problem, distinct_adapters
from capplan.planner.problem._setup import make_problem, require_folders
from capplan.planner.search._local_search import available_gpus
from capplan.planner.solvers import find_solver
from capplan.planner.solvers._base import DEFAULT_TIME_LIMIT_S, Solver, SolverRun, solve
from capplan.planner.verification._verify import (
    FRESH_SEEDS,
    InstanceVerification,
    make_verifier,
    require_seeds,
)
from capplan.spec import Displayed, Profile, Workload
from capplan.twin import SimulationResult

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class SolverResult:
    """Result of one solver. Without an answer, numbers are 0 or NaN, and `failure` is the reason."""

    solver: str
    estimator: str = ""
    gpus: int = 0
    """GPUs used, `tp` per instance."""
    instances: int = 0
    starved: int = 0
    """Instances that serve too small a fraction, of all or of an adapter's requests, on at least one seed."""
    late: int = 0
    """Other instances that break a latency bound on at least one seed."""
    memory_errors: int = 0
    """Instances that do not start: no room for a request beside the slots, or for adapters on the host."""
    short_of_headroom: int = 0
    """Other instances that fail at the load over (1 - headroom)."""
    adapters_per_gpu: tuple[int, ...] = ()
    slots_per_gpu: tuple[int, ...] = ()
    served_fraction: float = math.nan
    """Lowest of all instances and seeds."""
    throughput_tok_s: float = math.nan
    """Sum over instances that start, mean over seeds."""
    itl_ms_mean: float = math.nan
    """Mean over instances weighted by output tokens, and over seeds."""
    ttft_s_p99: float = math.nan
    """Maximum over instances, mean over seeds."""
    solve_s: float = math.nan
    """Wall time of splitting and placing."""
    failure: str = ""
    exit_code: int = 0
    """Exit code of the command line for the failure."""

    @property
    def answered(self) -> bool:
        """Whether there is a placement."""
        return not self.failure

    @property
    def holds(self) -> bool:
        """Whether every instance keeps every bound at the planned load on every seed."""
        return self.answered and not (self.starved or self.late or self.memory_errors)


@dataclass(frozen=True, repr=False)
class SolverComparison(Displayed):
    """Results of several solvers on one workload."""

    profile: str
    gpus: int
    """Available GPUs."""
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
    """Place a workload with several solvers, and verify each raw answer with the twin.

    Parameters
    ----------
    workload, gpus, profile, estimator, seed, time_limit_s
        As for `plan`. Solvers with an estimator of their own ignore the estimator.
    solvers
        Names, or solvers of your own; by default all built-in solvers.
    seeds
        Number of fresh seeds; a trace is replayed once.
    progress
        Called with (stage, done, total).

    Returns
    -------
    SolverComparison
        One row per solver, in the order given, also if it fails.

    Raises
    ------
    InputError
        If a parameter or the workload is invalid.
    """
    chosen = [find_solver(solver) for solver in solvers]
    if not chosen:
        raise InputError(f"must name at least one of {', '.join(SOLVERS)}", location="solvers")
    require_seeds(seed, seeds)
    problem = make_problem(workload, gpus, profile)
    require_folders(problem)
    read_previous(workload)  # an unreadable plan in force is an error of the whole comparison
    report = progress or no_progress
    twin = TwinEstimator(problem, seed)
    twin(Assignment(problem.shares[:1], problem.fixed_a_max or 1))  # compiled before solvers are timed
    verifier = make_verifier(problem, twin, seed, count=seeds)
    rows = []
    for done, solver in enumerate(chosen):
        report("comparing", done, len(chosen))
        rows.append(_run_solver(problem, solver, estimator, seed, seeds, time_limit_s))
    report("comparing", len(chosen), len(chosen))
    return SolverComparison(
        profile=", ".join(dict.fromkeys(pool.profile.name for pool in problem.pools)),
        gpus=available_gpus(problem),
        lower_bound_gpus=lower_bound_gpus(problem),
        headroom=workload.headroom,
        adapters=len(workload.adapters),
        rate_rps=workload.total_rate_rps,
        seeds=verifier.seeds,
        duration_s=verifier.problem.duration_s,
        rows=tuple(rows),
    )


def _run_solver(
    problem: Problem, solver: Solver, estimator: str, seed: int, seeds: int, time_limit_s: float
) -> SolverResult:
    twin = TwinEstimator(problem, seed)
    try:
        run = solve(
            problem,
            solver,
            twin,
            estimator="auto" if solver.estimator != "auto" else estimator,
            seed=seed,
            time_limit_s=time_limit_s,
            previous=read_previous(problem.workload),
        )
        starting = [each for each in run.assignments if run.problem.fits_in_memory(each)]
        verifier = make_verifier(run.problem, twin, seed, count=seeds)
        # Instances are simulated one by one if another does not start: a cluster needs all of them.
        verify = verifier.whole if len(starting) == len(run.assignments) else verifier
        return _summarize(run, solver, len(starting), verify(starting))
    except CapplanError as error:
        return SolverResult(solver.name, failure=str(error), exit_code=error.exit_code)


def _summarize(
    run: SolverRun, solver: Solver, starting: int, verifications: Sequence[InstanceVerification]
) -> SolverResult:
    assignments = run.assignments
    starved = sum(each.starves for each in verifications)
    short_of_headroom = sum(each.lacks_headroom for each in verifications)
    by_seed = list(zip(*(each.results for each in verifications), strict=True))
    return SolverResult(
        solver=solver.name,
        estimator=run.estimator,
        gpus=sum(run.problem.pools[each.pool].profile.tp for each in assignments),
        instances=len(assignments),
        starved=starved,
        late=sum(not each.ok for each in verifications) - starved - short_of_headroom,
        memory_errors=len(assignments) - starting,
        short_of_headroom=short_of_headroom,
        adapters_per_gpu=tuple(distinct_adapters(each.shares) for each in assignments),
        slots_per_gpu=tuple(each.a_max for each in assignments),
        served_fraction=min((r.served_fraction for v in verifications for r in v.results), default=0.0),
        throughput_tok_s=_mean((sum(r.throughput_tok_s for r in results) for results in by_seed), 0.0),
        itl_ms_mean=_mean(map(_mean_itl_ms, by_seed)),
        ttft_s_p99=_mean(
            max(known_values(r.ttft_s_p99 for r in results), default=math.nan) for results in by_seed
        ),
        solve_s=run.solve_s,
    )


def _mean_itl_ms(results: Iterable[SimulationResult]) -> float:
    known = [(r.itl_ms_mean, r.output_tok_s) for r in results if not math.isnan(r.itl_ms_mean)]
    tokens = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / tokens if tokens else math.nan


def _mean(values: Iterable[float], empty: float = math.nan) -> float:
    known = known_values(values)
    return fmean(known) if known else empty
