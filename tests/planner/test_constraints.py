"""Placement constraints, and splitting of hot adapters."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import Adapter, Assignment, EngineConfig, InfeasibleError, InputError, Problem
from capplan.planner import SolverContext
from capplan.planner.problem import GpuPool, split_hot_adapters, whole_adapters
from capplan.planner.problem._problem import read_constraints
from capplan.planner.solvers import registry
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
    return placed(replace(problem, shares=split_hot_adapters(problem, estimator)), estimator)


def placed(problem: Problem, estimator: Capacity) -> Sequence[Assignment]:
    return registry()["capplan"].place(problem, SolverContext(estimator=estimator, twin=estimator))


def names_of(assignment: Assignment) -> set[str]:
    return {share.name for share in assignment.shares}


@pytest.mark.long
@settings(max_examples=30, derandomize=True)
@given(st.data())
def test_apart_from_and_together_with_are_kept(data: st.DataObject) -> None:
    problem = example_problem(data.draw(st.integers(0, 1000)), adapters=24, gpus=16)
    index = st.integers(0, 23)
    pairs = data.draw(st.lists(st.tuples(index, index).filter(lambda p: p[0] != p[1]), max_size=8))
    apart, together = pairs[::2], pairs[1::2]
    changes: dict[str, dict[str, object]] = {}
    for key, pairs in (("apart_from", apart), ("together_with", together)):
        for one, other in pairs:
            own = changes.setdefault(f"a{one}", {})
            own[key] = tuple(dict.fromkeys((*own.get(key, ()), f"a{other}")))  # type: ignore[misc]
    try:
        problem = changed(problem, **changes)
        read_constraints(problem.workload.adapters, problem.traffic)
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


def test_adapters_placed_together_are_split_together() -> None:
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
def test_contradicting_constraints_are_rejected(adapters: dict[str, dict[str, object]], words: str) -> None:
    problem = changed(two_pools(example_problem(0, adapters=4, gpus=4)), **adapters)
    with pytest.raises(InputError, match=words) as error:
        read_constraints(problem.workload.adapters, problem.traffic)
    assert len(str(error.value).splitlines()) == 1


def test_without_constraints_every_adapter_is_alone() -> None:
    problem = example_problem(0, adapters=5, gpus=1)
    constraints = read_constraints(problem.workload.adapters, problem.traffic)
    assert all(first == name for name, first in constraints.leader.items())
    assert not constraints.conflicts
    assert not constraints.pinned_pool
    assert isinstance(problem.workload.adapters[0], Adapter)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_a_hot_adapter_is_split_and_its_shares_sum_to_one(count: int) -> None:
    problem, estimator = example_problem(0, adapters=6, gpus=12), Capacity(rps=4.0)
    problem = changed(problem, a0={"rate_rps": 4.0 * count - 0.5})
    shares = split_hot_adapters(problem, estimator)
    mine = [share for share in shares if share.name == "a0"]
    assert len(mine) == count
    assert sum(share.fraction for share in mine) == pytest.approx(1.0, abs=1e-12)
    answer = placed(replace(problem, shares=shares), estimator)
    assert sum(any(p.name == "a0" for p in a.shares) for a in answer) == count


def test_a_costlier_kind_of_adapter_is_split_at_a_lower_rate() -> None:
    """Ranks and lengths count as well as tokens."""
    problem = example_problem(0, adapters=2, gpus=4)
    problem = changed(problem, a0={"rank": 8, "rate_rps": 3.0}, a1={"rank": 64, "rate_rps": 2.0})
    shares = split_hot_adapters(problem, Capacity(rps=4.0, rps_per_slot_of_rank_16=0.7))
    assert sorted(share.name for share in shares) == ["a0", "a1", "a1"]


@given(st.integers(0, 2**32 - 1), st.floats(2.0, 30.0))
def test_the_first_test_of_the_hottest_adapters_changes_no_share(seed: int, rps: float) -> None:
    """It ends the split of plain problems before kinds of adapters are built."""
    problem, estimator = example_problem(seed, adapters=8, gpus=40), Capacity(rps=rps)
    fast = split_hot_adapters(problem, estimator)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("capplan.planner.problem._splitting._is_plain", lambda _: False)
        assert split_hot_adapters(problem, estimator) == fast


def test_max_replicas_limits_the_shares() -> None:
    problem = example_problem(0, adapters=3, gpus=12)
    with pytest.raises(InfeasibleError, match="adapter a0") as error:
        split_hot_adapters(changed(problem, a0={"rate_rps": 11.0, "max_replicas": 2}), Capacity(rps=4.0))
    assert error.value.reason == "starvation"
    enough = changed(problem, a0={"rate_rps": 11.0, "max_replicas": 3})
    assert len(split_hot_adapters(enough, Capacity(rps=4.0))) == 5


def test_a_rank_without_room_for_the_fixed_slots_is_infeasible() -> None:
    """Also for an idle adapter."""
    problem = example_problem(0, adapters=6, gpus=12, engine=EngineConfig(max_loras=64))
    large = changed(problem, a3={"rank": 512, "rate_rps": 0.0})
    with pytest.raises(InfeasibleError, match="a3") as error:
        split_hot_adapters(large, Capacity(rps=4.0))
    assert error.value.reason == "memory"
