"""What a surrogate is asked: the workload of one GPU and its settings as a vector of numbers.

The adapter-caching paper's features (section 6: adapters, sum and spread of rates, largest, mean and spread
of sizes, A_max), request lengths, the engine's limits, and what physics says of them: KV capacity, the KV a
request holds, and the load offered.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.models.fluid import FluidEngine, batch_limit, fluid_state
from capplan.models.memory import kv_tokens
from capplan.models.slot_sharing import FluidLoad
from capplan.models.step_latency import coefficient_array, latency_code
from capplan.spec import Adapter, Arrivals, EngineArgs, Lengths, Profile, Workload
from capplan.spec.engine_args import DEFAULT_MAX_MODEL_LEN

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


class CommonInputs(NamedTuple):
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
    common: CommonInputs,
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
        load = FluidLoad(
            rates_rps=room[0, :distinct],
            gaps_s=room[1, :distinct],
            counts=room[2, :distinct],
            adapters=mix.adapters,
            total_rps=mix.rate_sum_rps,
            prompt_tokens=max(common.prompt_mean_tokens, 1.0),
            output_tokens=max(common.output_mean_tokens, 1.0),
            kv_tokens_per_request=common.kv_tokens_per_request,
            output_cv=common.output_std_tokens / max(common.output_mean_tokens, 1.0),
            mean_rank=mix.weighted_rank,
            max_rank=mix.rank_max,
            arrivals_cv=common.arrivals_cv,
        )
        gpu = FluidEngine(
            step_form=common.step_form,
            step_coefficients=common.step_coefficients,
            a_max=setting.a_max,
            s_max=setting.s_max,
            max_num_seqs=setting.max_num_seqs,
            kv_requests=setting.kv_tokens / common.kv_tokens_per_request,
            max_num_batched_tokens=common.max_num_batched_tokens,
            adapter_load_s=_load_s(common, mix, rates_rps, ranks, setting.s_max),
            max_in_flight=common.max_in_flight,
        )
        vector = _vector(common, setting, mix, gpu, load, ascending_rps, room[3])
        for number, value in enumerate(vector):
            vectors[row, number] = value


@jit
def _vector(
    common: CommonInputs,
    setting: Settings,
    mix: _Mix,
    gpu: FluidEngine,
    load: FluidLoad,
    ascending_rps: Floats,
    room: Floats,
) -> FeatureVector:
    state = fluid_state(gpu, load, common.horizon_s, room)
    limit = batch_limit(gpu, load)
    life_s = state.step_s * load.output_tokens
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
        prompt_over_budget=load.prompt_tokens / common.max_num_batched_tokens,
        slots_share=state.slots_share,
        full_queue_share=state.full_queue_share,
        slot_wait_s=state.slot_wait_s,
        active_adapters=state.active_adapters,
        active_adapters_over_slots=state.active_adapters / setting.a_max,
        adapters_over_slots=mix.adapters / setting.a_max,
        batch_per_slot=limit / setting.a_max,
        load_outside_slots=outside_rps / total_rps,
        hottest_requests_in_flight=rate_max_rps * life_s,
        step_ms=state.step_s * 1e3,
        full_step_ms=state.full_step_s * 1e3,
        loading_share=state.loading_share,
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
def _load_s(common: CommonInputs, mix: _Mix, rates_rps: Floats, ranks: Floats, s_max: float) -> float:
    """Return the seconds that an adapter takes into a slot, on average over requests."""
    padded = 0.0
    for i in range(ranks.size):
        if ranks[i] < s_max:
            padded += rates_rps[i] if mix.rate_sum_rps > 0.0 else 1.0
    every, per_rank, padding = common.loading_ms[0], common.loading_ms[1], common.loading_ms[2]
    return float((every + per_rank * mix.weighted_rank + padding * padded / mix.weight) / 1e3)


FEATURES = FeatureVector._fields

PAPER_FEATURES = FEATURES[:7]

HORIZON_S = 3600.0
"""What throughput and starvation are taken over."""

MAX_IN_FLIGHT = 25_000
"""Requests that the front end holds, as the client of the published runs did. Without a bound, an overloaded
engine would be slowed by the scan of a queue far longer than any that a profile was fitted on."""


def offered_tok_s(workload: Workload) -> float:
    """Return the input and output tokens per second that the workload asks for."""
    total = 0.0
    for adapter in workload.adapters:
        prompt, output = workload.lengths_of(adapter)
        total += adapter.rate_rps * (prompt.mean_tokens + output.mean_tokens)
    return total


def feature_vector(workload: Workload, profile: Profile, args: EngineArgs) -> NDArray[np.float32]:
    """Return the features of one GPU that serves all of `workload`, in the order of `FEATURES`."""
    rates_rps = np.array([a.rate_rps for a in workload.adapters])
    ranks = np.array([a.rank for a in workload.adapters], float)
    slots, rank, seqs = args.max_loras, args.max_lora_rank, args.max_num_seqs
    kv = kv_tokens(profile, slots, rank, args.gpu_memory_utilization, seqs)
    vectors = np.empty((1, len(FEATURES)), np.float32)
    fill_vectors(
        vectors,
        common_inputs(workload, profile, args.max_num_batched_tokens),
        np.array([[slots, rank, seqs, kv]], float),
        rates_rps,
        ranks,
        np.sort(rates_rps),
        np.empty((4, rates_rps.size)),
    )
    vector: NDArray[np.float32] = vectors[0]
    return vector


def common_inputs(workload: Workload, profile: Profile, max_num_batched_tokens: int) -> CommonInputs:
    """Return what GPUs that serve adapters of a workload have in common, all with its mean lengths."""
    lengths = _mean_lengths(workload)
    stated = workload.length_correlation
    correlation = profile.length_correlation if stated is None else stated
    value = profile.loading.value
    return CommonInputs(
        *lengths,
        length_correlation=correlation,
        kv_tokens_per_request=held_tokens(*lengths, correlation) + profile.engine.block_size / 2,
        arrivals_cv=arrivals_cv(workload),
        max_num_batched_tokens=float(max_num_batched_tokens),
        step_form=latency_code(profile.step_latency.form, profile.engine.kernel),
        step_coefficients=coefficient_array(profile.step_latency),
        loading_ms=value("serving_factor")
        * np.array([value("gpu_base_ms"), value("gpu_ms_per_rank"), value("gpu_padding_ms")]),
        horizon_s=HORIZON_S,
        max_in_flight=float(MAX_IN_FLIGHT),
    )


def unsupported_workload(workload: Workload, profile: Profile) -> str | None:
    """Return what of a workload no surrogate was trained on, in words; None if there is nothing."""
    arrivals = workload.arrivals
    process = arrivals if isinstance(arrivals, Arrivals) else getattr(arrivals, "process", "")
    if workload.trace is not None:
        return "a recorded trace"
    if process not in ("poisson", "gamma") or getattr(arrivals, "modulation", None) is not None:
        return "arrivals other than poisson and gamma"
    if workload.stickiness is not None:
        return "stickiness"
    if workload.length_pairs is not None:
        return "lengths in pairs"
    if any(a.prompt_tokens or a.output_tokens for a in workload.adapters):
        return "adapters with lengths of their own"
    if workload.shared_prefix_tokens and profile.engine.prefix_caching is not False:
        return "shared prefixes"
    return None


def arrivals_cv(workload: Workload) -> float:
    """Return the standard deviation over the mean of the gaps between requests of one adapter."""
    arrivals = workload.arrivals
    if arrivals is Arrivals.DETERMINISTIC:
        return 0.0
    cv = getattr(arrivals, "cv", None)
    return 1.0 if cv is None else float(cv)


def held_tokens(
    prompt_mean: float, prompt_std: float, output_mean: float, output_std: float, correlation: float
) -> float:
    """Return the KV tokens that a decoding request holds on average.

    It holds its prompt and half of its output, and long outputs decode longest; so prompts count as those
    that go with long outputs, by the covariance of log-normal lengths of these moments.

    Parameters
    ----------
    prompt_mean, prompt_std, output_mean, output_std
        Lengths in tokens.
    correlation
        Of the normal scores of prompt and output length.
    """
    prompt_log_var = np.log1p((prompt_std / max(prompt_mean, 1.0)) ** 2)
    output_log_var = np.log1p((output_std / max(output_mean, 1.0)) ** 2)
    together = np.exp(correlation * np.sqrt(prompt_log_var * output_log_var))
    return float(prompt_mean * together + (output_mean + output_std**2 / max(output_mean, 1.0)) / 2)


def feature_of(features: NDArray[np.float32], name: str) -> NDArray[np.float64]:
    """Return one feature by its name, as float64; shape (...)."""
    column: NDArray[np.float64] = features[..., FEATURES.index(name)].astype(float)
    return column


def expected_tok_s(features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the throughput that the fluid estimate expects.

    Surrogates answer relative to it, so that they need not extrapolate where the load grows without bound.

    Parameters
    ----------
    features
        Vectors in the order of `FEATURES`, shape (..., features).

    Returns
    -------
    ndarray
        Tokens per second, shape (...).
    """
    return feature_of(features, "offered_tok_s") * np.maximum(feature_of(features, "expected_share"), 1e-6)


def _mean_lengths(workload: Workload) -> tuple[float, float, float, float]:
    """Return mean and standard deviation of prompt and output lengths over the requests of all adapters."""
    rates = np.array([a.rate_rps for a in workload.adapters])
    weight = rates / rates.sum() if rates.sum() > 0 else np.full(rates.size, 1.0 / rates.size)
    moments = []
    for default, own in (
        (workload.prompt_tokens, [a.prompt_tokens for a in workload.adapters]),
        (workload.output_tokens, [a.output_tokens for a in workload.adapters]),
    ):
        if not any(own):
            moments += [default.mean_tokens, default.std_tokens]
            continue
        each = [lengths or default for lengths in own]
        mean = float(np.sum(weight * [e.mean_tokens for e in each]))
        second = float(np.sum(weight * [e.std_tokens**2 + e.mean_tokens**2 for e in each]))
        moments += [mean, max(0.0, second - mean**2) ** 0.5]
    return moments[0], moments[1], moments[2], moments[3]


def feature_probe(profile: Profile) -> list[str]:
    """Return the features of two scenarios of a profile, one that waits for slots and one that does not.

    Four digits tell estimates apart, and are the same on every machine.
    """
    probed = []
    for adapters, a_max in ((48, 6), (12, 16)):
        workload = Workload(
            base_model="probe",
            adapters=tuple(
                Adapter(name=str(i), rank=8 << i % 3, rate_rps=0.05 * (1 + i % 5)) for i in range(adapters)
            ),
            prompt_tokens=Lengths(mean=250, std=200),
            output_tokens=Lengths(mean=230, std=120),
            length_correlation=-0.3,
        )
        probed += feature_vector(
            workload,
            profile,
            EngineArgs(
                max_loras=a_max,
                max_lora_rank=32,
                max_num_seqs=128,
                max_num_batched_tokens=1024,
                gpu_memory_utilization=0.9,
                max_model_len=DEFAULT_MAX_MODEL_LEN,
            ),
        ).tolist()
    return [f"{value:.4g}" for value in probed]
