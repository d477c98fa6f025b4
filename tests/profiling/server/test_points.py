import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.profiling.server.closed_loop import ServerBounds, design

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
def test_no_point_asks_for_more_than_the_server_has(limits: ServerBounds, base_model: bool) -> None:
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
def test_bounds_are_sizes(change: dict[str, int]) -> None:
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
