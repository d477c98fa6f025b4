"""How solving grows with adapters and GPUs: ``python -m benchmarks.placement_growth`` prints the table.

Rates and sizes are drawn from the mixed sets of section 8.4 of the adapter-caching paper, and rates scaled so
that tokens alone keep a given share of the GPUs busy. Every line comes from a process of its own that has
compiled and loaded everything before: solving, and verifying an hour of one seed, on one core; verifying
five seeds on all cores; and the most memory that the process ever held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.common import command_line, markdown, resident_mib
from benchmarks.placement_grid import MODELS, RATES_RPS, SIZES
from capplan import Adapter, Problem, Workload
from capplan.datasets.published.runs import LENGTHS
from capplan.errors import CapplanError
from capplan.planner.api import SolverRun, solve
from capplan.planner.bound import busy_gpus, lower_bound_gpus
from capplan.planner.estimate import TwinEstimator
from capplan.planner.problem import make_problem
from capplan.planner.solvers import find_solver
from capplan.planner.solvers.base import DEFAULT_TIME_LIMIT_S
from capplan.planner.verify import FRESH_SEEDS, make_verifier
from capplan.spec import write_text_atomic
from capplan.twin.sweep import cores

ROOT = Path(__file__).resolve().parents[1]
PROBLEMS: Final = ("96x1", "384x4", "1000x16", "2000x64", "10000x256")
SOLVERS: Final = ("greedy-fast", "greedy", "capplan")
LOAD = 0.5
REPEATED = 2000
HEADER: Final = (
    "adapters x GPUs", "req/s", "at least", "solver", "GPUs", "holds", "solve s", "verify one seed s",
    "verify five seeds, all cores s", "peak MiB", "of it before",
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Cost of one solver on one problem."""

    adapters: int
    gpus: int
    rate_rps: float
    lower_bound_gpus: int
    solver: str
    failure: str = ""
    used: int = 0
    holds: bool = False
    """Every GPU on every fresh seed, with headroom."""
    solve_s: float = 0.0
    verify_one_s: float = 0.0
    verify_all_s: float = 0.0
    cores: int = 1
    """Cores of the verification of five seeds."""
    peak_mib: float = 0.0
    before_mib: float = 0.0
    """Memory after compilation, before the problem."""

    def line(self) -> tuple[str, ...]:
        head = (
            f"{self.adapters:,} x {self.gpus}",
            f"{self.rate_rps:.4g}",
            f"{self.lower_bound_gpus}",
            self.solver,
        )
        memory = (f"{self.peak_mib:.0f}", f"{self.before_mib:.0f}")
        if self.failure:
            return (*head, self.failure.replace("|", "/"), "", f"{self.solve_s:.3g}", "", "", *memory)
        times = (self.solve_s, self.verify_one_s, self.verify_all_s)
        return (*head, f"{self.used}", "yes" if self.holds else "no", *(f"{t:.3g}" for t in times), *memory)


def workload(adapters: int, gpus: int, load: float) -> Workload:
    random = np.random.default_rng((adapters, gpus))
    rank, weight = random.choice(SIZES["mixed"], adapters), random.choice(RATES_RPS["mixed"], adapters)
    unscaled = make_problem(_workload(rank, weight), gpus, None)
    return _workload(rank, weight * load * gpus / busy_gpus(unscaled) * (1.0 - unscaled.workload.headroom))


def _workload(rank: np.ndarray, rate_rps: np.ndarray) -> Workload:
    model = MODELS["llama"]
    prompt, output = LENGTHS[model.key]
    return Workload(
        base_model=model.arch.hf_ids[0],
        profile=model.profile,
        prompt_tokens=prompt,
        output_tokens=output,
        adapters=tuple(
            Adapter(name=f"a{i}", rank=int(rank[i]), rate_rps=float(rate_rps[i])) for i in range(len(rank))
        ),
    )


def measure(adapters: int, gpus: int, solver: str, load: float, repeat: int) -> Measured:
    """Time a solver; the fastest of `repeat` runs counts."""
    every_core = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(every_core)})
    _warm_up(solver)
    before_mib = resident_mib("VmRSS")
    problem = make_problem(workload(adapters, gpus, load), gpus, None)
    rate_rps = problem.workload.total_rate_rps
    told = Measured(adapters, gpus, rate_rps, lower_bound_gpus(problem), solver, before_mib=before_mib)
    started = time.perf_counter()
    try:
        solved = [_solved(problem, solver) for _ in range(repeat)]
    except CapplanError as error:
        wall_s = time.perf_counter() - started
        return replace(told, failure=str(error), solve_s=wall_s, peak_mib=resident_mib("VmHWM"))
    answer, exact = min(solved, key=lambda each: each[0].solve_s)
    one_s, _ = _verified(answer, exact, 1)
    os.sched_setaffinity(0, every_core)
    all_s, holds = _verified(answer, exact, FRESH_SEEDS)
    return replace(
        told,
        used=len(answer.assignments),
        holds=holds,
        solve_s=answer.solve_s,
        verify_one_s=one_s,
        verify_all_s=all_s,
        cores=cores(),
        peak_mib=resident_mib("VmHWM"),
    )


def _warm_up(solver: str) -> None:
    _verified(*_solved(make_problem(workload(24, 2, LOAD), 2, None), solver), 1)


def _solved(problem: Problem, solver: str) -> tuple[SolverRun, TwinEstimator]:
    exact = TwinEstimator(problem, 0)  # a new one remembers no answers
    return solve(problem, find_solver(solver), exact, time_limit_s=DEFAULT_TIME_LIMIT_S), exact


def _verified(answer: SolverRun, exact: TwinEstimator, seeds: int) -> tuple[float, bool]:
    verifier = make_verifier(answer.problem, exact, 0, count=seeds)
    started = time.perf_counter()
    verdicts = verifier.whole(answer.assignments)
    return time.perf_counter() - started, all(verdict.ok for verdict in verdicts)


def in_a_fresh_process(arguments: Sequence[str]) -> Measured:
    command = [sys.executable, "-m", "benchmarks.placement_growth", "--one", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(**json.loads(done.stdout))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sizes", default=",".join(PROBLEMS), metavar="AxG,...", help="adapters x GPUs")
    parser.add_argument("--solvers", default=",".join(SOLVERS), metavar="NAME,...")
    parser.add_argument("--load", type=float, default=LOAD, metavar="SHARE", help="of the GPUs")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="up to 2,000 adapters")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to this file, too")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        adapters, gpus, solver, load, repeat = given.one
        print(json.dumps(asdict(measure(int(adapters), int(gpus), solver, float(load), int(repeat)))))
        return
    lines = []
    print(markdown(HEADER, []), flush=True)
    for size in given.sizes.split(","):
        adapters, gpus = size.split("x")
        repeat = given.repeat if int(adapters) <= REPEATED else 1
        for solver in given.solvers.split(","):
            found = in_a_fresh_process([adapters, gpus, solver, str(given.load), str(repeat)])
            lines.append(found.line())
            print(f"| {' | '.join(lines[-1])} |", flush=True)
    if given.markdown:
        write_text_atomic(given.markdown, markdown(HEADER, lines) + "\n")


if __name__ == "__main__":
    main()
