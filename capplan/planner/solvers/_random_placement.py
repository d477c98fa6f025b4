"""Random and contiguous placements: baselines of the adapter-caching paper and of LoRAServe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from capplan.planner.problem._problem import AdapterShare, Assignment, Problem, distinct_adapters
from capplan.planner.problem._settings import rank_slots
from capplan.planner.problem._splitting import in_input_order
from capplan.planner.solvers._base import RequiredEstimator, Solver, SolverContext


def _place_random(problem: Problem, context: SolverContext) -> tuple[Assignment, ...]:
    random = np.random.default_rng(context.seed)

    def slots(shares: Sequence[AdapterShare]) -> int:
        return problem.fixed_a_max or int(random.integers(1, max(1, distinct_adapters(shares)) + 1))

    return tuple(Assignment(tuple(shares), slots(shares)) for shares in random_shares(problem, random))


def random_shares(problem: Problem, random: np.random.Generator) -> list[list[AdapterShare]]:
    """Return the shares of each used GPU, with every share on a uniformly random one."""
    gpus: list[list[AdapterShare]] = [[] for _ in range(problem.gpus)]
    shares = in_input_order(problem)
    for share, gpu in zip(shares, random.integers(0, problem.gpus, len(shares)).tolist(), strict=True):
        gpus[gpu].append(share)
    return [shares for shares in gpus if shares]


RANDOM = Solver(
    name="random",
    summary="every adapter on a random GPU, a random number of slots",
    source="adapter-caching paper, section 8.4.2 (Random)",
    place=_place_random,
    uses_all_gpus=True,
)


def _place_slora_random(problem: Problem, context: SolverContext) -> tuple[Assignment, ...]:
    runs = shuffled_runs(problem, np.random.default_rng(context.seed))
    return _with_slots(problem, context, [run for run in runs if run])


def shuffled_runs(problem: Problem, random: np.random.Generator) -> list[list[AdapterShare]]:
    """Return the shares in random order, cut into one run of equal length per GPU, some perhaps empty.

    LoRAServe's stored random map has 7, 6, 6 and 6 of 25 adapters.
    """
    shares = in_input_order(problem)
    order = [shares[i] for i in random.permutation(len(shares)).tolist()]
    ends = [-(-len(order) * gpu // problem.gpus) for gpu in range(problem.gpus + 1)]
    return [order[start:end] for start, end in pairwise(ends)]


def contiguous_by_rank(problem: Problem) -> list[list[AdapterShare]]:
    """Return the shares by rank, cut into one run of equal length per GPU."""
    ordered = sorted(in_input_order(problem), key=lambda share: share.rank)
    ends = [len(ordered) * gpu // problem.gpus for gpu in range(problem.gpus + 1)]
    runs = [ordered[start:end] for start, end in pairwise(ends)]
    return [run for run in runs if run]


def _with_slots(
    problem: Problem, context: SolverContext, gpus: Sequence[Sequence[AdapterShare]]
) -> tuple[Assignment, ...]:
    """Return the GPUs with the best number of slots that fits in memory, even if they starve."""
    assignments = []
    for shares in gpus:
        instance = Assignment(tuple(shares), problem.fixed_a_max or 1)
        fitting = rank_slots(problem, instance, context.estimator)
        assignments.append(replace(instance, a_max=next(iter(fitting), instance.a_max)))
    return tuple(assignments)


SLORA_RANDOM = Solver(
    name="slora-random",
    summary="adapters in random order, equally many on each GPU, the best number of slots there",
    source="LoRAServe, section V-D (S-LoRA Random)",
    place=_place_slora_random,
    uses_all_gpus=True,
    required_estimator=RequiredEstimator.ESTIMATOR,
)

SLORA_CONTIGUOUS = Solver(
    name="slora-contiguous",
    summary="adapters by rank, equally many on each GPU, the best number of slots there",
    source="LoRAServe, section V-D (S-LoRA Contiguous)",
    place=lambda problem, context: _with_slots(problem, context, contiguous_by_rank(problem)),
    uses_all_gpus=True,
    required_estimator=RequiredEstimator.ESTIMATOR,
)
