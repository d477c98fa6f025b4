"""Demand of adapters by window, and its forecast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError
from capplan.serving.rebalancing import DemandHistory, arrived_tok_s, extrapolate
from capplan.spec import Forecast

HISTORIES = st.lists(st.floats(0.0, 1e6), max_size=30)
KINDS = st.sampled_from([kind for kind in get_args(Forecast) if kind != "gamma-poisson"])
COUNTS = st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=3, max_size=15)


def by_counts(counts: Sequence[Sequence[float]], tok_s_per_request: float) -> np.ndarray:
    """Return the forecast ``gamma-poisson`` for requests of one length."""
    history = DemandHistory(len(counts[0]), "gamma-poisson")
    for window in counts:
        history.close([tok_s_per_request * count for count in window], window)
    return history.forecast(np.zeros(len(counts[0])))


@given(HISTORIES, st.floats(0.0, 1e6), KINDS)
def test_a_forecast_is_between_0_and_twice_the_largest_recent_window(
    history: list[float], declared: float, kind: Forecast
) -> None:
    forecast = extrapolate(history, declared, kind)
    if not history:
        assert forecast == declared
    else:
        assert 0.0 <= forecast <= 2.0 * max(history[-12:]) + 1e-9


@given(HISTORIES.filter(len))
def test_the_last_of_fewer_than_three_steps_is_the_forecast(history: list[float]) -> None:
    assert extrapolate(history[:2], 1.0) == history[:2][-1]


@given(st.floats(0.0, 1e6), st.integers(3, 20))
def test_a_constant_demand_is_extrapolated(tok_s: float, steps: int) -> None:
    assert extrapolate([tok_s] * steps, 0.0) == pytest.approx(tok_s, abs=1e-3)


@given(st.floats(1.0, 1e4), st.floats(0.0, 100.0), st.integers(3, 12))
def test_a_linear_trend_continues(start: float, slope: float, steps: int) -> None:
    history = [start + slope * i for i in range(steps)]
    expected = min(start + slope * steps, 2.0 * history[-1])
    assert extrapolate(history, 0.0) == pytest.approx(expected, rel=1e-9)


def test_holt_is_level_and_trend_smoothed() -> None:
    # Level 0 and trend 4; after the second step 4 and 4; after a third of 2: 5, and 0.3 * 1 + 0.7 * 4 = 3.1.
    assert extrapolate([0.0, 4.0, 2.0], 0.0) == pytest.approx(8.0)  # 8.1, limited to twice the largest step
    assert extrapolate([0.0, 4.0, 6.0], 0.0) == pytest.approx(7.0 + 0.3 * 3.0 + 0.7 * 4.0)


def test_a_smoothed_level_halves_the_weight_of_each_older_window() -> None:
    assert extrapolate([8.0, 4.0, 2.0], 0.0, "ewma") == pytest.approx(8.0 / 4 + 4.0 / 4 + 2.0 / 2)


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=30))
def test_the_last_window_is_a_forecast(history: list[float]) -> None:
    assert extrapolate(history, 1.0, "last") == history[-1]


@given(st.lists(st.floats(1.0, 100.0), min_size=3, max_size=20))
def test_a_line_is_fitted_to_the_last_twelve_windows(history: list[float]) -> None:
    recent = history[-12:]
    slope, constant = np.polyfit(np.arange(len(recent)), recent, 1)
    expected = np.clip(slope * len(recent) + constant, 0.0, 2.0 * max(recent))
    assert extrapolate(history, 1.0, "linear") == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(st.lists(st.tuples(st.floats(0.0, 1e6), st.floats(0.0, 1e6)), max_size=20), KINDS)
def test_adapters_are_forecast_independently(windows: list[tuple[float, float]], kind: Forecast) -> None:
    history = DemandHistory(2, kind)
    for window in windows:
        history.close(window)
    assert history.windows == len(windows)
    alone = [extrapolate([window[i] for window in windows], 1.0, kind) for i in range(2)]
    assert history.forecast([1.0, 1.0]) == pytest.approx(alone, rel=1e-9, abs=1e-6)


@given(COUNTS, st.floats(0.1, 100.0))
def test_counts_shrink_the_last_window_to_the_mean(counts: list[list[int]], tok_s: float) -> None:
    """The forecast is between both, and nearer to the last window the more requests an adapter has."""
    recent = np.array(counts[-12:], float)
    mean, last = recent.mean(axis=0), recent[-1]
    found = by_counts(counts, tok_s) / tok_s
    assert (found >= np.minimum(mean, last) - 1e-9).all()
    assert (found <= np.maximum(mean, last) + 1e-9).all()
    weight = {
        float(m): (f - m) / (x - m) for f, m, x in zip(found, mean, last, strict=True) if abs(x - m) > 1e-6
    }
    assert sorted(weight.values()) == pytest.approx([weight[m] for m in sorted(weight)], abs=1e-6)


def test_counts_of_a_constant_rate_are_forecast_by_their_mean() -> None:
    """A Poisson process leaves about its rate, a trend of many requests its last window."""
    rng = np.random.default_rng(0)
    rates = np.array([3.0, 10.0, 40.0])
    errors = {"gamma-poisson": 0.0, "last": 0.0}
    for _ in range(200):
        counts = rng.poisson(rates, (12, 3)).astype(float)
        errors["gamma-poisson"] += float(np.square(by_counts(counts.tolist(), 1.0) - rates).sum())
        errors["last"] += float(np.square(counts[-1] - rates).sum())
    assert errors["gamma-poisson"] < 0.25 * errors["last"]
    assert by_counts([[1000.0 * 2**i] for i in range(6)], 1.0) == pytest.approx([32000.0], rel=0.001)


def test_counts_are_required_by_the_forecast_that_needs_them() -> None:
    with pytest.raises(InputError, match="requests: are required by the forecast gamma-poisson"):
        DemandHistory(1, "gamma-poisson").close([1.0])
    with pytest.raises(InputError, match="requests: must be one number for each of 1 adapters"):
        DemandHistory(1, "gamma-poisson").close([1.0], [1.0, 2.0])


def test_invalid_demand_is_rejected() -> None:
    history = DemandHistory(2)
    with pytest.raises(InputError, match="tok_s: must be one number for each of 2 adapters"):
        history.close([1.0])
    with pytest.raises(InputError, match="tok_s: must be finite numbers >= 0"):
        history.close([1.0, -1.0])
    with pytest.raises(InputError, match="forecast: must be one of holt"):
        DemandHistory(2, "oracle")  # type: ignore[arg-type]
    assert history.windows == 0


def test_tokens_count_in_the_window_of_arrival() -> None:
    rows = ((0.0, 1, 15), (9.9, 2, 10), (10.0, 1, 100), (15.0, 0, 1008), (20.5, 1, 8))
    arrival_s, adapter, tokens = map(np.array, zip(*rows, strict=True))
    arrived = arrived_tok_s((arrival_s * 1e9).astype(np.int64), adapter, tokens, 2, 10.0, 25.0)
    assert arrived.tolist() == [[1.5, 1.0], [10.0, 0.0]]


@pytest.mark.parametrize("window_s", [0.0, -1.0, 26.0])
def test_an_invalid_window_is_rejected(window_s: float) -> None:
    none = np.zeros(0, np.int64)
    with pytest.raises(InputError, match="window_s"):
        arrived_tok_s(none, none.astype(np.int32), none, 1, window_s, 25.0)
