"""MaxBase and MaxBase*, baselines of the adapter-caching paper (section 8.4.1).

Adapters in input order fill a GPU until their tokens per second would exceed what the backbone serves without
adapters when saturated; then the next GPU. MaxBase gives every adapter there a slot, MaxBase* (here
``maxbase-half``) every second one, rounded up. Neither knows what adapters cost, so GPUs may starve, and
slots may leave no memory. The workload's headroom is taken off the backbone's throughput; the paper has none.
"""

from __future__ import annotations

from capplan.errors import InfeasibleError
from capplan.planner.backbone import backbone_tok_s
from capplan.planner.parts import in_input_order
from capplan.planner.problem import Assignment, Part, Problem, distinct_adapters
from capplan.planner.solvers.description import Asks, Solver, Tools


def _place(problem: Problem, tools: Tools) -> tuple[Assignment, ...]:
    return _filled(problem, tools, adapters_per_slot=1)


def _place_half(problem: Problem, tools: Tools) -> tuple[Assignment, ...]:
    return _filled(problem, tools, adapters_per_slot=2)


def _filled(problem: Problem, tools: Tools, adapters_per_slot: int) -> tuple[Assignment, ...]:
    limit_tok_s = backbone_tok_s(problem, tools.seed) * (1.0 - problem.workload.headroom)
    gpus = fill(problem, limit_tok_s)
    if len(gpus) > problem.gpus:
        raise InfeasibleError(
            f"gpus: at {limit_tok_s:,.0f} tok/s each, what the backbone serves without adapters less the "
            f"headroom, the adapters fill {len(gpus)} instances, and there are {problem.gpus}",
            reason="gpus",
        )
    return tuple(
        Assignment(tuple(parts), problem.fixed_a_max or -(-distinct_adapters(parts) // adapters_per_slot))
        for parts in gpus
    )


def fill(problem: Problem, limit_tok_s: float) -> list[list[Part]]:
    """Return the parts in input order, cut where the next one would exceed the limit."""
    gpus: list[list[Part]] = []
    filled_tok_s = 0.0
    for part in in_input_order(problem):
        load_tok_s = problem.offered_tok_s(part)
        if not gpus or filled_tok_s + load_tok_s > limit_tok_s:
            gpus.append([])
            filled_tok_s = 0.0
        gpus[-1].append(part)
        filled_tok_s += load_tok_s
    return gpus


MAXBASE = Solver(
    name="maxbase",
    summary="fills GPUs up to the throughput of the model without adapters, a slot for each adapter",
    source="adapter-caching paper, section 8.4.1 (MaxBase)",
    place=_place,
    asks=Asks.NOTHING,
)
MAXBASE_HALF = Solver(
    name="maxbase-half",
    summary="the same with a slot for every second adapter",
    source="adapter-caching paper, section 8.4.1 (MaxBase*)",
    place=_place_half,
    asks=Asks.NOTHING,
)
