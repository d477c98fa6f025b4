"""Random numbers by position are those of SplitMix64, uniform, and unrelated between streams and seeds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from capplan.workload import uniform
from capplan.workload._sampling import streams, uniforms

N = 200_000


def test_the_numbers_are_those_of_splitmix64():
    """First five of the published generator seeded with 1234567; it counts from 1."""
    published = (
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    )
    for index, bits in enumerate(published, start=1):
        assert uniform(np.uint64(1234567), index) == (bits >> 11) / 2**53


@given(seed=st.integers(0, 2**128), count=st.integers(1, 50), index=st.integers(0, 49))
def test_a_number_depends_on_seed_stream_and_position_only(seed, count, index):
    key = streams(seed).prompts
    assert key == streams(seed).prompts
    if index < count:
        assert uniforms(key, count)[index] == uniform(key, index)
    assert 0 <= uniform(key, index) < 1


def test_keys_of_streams_and_of_neighbouring_seeds_differ():
    keys = [int(key) for seed in range(1000) for key in streams(seed)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_each_stream_is_uniform_and_its_neighbours_are_independent(seed):
    for key in streams(seed):
        numbers = uniforms(key, N)
        assert stats.kstest(numbers, "uniform").pvalue > 1e-4
        for distance in (1, 2, 64):  # pairs fill a 32 x 32 grid evenly
            pairs = (numbers[:-distance] * 32).astype(int) * 32 + (numbers[distance:] * 32).astype(int)
            assert stats.chisquare(np.bincount(pairs, minlength=1024)).pvalue > 1e-4


def test_low_bits_are_as_even_as_high_ones():
    bits = (uniforms(streams(5).arrivals, N) * 2**53).astype(np.int64)
    ones = np.array([((bits >> position) & 1).sum() for position in range(53)])
    assert np.all(np.abs(ones - N / 2) < 5 * np.sqrt(N) / 2)


def test_streams_of_one_seed_and_of_neighbouring_seeds_do_not_correlate():
    columns = np.array([uniforms(key, N) for seed in (0, 1, 2) for key in streams(seed)])
    correlation = np.corrcoef(columns)[np.triu_indices(len(columns), 1)]
    assert np.abs(correlation).max() < 5 / np.sqrt(N)
