"""Lengths keep their mean, and their bounds, whatever rounding and the clip do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError, Lengths
from capplan.workload import length_table
from capplan.workload._sampling import discrete_table, sample_at

LIMIT = 8192


@given(mean=st.floats(2, 4000), spread=st.floats(0, 2), limit=st.sampled_from([LIMIT, 131_072]))
def test_the_realised_mean_is_the_mean_asked_for(mean, spread, limit):
    """A floored normal would inflate it by 10 %; within 0.5 % is the contract, and 0.1 % is what is kept."""
    table = length_table(Lengths(mean=mean, std=spread * mean), limit)
    assert table.mean_tokens == pytest.approx(mean, rel=1e-3)
    assert table.tokens[0] >= 1
    assert table.tokens[-1] <= limit
    assert np.all(table.probabilities > 0)
    assert table.probabilities.sum() == pytest.approx(1, abs=1e-12)


@given(mean=st.floats(2, 1000), spread=st.floats(0.1, 2))
def test_the_realised_spread_is_the_one_asked_for_where_the_clip_leaves_room(mean, spread):
    """Means up to 1000 with std up to twice that lose little to a clip at 131072."""
    std = max(1.0, spread * mean)
    table = length_table(Lengths(mean=mean, std=std), 131_072)
    assert table.std_tokens == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize(("mean", "std"), [(1000, 1500), (1000, 300), (2000, 4000), (2040, 500)])
def test_a_tight_clip_cuts_the_spread_but_not_the_mean(mean, std):
    table = length_table(Lengths(mean=mean, std=std), 2048)
    assert table.mean_tokens == pytest.approx(mean, rel=1e-3)
    assert table.std_tokens <= std * 1.001


@pytest.mark.parametrize(
    ("mean", "std", "limit"), [(130.25, 0.5, LIMIT), (3, 1, 4), (60, 50, 100), (1.01, 0.5, 64)]
)
def test_corners_keep_the_mean(mean, std, limit):
    assert length_table(Lengths(mean=mean, std=std), limit).mean_tokens == pytest.approx(mean, rel=1e-3)


@pytest.mark.parametrize(
    ("lengths", "limit"),
    [
        (Lengths(mean=5000), 4096),
        (Lengths(mean=5000, std=10), 4096),
        (Lengths(mean=4096, std=10), 4096),
        (Lengths(mean=1, std=3), 4096),
        (Lengths(mean=10), 0),
        (Lengths(mean=4096 - 1e-9, std=40_000), 4096),
    ],
)
def test_a_mean_that_cannot_be_reached_is_refused(lengths, limit):
    with pytest.raises(InputError, match=r"must be|cannot be reached"):
        length_table(lengths, limit)


def test_a_constant_is_constant_and_a_fraction_is_shared_out():
    assert length_table(Lengths(mean=900), LIMIT).tokens.tolist() == [900]
    table = length_table(Lengths(mean=2.25), LIMIT)
    assert table.tokens.tolist() == [2, 3]
    assert table.probabilities.tolist() == [0.75, 0.25]
    assert length_table(Lengths(mean=LIMIT), LIMIT).tokens.tolist() == [LIMIT]


def test_a_histogram_is_taken_as_it_is_and_its_tail_ends_at_the_limit():
    table = length_table(Lengths(values=[1, 50, 200, 300], counts=[1, 0, 2, 1]), 100)
    assert table.tokens.tolist() == [1, 100]
    assert table.probabilities.tolist() == [0.25, 0.75]


def test_bins_are_uniform_inside():
    table = length_table(Lengths(edges=[1, 3, 8], counts=[2, 1]), LIMIT)
    assert table.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert table.probabilities == pytest.approx(np.array([1, 1, 0.2, 0.2, 0.2, 0.2, 0.2]) / 3)


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=300).filter(any),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=50),
)
def test_draws_invert_the_cumulative_distribution(counts, draws):
    """The definition, in its slow form: the first value whose cumulative probability exceeds the draw."""
    lengths = Lengths(values=range(1, len(counts) + 1), counts=counts)
    table = length_table(lengths, LIMIT)
    cumulative = np.cumsum(table.probabilities)
    edges = (np.arange(0, 300) / 256).tolist()  # draws on the borders of look-up buckets
    uniform = np.array([u for u in (*draws, *edges, *cumulative.tolist()) if u < cumulative[-1] and u < 1])
    drawn = table.draw(uniform)
    for u, tokens in zip(uniform, drawn, strict=True):
        assert any(
            tokens
            == table.tokens[
                np.searchsorted(cumulative, u + shift, side="right").clip(max=len(table.tokens) - 1)
            ]
            for shift in (-1e-12, 0.0, 1e-12)
        )
    assert all(counts[tokens - 1] > 0 for tokens in drawn)


@given(
    distributions=st.lists(
        st.lists(st.floats(0, 5), min_size=1, max_size=40).filter(lambda weights: max(weights) > 1e-3),
        min_size=1,
        max_size=6,
    ),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20),
)
def test_each_of_several_distributions_is_inverted_by_its_own_cumulative(distributions, draws):
    tables = [
        (np.arange(10 * k, 10 * k + len(weights), dtype=np.int32) + 1, np.array(weights))
        for k, weights in enumerate(distributions)
    ]
    numbers = np.tile(draws, len(tables))
    which = np.repeat(np.arange(len(tables), dtype=np.int32), len(draws))
    drawn = np.empty(len(numbers), np.int32)
    sample_at(drawn, discrete_table(tables), which, numbers)
    for u, k, value in zip(numbers, which, drawn, strict=True):
        values, weights = tables[k]
        cumulative = np.cumsum(weights) / weights.sum()
        at = int(np.flatnonzero(values == value)[0])
        assert weights[at] > 0
        assert cumulative[at] >= u - 1e-12
        assert at == 0 or cumulative[at - 1] <= u + 1e-12


def test_drawn_frequencies_are_the_probabilities():
    table = length_table(Lengths(mean=12, std=9), LIMIT)
    n = 400_000
    drawn = table.draw(np.random.default_rng(5).random(n))
    seen = np.bincount(drawn, minlength=table.tokens[-1] + 1)[table.tokens]
    expected = table.probabilities * n
    busy = expected > 10
    chi_square = ((seen - expected)[busy] ** 2 / expected[busy]).sum()
    assert chi_square < busy.sum() + 5 * np.sqrt(2 * busy.sum())
