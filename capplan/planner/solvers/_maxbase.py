"""MaxBase and MaxBase*, baselines of the adapter-caching paper (section 8.4.1).

Adapters in input order fill a GPU up to the saturated throughput of the base model; then the next GPU.
MaxBase gives every adapter a slot, MaxBase* (here ``maxbase-half``) every second one, rounded up. The cost of
adapters is ignored, so GPUs may starve, and slots may leave no memory. The workload's headroom is subtracted
from the throughput; the paper has none.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Final

import numpy as np

from capplan.models import kv_budget
from capplan.planner.problem._problem import (
    AdapterShare,
    Assignment,
    Problem,
    distinct_adapters,
    infeasible,
    whole_adapters,
)
from capplan.planner.problem._splitting import in_input_order
from capplan.planner.solvers._base import Solver, SolverContext
from capplan.twin.instance import SimulationResult, build_scenario, run, summarize


def _place(problem: Problem, context: SolverContext, *, adapters_per_slot: int = 1) -> tuple[Assignment, ...]:
    limit_tok_s = base_model_tok_s(problem, context.seed) * (1.0 - problem.workload.headroom)
    gpus = fill_gpus(problem, limit_tok_s)
    if len(gpus) > problem.gpus:
        raise infeasible(
            "gpus",
            f"at {limit_tok_s:,.0f} tok/s each, what the backbone serves without adapters less the headroom, "
            f"the adapters fill {len(gpus)} instances, and there are {problem.gpus}",
        )
    return tuple(
        Assignment(tuple(shares), problem.fixed_a_max or -(-distinct_adapters(shares) // adapters_per_slot))
        for shares in gpus
    )


def fill_gpus(problem: Problem, limit_tok_s: float) -> list[list[AdapterShare]]:
    """Return the shares in input order, cut where the next one would exceed the limit."""
    gpus: list[list[AdapterShare]] = []
    filled_tok_s = 0.0
    for share in in_input_order(problem):
        load_tok_s = problem.offered_tok_s(share)
        if not gpus or filled_tok_s + load_tok_s > limit_tok_s:
            gpus.append([])
            filled_tok_s = 0.0
        gpus[-1].append(share)
        filled_tok_s += load_tok_s
    return gpus


MAXBASE = Solver(
    name="maxbase",
    summary="fills GPUs up to the throughput of the model without adapters, a slot for each adapter",
    source="adapter-caching paper, section 8.4.1 (MaxBase)",
    place=_place,
)
MAXBASE_HALF = Solver(
    name="maxbase-half",
    summary="the same with a slot for every second adapter",
    source="adapter-caching paper, section 8.4.1 (MaxBase*)",
    place=partial(_place, adapters_per_slot=2),
)

_DURATION_S: Final = 600.0
_FIRST_RPS: Final = 16.0
_SATURATED: Final = 0.8
"""Served share of the offered tokens below which the engine is saturated."""
_MAX_STEPS: Final = 10


def base_model_tok_s(problem: Problem, seed: int) -> float:
    """Return the input and output tokens per second of the base model under saturation.

    The twin serves the workload's mix of lengths without adapters and slots, at a rate that grows until the
    engine is saturated. Infinite if the workload has no requests.
    """
    rate_rps = problem.workload.total_rate_rps
    if rate_rps == 0.0:
        return math.inf
    scale = _FIRST_RPS / rate_rps
    for _ in range(_MAX_STEPS):
        result = _simulate_without_adapters(problem, scale, seed)
        if result.throughput_tok_s < _SATURATED * result.offered_tok_s:
            break
        scale *= 4.0
    return result.throughput_tok_s


def _simulate_without_adapters(problem: Problem, scale: float, seed: int) -> SimulationResult:
    engine, profile = problem.engine, problem.profile
    shares = whole_adapters(problem)
    workload, s_max = problem.subworkload(shares, scale), problem.s_max(shares)
    args = engine.model_copy(update={"max_loras": 1, "max_lora_rank": s_max, "max_cpu_loras": None})
    duration_s = workload.horizon_s(_DURATION_S)
    scenario = build_scenario(workload, profile, args, duration_s=duration_s, seed=seed)
    tokens = kv_budget(profile, engine.gpu_memory_utilization).tokens(engine, a_max=0)
    bare = scenario._replace(
        requests=scenario.requests._replace(adapter=np.zeros_like(scenario.requests.adapter)),
        num_blocks=tokens // profile.engine.block_size,
        costs=scenario.costs._replace(a_max=0),
    )
    return summarize(bare, run(bare), request_overhead_ms=0.0)
