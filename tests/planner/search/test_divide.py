from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.planner.search.data import build_search_data, split_heavy_adapters
from capplan.testing import example_problem


@settings(max_examples=30, derandomize=True)
@given(seed=st.integers(0, 10_000), adapters=st.integers(1, 40), factor=st.floats(0.1, 20.0))
def test_heavy_adapters_come_in_light_shares_that_add_up(seed: int, adapters: int, factor: float) -> None:
    problem = example_problem(seed, adapters, gpus=4)
    shares = tuple(replace(share, rate_rps=share.rate_rps * factor) for share in problem.shares)
    ground = build_search_data(replace(problem, shares=shares))
    lighter = split_heavy_adapters(ground)
    for name in {share.name for share in shares}:
        assert sum(share.fraction for share in lighter.shares if share.name == name) == pytest.approx(1.0)
    if lighter is not ground.problem:
        assert len(lighter.shares) > len(shares)


def test_no_more_shares_than_max_replicas() -> None:
    problem = example_problem(0, 3, gpus=4)
    hot = tuple(
        adapter.model_copy(update={"rate_rps": 50.0, "max_replicas": 2})
        for adapter in problem.workload.adapters
    )
    workload = problem.workload.model_copy(update={"adapters": hot})
    shares = tuple(replace(share, rate_rps=50.0) for share in problem.shares)
    lighter = split_heavy_adapters(build_search_data(replace(problem, workload=workload, shares=shares)))
    assert sorted(share.number for share in lighter.shares) == [0, 0, 0, 1, 1, 1]
