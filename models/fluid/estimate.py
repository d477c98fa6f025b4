"""A fluid estimate of one GPU that serves many adapters: what it can carry, and what its slots let through.

No randomness but that of Poisson arrivals in the mean: batch, step time and the wait for a slot solve a few
balance equations (Little's law, busy periods). Good enough to tell a surrogate where the edges lie; the twin
knows the rest.
"""

from __future__ import annotations

from typing import NamedTuple

from capplan.compile import jit
from capplan.models.fluid.inputs import Gpu, Load, adapter_count, running_adapters, total_rps
from capplan.models.fluid.slots import (
    Turn,
    flow_when_full_rps,
    full_loads_per_step,
    load_s,
    taken_turns,
)
from capplan.models.fluid.steps import life_s as life_in
from capplan.models.fluid.steps import step_s as step_of

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


@jit
def fluid(gpu: Gpu, load: Load, horizon_s: float) -> Fluid:
    """Return the estimate for a horizon; parameters are described where they are declared."""
    limit = batch_limit(gpu, load)
    total = max(total_rps(load), _LEAST_RPS)
    step_s, batch, wait_s, share, active = _under_load(gpu, load, limit, horizon_s)
    adapters = min(gpu.a_max, max(1.0, running_adapters(load, limit / total)))
    full_step_s, compute_s = _when_full(gpu, load, limit, adapters, horizon_s)
    capacity = _capacity_rps(gpu, load, full_step_s)

    served = min(capacity, share * total)
    later = served
    time_to_full_s = gpu.max_waiting / max(_LEAST_RPS, total - served)
    if wait_s > 0.0 and time_to_full_s < horizon_s:
        later = max(served, min(capacity, flow_when_full_rps(gpu, load, limit, life_in(gpu, load, step_s))))
        served = (time_to_full_s * served + (horizon_s - time_to_full_s) * later) / horizon_s
    return Fluid(
        capacity_rps=capacity,
        served_rps=served,
        batch_over_limit=batch / limit,
        slots_share=share,
        later_share=later / total,
        slot_wait_s=wait_s,
        active_adapters=active,
        full_adapters=adapters,
        step_s=step_s,
        full_step_s=full_step_s,
        load_share=max(0.0, 1.0 - compute_s / full_step_s),
    )


@jit
def _under_load(
    gpu: Gpu, load: Load, limit: float, horizon_s: float
) -> tuple[float, float, float, float, float]:
    """Return step time, batch, wait for a slot, share of the load with a slot, and adapters that ask at once.

    A longer step means longer lives, more requests at once and again a longer step: damped rounds.
    """
    total = total_rps(load)
    step_s = step_of(gpu, load, 1.0, 1.0, 0.0)
    batch, active = 1.0, 1.0
    turn = Turn(0.0, 0.0, 1.0, 0.0)
    for _ in range(_ROUNDS):
        life_s = life_in(gpu, load, step_s)
        active = running_adapters(load, life_s)
        turn = taken_turns(load, life_s, gpu.a_max, horizon_s)
        batch = 0.5 * (batch + min(limit, turn.share * total * life_s))
        running = min(active, gpu.a_max, batch)
        loading = 0.0
        if adapter_count(load) > gpu.a_max:
            loading = step_s * turn.loads_per_s * load_s(gpu, running)
        compute_s = step_of(gpu, load, max(1.0, batch), max(running, min(1.0, batch)), 0.0)
        step_s = compute_s + min(_LONGEST_LOADING_S, loading)
    return step_s, batch, turn.wait_s, turn.share, active


@jit
def _when_full(gpu: Gpu, load: Load, limit: float, adapters: float, horizon_s: float) -> tuple[float, float]:
    """Return the time of a step with a full batch, and its part without loads."""
    full_step_s = compute_s = step_of(gpu, load, limit, adapters, 0.0)
    if adapter_count(load) > gpu.a_max:
        for _ in range(_ROUNDS):
            growth_rps = total_rps(load) - _capacity_rps(gpu, load, full_step_s)
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
