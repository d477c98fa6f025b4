"""Which instance goes, and which one comes."""

import pytest

from capplan import Adapter, InfeasibleError, Lengths, Problem, Workload
from capplan.planner.explain.what_if import one_fewer, one_more
from capplan.planner.problem import make_problem
from tests.planner.conftest import MODEL, PROFILE


def posed(prices: dict[str, float | None], pinned: str | None = None) -> Problem:
    pools = tuple(
        {"name": name, "profile": PROFILE, "count": 4, "usd_per_hour": price}
        for name, price in prices.items()
    )
    workload = Workload(
        base_model=MODEL,
        pools=pools,
        prompt_tokens=Lengths(mean=100),
        output_tokens=Lengths(mean=50),
        adapters=(
            Adapter(name="a", rank=8, rate_rps=1.0, pool=pinned),
            Adapter(name="b", rank=8, rate_rps=1.0),
        ),
    )
    return make_problem(workload, None, None)


@pytest.mark.parametrize(
    ("prices", "used", "left", "grown"),
    [
        ({"dear": 4.0, "cheap": 1.0}, (0, 1, 1), (1, 1), (0, 1, 1, 1)),
        ({"dear": 4.0, "cheap": 1.0}, (0, 0), (0,), (0, 0, 1)),
        ({"x": None, "y": 1.0}, (0, 1, 1), (0, 1), (0, 1, 1, 1)),
    ],
    ids=["both in use", "cheap one unused", "no prices"],
)
def test_the_dearest_in_use_goes_and_the_cheapest_comes(
    prices: dict[str, float | None], used: tuple[int, ...], left: tuple[int, ...], grown: tuple[int, ...]
) -> None:
    problem = posed(prices)
    fewer = one_fewer(problem, used)
    assert fewer is not None
    assert fewer.pools == left
    assert one_more(problem, used).pools == grown


def test_the_workload_has_the_instances_that_are_left_and_no_other() -> None:
    fewer = one_fewer(posed({"dear": 4.0, "cheap": 1.0}), (0, 1, 1))
    assert fewer is not None
    assert [(pool.name, pool.count) for pool in fewer.workload.pools] == [("cheap", 2)]
    assert fewer.gpus == 2


def test_an_adapter_pinned_to_what_is_gone_has_no_place() -> None:
    fewer = one_fewer(posed({"dear": 4.0, "cheap": 1.0}, pinned="dear"), (0, 1))
    assert fewer is not None
    with pytest.raises(InfeasibleError, match="adapter a is pinned to pool dear, which has none left"):
        _ = fewer.workload


def test_nothing_is_left_of_one_instance() -> None:
    assert one_fewer(posed({"dear": 4.0}), (0,)) is None
