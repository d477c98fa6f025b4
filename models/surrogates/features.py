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
from capplan.models.surrogates.vector import Common, FeatureVector, fill_vectors
from capplan.spec import Arrivals, Profile, Workload

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
    rates_rps = np.array([a.rate_rps for a in workload.adapters])
    ranks = np.array([a.rank for a in workload.adapters], float)
    kv = kv_tokens(profile, a_max, s_max, gpu_memory_utilization, max_num_seqs)
    vectors = np.empty((1, len(FEATURES)), np.float32)
    fill_vectors(
        vectors,
        common_of(workload, profile, max_num_batched_tokens),
        np.array([[a_max, s_max, max_num_seqs, kv]], float),
        rates_rps,
        ranks,
        np.sort(rates_rps),
        np.empty((4, rates_rps.size)),
    )
    vector: NDArray[np.float32] = vectors[0]
    return vector


def common_of(workload: Workload, profile: Profile, max_num_batched_tokens: int) -> Common:
    """Return what GPUs that serve adapters of a workload have in common, all with its mean lengths."""
    lengths = _mean_lengths(workload)
    stated = workload.length_correlation
    correlation = profile.length_correlation if stated is None else stated
    value = profile.loading.value
    return Common(
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
