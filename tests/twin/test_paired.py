"""Order of configurations by paired simulations."""

import math

import pytest

from capplan import InputError
from capplan.twin.instance import PAIRED_SEEDS, mean_with_error, paired_difference, paired_order
from capplan.twin.instance._paired import contradictions

NOISE = (0.0, 30.0, -10.0, 55.0, -45.0)


def test_noise_that_configurations_share_cancels() -> None:
    slow = [100.0 + noise for noise in NOISE]
    fast = [102.0 + noise + small for noise, small in zip(NOISE, (0.1, -0.1, 0.2, 0.0, -0.2), strict=True)]
    assert paired_difference(fast, slow).decided
    assert paired_difference(fast, slow).sign == 1
    assert not mean_with_error([value - 100.0 for value in fast]).decided


def test_the_standard_error_is_that_of_the_mean() -> None:
    found = mean_with_error([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.std_error == pytest.approx(math.sqrt(5.0 / 3.0 / 4.0))


@pytest.mark.parametrize("seeds", range(1, PAIRED_SEEDS))
def test_fewer_than_five_seeds_decide_nothing(seeds: int) -> None:
    assert not paired_difference([1.0] * seeds, [100.0] * seeds).decided
    assert paired_difference([1.0] * seeds, [100.0] * seeds).sign == 0


def test_equal_values_are_undecided() -> None:
    assert not paired_difference([1.0] * 5, [1.0] * 5).decided


def test_an_order_marks_neighbours_that_are_not_told_apart() -> None:
    values = {1: (10.0, 11.0, 12.0, 11.0, 10.0), 3: (20.0, 22.0, 21.0, 20.0, 22.0)}
    values[8] = (20.5, 21.0, 21.9, 20.9, 21.0)
    assert str(paired_order(values, largest_first=True)) == "8 ~ 3 > 1"
    assert str(paired_order(values, largest_first=False)) == "1 > 3 ~ 8"


def test_only_decided_measurements_can_be_contradicted() -> None:
    up, down, unsure = (1.0, 1.1, 1.2, 1.1, 1.0), (0.0, 0.1, 0.3, 0.2, 0.1), (0.2, 1.4, 0.7, 1.7, 0.9)
    assert contradictions({3: up, 8: down}, {3: up, 8: down}) == ()
    assert contradictions({3: up, 8: down}, {3: down, 8: up}) == ((3, 8),)
    assert contradictions({3: up, 8: down}, {3: up, 8: unsure}) == ((3, 8),)
    assert contradictions({3: up, 8: unsure}, {3: down, 8: up}) == ()


def test_different_numbers_of_seeds_are_refused() -> None:
    with pytest.raises(InputError, match="must have 2 seeds"):
        paired_difference([1.0, 2.0], [1.0])
