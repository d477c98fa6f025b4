"""What a GPU serves without adapters: the measure by which simple strategies fill GPUs."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from capplan.models.memory import kv_tokens
from capplan.planner.parts import whole_parts
from capplan.planner.problem import Problem, replayed_s
from capplan.twin.core import run
from capplan.twin.result import SimulationResult, summarize
from capplan.twin.scenario import build_scenario

_DURATION_S: Final = 600.0
_FIRST_RPS: Final = 16.0
_SATURATED: Final = 0.8
"""Share of the offered tokens below which requests pile up: more of them would not raise the throughput."""
_RAISES: Final = 10


def backbone_tok_s(problem: Problem, seed: int) -> float:
    """Return the input and output tokens per second of the base model alone under saturation.

    The twin serves the workload's mix of lengths with no adapter and no slot, and more and more requests
    until they pile up. Infinite where the workload asks for nothing.
    """
    rate_rps = problem.workload.total_rate_rps
    if rate_rps == 0.0:
        return math.inf
    scale = _FIRST_RPS / rate_rps
    for _ in range(_RAISES):
        result = _without_adapters(problem, scale, seed)
        if result.throughput_tok_s < _SATURATED * result.offered_tok_s:
            break
        scale *= 4.0
    return result.throughput_tok_s


def _without_adapters(problem: Problem, scale: float, seed: int) -> SimulationResult:
    engine, profile = problem.engine, problem.profile
    parts = whole_parts(problem)
    workload = problem.subworkload(parts, scale)
    s_max = problem.s_max(parts)
    scenario = build_scenario(
        workload,
        profile,
        a_max=1,
        s_max=s_max,
        duration_s=replayed_s(workload, _DURATION_S),
        seed=seed,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_cpu_loras=None,
        max_model_len=engine.max_model_len,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        max_in_flight=None,
    )
    tokens = kv_tokens(profile, 0, s_max, engine.gpu_memory_utilization, engine.max_num_seqs)
    bare = scenario._replace(
        requests=scenario.requests._replace(adapter=np.zeros_like(scenario.requests.adapter)),
        num_blocks=tokens // profile.engine.block_size,
        costs=scenario.costs._replace(a_max=0),
    )
    return summarize(bare, run(bare), request_overhead_ms=0.0)
