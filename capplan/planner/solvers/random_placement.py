"""The baseline Random of the adapter-caching paper (section 8.4.2): chance decides GPUs and slots."""

from __future__ import annotations

import numpy as np

from capplan.planner.parts import in_input_order
from capplan.planner.problem import Assignment, Part, Problem, distinct_adapters
from capplan.planner.solvers.description import Asks, Solver, Tools


def _place(problem: Problem, tools: Tools) -> tuple[Assignment, ...]:
    random = np.random.default_rng(tools.seed)
    return tuple(
        Assignment(tuple(parts), problem.fixed_a_max or int(random.integers(1, distinct_adapters(parts) + 1)))
        for parts in scattered(problem, random)
    )


def scattered(problem: Problem, random: np.random.Generator) -> list[list[Part]]:
    """Return the parts of each GPU that gets any, when every part goes to any GPU alike."""
    gpus: list[list[Part]] = [[] for _ in range(problem.gpus)]
    parts = in_input_order(problem)
    for part, gpu in zip(parts, random.integers(0, problem.gpus, len(parts)).tolist(), strict=True):
        gpus[gpu].append(part)
    return [parts for parts in gpus if parts]


RANDOM = Solver(
    name="random",
    summary="every adapter on a random GPU, a random number of slots",
    source="adapter-caching paper, section 8.4.2 (Random)",
    place=_place,
    asks=Asks.NOTHING,
)
