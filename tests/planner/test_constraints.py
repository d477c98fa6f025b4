from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import Adapter, Assignment, InfeasibleError, InputError, Problem
from capplan.planner import SolverContext
from capplan.planner.problem import GpuPool, read_constraints, whole_adapters
from capplan.planner.solvers import REGISTRY
from capplan.planner.splitting import split_hot_adapters
from capplan.testing import Capacity, example_problem

SMALL = Capacity(rps=4.0, rps_per_slot_of_rank_16=0.01)


def changed(problem: Problem, **changes: dict[str, object]) -> Problem:
    """Return the problem with fields of some adapters changed."""
    adapters = tuple(a.replace(**changes.get(a.name, {})) for a in problem.workload.adapters)
    problem = replace(problem, workload=problem.workload.replace(adapters=adapters))
    return replace(problem, shares=whole_adapters(problem))


def two_pools(problem: Problem) -> Problem:
    """Return the problem with the GPUs of its only pool divided in two pools."""
    (pool,) = problem.pools
    names = ({"name": name, "profile": pool.profile.name, "count": 8} for name in ("big", "small"))
    workload = problem.workload.replace(pools=tuple(names))
    pools = tuple(GpuPool(name, pool.profile, 8) for name in ("big", "small"))
    return replace(problem, workload=workload, pools=pools)


def solved(problem: Problem, estimator: Capacity = SMALL) -> Sequence[Assignment]:
    split = replace(problem, shares=split_hot_adapters(problem, estimator))
    return REGISTRY["capplan"].place(split, SolverContext(estimator=estimator, twin=estimator))


def names_of(assignment: Assignment) -> set[str]:
    return {share.name for share in assignment.shares}


@settings(max_examples=30, derandomize=True)
@given(st.data())
def test_apart_is_never_on_one_gpu_and_together_always(data: st.DataObject) -> None:
    """Whatever the wishes, as long as they do not contradict each other."""
    problem = example_problem(data.draw(st.integers(0, 1000)), adapters=24, gpus=16)
    index = st.integers(0, 23)
    pairs = data.draw(st.lists(st.tuples(index, index).filter(lambda p: p[0] != p[1]), max_size=8))
    apart, together = pairs[::2], pairs[1::2]
    changes: dict[str, dict[str, object]] = {}
    for key, wishes in (("apart_from", apart), ("together_with", together)):
        for one, other in wishes:
            own = changes.setdefault(f"a{one}", {})
            own[key] = tuple(dict.fromkeys((*own.get(key, ()), f"a{other}")))  # type: ignore[misc]
    try:
        problem = changed(problem, **changes)
        read_constraints(problem.workload)
    except (InputError, ValueError):
        return
    try:
        answer = solved(problem)
    except InfeasibleError:
        return
    for assignment in answer:
        there = names_of(assignment)
        assert all(not {f"a{one}", f"a{other}"} <= there for one, other in apart)
        assert all((f"a{one}" in there) == (f"a{other}" in there) for one, other in together)
    assert sum(len(a.shares) for a in answer) == len(split_hot_adapters(problem, SMALL))


def test_adapters_that_stay_together_are_split_together() -> None:
    problem = changed(
        example_problem(0, adapters=3, gpus=12),
        a0={"rate_rps": 7.0, "together_with": ("a1",)},
        a1={"rate_rps": 2.0},
    )
    answer = solved(problem)
    holders = [names_of(a) for a in answer if "a0" in names_of(a)]
    assert len(holders) == 3
    assert all("a1" in names for names in holders)


def test_a_pinned_adapter_is_served_from_its_pool_only() -> None:
    problem = changed(
        two_pools(example_problem(3, adapters=20, gpus=16)),
        a2={"pool": "small"},
        a5={"pool": "big", "rate_rps": 5.0},
    )
    for assignment in solved(problem):
        pool = problem.pools[assignment.pool].name
        assert pool == "small" or "a2" not in names_of(assignment)
        assert pool == "big" or "a5" not in names_of(assignment)


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        ({"a0": {"together_with": ("a1",)}, "a1": {"apart_from": ("a0",)}}, "a1.apart_from"),
        (
            {
                "a0": {"together_with": ("a1",)},
                "a1": {"together_with": ("a2",)},
                "a2": {"apart_from": ("a0",)},
            },
            "a2.apart_from",
        ),
        ({"a0": {"together_with": ("a1",), "pool": "big"}, "a1": {"pool": "small"}}, "a1.pool"),
    ],
)
def test_wishes_that_contradict_each_other_are_named(
    adapters: dict[str, dict[str, object]], words: str
) -> None:
    problem = changed(two_pools(example_problem(0, adapters=4, gpus=4)), **adapters)
    with pytest.raises(InputError, match=words) as error:
        read_constraints(problem.workload)
    assert len(str(error.value).splitlines()) == 1


def test_without_wishes_every_adapter_is_its_own_bundle() -> None:
    problem = example_problem(0, adapters=5, gpus=1)
    constraints = read_constraints(problem.workload)
    assert all(first == name for name, first in constraints.leader.items())
    assert not constraints.conflicts
    assert not constraints.pinned_pool
    assert isinstance(problem.workload.adapters[0], Adapter)
