"""Fluid model of one GPU with many adapters: capacity, batch size and waiting time for a slot.

Poisson arrivals enter by their mean only. Batch, step time and slot waiting time solve a few balance
equations (Little's law, busy periods). The estimate locates the capacity limits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import jit
from capplan.models._slot_sharing import (
    FluidLoad,
    SlotRotation,
    busy_periods,
    first_share,
    full_loads_per_step,
    rotation_period_s,
    running_adapters,
    slot_rotation,
)
from capplan.models._step_latency import StepFeatures, StepRanks, rank_ms, step_ms
from capplan.spec import EngineLimits

_ROUNDS = 24
_MIN_RPS = 1e-12
_MAX_LOADING_S = 4.0


class FluidEngine(NamedTuple):
    """Engine of the fluid model."""

    step_form: int
    step_coefficients: NDArray[np.float64]
    """Step-latency model, by `latency_code` and `coefficient_array`."""
    limits: EngineLimits
    kv_requests: float
    """Requests that the KV cache holds."""
    adapter_load_s: float
    """Duration of an adapter load into a slot."""
    max_in_flight: float
    """Requests that the front end holds."""


class FluidState(NamedTuple):
    """Steady state of the fluid model."""

    capacity_rps: float
    """Requests per second completed with a full batch while all adapters queue."""
    served_rps: float
    """Requests per second served over the horizon."""
    batch_over_limit: float
    """Batch under the load over the largest batch allowed by memory, tokens and max_num_seqs."""
    slots_share: float
    """Share of the load whose adapter gets a slot within the horizon."""
    full_queue_share: float
    """Share of the load served once the front end is full."""
    slot_wait_s: float
    """Mean wait of an adapter for a slot."""
    active_adapters: float
    """Adapters in use at a time if slots were unlimited."""
    full_adapters: float
    """Adapters in a full batch."""
    step_s: float
    """Step time under the load."""
    full_step_s: float
    """Step time with a full batch."""
    loading_share: float
    """Share of adapter loads in the time of a full batch."""


@jit
def fluid_state(
    engine: FluidEngine, load: FluidLoad, horizon_s: float, scratch: NDArray[np.float64]
) -> FluidState:
    """Return the state over a horizon.

    Parameters
    ----------
    engine, load
        Engine and workload.
    horizon_s
        Simulated time in seconds.
    scratch
        Work array, shape (rates,).
    """
    limit = batch_limit(engine, load)
    total = max(load.total_rps, _MIN_RPS)
    step_s, batch, rotation, active = _under_load(engine, load, limit, horizon_s, scratch)
    adapters = min(engine.limits.max_loras, max(1.0, running_adapters(load, limit / total)))
    full_step_s, compute_s = _full_step_s(engine, load, limit, adapters, horizon_s)
    capacity = _capacity_rps(engine, load, full_step_s)

    served = min(capacity, rotation.share * total)
    later = served
    time_to_full_s = engine.max_in_flight / max(_MIN_RPS, total - served)
    if rotation.wait_s > 0.0 and time_to_full_s < horizon_s:
        flow_rps = _flow_when_full_rps(engine, load, limit, _request_life_s(engine, load, step_s))
        later = max(served, min(capacity, flow_rps))
        served = (time_to_full_s * served + (horizon_s - time_to_full_s) * later) / horizon_s
    return FluidState(
        capacity_rps=capacity,
        served_rps=served,
        batch_over_limit=batch / limit,
        slots_share=rotation.share,
        full_queue_share=later / total,
        slot_wait_s=rotation.wait_s,
        active_adapters=active,
        full_adapters=adapters,
        step_s=step_s,
        full_step_s=full_step_s,
        loading_share=max(0.0, 1.0 - compute_s / full_step_s),
    )


@jit
def batch_limit(engine: FluidEngine, load: FluidLoad) -> float:
    """Return the largest batch that max_num_seqs, KV cache and token budget allow."""
    tokens_limit = engine.limits.max_num_batched_tokens / (1.0 + load.prompt_tokens / load.output_tokens)
    return max(1.0, min(engine.limits.max_num_seqs, engine.kv_requests, tokens_limit))


@jit
def _under_load(
    engine: FluidEngine, load: FluidLoad, limit: float, horizon_s: float, scratch: NDArray[np.float64]
) -> tuple[float, float, SlotRotation, float]:
    """Return step time, batch, slot rotation and active adapters.

    Longer steps mean longer lifetimes, larger batches and longer steps again: a damped fixed-point iteration.
    """
    crowded = load.adapters > engine.limits.max_loras and load.total_rps > 0.0
    step_s = _step_s(engine, load, 1.0, 1.0, 0.0)
    batch, active, loading_s = 1.0, 1.0, 0.0
    rotation = SlotRotation(0.0, 0.0, 1.0, 0.0)
    first, guess_s, change = -1.0, 0.0, 0.0
    for _ in range(_ROUNDS):
        life_s = _request_life_s(engine, load, step_s)
        if crowded:
            active, wanted = busy_periods(load, life_s, scratch)
            backlog_s = life_s * min(1.0, load.output_cv)
            period_s = 0.0
            if wanted > engine.limits.max_loras:
                start_s = guess_s or life_s
                period_s = rotation_period_s(
                    load, scratch, backlog_s, engine.limits.max_loras, horizon_s, start_s
                )
                before, change = change, _log_ratio(period_s, rotation.period_s)
                guess_s = period_s * np.exp(change * _decline(change, before))
            rotation = slot_rotation(load, scratch, backlog_s, period_s, horizon_s)
            if period_s > horizon_s:
                if first < 0.0:
                    first = first_share(load, engine.limits.max_loras)
                share = max(rotation.share, first)
                rotation = SlotRotation(period_s, rotation.wait_s, share, rotation.loads_per_s)
        else:
            active = running_adapters(load, life_s)
        batch = 0.5 * (batch + min(limit, rotation.share * load.total_rps * life_s))
        running = min(active, engine.limits.max_loras, batch)
        if load.adapters > engine.limits.max_loras:
            load_s = step_s * rotation.loads_per_s * _adapter_load_s(engine, running)
            loading_s = min(_MAX_LOADING_S, load_s)
        step_s = _step_s(engine, load, max(1.0, batch), max(running, min(1.0, batch)), 0.0) + loading_s
    return step_s, batch, rotation, active


@jit
def _log_ratio(period_s: float, before_s: float) -> float:
    return float(np.log(period_s / before_s)) if before_s > 0.0 else 0.0


@jit
def _decline(change: float, before: float) -> float:
    """Return the next change over this one, if changes decline geometrically; otherwise 1/2, the damping."""
    return change / before if 0.0 < change / before < 1.0 else 0.5


@jit
def _full_step_s(
    engine: FluidEngine, load: FluidLoad, limit: float, adapters: float, horizon_s: float
) -> tuple[float, float]:
    """Return the time of a step with a full batch, with and without adapter loads."""
    full_step_s = compute_s = _step_s(engine, load, limit, adapters, 0.0)
    if load.adapters > engine.limits.max_loras:
        for _ in range(_ROUNDS):
            growth_rps = load.total_rps - _capacity_rps(engine, load, full_step_s)
            compute_s = _step_s(engine, load, limit, adapters, _mean_waiting(engine, growth_rps, horizon_s))
            loads = full_loads_per_step(load, limit, engine.limits.max_loras)
            full_step_s = 0.5 * (full_step_s + compute_s + loads * _adapter_load_s(engine, adapters))
    return full_step_s, compute_s


@jit
def _flow_when_full_rps(engine: FluidEngine, load: FluidLoad, limit: float, life_s: float) -> float:
    """Return the requests per second through the slots while the front end is full.

    The front end admits one request for each completed one, so adapters in slots soon run out of requests.
    Each of their successors has collected twice its mean share of the queue.
    """
    collected = 2.0 * engine.max_in_flight / load.adapters
    refilled = min(0.9, engine.limits.max_loras / load.adapters)
    lives = 1.0 + max(min(1.0, load.output_cv), -1.0 / np.log(refilled)) * np.log1p(min(collected, limit))
    return float(engine.limits.max_loras * collected / (lives * life_s) / (1.0 - refilled))


@jit
def _adapter_load_s(engine: FluidEngine, running: float) -> float:
    """Return the seconds of a load; with every slot in use it causes further loads (the twin's clock)."""
    in_use = min(1.0, max(0.0, (running / engine.limits.max_loras - 0.8) / 0.2))
    return engine.adapter_load_s * (1.0 + in_use * running / 6.0)


@jit
def _capacity_rps(engine: FluidEngine, load: FluidLoad, step_s: float) -> float:
    """Return the completion rate at a step time, limited by batch places or by the token budget."""
    places = max(1.0, min(engine.limits.max_num_seqs, engine.kv_requests))
    tokens_rps = engine.limits.max_num_batched_tokens / (load.prompt_tokens + load.output_tokens) / step_s
    return min(places / _request_life_s(engine, load, step_s), tokens_rps)


@jit
def _mean_waiting(engine: FluidEngine, growth_rps: float, horizon_s: float) -> float:
    """Return the mean queue length while the queue grows up to the capacity of the front end."""
    at_end = max(0.0, growth_rps) * horizon_s
    if at_end <= engine.max_in_flight:
        return 0.5 * at_end
    return engine.max_in_flight * (1.0 - 0.5 * engine.max_in_flight / at_end)


@jit
def _request_life_s(engine: FluidEngine, load: FluidLoad, step_s: float) -> float:
    """Return the lifetime of a request: one step per output token and per chunk of a long prompt."""
    chunks = max(0.0, load.prompt_tokens / engine.limits.max_num_batched_tokens - 1.0)
    return step_s * (load.output_tokens + chunks)


@jit
def _step_s(engine: FluidEngine, load: FluidLoad, batch: float, adapters: float, waiting: float) -> float:
    """Return the seconds of a step with `batch` running and `waiting` queued requests."""
    step = StepFeatures(
        tokens=batch * (1.0 + load.prompt_tokens / load.output_tokens),
        requests=batch,
        kv_tokens=batch * load.kv_tokens_per_request,
        adapters=adapters,
        a_max=engine.limits.max_loras,
        s_max=engine.limits.max_lora_rank,
        waiting=waiting,
        slots_per_adapter=min(1.0, engine.limits.max_loras / load.adapters),
        adapters_served=load.adapters,
    )
    milliseconds = step_ms(engine.step_form, engine.step_coefficients, step)
    return (milliseconds + _ranks_ms(engine, load, batch)) / 1000.0


@jit
def _ranks_ms(engine: FluidEngine, load: FluidLoad, batch: float) -> float:
    # A request is prefilled once in `output_tokens` steps: small batches leave some steps without a prefill.
    prefills = max(1.0, batch / load.output_tokens)
    decoding = StepRanks(
        decodes=batch,
        prefills=0.0,
        lora_decodes=batch,
        lora_prefills=0.0,
        lora_prefill_tokens=0.0,
        max_rank=load.max_rank,
        decode_rank_sum=batch * load.mean_rank,
        prefill_rank_sum=0.0,
        prefill_rank_tokens=0.0,
        prefill_mpairs=0.0,
    )
    prefilling = StepRanks(
        decodes=0.0,
        prefills=prefills,
        lora_decodes=0.0,
        lora_prefills=prefills,
        lora_prefill_tokens=prefills * load.prompt_tokens,
        max_rank=load.max_rank,
        decode_rank_sum=0.0,
        prefill_rank_sum=prefills * load.mean_rank,
        prefill_rank_tokens=prefills * load.prompt_tokens * load.mean_rank,
        prefill_mpairs=prefills * load.prefill_mpairs_per_request,
    )
    share = min(1.0, batch / load.output_tokens)
    prefill_ms = rank_ms(engine.step_form, engine.step_coefficients, engine.limits.max_lora_rank, prefilling)
    return (
        rank_ms(engine.step_form, engine.step_coefficients, engine.limits.max_lora_rank, decoding)
        + share * prefill_ms
    )
