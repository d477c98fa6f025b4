from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.planner.search.data import build_search_data
from capplan.planner.search.placement import INITIAL_SOLUTIONS, InitialSolution, balanced
from capplan.planner.splitting import split_evenly
from capplan.testing import example_problem


@pytest.mark.parametrize("start", INITIAL_SOLUTIONS)
@given(seed=st.integers(0, 10_000), adapters=st.integers(1, 60), gpus=st.integers(1, 12))
def test_a_start_places_every_unit_once_and_adds_up_shares(
    start: InitialSolution, seed: int, adapters: int, gpus: int
) -> None:
    problem = example_problem(seed, adapters, gpus)
    count = min(gpus, 1 + seed % 4)
    shares = (*split_evenly(problem.shares[0], count), *problem.shares[1:])
    ground = build_search_data(replace(problem, shares=shares))
    board = start(ground, [0] * gpus)
    assert board is not None
    assert sorted(unit for members in board.members for unit in members) == list(range(len(shares)))
    for members in board.members:
        names = [share.name for share in ground.shares(frozenset(members))]
        assert len(set(names)) == len(names)
    served = [share for members in board.members for share in ground.shares(frozenset(members))]
    first = problem.shares[0].name
    assert sum(share.fraction for share in served if share.name == first) == pytest.approx(1.0)


@given(seed=st.integers(0, 10_000), gpus=st.integers(1, 8))
def test_mixed_instances_of_one_rank_differ_by_at_most_the_heaviest_unit(seed: int, gpus: int) -> None:
    problem = example_problem(seed, 40, gpus)
    ground = build_search_data(
        replace(problem, shares=tuple(replace(share, rank=8) for share in problem.shares))
    )
    board = balanced(ground, [0] * gpus)
    assert board is not None
    assert board.taken().max() - board.taken().min() <= ground.weight.max() + 1e-9
