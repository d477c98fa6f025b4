"""Growth of solving with adapters and GPUs: ``python -m benchmarks.placement_growth`` prints the table.

Rates and sizes are drawn from the mixed sets of section 8.4 of the adapter-caching paper; rates are scaled so
that tokens alone keep a given share of the GPUs busy. Each line is measured in a fresh process after
compilation: solving, and verifying an hour of one seed, on one core; verifying five seeds on all cores; peak
memory.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.common import command_line, in_fresh_process, numbered_adapters, records_table, resident_mib
from benchmarks.placement_records import busy_gpus_of, workload_of
from capplan import Problem, Workload
from capplan.errors import CapplanError
from capplan.planner.problem._bound import lower_bound_gpus
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._setup import make_problem
from capplan.planner.solvers import find_solver
from capplan.planner.solvers._base import DEFAULT_TIME_LIMIT_S, SolverRun, solve
from capplan.planner.verification._verify import FRESH_SEEDS, make_verifier
from capplan.reproduce.twin._setting import setting
from capplan.spec import write_text_atomic

PROBLEMS: Final = ("96x1", "384x4", "1000x16", "2000x64", "10000x256")
SOLVERS: Final = ("greedy-fast", "greedy", "capplan")
LOAD = 0.5
REPEATED = 2000


def workload(adapters: int, gpus: int, load: float, spread: float = 0.0) -> Workload:
    """Return a workload with the rates of the mixed set, each times 1 - `spread` to 1 + `spread`."""
    random = np.random.default_rng((adapters, gpus))
    given = setting().placement
    rank = random.choice(given.ranks["mixed"], adapters)
    weight = random.choice(given.rates_rps["mixed"], adapters)
    weight = weight * random.uniform(1.0 - spread, 1.0 + spread, adapters)
    unscaled = workload_of("llama", numbered_adapters(rank, weight))
    rate_rps = weight * load * gpus / busy_gpus_of(unscaled) * (1.0 - unscaled.headroom)
    return workload_of("llama", numbered_adapters(rank, rate_rps))


def measure(adapters: int, gpus: int, solver: str, load: float, repeat: int) -> dict[str, object]:
    """Return the table row of a solver on a problem; the fastest of `repeat` runs counts."""
    every_core = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(every_core)})
    _warm_up(solver)
    before_mib = resident_mib("VmRSS")
    problem = make_problem(workload(adapters, gpus, load), gpus, None)
    row: dict[str, object] = {
        "adapters x GPUs": f"{adapters:,} x {gpus}",
        "req/s": f"{problem.workload.total_rate_rps:.4g}",
        "at least": lower_bound_gpus(problem),
        "solver": solver,
        **dict.fromkeys(("GPUs", "holds", "solve s", "verify one seed s"), ""),
        "verify five seeds, all cores s": "",
    }
    started = time.perf_counter()
    try:
        solved = [solve_once(problem, solver) for _ in range(repeat)]
    except CapplanError as error:
        row["GPUs"] = str(error).replace("|", "/")
        row["solve s"] = f"{time.perf_counter() - started:.3g}"
    else:
        answer, exact = min(solved, key=lambda each: each[0].solve_s)
        row["verify one seed s"] = f"{_verified(answer, exact, 1)[0]:.3g}"
        os.sched_setaffinity(0, every_core)
        all_s, holds = _verified(answer, exact, FRESH_SEEDS)
        row["GPUs"], row["holds"] = len(answer.assignments), "yes" if holds else "no"
        row["solve s"] = f"{answer.solve_s:.3g}"
        row["verify five seeds, all cores s"] = f"{all_s:.3g}"
    return row | {"peak MiB": f"{resident_mib('VmHWM'):.0f}", "of it before": f"{before_mib:.0f}"}


def _warm_up(solver: str) -> None:
    _verified(*solve_once(make_problem(workload(24, 2, LOAD), 2, None), solver), 1)


def solve_once(problem: Problem, solver: str) -> tuple[SolverRun, TwinEstimator]:
    """Return the answer of a solver before verification, and its twin."""
    exact = TwinEstimator(problem, 0)  # with an empty cache
    return solve(problem, find_solver(solver), exact, time_limit_s=DEFAULT_TIME_LIMIT_S), exact


def _verified(answer: SolverRun, exact: TwinEstimator, seeds: int) -> tuple[float, bool]:
    verifier = make_verifier(answer.problem, exact, 0, count=seeds)
    started = time.perf_counter()
    verdicts = verifier.whole(answer.assignments)
    return time.perf_counter() - started, all(verdict.ok for verdict in verdicts)


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
        print(json.dumps(measure(int(adapters), int(gpus), solver, float(load), int(repeat))))
        return
    rows: list[dict[str, object]] = []
    for size in given.sizes.split(","):
        adapters, gpus = size.split("x")
        repeat = given.repeat if int(adapters) <= REPEATED else 1
        for solver in given.solvers.split(","):
            words = ["--one", adapters, gpus, solver, str(given.load), str(repeat)]
            rows.append(json.loads(in_fresh_process("placement_growth", *words)))
            lines = records_table(rows).splitlines()
            print("\n".join(lines if len(rows) == 1 else lines[-1:]), flush=True)
    if given.markdown:
        write_text_atomic(given.markdown, records_table(rows) + "\n")


if __name__ == "__main__":
    main()
