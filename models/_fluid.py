"""Fluid model of one GPU with many adapters: capacity, batch size and waiting time for a slot.

Poisson arrivals enter by their mean only. Batch, step time and slot waiting time solve a few balance
equations (Little's law, busy periods). The estimate locates the capacity limits.

Slots are shared by time if there are more adapters: each is in a slot for a while, then waits for the next.
The rotation period is the root of a balance equation. The shipped surrogates were trained on the result of 24
bisections on a logarithmic scale, which is the next of 2^24 steps. Newton's method finds the same step in a
few evaluations, starting from the period of a similar request lifetime.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import inner_sum, jit
from capplan.models._step_latency import StepFeatures, StepRanks, rank_ms, step_ms
from capplan.models._vector_math import exp, log
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
    """Return the state over a horizon of simulated time; `scratch` is a work array of shape (rates,)."""
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
                before = change
                change = np.log(period_s / rotation.period_s) if rotation.period_s > 0.0 else 0.0
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


_LEAST_CV = 0.1
_TERMS = 200
_CONVERGED = 4e-16
_STEPS = 2.0**24
_MIN_PERIOD_S = 1e-3
_MAX_PERIOD_HORIZONS = 1e5
_MAX_BUSY_S = 36_000.0
_LOG_TIME_S = 30.0
_MIN_PROBABILITY = 1e-20
_NEAR = 1e-4
"""Newton's method squares the error: after a step this short the error is far below one step of the scale."""
_MAX_EVALUATIONS = 64


class FluidLoad(NamedTuple):
    """Workload of the fluid model: adapters grouped by request rate."""

    rates_rps: NDArray[np.float64]
    """Distinct rates above 0, shape (n,)."""
    gaps_s: NDArray[np.float64]
    """Mean seconds between requests at each rate, shape (n,)."""
    counts: NDArray[np.float64]
    """Adapters with each rate, shape (n,)."""
    adapters: float
    """All adapters, including those without requests."""
    total_rps: float
    """Requests per second of all adapters."""
    prompt_tokens: float
    output_tokens: float
    kv_tokens_per_request: float
    """Mean KV tokens that a decoding request holds."""
    prefill_mpairs_per_request: float
    """Mean million pairs of a query and a key token in the prefill of a prompt."""
    output_cv: float
    mean_rank: float
    max_rank: float
    arrivals_cv: float
    """Coefficient of variation of the gaps between requests of one adapter."""


class SlotRotation(NamedTuple):
    """Result of slot time-sharing."""

    period_s: float
    """Time from one slot of an adapter to its next one; 0 without waiting."""
    wait_s: float
    """Mean wait for a slot per request."""
    share: float
    """Share of requests whose adapter had a slot before the horizon ended."""
    loads_per_s: float
    """Adapter loads into slots per second."""


@inner_sum
def running_adapters(load: FluidLoad, life_s: float) -> float:
    """Return the mean number of adapters with a request in any window of `life_s`."""
    total = 0.0
    for i in range(load.rates_rps.size):
        total += load.counts[i] * (1.0 - exp(-load.rates_rps[i] * life_s))
    return total


@jit
def busy_periods(load: FluidLoad, life_s: float, busy_s: NDArray[np.float64]) -> tuple[float, float]:
    """Write the busy period of an adapter of each rate for requests that run for `life_s`.

    A busy period is one request lifetime and all shorter gaps before it. With exponential gaps it is the busy
    period of an M/G/inf queue. Return the adapters with a request within a request lifetime, and the slots in
    use if no adapter waits.
    """
    if load.arrivals_cv == 1.0:
        return _poisson_busy_periods(load, life_s, busy_s)
    for i in range(load.rates_rps.size):
        longer, shorter = gamma_gaps(load.arrivals_cv, load.rates_rps[i] * life_s)
        busy_s[i] = life_s + load.gaps_s[i] * (shorter / max(longer, _MIN_PROBABILITY))
    return running_adapters(load, life_s), _slots_without_wait(load, busy_s)


@inner_sum
def _poisson_busy_periods(load: FluidLoad, life_s: float, busy_s: NDArray[np.float64]) -> tuple[float, float]:
    """Return and write what `busy_periods` does, for exponential gaps."""
    active, wanted = 0.0, 0.0
    for i in range(load.rates_rps.size):
        requests, gap_s = load.rates_rps[i] * life_s, load.gaps_s[i]
        longer = exp(-requests)
        shorter = max(0.0, 1.0 - longer * (1.0 + requests))
        active += load.counts[i] * (1.0 - longer)
        busy_s[i] = life_s + gap_s * (shorter / max(longer, _MIN_PROBABILITY))
        held_s = min(_MAX_BUSY_S, busy_s[i])
        wanted += load.counts[i] * held_s / (gap_s + held_s)
    return active, wanted


@inner_sum
def _slots_without_wait(load: FluidLoad, busy_s: NDArray[np.float64]) -> float:
    """Return the slots in use if no adapter waits."""
    wanted = 0.0
    for i in range(load.rates_rps.size):
        held_s = min(_MAX_BUSY_S, busy_s[i])
        wanted += load.counts[i] * held_s / (load.gaps_s[i] + held_s)
    return wanted


@jit
def slot_rotation(
    load: FluidLoad, busy_s: NDArray[np.float64], backlog_s: float, period_s: float, horizon_s: float
) -> SlotRotation:
    """Return waits and served share for a rotation period.

    An adapter keeps its slot until none of its requests runs. It returns after the period or with its next
    request, whichever is later. An adapter without a slot at the end of the horizon has waited half of its
    wait, or all of it if waits exceed the horizon.
    `load` has a total rate above 0, `busy_s` is by `busy_periods`, and `backlog_s` extends a busy period per
    e-fold of waiting requests.
    """
    lost, waited, loads = _rotation_sums(load, busy_s, backlog_s, period_s, horizon_s)
    return SlotRotation(period_s, waited / load.total_rps, 1.0 - lost / load.total_rps, loads)


@inner_sum
def _rotation_sums(
    load: FluidLoad, busy_s: NDArray[np.float64], backlog_s: float, period_s: float, horizon_s: float
) -> tuple[float, float, float]:
    """Return lost requests per second, waiting requests, and adapter loads per second."""
    lost, waited, loads, half_per_s = 0.0, 0.0, 0.0, 0.5 / horizon_s
    within = period_s <= horizon_s  # and so is every wait
    for i in range(load.rates_rps.size):
        stay_s = min(_MAX_BUSY_S, busy_s[i] + backlog_s * log(1.0 + load.rates_rps[i] * period_s))
        free_s = load.gaps_s[i] + stay_s
        per_s = load.counts[i] / max(period_s, free_s)
        wait_s = max(0.0, period_s - free_s)
        half = wait_s * half_per_s
        waiting = load.rates_rps[i] * wait_s
        loads += per_s
        waited += load.counts[i] * waiting
        lost += per_s * waiting * (half if within or half <= 0.5 else 1.0 - 0.25 / half)
    return lost, waited, loads


@jit
def rotation_period_s(
    load: FluidLoad,
    busy_s: NDArray[np.float64],
    backlog_s: float,
    a_max: float,
    horizon_s: float,
    guess_s: float,
) -> float:
    """Return the period at which the slots in use equal `a_max`; the search starts at `guess_s`."""
    shortest, longest = np.log(_MIN_PERIOD_S), np.log(_MAX_PERIOD_HORIZONS * horizon_s)
    low, high = shortest, longest
    period = _between(low, high, np.log(guess_s))
    for _ in range(_MAX_EVALUATIONS):
        wanted, slope = _slots_in_use(load, busy_s, backlog_s, np.exp(period))
        if wanted > a_max:
            low = period
        else:
            high = period
        step = np.log(a_max / wanted) * wanted / slope if slope < 0.0 else np.inf
        if abs(step) < _NEAR:
            period += step
            break
        period = _between(low, high, period + step)
    return float(np.exp(_next_step(shortest, longest, period)))


@jit
def first_share(load: FluidLoad, a_max: float) -> float:
    """Return the share of the load on the `a_max` adapters that receive requests first.

    Where the period exceeds the horizon, these adapters may keep their slots throughout.
    """
    low, high = -_LOG_TIME_S, _LOG_TIME_S
    time = _between(low, high, np.log(a_max / load.total_rps))
    for _ in range(_MAX_EVALUATIONS):
        requested, slope = _requested_adapters(load, np.exp(time))
        if requested < a_max:
            low = time
        else:
            high = time
        step = np.log(a_max / requested) * requested / slope if slope > 0.0 else np.inf
        if abs(step) < _NEAR:
            time += step
            break
        time = _between(low, high, time + step)
    time_s = np.exp(_next_step(-_LOG_TIME_S, _LOG_TIME_S, time))
    return _requested_rps(load, time_s) / max(load.total_rps, 1e-12)


@jit
def full_loads_per_step(load: FluidLoad, batch: float, slots: float) -> float:
    """Return adapter loads per step while the batch is full and requests queue.

    Batch places go to the oldest requests, so an adapter with a new slot fills the free places with its
    backlog while others finish within a request lifetime. The constants were fitted to twin runs with 4 to
    150 slots.
    """
    per_slot = batch / slots
    missing = np.sqrt(max(0.0, 1.0 - slots / load.adapters))
    return float(slots / load.output_tokens * missing * min(0.65, per_slot) / (1.0 + per_slot / 8.0))


@jit
def gamma_gaps(cv: float, length: float) -> tuple[float, float]:
    """Return P(gap > length) and E[gap; gap <= length] for gamma-distributed gaps of mean 1, by their cv."""
    shape = 1.0 / max(cv, _LEAST_CV) ** 2
    x = shape * length
    if x <= 0.0:
        return 1.0, 0.0
    density = np.exp(-x + shape * np.log(x) - math.lgamma(shape))
    if x < shape + 1.0:  # series of the lower incomplete gamma function
        term = total = 1.0 / shape
        for n in range(1, _TERMS):
            term *= x / (shape + n)
            total += term
            if term < _CONVERGED * total:
                break
        longer = 1.0 - total * density
    else:  # continued fraction of the upper one, by Lentz's method
        b = x + 1.0 - shape
        c = 1e30
        d = 1.0 / b
        fraction = d
        for n in range(1, _TERMS):
            a = -n * (n - shape)
            b += 2.0
            d = 1.0 / (a * d + b)
            c = b + a / c
            fraction *= d * c
            if abs(d * c - 1.0) < _CONVERGED:
                break
        longer = density * fraction
    longer = min(1.0, max(0.0, longer))
    return longer, max(0.0, 1.0 - longer - density / shape)


@inner_sum
def _slots_in_use(
    load: FluidLoad, busy_s: NDArray[np.float64], backlog_s: float, period_s: float
) -> tuple[float, float]:
    """Return the slots in use at a period, and their derivative by the logarithm of the period."""
    wanted, slope = 0.0, 0.0
    for i in range(load.rates_rps.size):
        gap_s, growth = load.gaps_s[i], 1.0 + load.rates_rps[i] * period_s
        unbounded_s = busy_s[i] + backlog_s * log(growth)
        stay_s = min(_MAX_BUSY_S, unbounded_s)
        longer_s = backlog_s - backlog_s / growth if unbounded_s <= _MAX_BUSY_S else 0.0
        per_s = 1.0 / max(period_s, gap_s + stay_s)
        share = load.counts[i] * per_s
        wanted += share * stay_s
        slope += share * (longer_s - stay_s if period_s > gap_s + stay_s else longer_s * gap_s * per_s)
    return wanted, slope


@inner_sum
def _requested_adapters(load: FluidLoad, time_s: float) -> tuple[float, float]:
    """Return the adapters with a request within `time_s`, and the derivative by the logarithm of time."""
    requested, slope = 0.0, 0.0
    for i in range(load.rates_rps.size):
        x = load.rates_rps[i] * time_s
        none = exp(-x)
        requested += load.counts[i] * (1.0 - none)
        slope += load.counts[i] * x * none
    return requested, slope


@inner_sum
def _requested_rps(load: FluidLoad, time_s: float) -> float:
    """Return the requests per second of the adapters with a request within `time_s`."""
    total_rps = 0.0
    for i in range(load.rates_rps.size):
        rate_rps = load.rates_rps[i]
        total_rps += load.counts[i] * rate_rps * (1.0 - exp(-rate_rps * time_s))
    return total_rps


@jit
def _between(low: float, high: float, value: float) -> float:
    return value if low < value < high else 0.5 * (low + high)


@jit
def _next_step(low: float, high: float, value: float) -> float:
    """Return the next of the `_STEPS` equal steps from `low` to `high`, at least the first."""
    step = (high - low) / _STEPS
    return float(low + step * min(_STEPS, max(1.0, np.ceil((value - low) / step))))
