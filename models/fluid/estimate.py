"""A fluid estimate of one GPU that serves many adapters: what it can carry, and what its slots let through.

No randomness but that of Poisson arrivals in the mean: batch, step time and the wait for a slot solve a few
balance equations (Little's law, busy periods). Good enough to tell a surrogate where the edges lie; the twin
knows the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.models.fluid.inputs import Gpu, Load, running_adapters
from capplan.models.fluid.slots import flow_when_full_rps, full_loads_per_step, load_s
from capplan.models.fluid.steps import life_s as life_in
from capplan.models.fluid.steps import step_s as step_of
from capplan.models.fluid.turns import Turn, balanced_turn_s, busy_periods, first_share, taken_turns

_ROUNDS = 24
_LEAST_RPS = 1e-12
_LONGEST_LOADING_S = 4.0


class Fluid(NamedTuple):
    """The estimate."""

    capacity_rps: float
    """Requests per second that a full batch completes, all adapters waiting for it."""
    served_rps: float
    """Requests per second that are served over the horizon."""
    batch_over_limit: float
    """Batch that carries the load, over the largest batch that memory, tokens and max_num_seqs allow."""
    slots_share: float
    """Share of the load that finds its adapter in a slot within the horizon."""
    later_share: float
    """The same, once the front end is full."""
    slot_wait_s: float
    """How long an adapter waits for a slot."""
    active_adapters: float
    """Adapters that run at once, if slots did not bind."""
    full_adapters: float
    """Adapters in a full batch."""
    step_s: float
    """Duration of a step under this load."""
    full_step_s: float
    """Duration of a step with a full batch."""
    load_share: float
    """Share of the time of a full batch that goes to loads."""


def fluid(gpu: Gpu, load: Load, horizon_s: float) -> Fluid:
    """Return the estimate for a horizon; parameters are described where they are declared."""
    return fluid_in(gpu, load, horizon_s, np.empty(load.rates_rps.size))


@jit
def fluid_in(gpu: Gpu, load: Load, horizon_s: float, room: NDArray[np.float64]) -> Fluid:
    """Return the same for compiled callers, who give room for notes, as long as the load's rates."""
    limit = batch_limit(gpu, load)
    total = max(load.total_rps, _LEAST_RPS)
    step_s, batch, turn, active = _under_load(gpu, load, limit, horizon_s, room)
    adapters = min(gpu.a_max, max(1.0, running_adapters(load, limit / total)))
    full_step_s, compute_s = _when_full(gpu, load, limit, adapters, horizon_s)
    capacity = _capacity_rps(gpu, load, full_step_s)

    served = min(capacity, turn.share * total)
    later = served
    time_to_full_s = gpu.max_waiting / max(_LEAST_RPS, total - served)
    if turn.wait_s > 0.0 and time_to_full_s < horizon_s:
        later = max(served, min(capacity, flow_when_full_rps(gpu, load, limit, life_in(gpu, load, step_s))))
        served = (time_to_full_s * served + (horizon_s - time_to_full_s) * later) / horizon_s
    return Fluid(
        capacity_rps=capacity,
        served_rps=served,
        batch_over_limit=batch / limit,
        slots_share=turn.share,
        later_share=later / total,
        slot_wait_s=turn.wait_s,
        active_adapters=active,
        full_adapters=adapters,
        step_s=step_s,
        full_step_s=full_step_s,
        load_share=max(0.0, 1.0 - compute_s / full_step_s),
    )


@jit
def _under_load(
    gpu: Gpu, load: Load, limit: float, horizon_s: float, room: NDArray[np.float64]
) -> tuple[float, float, Turn, float]:
    """Return step time, batch, turns in the slots, and adapters that ask at once.

    A longer step means longer lives, more requests at once and again a longer step: damped rounds.
    """
    crowded = load.adapters > gpu.a_max and load.total_rps > 0.0
    step_s = step_of(gpu, load, 1.0, 1.0, 0.0)
    batch, active, loading_s = 1.0, 1.0, 0.0
    turn = Turn(0.0, 0.0, 1.0, 0.0)
    first, guess_s = -1.0, 0.0
    for _ in range(_ROUNDS):
        life_s = life_in(gpu, load, step_s)
        if crowded:
            active, wanted = busy_periods(load, life_s, room)
            backlog_s = life_s * min(1.0, load.output_cv)
            turn_s = 0.0
            if wanted > gpu.a_max:
                turn_s = balanced_turn_s(load, room, backlog_s, gpu.a_max, horizon_s, guess_s or life_s)
                # Damped rounds move about half as far as the one before.
                guess_s = turn_s * np.sqrt(turn_s / turn.turn_s) if turn.turn_s > 0.0 else turn_s
            turn = taken_turns(load, room, backlog_s, turn_s, horizon_s)
            if turn_s > horizon_s:
                if first < 0.0:
                    first = first_share(load, gpu.a_max)
                turn = Turn(turn_s, turn.wait_s, max(turn.share, first), turn.loads_per_s)
        else:
            active = running_adapters(load, life_s)
        batch = 0.5 * (batch + min(limit, turn.share * load.total_rps * life_s))
        running = min(active, gpu.a_max, batch)
        if load.adapters > gpu.a_max:
            loading_s = min(_LONGEST_LOADING_S, step_s * turn.loads_per_s * load_s(gpu, running))
        step_s = step_of(gpu, load, max(1.0, batch), max(running, min(1.0, batch)), 0.0) + loading_s
    return step_s, batch, turn, active


@jit
def _when_full(gpu: Gpu, load: Load, limit: float, adapters: float, horizon_s: float) -> tuple[float, float]:
    """Return the time of a step with a full batch, and its part without loads."""
    full_step_s = compute_s = step_of(gpu, load, limit, adapters, 0.0)
    if load.adapters > gpu.a_max:
        for _ in range(_ROUNDS):
            growth_rps = load.total_rps - _capacity_rps(gpu, load, full_step_s)
            compute_s = step_of(gpu, load, limit, adapters, _mean_waiting(gpu, growth_rps, horizon_s))
            loads = full_loads_per_step(load, limit, gpu.a_max)
            full_step_s = 0.5 * (full_step_s + compute_s + loads * load_s(gpu, adapters))
    return full_step_s, compute_s


@jit
def batch_limit(gpu: Gpu, load: Load) -> float:
    """Return the largest batch that max_num_seqs, KV cache and token budget allow."""
    tokens_limit = gpu.token_budget / (1.0 + load.prompt / load.output)
    return max(1.0, min(gpu.max_num_seqs, gpu.kv_requests, tokens_limit))


@jit
def _capacity_rps(gpu: Gpu, load: Load, step_s: float) -> float:
    """Return what leaves in steps of that duration: seats bind, or the token budget does."""
    seats = max(1.0, min(gpu.max_num_seqs, gpu.kv_requests))
    return min(seats / life_in(gpu, load, step_s), gpu.token_budget / (load.prompt + load.output) / step_s)


@jit
def _mean_waiting(gpu: Gpu, growth_rps: float, horizon_s: float) -> float:
    """Return the mean number of requests that wait while the queue grows, up to what the front end holds."""
    at_end = max(0.0, growth_rps) * horizon_s
    if at_end <= gpu.max_waiting:
        return 0.5 * at_end
    return gpu.max_waiting * (1.0 - 0.5 * gpu.max_waiting / at_end)
