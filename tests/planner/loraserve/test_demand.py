"""Demand: what arrives in a time step, and what the next one will bring."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError
from capplan.planner.solvers.loraserve import Extrapolation, arrived_tok_s, extrapolate
from capplan.workload import Requests

METHODS = st.sampled_from(Extrapolation)
HISTORIES = st.lists(st.floats(0.0, 1e6), max_size=30)


@given(HISTORIES, st.floats(0.0, 1e6), METHODS)
def test_a_forecast_is_between_nothing_and_twice_the_largest_recent_step(
    history: list[float], declared: float, method: Extrapolation
) -> None:
    forecast = extrapolate(history, declared, method)
    if not history:
        assert forecast == declared
    else:
        assert 0.0 <= forecast <= 2.0 * max(history[-12:]) + 1e-9


@given(HISTORIES.filter(len), METHODS)
def test_fewer_than_three_steps_stand_for_themselves(history: list[float], method: Extrapolation) -> None:
    assert extrapolate(history[:2], 1.0, method) == history[:2][-1]


@given(st.floats(0.0, 1e6), st.integers(3, 20), METHODS)
def test_a_steady_demand_stays(tok_s: float, steps: int, method: Extrapolation) -> None:
    assert extrapolate([tok_s] * steps, 0.0, method) == pytest.approx(tok_s, abs=1e-3)


@given(st.floats(1.0, 1e4), st.floats(0.0, 100.0), st.integers(3, 12))
def test_trends_go_on_where_a_method_knows_of_them(start: float, slope: float, steps: int) -> None:
    history = [start + slope * i for i in range(steps)]
    goes_on = min(start + slope * steps, 2.0 * history[-1])
    assert extrapolate(history, 0.0, Extrapolation.LINEAR) == pytest.approx(goes_on, rel=1e-6)
    assert extrapolate(history, 0.0, Extrapolation.HOLT) == pytest.approx(goes_on, rel=1e-9)
    assert extrapolate(history, 0.0, Extrapolation.LAST) == history[-1]
    assert extrapolate(history, 0.0, Extrapolation.EWMA) <= history[-1] * (1 + 1e-12)


def test_holt_is_level_and_trend_smoothed() -> None:
    # Level 0 and trend 4; after the second step 4 and 4; after a third of 2: 5, and 0.3 * 1 + 0.7 * 4 = 3.1.
    assert extrapolate([0.0, 4.0, 2.0], 0.0) == pytest.approx(8.0)  # 8.1, kept at twice the largest step
    assert extrapolate([0.0, 4.0, 6.0], 0.0) == pytest.approx(7.0 + 0.3 * 3.0 + 0.7 * 4.0)


def requests(*rows: tuple[float, int, int, int]) -> Requests:
    arrival_s, adapter, prompt, output = zip(*rows, strict=True)
    return Requests(
        (np.array(arrival_s) * 1e9).astype(np.int64),
        np.array(adapter, np.int32),
        np.array(prompt, np.int32),
        np.array(output, np.int32),
    )


def test_tokens_count_where_their_requests_arrive() -> None:
    some = requests((0.0, 1, 10, 5), (9.9, 2, 7, 3), (10.0, 1, 100, 0), (15.0, 0, 999, 9), (20.5, 1, 4, 4))
    assert arrived_tok_s(some, 2, 10.0, 25.0).tolist() == [[1.5, 1.0], [10.0, 0.0]]


@pytest.mark.parametrize("step_s", [0.0, -1.0, 26.0])
def test_a_step_that_does_not_fit_is_refused(step_s: float) -> None:
    with pytest.raises(InputError, match="step_s"):
        arrived_tok_s(requests((0.0, 1, 1, 1)), 1, step_s, 25.0)
