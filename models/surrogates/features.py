"""What a surrogate is asked: the workload of one GPU and its settings as a vector of numbers.

The adapter-caching paper's features (section 6: adapters, sum and spread of rates, largest, mean and spread
of sizes, A_max), request lengths, the engine's limits, and what physics says of them: KV capacity, the KV a
request holds, and the load offered.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capplan.models.fluid import Gpu, Load, batch_limit, fluid
from capplan.models.loading import gpu_load_ms
from capplan.models.memory import kv_tokens
from capplan.models.step_latency import coefficient_array, latency_code
from capplan.spec import Arrivals, Profile, Workload

FEATURES = (
    # What the paper's models are told (section 6).
    "adapters",
    "rate_sum_rps",
    "rate_std_rps",
    "rank_max",
    "rank_mean",
    "rank_std",
    "a_max",
    # What the paper holds fixed.
    "s_max",
    "rate_max_rps",
    "prompt_mean_tokens",
    "prompt_std_tokens",
    "output_mean_tokens",
    "output_std_tokens",
    "length_correlation",
    "arrivals_cv",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_tokens",
    # What physics says of it: the fluid estimate, and ratios that decide which resource binds.
    "offered_tok_s",
    "expected_share",
    "kv_tokens_per_request",
    "load_over_capacity",
    "batch_limit",
    "batch_over_limit",
    "kv_requests_over_seqs",
    "prompt_over_budget",
    "slots_share",
    "full_queue_share",
    "slot_wait_s",
    "active_adapters",
    "active_adapters_over_slots",
    "adapters_over_slots",
    "batch_per_slot",
    "load_outside_slots",
    "hottest_requests_in_flight",
    "step_ms",
    "full_step_ms",
    "loading_share",
    "request_life_s",
)

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


def feature_vector(
    workload: Workload,
    profile: Profile,
    *,
    a_max: int,
    s_max: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    gpu_memory_utilization: float,
) -> NDArray[np.float32]:
    """Return the features of one GPU that serves all of `workload`, in the order of `FEATURES`."""
    rates = np.array([a.rate_rps for a in workload.adapters])
    ranks = np.array([a.rank for a in workload.adapters], float)
    total = max(float(rates.sum()), 1e-12)
    lengths = _mean_lengths(workload, rates)
    stated = workload.length_correlation
    correlation = profile.length_correlation if stated is None else stated
    held = held_tokens(*lengths, correlation) + profile.engine.block_size / 2
    kv = kv_tokens(profile, a_max, s_max, gpu_memory_utilization, max_num_seqs)
    distinct, counts = np.unique(rates, return_counts=True)
    weights = rates if rates.any() else np.ones(rates.size)
    load = Load(
        distinct,
        counts.astype(float),
        max(lengths[0], 1.0),
        max(lengths[2], 1.0),
        held,
        lengths[3] / max(lengths[2], 1.0),
        float(np.average(ranks, weights=weights)),
        float(ranks.max()),
        arrivals_cv(workload),
    )
    gpu = Gpu(
        latency_code(profile.step_latency.form, profile.engine.kernel),
        coefficient_array(profile.step_latency),
        float(a_max),
        float(s_max),
        float(max_num_seqs),
        kv / held,
        float(max_num_batched_tokens),
        _mean_load_s(profile, ranks, weights, s_max),
        float(MAX_IN_FLIGHT),
    )
    state = fluid(gpu, load, HORIZON_S)
    limit = batch_limit(gpu, load)
    life_s = state.step_s * load.output
    in_time = 1.0 - min(0.98, life_s / HORIZON_S)  # what still runs at the end is not completed
    busiest = np.sort(rates)[::-1]
    return np.array(
        [
            rates.size,
            rates.sum(),
            rates.std(),
            ranks.max(),
            ranks.mean(),
            ranks.std(),
            a_max,
            s_max,
            rates.max(),
            *lengths,
            correlation,
            arrivals_cv(workload),
            max_num_seqs,
            max_num_batched_tokens,
            kv,
            offered_tok_s(workload),
            min(1.0, state.served_rps / total) * in_time,
            held,
            total / state.capacity_rps,
            limit,
            state.batch_over_limit,
            kv / held / max_num_seqs,
            load.prompt / max_num_batched_tokens,
            state.slots_share,
            state.later_share,
            state.slot_wait_s,
            state.active_adapters,
            state.active_adapters / a_max,
            rates.size / a_max,
            limit / a_max,
            busiest[a_max:].sum() / total,
            busiest[0] * life_s,
            state.step_s * 1e3,
            state.full_step_s * 1e3,
            state.load_share,
            life_s,
        ],
        np.float32,
    )


def untrained(workload: Workload, profile: Profile) -> str | None:
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


def _mean_load_s(
    profile: Profile, ranks: NDArray[np.float64], weights: NDArray[np.float64], s_max: int
) -> float:
    """Return the seconds that an adapter takes into a slot, on average over requests."""
    distinct, which = np.unique(ranks, return_inverse=True)
    each = np.array([gpu_load_ms(profile.loading, int(rank), s_max) for rank in distinct])
    return float(np.average(each[which], weights=weights)) / 1e3


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


def _mean_lengths(workload: Workload, rates: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """Return mean and standard deviation of prompt and output lengths over the requests of all adapters."""
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
