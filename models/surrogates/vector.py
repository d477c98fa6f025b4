"""The vector that a surrogate is asked with, made by compiled code from rates, ranks and settings."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.models.fluid import Gpu, Load, batch_limit, fluid_in

Floats = NDArray[np.float64]


class FeatureVector(NamedTuple):
    """The features of one GPU, in their order."""

    # What the adapter-caching paper's models are told (section 6).
    adapters: float
    rate_sum_rps: float
    rate_std_rps: float
    rank_max: float
    rank_mean: float
    rank_std: float
    a_max: float
    # What the paper holds fixed.
    s_max: float
    rate_max_rps: float
    prompt_mean_tokens: float
    prompt_std_tokens: float
    output_mean_tokens: float
    output_std_tokens: float
    length_correlation: float
    arrivals_cv: float
    max_num_seqs: float
    max_num_batched_tokens: float
    kv_tokens: float
    # What physics says of it: the fluid estimate, and ratios that decide which resource binds.
    offered_tok_s: float
    expected_share: float
    kv_tokens_per_request: float
    load_over_capacity: float
    batch_limit: float
    batch_over_limit: float
    kv_requests_over_seqs: float
    prompt_over_budget: float
    slots_share: float
    full_queue_share: float
    slot_wait_s: float
    active_adapters: float
    active_adapters_over_slots: float
    adapters_over_slots: float
    batch_per_slot: float
    load_outside_slots: float
    hottest_requests_in_flight: float
    step_ms: float
    full_step_ms: float
    loading_share: float
    request_life_s: float


class Common(NamedTuple):
    """What all GPUs of a question have in common: requests, profile, and what of the engine nobody varies."""

    prompt_mean_tokens: float
    prompt_std_tokens: float
    output_mean_tokens: float
    output_std_tokens: float
    length_correlation: float
    kv_tokens_per_request: float
    """KV tokens that a decoding request holds on average."""
    arrivals_cv: float
    max_num_batched_tokens: float
    step_form: int
    step_coefficients: Floats
    """Step-latency model, by `latency_code` and `coefficient_array`."""
    loading_ms: Floats
    """Of a load into a slot: what every adapter takes, each rank of it, and a rank below the slot's."""
    horizon_s: float
    max_in_flight: float


class Settings(NamedTuple):
    """What planners vary."""

    a_max: float
    s_max: float
    max_num_seqs: float
    kv_tokens: float


class _Mix(NamedTuple):
    """Adapters in numbers; means by weight count every request alike."""

    adapters: float
    rate_sum_rps: float
    rate_std_rps: float
    rank_max: float
    rank_mean: float
    rank_std: float
    weight: float
    weighted_rank: float


@jit
def fill_vectors(
    vectors: NDArray[np.float32],
    common: Common,
    settings: Floats,
    rates_rps: Floats,
    ranks: Floats,
    ascending_rps: Floats,
    room: Floats,
) -> None:
    """Write the features of GPUs that serve the same adapters under different settings.

    Parameters
    ----------
    vectors
        Written, shape (settings, features).
    common
        See there.
    settings
        Rows of `Settings`, shape (settings, 4).
    rates_rps, ranks
        Of each adapter, shape (adapters,).
    ascending_rps
        The rates in ascending order.
    room
        Room for notes, shape (4, adapters).
    """
    mix = _mix(rates_rps, ranks)
    distinct = _distinct(ascending_rps, room[0], room[1], room[2])
    for row in range(settings.shape[0]):
        setting = Settings(settings[row, 0], settings[row, 1], settings[row, 2], settings[row, 3])
        load = Load(
            rates_rps=room[0, :distinct],
            gaps_s=room[1, :distinct],
            counts=room[2, :distinct],
            adapters=mix.adapters,
            total_rps=mix.rate_sum_rps,
            prompt=max(common.prompt_mean_tokens, 1.0),
            output=max(common.output_mean_tokens, 1.0),
            held=common.kv_tokens_per_request,
            output_cv=common.output_std_tokens / max(common.output_mean_tokens, 1.0),
            mean_rank=mix.weighted_rank,
            max_rank=mix.rank_max,
            arrivals_cv=common.arrivals_cv,
        )
        gpu = Gpu(
            form=common.step_form,
            k=common.step_coefficients,
            a_max=setting.a_max,
            s_max=setting.s_max,
            max_num_seqs=setting.max_num_seqs,
            kv_requests=setting.kv_tokens / common.kv_tokens_per_request,
            token_budget=common.max_num_batched_tokens,
            load_s=_load_s(common, mix, rates_rps, ranks, setting.s_max),
            max_waiting=common.max_in_flight,
        )
        vector = _vector(common, setting, mix, gpu, load, ascending_rps, room[3])
        for number, value in enumerate(vector):
            vectors[row, number] = value


@jit
def _vector(
    common: Common,
    setting: Settings,
    mix: _Mix,
    gpu: Gpu,
    load: Load,
    ascending_rps: Floats,
    room: Floats,
) -> FeatureVector:
    state = fluid_in(gpu, load, common.horizon_s, room)
    limit = batch_limit(gpu, load)
    life_s = state.step_s * load.output
    in_time = 1.0 - min(0.98, life_s / common.horizon_s)  # what still runs at the end is not completed
    total_rps = max(mix.rate_sum_rps, 1e-12)
    rate_max_rps = ascending_rps[ascending_rps.size - 1]
    outside_rps = 0.0
    for i in range(ascending_rps.size - int(setting.a_max)):
        outside_rps += ascending_rps[i]
    return FeatureVector(
        adapters=mix.adapters,
        rate_sum_rps=mix.rate_sum_rps,
        rate_std_rps=mix.rate_std_rps,
        rank_max=mix.rank_max,
        rank_mean=mix.rank_mean,
        rank_std=mix.rank_std,
        a_max=setting.a_max,
        s_max=setting.s_max,
        rate_max_rps=rate_max_rps,
        prompt_mean_tokens=common.prompt_mean_tokens,
        prompt_std_tokens=common.prompt_std_tokens,
        output_mean_tokens=common.output_mean_tokens,
        output_std_tokens=common.output_std_tokens,
        length_correlation=common.length_correlation,
        arrivals_cv=common.arrivals_cv,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=common.max_num_batched_tokens,
        kv_tokens=setting.kv_tokens,
        offered_tok_s=mix.rate_sum_rps * (common.prompt_mean_tokens + common.output_mean_tokens),
        expected_share=min(1.0, state.served_rps / total_rps) * in_time,
        kv_tokens_per_request=common.kv_tokens_per_request,
        load_over_capacity=total_rps / state.capacity_rps,
        batch_limit=limit,
        batch_over_limit=state.batch_over_limit,
        kv_requests_over_seqs=gpu.kv_requests / setting.max_num_seqs,
        prompt_over_budget=load.prompt / common.max_num_batched_tokens,
        slots_share=state.slots_share,
        full_queue_share=state.later_share,
        slot_wait_s=state.slot_wait_s,
        active_adapters=state.active_adapters,
        active_adapters_over_slots=state.active_adapters / setting.a_max,
        adapters_over_slots=mix.adapters / setting.a_max,
        batch_per_slot=limit / setting.a_max,
        load_outside_slots=outside_rps / total_rps,
        hottest_requests_in_flight=rate_max_rps * life_s,
        step_ms=state.step_s * 1e3,
        full_step_ms=state.full_step_s * 1e3,
        loading_share=state.load_share,
        request_life_s=life_s,
    )


@jit
def _mix(rates_rps: Floats, ranks: Floats) -> _Mix:
    _, rate_std = _moments(rates_rps)
    rank_mean, rank_std = _moments(ranks)
    count, rate_sum = float(rates_rps.size), 0.0
    rank_max, weighted_rank = 0.0, 0.0
    for i in range(rates_rps.size):
        rate_sum += rates_rps[i]
        rank_max = max(rank_max, ranks[i])
        weighted_rank += rates_rps[i] * ranks[i]
    return _Mix(
        adapters=count,
        rate_sum_rps=rate_sum,
        rate_std_rps=rate_std,
        rank_max=rank_max,
        rank_mean=rank_mean,
        rank_std=rank_std,
        weight=rate_sum if rate_sum > 0.0 else count,
        weighted_rank=weighted_rank / rate_sum if rate_sum > 0.0 else rank_mean,
    )


@jit
def _moments(values: Floats) -> tuple[float, float]:
    """Return mean and standard deviation, the latter exactly 0 where all values are equal."""
    away, squared = 0.0, 0.0
    for value in values:
        away += value - values[0]
    mean = values[0] + away / values.size
    for value in values:
        squared += (value - mean) ** 2
    return mean, np.sqrt(squared / values.size)


@jit
def _distinct(ascending_rps: Floats, rates_rps: Floats, gaps_s: Floats, counts: Floats) -> int:
    """Write the distinct rates above 0, their gaps and counts of adapters; return how many there are."""
    distinct, same = 0, 0.0
    for i in range(ascending_rps.size):
        rate = ascending_rps[i]
        if rate > 0.0:
            same += 1.0
            if i + 1 == ascending_rps.size or ascending_rps[i + 1] != rate:
                rates_rps[distinct], gaps_s[distinct], counts[distinct] = rate, 1.0 / rate, same
                distinct, same = distinct + 1, 0.0
    return distinct


@jit
def _load_s(common: Common, mix: _Mix, rates_rps: Floats, ranks: Floats, s_max: float) -> float:
    """Return the seconds that an adapter takes into a slot, on average over requests."""
    padded = 0.0
    for i in range(ranks.size):
        if ranks[i] < s_max:
            padded += rates_rps[i] if mix.rate_sum_rps > 0.0 else 1.0
    every, per_rank, padding = common.loading_ms[0], common.loading_ms[1], common.loading_ms[2]
    return float((every + per_rank * mix.weighted_rank + padding * padded / mix.weight) / 1e3)
