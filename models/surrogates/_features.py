"""Features of a surrogate: workload and engine settings of one GPU as a vector of numbers.

The adapter-caching paper's features (section 6: adapters, sum and spread of rates, largest, mean and spread
of sizes, A_max), request lengths, engine limits, and quantities of the memory and fluid models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import jit
from capplan.errors import InputError
from capplan.models._fluid import FluidEngine, FluidLoad, batch_limit, fluid_state
from capplan.models._memory import KvBudget, kv_budget
from capplan.models._step_latency import coefficient_array, latency_code
from capplan.spec import Adapter, Arrivals, EngineArgs, EngineLimits, Lengths, Profile, Workload

Floats = NDArray[np.float64]

HORIZON_S: Final = 3600.0
"""Duration over which throughput and starvation are taken."""

MAX_IN_FLIGHT: Final = 25_000
"""Requests that the front end holds, as the client of the published runs did. Without a bound, an overloaded
engine would be slowed by the scan of a queue far longer than any that a profile was fitted on."""

MAX_RUNNING_SHARE: Final = 0.98
"""Largest share of the load that still runs at the end of the horizon, and so is not completed."""


class FeatureVector(NamedTuple):
    """The features of one GPU, in their order."""

    # Features of the adapter-caching paper (section 6).
    adapters: float
    rate_sum_rps: float
    rate_std_rps: float
    rank_max: float
    rank_mean: float
    rank_std: float
    a_max: float
    # Constants of the paper.
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
    # The fluid model, and ratios that determine the bottleneck.
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
    """Inputs shared by all GPUs of a prediction: requests and profile."""

    prompt_mean_tokens: float
    prompt_std_tokens: float
    output_mean_tokens: float
    output_std_tokens: float
    length_correlation: float
    kv_tokens_per_request: float
    """KV tokens that a decoding request holds on average."""
    arrivals_cv: float
    step_form: int
    step_coefficients: Floats
    """Step-latency model, by `latency_code` and `coefficient_array`."""
    loading_ms: Floats
    """Load into a slot: constant, per rank, and extra time of a rank below the slot's."""


def feature_vectors(
    common: CommonInputs, limits: Sequence[Sequence[float]], rates_rps: Floats, ranks: Floats
) -> NDArray[np.float32]:
    """Return the features of GPUs that serve the same adapters under different limits.

    Parameters
    ----------
    common
        Requests and profile.
    limits
        `gpu_limits` of each GPU.
    rates_rps, ranks
        Of each adapter, shape (adapters,).

    Returns
    -------
    ndarray
        Shape (len(limits), features), in the order of `FEATURES`.
    """
    vectors = np.empty((len(limits), len(FEATURES)), np.float32)
    scratch = np.empty((4, rates_rps.size))
    fill_vectors(vectors, common, np.array(limits, float), rates_rps, ranks, np.sort(rates_rps), scratch)
    return vectors


def vectors_alone(
    common: CommonInputs, limits: Sequence[Sequence[float]], rates_rps: Floats, ranks: Floats
) -> NDArray[np.float32]:
    """Return the features of GPUs that serve one adapter each; arguments as in `feature_vectors`."""
    vectors = np.empty((len(limits), len(FEATURES)), np.float32)
    _fill_alone(vectors, common, np.array(limits, float), rates_rps, ranks, np.empty((4, 1)))
    return vectors


@jit
def fill_vectors(
    vectors: NDArray[np.float32],
    common: CommonInputs,
    limits: Floats,
    rates_rps: Floats,
    ranks: Floats,
    ascending_rps: Floats,
    scratch: Floats,
) -> None:
    """Write the rows of `feature_vectors`; `scratch` has shape (4, adapters) or more columns."""
    _, rate_std = _moments(rates_rps)
    rank_mean, rank_std = _moments(ranks)
    moments = (rate_std, rank_mean, rank_std)
    load = _fluid_load(common, rates_rps, ranks, ascending_rps, scratch)
    for row in range(limits.shape[0]):
        gpu = FluidEngine(
            step_form=common.step_form,
            step_coefficients=common.step_coefficients,
            limits=EngineLimits(limits[row, 0], limits[row, 1], limits[row, 2], limits[row, 4]),
            kv_requests=limits[row, 3] / common.kv_tokens_per_request,
            adapter_load_s=_load_s(common, load, rates_rps, ranks, limits[row, 1]),
            max_in_flight=float(MAX_IN_FLIGHT),
        )
        vector = _vector(common, limits[row, 3], moments, gpu, load, ascending_rps, scratch[3])
        for number, value in enumerate(vector):
            vectors[row, number] = value


@jit
def _fill_alone(
    vectors: NDArray[np.float32],
    common: CommonInputs,
    limits: Floats,
    rates_rps: Floats,
    ranks: Floats,
    scratch: Floats,
) -> None:
    for i in range(limits.shape[0]):
        here, rate_rps = slice(i, i + 1), rates_rps[i : i + 1]
        fill_vectors(vectors[here], common, limits[here], rate_rps, ranks[here], rate_rps, scratch)


@jit
def _vector(
    common: CommonInputs,
    kv_tokens: float,
    moments: tuple[float, float, float],
    gpu: FluidEngine,
    load: FluidLoad,
    ascending_rps: Floats,
    scratch: Floats,
) -> FeatureVector:
    rate_std_rps, rank_mean, rank_std = moments
    state = fluid_state(gpu, load, HORIZON_S, scratch)
    limit = batch_limit(gpu, load)
    life_s = state.step_s * load.output_tokens
    in_time = 1.0 - min(MAX_RUNNING_SHARE, life_s / HORIZON_S)  # those at the end are not completed
    total_rps = max(load.total_rps, 1e-12)
    rate_max_rps = ascending_rps[ascending_rps.size - 1]
    outside_rps = 0.0
    for i in range(ascending_rps.size - int(gpu.limits.max_loras)):
        outside_rps += ascending_rps[i]
    return FeatureVector(
        adapters=load.adapters,
        rate_sum_rps=load.total_rps,
        rate_std_rps=rate_std_rps,
        rank_max=load.max_rank,
        rank_mean=rank_mean,
        rank_std=rank_std,
        a_max=gpu.limits.max_loras,
        s_max=gpu.limits.max_lora_rank,
        rate_max_rps=rate_max_rps,
        prompt_mean_tokens=common.prompt_mean_tokens,
        prompt_std_tokens=common.prompt_std_tokens,
        output_mean_tokens=common.output_mean_tokens,
        output_std_tokens=common.output_std_tokens,
        length_correlation=common.length_correlation,
        arrivals_cv=common.arrivals_cv,
        max_num_seqs=gpu.limits.max_num_seqs,
        max_num_batched_tokens=gpu.limits.max_num_batched_tokens,
        kv_tokens=kv_tokens,
        offered_tok_s=load.total_rps * (common.prompt_mean_tokens + common.output_mean_tokens),
        expected_share=min(1.0, state.served_rps / total_rps) * in_time,
        kv_tokens_per_request=common.kv_tokens_per_request,
        load_over_capacity=total_rps / state.capacity_rps,
        batch_limit=limit,
        batch_over_limit=state.batch_over_limit,
        kv_requests_over_seqs=gpu.kv_requests / gpu.limits.max_num_seqs,
        prompt_over_budget=load.prompt_tokens / gpu.limits.max_num_batched_tokens,
        slots_share=state.slots_share,
        full_queue_share=state.full_queue_share,
        slot_wait_s=state.slot_wait_s,
        active_adapters=state.active_adapters,
        active_adapters_over_slots=state.active_adapters / gpu.limits.max_loras,
        adapters_over_slots=load.adapters / gpu.limits.max_loras,
        batch_per_slot=limit / gpu.limits.max_loras,
        load_outside_slots=outside_rps / total_rps,
        hottest_requests_in_flight=rate_max_rps * life_s,
        step_ms=state.step_s * 1e3,
        full_step_ms=state.full_step_s * 1e3,
        loading_share=state.loading_share,
        request_life_s=life_s,
    )


@jit
def _fluid_load(
    common: CommonInputs, rates_rps: Floats, ranks: Floats, ascending_rps: Floats, scratch: Floats
) -> FluidLoad:
    """Return the load of all adapters; its arrays are views of the first rows of `scratch`."""
    total_rps, max_rank, weighted_rank = 0.0, 0.0, 0.0
    for i in range(rates_rps.size):
        total_rps += rates_rps[i]
        max_rank = max(max_rank, ranks[i])
        weighted_rank += rates_rps[i] * ranks[i]
    distinct = _distinct(ascending_rps, scratch[0], scratch[1], scratch[2])
    prompt_tokens = max(common.prompt_mean_tokens, 1.0)
    squared_tokens = prompt_tokens**2 + common.prompt_std_tokens**2
    return FluidLoad(
        rates_rps=scratch[0, :distinct],
        gaps_s=scratch[1, :distinct],
        counts=scratch[2, :distinct],
        adapters=float(rates_rps.size),
        total_rps=total_rps,
        prompt_tokens=prompt_tokens,
        output_tokens=max(common.output_mean_tokens, 1.0),
        kv_tokens_per_request=common.kv_tokens_per_request,
        prefill_mpairs_per_request=(squared_tokens + prompt_tokens) / 2e6,
        output_cv=common.output_std_tokens / max(common.output_mean_tokens, 1.0),
        mean_rank=weighted_rank / total_rps if total_rps > 0.0 else _moments(ranks)[0],
        max_rank=max_rank,
        arrivals_cv=common.arrivals_cv,
    )


@jit
def _moments(values: Floats) -> tuple[float, float]:
    """Return mean and standard deviation, the latter exactly 0 if all values are equal."""
    away, squared = 0.0, 0.0
    for value in values:
        away += value - values[0]
    mean = values[0] + away / values.size
    for value in values:
        squared += (value - mean) ** 2
    return mean, np.sqrt(squared / values.size)


@jit
def _distinct(ascending_rps: Floats, rates_rps: Floats, gaps_s: Floats, counts: Floats) -> int:
    """Write the distinct rates above 0, their gaps and counts of adapters; return their number."""
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
def _load_s(common: CommonInputs, load: FluidLoad, rates_rps: Floats, ranks: Floats, s_max: float) -> float:
    """Return the seconds that an adapter takes into a slot, on average over requests."""
    padded = 0.0
    for i in range(ranks.size):
        if ranks[i] < s_max:
            padded += rates_rps[i] if load.total_rps > 0.0 else 1.0
    every, per_rank, padding = common.loading_ms[0], common.loading_ms[1], common.loading_ms[2]
    weight = load.total_rps if load.total_rps > 0.0 else load.adapters
    return float((every + per_rank * load.mean_rank + padding * padded / weight) / 1e3)


FEATURES = FeatureVector._fields


def offered_tok_s(workload: Workload) -> float:
    """Return the offered input and output tokens per second."""
    total = 0.0
    for adapter in workload.adapters:
        prompt, output = workload.lengths_of(adapter)
        total += adapter.rate_rps * (prompt.mean_tokens + output.mean_tokens)
    return total


def feature_vector(workload: Workload, profile: Profile, args: EngineArgs) -> NDArray[np.float32]:
    """Return the features of one GPU that serves all of `workload`, in the order of `FEATURES`.

    Raises
    ------
    InputError
        If it has traffic of the base model: no surrogate was trained on any.
    """
    if workload.base is not None:
        raise InputError("is not covered by surrogates; use the twin", location="workload.base")
    rates_rps = np.array([a.rate_rps for a in workload.adapters])
    ranks = np.array([a.rank for a in workload.adapters], float)
    common = common_inputs(workload, profile)
    limits = gpu_limits(kv_budget(profile, args.gpu_memory_utilization), args)
    return np.asarray(feature_vectors(common, [limits], rates_rps, ranks)[0])


def gpu_limits(budget: KvBudget, args: EngineArgs | EngineLimits) -> tuple[float, ...]:
    """Return slots, their rank, most running requests, KV tokens and most tokens per step of one GPU."""
    slots = args.max_loras, args.max_lora_rank
    return *slots, args.max_num_seqs, budget.tokens(args), args.max_num_batched_tokens


def common_inputs(workload: Workload, profile: Profile) -> CommonInputs:
    """Return the inputs shared by GPUs that serve adapters of a workload, all with its mean lengths."""
    lengths = _mean_lengths(workload)
    stated = workload.length_correlation
    correlation = profile.length_correlation if stated is None else stated
    value = profile.loading.value
    return CommonInputs(
        *lengths,
        length_correlation=correlation,
        kv_tokens_per_request=held_tokens(*lengths, correlation) + profile.engine.block_size / 2,
        arrivals_cv=arrivals_cv(workload),
        step_form=latency_code(profile.step_latency.form, profile.engine.kernel),
        step_coefficients=coefficient_array(profile.step_latency),
        loading_ms=value("serving_factor")
        * np.array([value("gpu_base_ms"), value("gpu_ms_per_rank"), value("gpu_padding_ms")]),
    )


def unsupported_workload(workload: Workload, profile: Profile) -> str | None:
    """Return the property of a workload that no surrogate was trained on; None if all are supported."""
    arrivals = workload.arrivals
    process = arrivals if isinstance(arrivals, Arrivals) else getattr(arrivals, "process", "")
    if workload.trace is not None:
        return "a recorded trace"
    if workload.base is not None:
        return "traffic of the base model"
    if process not in ("poisson", "gamma") or getattr(arrivals, "modulation", None) is not None:
        return "arrivals other than poisson and gamma"
    if workload.scheduling is not None:
        return "a scheduler or an adapter cache"
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

    It holds its prompt and half of its output. Long outputs decode longest, so prompts count as those of
    long outputs, by the covariance of log-normal lengths of these moments in tokens. `correlation` is that of
    the normal scores of prompt and output length.
    """
    prompt_log_var = np.log1p((prompt_std / max(prompt_mean, 1.0)) ** 2)
    output_log_var = np.log1p((output_std / max(output_mean, 1.0)) ** 2)
    together = np.exp(correlation * np.sqrt(prompt_log_var * output_log_var))
    return float(prompt_mean * together + (output_mean + output_std**2 / max(output_mean, 1.0)) / 2)


def feature_of(features: NDArray[np.float32], name: str) -> NDArray[np.float64]:
    """Return one feature by its name, as float64; shape (...)."""
    return np.asarray(features[..., FEATURES.index(name)].astype(float))


def expected_tok_s(features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the throughput of the fluid model.

    Surrogates predict relative to it, since load is unbounded and trees do not extrapolate. Features have
    shape (..., features), the result in tokens per second shape (...).
    """
    return feature_of(features, "offered_tok_s") * np.maximum(feature_of(features, "expected_share"), 1e-6)


def steady_share(features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the share of the load that the fluid model serves, requests in execution at the end included.

    Features have shape (..., features), the result shape (...).
    """
    in_time = 1.0 - np.minimum(MAX_RUNNING_SHARE, feature_of(features, "request_life_s") / HORIZON_S)
    return np.asarray(feature_of(features, "expected_share") / in_time)


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

    Four digits are the same on every machine.
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
        args = EngineArgs(
            max_loras=a_max,
            max_lora_rank=32,
            max_num_seqs=128,
            max_num_batched_tokens=1024,
            gpu_memory_utilization=0.9,
            max_model_len=profile.model.default_max_model_len,
        )
        probed += feature_vector(workload, profile, args).tolist()
    return [f"{value:.4g}" for value in probed]
