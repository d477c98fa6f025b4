import numpy as np
import pytest

from capplan import load_profile
from capplan.models.surrogates.features import FEATURES
from capplan.twin.dataset.old import generate_dataset, sample_at

PROFILE = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")


def test_the_same_seed_gives_the_same_data_whatever_the_number_of_workers() -> None:
    one = generate_dataset(PROFILE, 40, seed=1, duration_s=20.0)
    two = generate_dataset(PROFILE, 40, seed=1, duration_s=20.0, workers=2)
    np.testing.assert_array_equal(one.features, two.features)
    np.testing.assert_array_equal(one.throughput_tok_s, two.throughput_tok_s)
    np.testing.assert_array_equal(one.served_fraction, two.served_fraction)
    other = generate_dataset(PROFILE, 40, seed=2, duration_s=20.0)
    assert not np.array_equal(one.features, other.features)


def test_every_scenario_is_told_of() -> None:
    calls: list[tuple[int, int]] = []
    data = generate_dataset(
        PROFILE, 24, duration_s=5.0, progress=lambda done, total: calls.append((done, total))
    )
    assert calls == [(done, 24) for done in range(1, 25)]
    assert data.features.shape == (data.throughput_tok_s.size, len(FEATURES))
    assert 12 <= data.throughput_tok_s.size <= 24
    assert np.all(np.isfinite(data.features))
    assert np.all((data.served_fraction >= 0) & (data.served_fraction <= 1))


@pytest.mark.parametrize("seed", range(20))
def test_a_sample_is_a_workload_that_an_engine_accepts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sample = sample_at(rng.random(10), rng)
    ranks = [adapter.rank for adapter in sample.workload.adapters]
    assert sample.s_max >= max(ranks)
    assert 1 <= sample.a_max <= len(ranks)
    assert sample.workload.total_rate_rps > 0
