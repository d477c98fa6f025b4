"""Drawn profiles follow the stored covariance and scatter; pessimistic ones are slower by a stated factor."""

import numpy as np
import pytest
from scipy.special import ndtri

from capplan import load_profile
from capplan.errors import InputError
from capplan.models import DRAWS, drawn_profiles, pessimistic_profile, with_step_times
from capplan.models._uncertainty import DEFAULT_SCATTER, scatter
from capplan.models.surrogates import profile_digest
from capplan.spec import Coefficient, Profile, ProvenanceKind, Uncertainty

LLAMA = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")


def with_uncertainty(known: Uncertainty | None) -> Profile:
    steps = LLAMA.step_latency.replace(uncertainty=known)
    loading = LLAMA.loading.replace(uncertainty=None)
    return LLAMA.replace(step_latency=steps, loading=loading)


def coefficients(profile: Profile, *names: str) -> list[float]:
    return [profile.step_latency.value(name) for name in names]


def test_drawn_coefficients_have_the_mean_and_covariance_of_the_fit() -> None:
    names = ("base_ms", "ms_per_adapter")
    covariance = np.array([[0.04, 0.0012], [0.0012, 0.0001]])
    known = Uncertainty(names=names, covariance=tuple(map(tuple, covariance.tolist())))
    drawn = np.array([coefficients(p, *names) for p in drawn_profiles(with_uncertainty(known), 4000)])
    assert drawn.mean(axis=0) == pytest.approx(coefficients(LLAMA, *names), rel=1e-9)
    assert np.cov(drawn.T) == pytest.approx(covariance, rel=0.1)


def test_the_scatter_is_a_common_factor_of_all_step_times() -> None:
    profile = with_uncertainty(Uncertainty(scatter=0.03))
    factors = [
        p.step_latency.value("base_ms") / LLAMA.step_latency.value("base_ms") for p in drawn_profiles(profile)
    ]
    assert len(factors) == DRAWS
    assert np.mean(np.log(factors)) == pytest.approx(0.0, abs=1e-12)
    assert np.std(np.log(factors)) == pytest.approx(0.03)
    for factor, drawn in zip(factors, drawn_profiles(profile), strict=True):
        for name, each in LLAMA.step_latency.coefficients.items():
            assert drawn.step_latency.value(name) == pytest.approx(factor * each.value)


def test_draws_are_the_same_numbers_every_time() -> None:
    assert drawn_profiles(LLAMA) == drawn_profiles(LLAMA)


def test_memory_and_identity_of_drawn_profiles_are_those_of_the_profile() -> None:
    for drawn in drawn_profiles(LLAMA):
        assert (drawn.memory, drawn.host, drawn.name) == (LLAMA.memory, LLAMA.host, LLAMA.name)
        assert min(each.value for each in drawn.step_latency.coefficients.values()) >= 0.0


@pytest.mark.parametrize("kind", list(ProvenanceKind))
def test_profiles_without_a_stored_uncertainty_have_that_of_their_kind(kind: ProvenanceKind) -> None:
    profile = with_uncertainty(None)
    profile = profile.replace(provenance=profile.provenance.replace(kind=kind))
    assert scatter(profile) == DEFAULT_SCATTER[kind] > 0.0


def test_pessimistic_steps_are_slower_by_the_quantile_of_the_scatter() -> None:
    profile = with_uncertainty(Uncertainty(scatter=0.1))
    slow = pessimistic_profile(profile, 0.9)
    ratio = slow.step_latency.value("base_ms") / profile.step_latency.value("base_ms")
    assert ratio == pytest.approx(np.exp(0.1 * ndtri(0.9)))
    assert pessimistic_profile(profile, 0.5).step_latency == profile.step_latency


def test_a_slower_machine_has_the_cache_of_the_profile() -> None:
    cache = {
        "ms_per_kv_ktoken_beyond_cache": Coefficient(value=0.02),
        "cache_kv_ktokens": Coefficient(value=8.0),
    }
    steps = LLAMA.step_latency.replace(coefficients=LLAMA.step_latency.coefficients | cache)
    slow = with_step_times(LLAMA.replace(step_latency=steps), 1.5).step_latency
    assert slow.value("cache_kv_ktokens") == 8.0
    times = set(steps.coefficients) - {"cache_kv_ktokens"}
    assert all(slow.value(name) == pytest.approx(1.5 * steps.value(name)) for name in times)


@pytest.mark.parametrize("quantile", [0.4, 1.0, -1.0])
def test_quantiles_on_the_optimistic_side_are_refused(quantile: float) -> None:
    with pytest.raises(InputError, match="robust"):
        pessimistic_profile(LLAMA, quantile)


def test_uncertainties_and_ranges_do_not_change_the_digest_that_surrogates_check() -> None:
    other = with_uncertainty(Uncertainty(scatter=0.5))
    ranges = other.step_latency.replace(fitted_range={})
    assert profile_digest(other.replace(step_latency=ranges)) == profile_digest(LLAMA)


def test_shipped_profiles_store_the_covariance_of_their_fit() -> None:
    for name in ("h100-64g/llama-3.1-8b/vllm-0.8.5", "h100-64g/qwen2.5-7b/vllm-0.8.5"):
        known = load_profile(name).step_latency.uncertainty
        assert known is not None
        assert len(known.names) >= 10
        assert 0.005 < known.scatter < 0.05
