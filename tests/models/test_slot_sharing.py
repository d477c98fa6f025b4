"""Slot time-sharing: the roots that Newton's method finds are those of bisections, or further ones."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from capplan.models._fluid import (
    FluidLoad,
    busy_periods,
    first_share,
    rotation_period_s,
    slot_rotation,
)
from tests.models.test_fluid import load_of

HORIZON_S = 3600.0
BISECTIONS = 24
STAY_S = 36_000.0

LOADS = st.builds(
    load_of,
    st.dictionaries(st.floats(-4.0, 1.0).map(lambda x: 10.0**x), st.integers(1, 60), min_size=1, max_size=6),
    output_cv=st.floats(0.0, 2.0),
    arrivals_cv=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
LIVES = st.floats(0.1, 100.0)
SLOTS = st.floats(0.02, 0.98)
"""Slots over adapters."""


def bisected(low: float, high: float, is_below: Callable[[float], bool]) -> float:
    """Return the root of a falling function after 24 halvings of its logarithm, from above."""
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if is_below(np.exp(middle)) else (low, middle)
    return float(np.exp(high))


def stays_s(load: FluidLoad, busy_s: np.ndarray, backlog_s: float, period_s: float) -> np.ndarray:
    return np.minimum(STAY_S, busy_s + backlog_s * np.log1p(load.rates_rps * period_s))


def slots_wanted(load: FluidLoad, busy_s: np.ndarray, backlog_s: float, period_s: float) -> float:
    stays = stays_s(load, busy_s, backlog_s, period_s)
    return float((load.counts * stays / np.maximum(period_s, 1.0 / load.rates_rps + stays)).sum())


def noted(load: FluidLoad, life_s: float) -> tuple[np.ndarray, float]:
    """Return the busy periods of a load, and how many slots are wanted where nobody waits."""
    busy_s = np.empty(load.rates_rps.size)
    return busy_s, busy_periods(load, life_s, busy_s)[1]


@given(LOADS, LIVES, SLOTS, st.floats(1e-3, 1e8))
def test_the_period_is_the_step_that_bisections_end_at_wherever_the_search_begins(
    load: FluidLoad, life_s: float, share: float, guess_s: float
) -> None:
    busy_s, wanted = noted(load, life_s)
    a_max, backlog_s = share * load.adapters, life_s * min(1.0, load.output_cv)
    assume(wanted > a_max)
    found = rotation_period_s(load, busy_s, backlog_s, a_max, HORIZON_S, guess_s)

    def is_crowded(period_s: float) -> bool:
        return slots_wanted(load, busy_s, backlog_s, period_s) > a_max

    exact = bisected(np.log(1e-3), np.log(1e5 * HORIZON_S), is_crowded)
    step = 1.5 * (np.log(1e5 * HORIZON_S) - np.log(1e-3)) / 2**BISECTIONS
    # Stays grow with the period, so there may be several periods with as many slots in use as there are.
    is_another = is_crowded(found * np.exp(-step)) and not is_crowded(found * np.exp(step))
    assert is_another or abs(np.log(found / exact)) < step


@given(st.integers(0, 2**32 - 1), st.integers(1, 400), LIVES, st.floats(1e-2, 1e6))
def test_sums_over_many_rates_are_those_of_numpy(
    seed: int, adapters: int, life_s: float, period_s: float
) -> None:
    """Compiled loops over many rates are vectorised, with another exponential and in another order."""
    random = np.random.default_rng(seed)
    rates = np.sort(10.0 ** random.uniform(-4.0, 1.0, adapters))
    load = load_of(dict.fromkeys(rates.tolist(), 2.0))
    busy_s, wanted = noted(load, life_s)
    longer = np.exp(-rates * life_s)
    stay_s = life_s + (1.0 - longer * (1.0 + rates * life_s)) / (rates * np.maximum(longer, 1e-20))
    held_s = np.minimum(STAY_S, stay_s)
    assert busy_s == pytest.approx(stay_s, rel=1e-9)
    assert wanted == pytest.approx((2.0 * held_s / (1.0 / rates + held_s)).sum(), rel=1e-9)
    for each in (load, load._replace(arrivals_cv=0.5)):
        active, _ = busy_periods(each, life_s, np.empty(adapters))
        assert active == pytest.approx((2.0 * (1.0 - longer)).sum(), rel=1e-9)
    rotation = slot_rotation(load, busy_s, life_s, period_s, HORIZON_S)
    free_s = 1.0 / rates + stays_s(load, busy_s, life_s, period_s)
    wait_s = np.maximum(0.0, period_s - free_s)
    assert rotation.loads_per_s == pytest.approx((2.0 / np.maximum(period_s, free_s)).sum(), rel=1e-9)
    assert rotation.wait_s == pytest.approx((2.0 * rates * wait_s).sum() / load.total_rps, rel=1e-9)


@given(LOADS, SLOTS)
def test_the_first_requested_adapters_are_as_many_as_slots(load: FluidLoad, share: float) -> None:
    a_max = share * load.adapters

    def asked_for(time_s: float) -> np.ndarray:
        return load.counts * -np.expm1(-load.rates_rps * time_s)

    time_s = bisected(-30.0, 30.0, lambda x: float(asked_for(x).sum()) < a_max)
    expected = (asked_for(time_s) * load.rates_rps).sum() / load.total_rps
    assert first_share(load, a_max) == pytest.approx(expected, rel=2e-5)


@given(LOADS, LIVES)
def test_without_waits_nothing_is_lost(load: FluidLoad, life_s: float) -> None:
    busy_s, _ = noted(load, life_s)
    rotation = slot_rotation(load, busy_s, life_s, 0.0, HORIZON_S)
    assert (rotation.wait_s, rotation.share) == (0.0, 1.0)


@given(LOADS, LIVES, st.floats(1.0, 1e6), st.floats(1.0, 10.0))
def test_longer_periods_let_less_through(
    load: FluidLoad, life_s: float, period_s: float, factor: float
) -> None:
    busy_s, _ = noted(load, life_s)
    shorter, longer = (
        slot_rotation(load, busy_s, life_s, t, HORIZON_S) for t in (period_s, factor * period_s)
    )
    assert 0.0 < longer.share <= shorter.share * (1 + 1e-9) <= 1 + 2e-9
    assert longer.loads_per_s <= shorter.loads_per_s * (1 + 1e-9)
