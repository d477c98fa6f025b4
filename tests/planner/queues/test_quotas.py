import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InfeasibleError
from capplan.planner.queues import QueueLoad, allocate_quotas, queue_loads

RESTS = ("minimum", "load", "rate")


@st.composite
def loads(draw: st.DrawFn) -> QueueLoad:
    largest = draw(st.integers(2, 20_000))
    mean = draw(st.floats(2.0, largest))
    return QueueLoad(
        rate_rps=draw(st.floats(1e-6, 50.0)),
        size_tokens=draw(st.floats(mean, largest)),
        mean_tokens=mean,
        largest_tokens=largest,
        execution_s=draw(st.floats(1e-3, 200.0)),
    )


several = st.lists(loads(), min_size=1, max_size=4)
bounds = st.floats(0.1, 100.0)
percentiles = st.none() | st.sampled_from([0.5, 0.95, 0.99])


def needed(queues: Sequence[QueueLoad], bound_s: float, percentile: float | None) -> list[int]:
    return [max(each.least_tokens(bound_s, percentile), each.largest_tokens) for each in queues]


@given(several, bounds, percentiles, st.sampled_from(RESTS), st.integers(0, 10**6))
def test_quotas_sum_to_all_tokens_and_none_is_below_its_minimum_or_its_largest_request(
    queues: list[QueueLoad], bound_s: float, percentile: float | None, rest: str, spare: int
) -> None:
    least = needed(queues, bound_s, percentile)
    tokens = sum(least) + spare
    quotas = allocate_quotas(queues, tokens, bound_s, percentile=percentile, rest=rest)  # type: ignore[arg-type]
    assert sum(quotas) == tokens
    assert all(quota >= minimum for quota, minimum in zip(quotas, least, strict=True))


@given(several, bounds, percentiles, st.integers(1, 10**6))
def test_quotas_that_do_not_fit_are_refused_with_the_queue_and_the_shortfall(
    queues: list[QueueLoad], bound_s: float, percentile: float | None, short: int
) -> None:
    least = needed(queues, bound_s, percentile)
    with pytest.raises(InfeasibleError) as error:
        allocate_quotas(queues, sum(least) - short, bound_s, percentile=percentile)
    assert f"{short:,} more than" in str(error.value)
    assert f"queue {least.index(max(least)) + 1} of {len(queues)}" in str(error.value)
    fits = sum(each.largest_tokens for each in queues) <= sum(least) - short
    assert error.value.reason == ("slo" if fits else "memory")


@given(loads(), bounds)
def test_the_minimum_keeps_the_mean_time_of_the_model_within_its_bound(
    load: QueueLoad, bound_s: float
) -> None:
    rate = load.least_tokens(bound_s) / (load.size_tokens * load.execution_s)
    assert rate > load.rate_rps
    assert 1.0 / (rate - load.rate_rps) <= bound_s * (1.0 + 1e-9)


@given(loads(), bounds, st.floats(0.01, 0.999))
def test_the_minimum_for_a_percentile_keeps_that_share_within_the_bound(
    load: QueueLoad, bound_s: float, percentile: float
) -> None:
    rate = load.least_tokens(bound_s, percentile) / (load.size_tokens * load.execution_s)
    assert 1.0 - math.exp(-(rate - load.rate_rps) * bound_s) >= percentile - 1e-9


def load(rate_rps: float, tokens: int, execution_s: float) -> QueueLoad:
    return QueueLoad(rate_rps, tokens, tokens / 2, tokens, execution_s)


@pytest.mark.parametrize(
    ("rest", "quotas"),
    [
        # Minima are 100 x 2 x (0.5 + 3) = 700 and 300 x 10 x (0.5 + 1) = 4500; 2600 of the 7800 are left.
        ("minimum", (1050, 6750)),
        # Mean loads are 3 x 50 x 2 = 300 and 1 x 150 x 10 = 1500.
        ("load", (700 + 433, 4500 + 2167)),
        # Rates are 3 and 1.
        ("rate", (700 + 1950, 4500 + 650)),
    ],
)
def test_the_rest_goes_by_the_weight_that_was_asked_for(rest: str, quotas: tuple[int, int]) -> None:
    two = (load(3.0, 100, 2.0), load(1.0, 300, 10.0))
    assert allocate_quotas(two, 7800, 2.0, rest=rest) == quotas  # type: ignore[arg-type]


def test_by_minima_quotas_are_the_minima_scaled_up() -> None:
    """The paper's rule in one formula: Tok_min x Tok_total / sum of Tok_min."""
    queues = (load(5.0, 400, 1.0), load(2.0, 900, 3.0), load(0.5, 4000, 9.0))
    least = [each.least_tokens(4.0) for each in queues]
    quotas = allocate_quotas(queues, 3 * sum(least), 4.0)
    assert quotas == pytest.approx([3 * each for each in least], abs=1)


def test_the_size_that_stands_for_a_queue_is_the_one_that_was_asked_for() -> None:
    charges, alone = np.array([100] * 98 + [700, 9000]), np.zeros(100, np.int64)
    sizes = {
        size: queue_loads(charges, np.ones(100), alone, 4.0, size)[0].size_tokens  # type: ignore[arg-type]
        for size in ("max", "p99", "mean")
    }
    assert sizes["max"] == 9000
    assert sizes["p99"] == np.percentile(charges, 99)
    assert sizes["mean"] == 195.0


def test_a_queue_with_no_known_time_takes_that_of_the_others() -> None:
    times = np.array([2.0, 4.0, np.nan, np.nan])
    loads = queue_loads(np.array([10, 10, 90, 90]), times, np.array([0, 0, 1, 1]), 4.0, "max")
    assert [load.execution_s for load in loads] == [3.0, 3.0]
    assert [load.rate_rps for load in loads] == [2.0, 2.0]
