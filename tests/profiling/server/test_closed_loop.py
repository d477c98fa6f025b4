"""Operating points of a server, first tokens and adapter loads."""

import asyncio
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError
from capplan.profiling.load._record import FINISHED, REFUSED, UNFINISHED, RequestOutcome
from capplan.profiling.server._closed_loop import (
    ClosedLoopRequest,
    LoopError,
    RequestSender,
    ServerBounds,
    adapter_loads,
    design,
    first_tokens,
)

bounds = st.builds(
    ServerBounds,
    adapters=st.integers(0, 40),
    a_max=st.integers(1, 40),
    max_streams=st.integers(1, 100),
    longest=st.integers(64, 8192),
    kv_tokens=st.none() | st.integers(100, 100_000),
    prompt_tokens=st.integers(1, 500),
    output_tokens=st.integers(1, 500),
)


@given(bounds, st.booleans())
def test_points_are_within_the_bounds_of_the_server(limits: ServerBounds, base_model: bool) -> None:
    points = design(limits, base_model)
    assert len({point.name for point in points}) == len(points)
    for point in points:
        assert 1 <= point.streams <= limits.max_streams
        assert (0 if base_model else 1) <= point.adapters <= min(limits.adapters, limits.a_max, point.streams)
        assert limits.allow(point)


@given(bounds)
def test_the_first_points_span_the_rest(limits: ServerBounds) -> None:
    points = design(limits)
    if not points:
        return
    batches = {point.streams for point in points[: max(1, len(points) // 2)]}
    assert min(batches) == min(point.streams for point in points)


def test_every_batch_and_number_of_adapters_has_points() -> None:
    points = design(ServerBounds(8, 4, 16, 1024, None, 80, 40))
    assert {(p.streams, p.adapters) for p in points} >= {(1, 1), (16, 4), (16, 1), (16, 0), (8, 2)}


@pytest.mark.parametrize("change", [{"a_max": 0}, {"adapters": -1}, {"prompt_tokens": 0}])
def test_bounds_must_be_positive(change: dict[str, int]) -> None:
    fine = {
        "adapters": 1,
        "a_max": 1,
        "max_streams": 1,
        "longest": 10,
        "prompt_tokens": 1,
        "output_tokens": 1,
    }
    with pytest.raises(InputError):
        ServerBounds(**(fine | change), kv_tokens=None)


class Server:
    """Sender with the given times to first token in turn."""

    def __init__(self, *ttft_s: float, kind: str = FINISHED) -> None:
        self.ttft_s, self.kind, self.sent = ttft_s, kind, 0

    async def send(self, model: int, prompt_tokens: int, output_tokens: int) -> ClosedLoopRequest:
        after_s = self.ttft_s[self.sent % len(self.ttft_s)]
        self.sent += 1
        return ClosedLoopRequest(
            RequestOutcome(0, self.kind, 0.0, 2.0, [after_s, 2.0]), model, prompt_tokens, output_tokens
        )


def loads(server: Server) -> list[dict[str, float | str]]:
    adapters = {1: 8, 2: 8, 3: 16, 4: 8}
    return asyncio.run(adapter_loads(cast(RequestSender, server), adapters, 2, 16, 3, lambda: None))


def test_a_load_time_is_the_difference_of_cold_and_warm_requests() -> None:
    rows = loads(Server(0.030, 0.010))
    assert {row["rank"]: row["ms"] for row in rows} == {8.0: pytest.approx(20.0), 16.0: pytest.approx(20.0)}


def test_an_unmeasurable_load_gets_the_least_time_that_calibration_accepts() -> None:
    rows = loads(Server(0.010, 0.012))
    assert {row["rank"] for row in rows} == {8.0, 16.0}
    assert all(0.0 < float(row["ms"]) < 0.01 for row in rows)


def test_failed_requests_raise_loop_errors_and_cancelled_ones_cancel() -> None:
    for kind, error in ((REFUSED, LoopError), (UNFINISHED, asyncio.CancelledError)):
        with pytest.raises(error):
            asyncio.run(first_tokens(cast(RequestSender, Server(0.01, kind=kind)), [0], [8], 1, lambda: None))
