from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import (
    Adapter,
    Assignment,
    InfeasibleError,
    InputError,
    Lengths,
    Problem,
    Profile,
    Workload,
    load_profile,
    plan,
)
from capplan.planner import SolverContext
from capplan.planner.problem import Estimate, GpuPool
from capplan.planner.problem._bound import lower_bound, lower_bound_gpus
from capplan.planner.problem._setup import make_problem
from capplan.planner.solvers import registry
from capplan.spec import EngineConfig, Objective
from capplan.testing import Capacity, example_problem

PROFILE = "h100-64g/llama-3.1-8b/vllm-0.8.5"


class TwoKinds:
    """Instances of the second pool hold half of what those of the first do."""

    def __init__(self, rps: float) -> None:
        self.kinds = (Capacity(rps), Capacity(rps / 2.0))

    def __call__(self, assignment: Assignment) -> Estimate:
        return self.kinds[assignment.pool](assignment)


def pooled(seed: int, adapters: int, counts: tuple[int, int], prices: tuple[float, float]) -> Problem:
    """Return a problem with two pools of these sizes and prices."""
    problem = example_problem(seed, adapters, gpus=1)
    (only,) = problem.pools
    pools = tuple(
        GpuPool(name, only.profile, count, price)
        for name, count, price in zip(("big", "small"), counts, prices, strict=True)
    )
    configs = tuple(pool_config(str(pool.name), pool.instances, pool.usd_per_hour) for pool in pools)
    return replace(problem, workload=problem.workload.replace(pools=configs), pools=pools)


def pool_config(name: str, count: int, usd_per_hour: float | None) -> dict[str, object]:
    return {"name": name, "profile": PROFILE, "count": count, "usd_per_hour": usd_per_hour}


def solved(problem: Problem, objective: Objective, rps: float) -> Sequence[Assignment]:
    estimator = TwoKinds(rps)
    changed = replace(problem, workload=problem.workload.replace(objective=objective))
    return registry()["capplan"].place(changed, SolverContext(estimator=estimator, twin=estimator))


def price(problem: Problem, answer: Sequence[Assignment]) -> float:
    return sum(problem.pools[a.pool].usd_per_hour or 0.0 for a in answer)


@pytest.mark.long
@settings(max_examples=8, derandomize=True)
@given(seed=st.integers(0, 1000), dear=st.sampled_from([1.0, 1.5, 3.0, 8.0]))
def test_min_cost_is_cheapest_and_min_gpus_is_smallest(seed: int, dear: float) -> None:
    problem = pooled(seed, adapters=20, counts=(6, 10), prices=(dear, 1.0))
    fewest = solved(problem, Objective.MIN_GPUS, rps=4.0)
    cheapest = solved(problem, Objective.MIN_COST, rps=4.0)
    assert len(fewest) <= len(cheapest)
    assert price(problem, cheapest) <= price(problem, fewest)
    for answer in (fewest, cheapest):
        used = [a.pool for a in answer]
        assert used.count(0) <= 6
        assert used.count(1) <= 10
        assert all(not TwoKinds(4.0)(a).starved for a in answer)
        assert sorted(p.name for a in answer for p in a.shares) == sorted(p.name for p in problem.shares)


def test_min_cost_prefers_the_pool_with_the_lower_price_per_load() -> None:
    problem = pooled(1, adapters=12, counts=(8, 16), prices=(4.0, 1.0))
    assert {a.pool for a in solved(problem, Objective.MIN_COST, rps=6.0)} == {1}
    assert 0 in {a.pool for a in solved(problem, Objective.MIN_GPUS, rps=6.0)}


def test_too_few_instances_in_all_pools_are_infeasible() -> None:
    problem = pooled(1, adapters=40, counts=(1, 1), prices=(1.0, 1.0))
    with pytest.raises(InfeasibleError, match="2 GPU"):
        solved(problem, Objective.MIN_GPUS, rps=2.0)


@pytest.fixture
def heavy() -> Workload:
    return Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        adapters=tuple(Adapter(name=f"a{i}", rank=8, rate_rps=0.5) for i in range(64)),
        prompt_tokens=Lengths(mean=500.0),
        output_tokens=Lengths(mean=200.0),
    )


def test_the_lower_bound_of_equal_pools_is_that_of_one(heavy: Workload) -> None:
    one = heavy.replace(profile=PROFILE, gpus={"count": 8})
    halves = [pool_config("a", 4, 3.0), pool_config("b", 4, 1.0)]
    two = heavy.replace(pools=tuple(halves))
    whole, divided = make_problem(one, None, None), make_problem(two, None, None)
    assert lower_bound(divided).gpus == pytest.approx(lower_bound(whole).gpus, rel=1e-6)
    assert lower_bound_gpus(divided) == lower_bound_gpus(whole)
    assert 0.0 < lower_bound(divided).usd_per_hour <= 3.0 * lower_bound(whole).gpus


def test_a_plan_over_pools_has_pools_and_prices(heavy: Workload) -> None:
    pools = [pool_config("a", 2, 3.0), pool_config("b", 2, 1.0)]
    adapters = (heavy.adapters[0].replace(pool="a"), *heavy.adapters[1:24])
    made = plan(heavy.replace(pools=tuple(pools), adapters=adapters, objective="min_cost"), seeds=1)
    assert made.verification.ok
    prices = {"a": 3.0, "b": 1.0}
    assert made.totals.usd_per_hour == sum(prices[g.pool or ""] for g in made.groups)
    assert all(g.pool == "a" for g in made.groups if any(x.name == "a0" for x in g.adapters))


def test_gpus_and_pools_together_are_rejected(heavy: Workload, profile: Profile) -> None:
    pools = ({"name": "a", "profile": PROFILE, "count": 2},)
    with pytest.raises(InputError, match="gpus: does not go with pools"):
        make_problem(heavy.replace(pools=pools), 3, None)
    with pytest.raises(InputError, match="profile: does not go with pools"):
        make_problem(heavy.replace(pools=pools), None, profile)


def test_groups_of_pools_with_different_engines_name_theirs(profile: Profile, tmp_path: Path) -> None:
    """A group is served by the engine that verified it."""
    other = profile.replace(
        name="other/engine", engine=profile.engine.replace(version="0.32.0", rules="vllm-0.32-sync")
    )
    (tmp_path / "other.json").write_text(other.model_dump_json())
    pools = [
        pool_config("old", 1, None),
        {**pool_config("new", 1, None), "profile": str(tmp_path / "other.json")},
    ]
    adapters = [Adapter(name=name, rank=8, rate_rps=0.1, pool=name) for name in ("old", "new")]
    lengths = {"prompt_tokens": Lengths(mean=100), "output_tokens": Lengths(mean=20)}
    workload = Workload(base_model=profile.model.hf_ids[0], adapters=adapters, pools=pools, **lengths)
    made = plan(workload, seeds=1)
    versions = {group.pool: made.engine_of(group).version for group in made.groups}
    assert versions == {"old": "0.8.5", "new": "0.32.0"}
    assert sum(group.engine is None for group in made.groups) == 1


def test_pools_with_and_without_an_adapter_cache_are_refused_before_the_search(
    heavy: Workload, profile: Profile, tmp_path: Path
) -> None:
    """The cluster twin refuses such instances; the search would take its time first."""
    other = profile.replace(
        name="other/cache",
        engine=profile.engine.replace(name="capplan", version="0.1.0", rules="chameleon"),
    )
    (tmp_path / "other.json").write_text(other.model_dump_json())
    pools = (
        pool_config("plain", 1, None),
        {**pool_config("cached", 4, None), "profile": str(tmp_path / "other.json")},
    )

    def never(problem: Problem, context: SolverContext) -> Sequence[Assignment]:
        raise AssertionError("searched")

    solver = replace(registry()["capplan"], place=never, splits_hot=False)
    rule = "pools: cached.profile: must serve with a scheduler and an adapter cache, or without"
    with pytest.raises(InputError, match=rule):
        plan(heavy.replace(pools=pools), solver=solver)
    cached = heavy.replace(pools=pools, scheduler="chameleon", cache="chameleon")
    with pytest.raises(AssertionError, match="searched"):
        plan(cached, solver=solver)


def test_max_model_len_never_exceeds_the_positions_of_the_model() -> None:
    shipped = load_profile(PROFILE)
    short = shipped.replace(model=shipped.model.replace(max_positions=4096))
    unknown = shipped.replace(model=shipped.model.replace(max_positions=None))
    spec = Workload(
        base_model=shipped.model.hf_ids[0],
        adapters=[Adapter(name="a", rank=8, rate_rps=0.1)],
        prompt_tokens=Lengths(mean=100),
        output_tokens=Lengths(mean=50),
    )
    assert make_problem(spec, 1, short).engine.max_model_len == 4096
    assert make_problem(spec, 1, shipped).engine.max_model_len == 8192
    assert make_problem(spec, 1, unknown).engine.max_model_len == 8192
    given = spec.replace(engine=EngineConfig(max_model_len=8192))
    with pytest.raises(InputError) as refused:
        make_problem(given, 1, short)
    assert str(refused.value) == (
        "engine.max_model_len: must be at most 4096, the positions of Llama-3.1-8B (got 8192)"
    )


def test_a_plan_names_the_profiles_that_it_uses_and_no_others() -> None:
    composed = "h100-80g/llama-3.1-8b/vllm-0.15.1"
    pools = (
        {"name": "dear", "profile": composed, "count": 1, "usd_per_hour": 9.0},
        {"name": "cheap", "profile": PROFILE, "count": 1, "usd_per_hour": 1.0},
    )
    workload = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        pools=pools,
        objective="min_cost",
        adapters=[Adapter(name="a", rank=8, rate_rps=0.1)],
        prompt_tokens=Lengths(mean=200),
        output_tokens=Lengths(mean=100),
    )
    made = plan(workload, seeds=1)
    assert [group.pool for group in made.groups] == ["cheap"]
    assert list(made.provenance["pools"]) == ["cheap"]
    assert (made.engine.version, made.groups[0].engine) == ("0.8.5", None)
