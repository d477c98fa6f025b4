"""The two S-LoRA placements that LoRAServe compares with (its section V-D): random, and contiguous by rank.

S-LoRA has no number of slots: adapters and KV share one pool. Here a GPU therefore gets the slots that the
estimator likes best for the adapters that it has, so that only the placement differs from other solvers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from capplan.planner.parts import in_input_order
from capplan.planner.problem import Assignment, Part, Problem
from capplan.planner.slots import slot_candidates
from capplan.planner.solvers.description import Asks, Solver, Tools
from capplan.planner.solvers.random_placement import scattered


def _place_random(problem: Problem, tools: Tools) -> tuple[Assignment, ...]:
    return _with_slots(problem, tools, scattered(problem, np.random.default_rng(tools.seed)))


def _place_contiguous(problem: Problem, tools: Tools) -> tuple[Assignment, ...]:
    return _with_slots(problem, tools, cut(problem))


def cut(problem: Problem) -> list[list[Part]]:
    """Return the parts by rank, cut into as many equally long runs as there are GPUs."""
    ordered = sorted(in_input_order(problem), key=lambda part: part.rank)  # stable: input order within a rank
    ends = [len(ordered) * gpu // problem.gpus for gpu in range(problem.gpus + 1)]
    runs = [ordered[start:end] for start, end in pairwise(ends)]
    return [run for run in runs if run]


def _with_slots(problem: Problem, tools: Tools, gpus: Sequence[Sequence[Part]]) -> tuple[Assignment, ...]:
    return tuple(Assignment(tuple(parts), _slots(problem, tools, parts)) for parts in gpus)


def _slots(problem: Problem, tools: Tools, parts: Sequence[Part]) -> int:
    """Return the best number of slots that fits in memory, whether or not the GPU keeps up with it."""
    fitting = slot_candidates(problem, parts, tools.quick)
    return fitting[0] if fitting else problem.fixed_a_max or 1


SLORA_RANDOM = Solver(
    name="slora-random",
    summary="every adapter on a random GPU, the best number of slots there",
    source="LoRAServe, section V-D (S-LoRA Random)",
    place=_place_random,
    asks=Asks.ESTIMATOR,
)
SLORA_CONTIGUOUS = Solver(
    name="slora-contiguous",
    summary="adapters by rank, equally many on each GPU, the best number of slots there",
    source="LoRAServe, section V-D (S-LoRA Contiguous)",
    place=_place_contiguous,
    asks=Asks.ESTIMATOR,
)
