"""The busiest window of a moving rate: no other window has more load, and the mean rate stays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import Adapter, InputError, Lengths, Workload
from capplan.spec import Burst, Diurnal, Renewal, ShiftingSkew, Steps
from capplan.workload import busiest_window
from capplan.workload._requests import operational_time

WINDOW_S = 3600.0


def workload_with(modulation: Steps | Diurnal | Burst | ShiftingSkew) -> Workload:
    return Workload(
        base_model="m",
        adapters=[Adapter(name="low", rank=8, rate_rps=1.0), Adapter(name="high", rank=64, rate_rps=1.0)],
        prompt_tokens=Lengths(mean=10),
        output_tokens=Lengths(mean=10),
        arrivals=Renewal(modulation=modulation),
    )


def load(workload: Workload, start_s: float, end_s: float) -> float:
    time = operational_time(workload.arrivals.modulation, workload, 10 * WINDOW_S)
    return float(np.sum(time.passed(end_s) - time.passed(start_s)))


factors = st.lists(st.floats(0.1, 10.0), min_size=2, max_size=5)
cycles = st.one_of(
    st.builds(Diurnal, amplitude=st.floats(0, 1), period_s=st.floats(600, 90_000), phase=st.floats(0, 0.99)),
    st.builds(
        lambda every_s, factor, at: Burst(
            factor=factor, every_s=every_s, length_s=every_s / 8, at_s=at * every_s
        ),
        st.floats(600, 20_000),
        st.floats(1, 10),
        st.floats(0, 0.8),
    ),
    st.builds(
        lambda period_s, values: Steps(
            steps=tuple((period_s * i / len(values), f) for i, f in enumerate(values)), period_s=period_s
        ),
        st.floats(600, 50_000),
        factors,
    ),
)


@settings(max_examples=80, deadline=None)
@given(cycles)
def test_no_window_of_a_long_cycle_is_busier(cycle: Steps | Diurnal | Burst) -> None:
    given_workload = workload_with(cycle)
    moved = busiest_window(given_workload, WINDOW_S)
    period_s = cycle.every_s if isinstance(cycle, Burst) else cycle.period_s
    assert period_s is not None
    if period_s <= WINDOW_S:
        assert moved is given_workload
        return
    most = max(load(given_workload, start, start + WINDOW_S) for start in np.linspace(0.0, period_s, 97))
    assert load(moved, 0.0, WINDOW_S) >= most * (1.0 - 1e-3)
    assert load(moved, 0.0, period_s) == pytest.approx(load(given_workload, 0.0, period_s))


def test_both_ends_of_a_slow_shift_of_popularity_are_in_the_window() -> None:
    moved = busiest_window(workload_with(ShiftingSkew(from_rank=32, to_rank=16, over_s=7200.0)), WINDOW_S)
    assert moved.arrivals == Renewal(modulation=ShiftingSkew(from_rank=32, to_rank=16, over_s=WINDOW_S))


def test_steps_beyond_the_window_need_a_period() -> None:
    steps = Steps(steps=((0.0, 1.0), (7200.0, 5.0)))
    with pytest.raises(InputError, match=r"arrivals\.modulation\.period_s: is required"):
        busiest_window(workload_with(steps), WINDOW_S)
