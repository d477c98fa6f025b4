"""Which batches are timed."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.profiling.kernels.cases import GRIDS, Case, cases

SEEDS = st.integers(0, 10_000)


@given(SEEDS)
def test_the_papers_grid_keeps_to_its_batches_and_ranks(seed: int) -> None:
    grid = cases("paper", seed)
    assert {case.requests for case in grid} == set(range(4, 33, 4))
    assert {rank for case in grid for rank in case.ranks} == {8, 16, 32, 64}
    assert all(case.tokens == case.requests == len(case.ranks) for case in grid)


@given(SEEDS)
def test_mixes_tell_the_largest_rank_from_the_sum(seed: int) -> None:
    for _, same_batch in groupby(cases("paper", seed), key=lambda case: case.requests):
        padded_as_64 = [sum(case.ranks) for case in same_batch if max(case.ranks) == 64]
        assert min(padded_as_64) < 0.5 * max(padded_as_64)


@pytest.mark.parametrize("grid", GRIDS)
def test_every_case_of_a_grid_has_a_name_of_its_own(grid: str) -> None:
    names = [case.name for case in cases(grid)]
    assert len(set(names)) == len(names)


def test_the_wide_grid_holds_the_papers_and_reaches_the_required_ends() -> None:
    wide = cases("wide")
    assert set(cases("paper")) < set(wide)
    assert {case.requests for case in wide} >= {1, 256}
    assert {rank for case in wide for rank in case.ranks} >= {8, 128}
    assert {case.phase for case in wide} == {"decode", "prefill"}


def test_draws_of_one_batch_belong_to_one_configuration() -> None:
    drawn = [case for case in cases("paper") if case.mix.startswith("drawn") and case.requests == 32]
    assert len(drawn) > 1
    assert len({case.ranks for case in drawn}) == len(drawn)
    assert len({case.configuration for case in drawn}) == 1


def test_shared_adapters_count_once_and_their_requests_each() -> None:
    case = Case("wide", "decode", "shared", 0, (8, 16), requests_each=4, tokens_each=3)
    assert (case.requests, case.tokens) == (8, 24)


def test_an_unknown_grid_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match="paper, wide"):
        cases("papers")
