"""LoRAServe's placement (section IV-A, Algorithm 1) as a solver; `capplan.planner.loraserve` has the steps.

It uses every server it is given and spreads the demand evenly over them: operating points of all ranks, from
the twin, turn tokens per second into servers' worth of demand. Demand is what the workload declares, since a
plan has no history. Slots are as many as the adapters on a server, or as fit in memory. With a plan in force,
servers are labelled so that the fewest bytes of adapters have to be copied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from capplan.errors import InfeasibleError
from capplan.planner.loraserve import AdapterLoad, Placement, Variants, place
from capplan.planner.loraserve.memory import most_slots
from capplan.planner.loraserve.operating_points import OperatingPoints
from capplan.planner.problem import Assignment, Part, Problem
from capplan.planner.solvers.description import Asks, Solver, Tools, Wish
from capplan.serving.memory import adapter_bytes
from capplan.spec import Plan


def solve_loraserve(
    problem: Problem,
    operating_points: Mapping[int, float],
    *,
    stored: Sequence[Collection[str]] | None = None,
    variants: Variants | None = None,
) -> tuple[Assignment, ...]:
    """Place all adapters on all instances.

    Parameters
    ----------
    problem
        Of one pool.
    operating_points
        Tokens per second that an instance sustains, by rank.
    stored
        Names of the adapters that each instance stores now; None: nothing anywhere.
    variants
        Readings of the algorithm.

    Raises
    ------
    InfeasibleError
        When the instances cannot sustain the demand; the message says how many could, with the headroom.
    InputError
        For a rank without an operating point.
    """
    placement = place(
        adapter_loads(problem), operating_points, problem.gpus, stored=stored, variants=variants
    )
    if placement.target > 1.0:
        raise _too_few(problem, placement)
    return assignments(problem, placement)


def adapter_loads(problem: Problem) -> tuple[AdapterLoad, ...]:
    """Return the adapters of a problem with the demand that the workload declares."""
    return tuple(
        AdapterLoad(
            adapter.name,
            adapter.rank,
            problem.offered_tok_s(Part(adapter.name, adapter.rank, adapter.rate_rps)),
            adapter_bytes(problem.profile.model, adapter.rank),
            adapter.max_replicas,
        )
        for adapter in problem.workload.adapters
    )


def assignments(problem: Problem, placement: Placement) -> tuple[Assignment, ...]:
    """Return a placement as assignments, servers without adapters left out."""
    taken: Counter[str] = Counter()
    answer = []
    for shares in placement.shares:
        parts = []
        for adapter in problem.workload.adapters:
            if adapter.name in shares:
                share, number = shares[adapter.name], taken[adapter.name]
                parts.append(Part(adapter.name, adapter.rank, adapter.rate_rps * share, share, number))
                taken[adapter.name] += 1
        if parts:
            answer.append(Assignment(tuple(parts), most_slots(problem, parts)))
    return tuple(answer)


def _too_few(problem: Problem, placement: Placement) -> InfeasibleError:
    demand = placement.target * problem.gpus
    enough = math.ceil(demand / (1.0 - problem.workload.headroom))
    return InfeasibleError(
        f"gpus: the demand is what {demand:.2f} instances sustain at their operating points, and there are "
        f"{problem.gpus}; with headroom {problem.workload.headroom:g} it takes {enough}",
        reason="gpus",
    )


def _stored(previous: Plan | None, servers: int) -> list[frozenset[str]]:
    """Return the adapters of each instance of the plan in force; beyond its instances nothing."""
    groups = () if previous is None else previous.groups
    held = [
        frozenset(adapter.name for adapter in group.adapters)
        for group in groups
        for _ in range(group.replicas)
    ]
    return (held + [frozenset[str]()] * servers)[:servers]


def _place(problem: Problem, tools: Tools) -> tuple[Assignment, ...]:
    points = OperatingPoints(problem, tools.seed)
    ranks = [adapter.rank for adapter in problem.workload.adapters]
    return solve_loraserve(problem, points(ranks), stored=_stored(tools.previous, problem.gpus))


LORASERVE = Solver(
    name="loraserve",
    summary="servers for each rank by their operating points, adapters packed on them in shares",
    source="LoRAServe, section IV-A, Algorithm 1",
    place=_place,
    asks=Asks.TWIN,
    divides=True,
    estimator="twin",
    honours=frozenset({Wish.MAX_REPLICAS, Wish.PREVIOUS_PLAN}),
)
