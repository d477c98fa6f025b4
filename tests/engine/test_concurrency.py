"""Concurrency limit of a server whose event loop is late."""

import math

from hypothesis import given
from hypothesis import strategies as st

from capplan.server._state import ConcurrencyLimit

MOST = 500


class Model:
    """Event loop whose lag grows with the requests in flight, under unlimited demand."""

    def __init__(self, capacity: int, ticks: int) -> None:
        self.in_flight = 0
        self.ended = [0] * ticks
        """Requests that end at each of the next ticks."""
        self.capacity = capacity
        self.limit = ConcurrencyLimit(MOST, lambda: self.in_flight)

    def tick(self) -> None:
        before = self.in_flight
        while self.in_flight < MOST and self.limit.admits():
            self.in_flight += 1
        self.ended.append(self.in_flight - before)
        self.limit.update(self.in_flight / self.capacity)
        self.in_flight -= self.ended.pop(0)


@given(st.integers(40, 400), st.integers(1, 20))
def test_the_limit_settles_at_the_requests_that_are_handled_in_time(capacity: int, ticks: int) -> None:
    """Requests take one to 20 ticks."""
    model = Model(capacity, ticks)
    found = []
    for _ in range(400):
        model.tick()
        found.append(model.limit.value)
    assert capacity / 2 <= min(found)
    assert max(found[200:]) <= capacity + MOST / 100


@given(st.lists(st.floats(0, 100)), st.integers(0, 32))
def test_a_lag_with_few_requests_limits_nothing(lags: list[float], in_flight: int) -> None:
    limit = ConcurrencyLimit(MOST, lambda: in_flight)
    for lag_s in lags:
        limit.update(lag_s)
    assert limit.value == math.inf


@given(st.lists(st.tuples(st.floats(1.1, 100), st.integers(1, 20)), max_size=20))
def test_single_pauses_limit_nothing(pauses: list[tuple[float, int]]) -> None:
    limit = ConcurrencyLimit(MOST, lambda: MOST)
    for lag_s, ticks_in_time in pauses:
        limit.update(lag_s)
        for _ in range(ticks_in_time):
            limit.update(0.0)
    assert limit.value == math.inf


@given(st.lists(st.floats(1.1, 100), min_size=2, max_size=50))
def test_the_limit_ends_in_time(lags: list[float]) -> None:
    limit = ConcurrencyLimit(MOST, lambda: MOST)
    for lag_s in lags:
        limit.update(lag_s)
    assert 32 <= limit.value < MOST
    for _ in range(100):
        limit.update(0.0)
    assert limit.value == math.inf
