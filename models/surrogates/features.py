"""What a surrogate is asked: the workload of one GPU and its settings as a vector of numbers.

The adapter-caching paper's features (section 6: adapters, sum and spread of rates, largest, mean and spread
of sizes, A_max), request lengths, the engine's limits, and what physics says of them: KV capacity, the KV a
request holds, and the load offered.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capplan.models.memory import kv_tokens
from capplan.models.step_latency import coefficient_array, latency_code
from capplan.models.surrogates.mean_field import mean_field
from capplan.spec import Profile, Workload

FEATURES = (
    "adapters",
    "rate_sum_rps",
    "rate_std_rps",
    "rank_max",
    "rank_mean",
    "rank_std",
    "a_max",
    "s_max",
    "prompt_mean_tokens",
    "prompt_std_tokens",
    "output_mean_tokens",
    "output_std_tokens",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_tokens",
    "offered_tok_s",
    "kv_tokens_per_request",
    "load_over_saturation",
    "batch_over_limit",
    "active_adapters",
    "active_adapters_over_slots",
    "load_outside_slots",
)


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
    lengths = _mean_lengths(workload, rates)
    prompt_mean, _, output_mean, _ = lengths
    stated = workload.length_correlation
    held = held_tokens(*lengths, profile.length_correlation if stated is None else stated)
    kv = kv_tokens(profile, a_max, s_max, gpu_memory_utilization, max_num_seqs)
    state = mean_field(
        latency_code(profile.step_latency.form, profile.engine.kernel),
        coefficient_array(profile.step_latency),
        rates,
        a_max,
        s_max,
        prompt_mean,
        output_mean,
        min(max_num_seqs, max(1.0, kv / held)),
        max_num_batched_tokens,
        float(np.average(ranks, weights=rates)) if rates.sum() > 0.0 else float(ranks.mean()),
        float(ranks.max()),
    )
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
            *lengths,
            max_num_seqs,
            max_num_batched_tokens,
            kv,
            offered_tok_s(workload),
            held,
            rates.sum() / state.saturation_rps,
            state.batch_over_limit,
            state.adapters,
            state.adapters / a_max,
            busiest[a_max:].sum() / max(rates.sum(), 1e-12),
        ],
        np.float32,
    )


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
    """Return the throughput that the mean field expects: the offered load, up to saturation.

    Forests answer relative to it, so that they need not extrapolate where the load grows without bound.

    Parameters
    ----------
    features
        Vectors in the order of `FEATURES`, shape (..., features).

    Returns
    -------
    ndarray
        Tokens per second, shape (...).
    """
    offered = feature_of(features, "offered_tok_s")
    overload = feature_of(features, "load_over_saturation")
    expected: NDArray[np.float64] = offered / np.maximum(1.0, overload)
    return expected


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
