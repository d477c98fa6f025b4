"""How long greedy-fast and its questions take: ``python -m benchmarks.planner_speed`` prints two tables.

CPU time of one process that has compiled and loaded everything before: the median of many solves of 384
adapters on 4 GPUs with the small tree (section 8.4.2 of the adapter-caching paper), the solver alone and with
the search for adapters that are too hot for one GPU; and the median of many questions to each surrogate about
one GPU, with one number of slots or with several at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np

from benchmarks.common import markdown
from capplan import Lengths, Workload, load_surrogate
from capplan.planner.estimate import SurrogateEstimator, TwinEstimator
from capplan.planner.problem import GRID, Assignment, Problem, make_problem
from capplan.planner.solvers import find_solver
from capplan.planner.solvers.base import SolverContext
from capplan.planner.splitting import split_hot_adapters
from capplan.spec import Adapter

PROFILE: Final = "h100-64g/llama-3.1-8b/vllm-0.8.5"
ADAPTERS: Final = 384
GPUS: Final = 4
SOLVES = 101
ASKED = 2001
RATES_RPS: Final[Mapping[str, Sequence[float]]] = MappingProxyType(
    {
        "3 low rates": (0.1, 0.05, 0.025),
        "5 mixed rates": (0.2, 0.1, 0.05, 0.025, 0.0125),
        "384 distinct rates": tuple(np.random.default_rng(0).uniform(0.01, 0.12, ADAPTERS)),
    }
)
RANKS: Final[Mapping[str, Sequence[int]]] = MappingProxyType({"rank 8": (8,), "ranks 8, 16, 32": (8, 16, 32)})
SLOTS: Final = tuple(value for value in GRID if value <= 64)


def problem_of(rates_rps: Sequence[float], ranks: Sequence[int], adapters: int = ADAPTERS) -> Problem:
    """Return a problem whose adapters get rates and ranks in turn."""
    turns = [(ranks[i % len(ranks)], rates_rps[i % len(rates_rps)]) for i in range(adapters)]
    workload = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        adapters=tuple(
            Adapter(name=f"a{i}", rank=rank, rate_rps=rate) for i, (rank, rate) in enumerate(turns)
        ),
        prompt_tokens=Lengths(mean=223, std=245),
        output_tokens=Lengths(mean=194, std=206),
    )
    return make_problem(workload, GPUS, PROFILE)


def estimator_of(problem: Problem, kind: str) -> SurrogateEstimator:
    return SurrogateEstimator(problem, load_surrogate(PROFILE, kind), TwinEstimator(problem, 0))


def median_s(run: Callable[[], object], rounds: int) -> float:
    """Return the median CPU time; the first call compiles and does not count."""
    run()
    taken = []
    for _ in range(rounds):
        before = time.process_time()
        run()
        taken.append(time.process_time() - before)
    return float(np.median(taken))


def solving(problem: Problem) -> list[str]:
    """Return milliseconds of the solver, alone and with the split of hot adapters, and the GPUs it takes."""
    estimator = estimator_of(problem, "tree")
    context, place = SolverContext(estimator, estimator.twin), find_solver("greedy-fast").place
    answer = place(problem, context)
    alone_s = median_s(lambda: place(problem, context), SOLVES)
    all_s = median_s(
        lambda: place(replace(problem, shares=split_hot_adapters(problem, estimator)), context), SOLVES
    )
    return [f"{1e3 * alone_s:.2f}", f"{1e3 * all_s:.2f}", str(len(answer))]


def asking(problem: Problem, kind: str) -> list[str]:
    """Return microseconds of a question about all adapters, and of one number of slots among several."""
    estimator = estimator_of(problem, kind)
    one = Assignment(problem.shares, 16)
    several = [Assignment(problem.shares, slots) for slots in SLOTS if slots <= len(problem.shares)]
    alone_s = median_s(lambda: estimator(one), ASKED)
    together_s = median_s(lambda: estimator.estimate_all(several), ASKED) / len(several)
    return [f"{1e6 * alone_s:.0f}", f"{1e6 * together_s:.0f}"]


def main() -> None:
    """Print both tables."""
    solved = [
        [rates, ranks, *solving(problem_of(RATES_RPS[rates], RANKS[ranks]))]
        for rates in RATES_RPS
        for ranks in RANKS
    ]
    print(f"greedy-fast, {ADAPTERS} adapters, {GPUS} GPUs\n")
    print(markdown(("rates", "ranks", "solver ms", "with the split of hot adapters ms", "GPUs used"), solved))
    asked = [
        [kind, rates, *asking(problem_of(RATES_RPS[rates], RANKS["ranks 8, 16, 32"], 40), kind)]
        for kind in ("tree", "forest", "best")
        for rates in ("3 low rates", "384 distinct rates")
    ]
    print("\nquestions about a GPU with 40 adapters\n")
    print(markdown(("surrogate", "rates of", "one us", "each of several numbers of slots us"), asked))


if __name__ == "__main__":
    main()
