import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import Adapter, InfeasibleError, InputError, Lengths, Plan, Workload, plan
from capplan.planner import Solver, SolverContext
from capplan.planner.problem import AdapterShare, Assignment, Problem
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._previous import (
    PreviousInstance,
    moved_adapters,
    moved_bytes,
    name_groups,
    previous_instances,
)
from capplan.planner.problem._setup import make_problem
from capplan.planner.search._local_search import Evaluator, LocalSearch, MoveSearch
from capplan.planner.search._placement import PlacementState, SearchData, build_search_data, warm_start
from capplan.planner.solvers._base import Requirement
from capplan.spec import Move
from tests.planner.conftest import MODEL, PROFILE

pytestmark = pytest.mark.long

Make = Callable[..., Workload]
ADAPTERS = tuple((f"a{i}", 8 * (1 + i % 2), 1.8) for i in range(20))


@pytest.fixture(scope="module")
def in_force(tmp_path_factory: pytest.TempPathFactory, workload: Make) -> Path:
    path = tmp_path_factory.mktemp("plans") / "yesterday.json"
    plan(workload(*ADAPTERS), gpus=8, seeds=1).to_json(path)
    return path


def replanned(spec: Workload, path: Path, **options: Any) -> Plan:
    return plan(spec.replace(previous_plan=str(path)), gpus=8, seeds=1, **options)


def holders(made: Plan) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for group in made.groups:
        for adapter in group.adapters:
            found.setdefault(adapter.name, set()).add(group.id)
    return found


def test_an_unchanged_workload_has_no_moves(workload: Make, in_force: Path) -> None:
    made = replanned(workload(*ADAPTERS), in_force)
    assert made.moves == ()
    assert made.provenance["moved_bytes"] == 0
    assert holders(made) == holders(Plan.from_json(in_force))


def test_a_new_adapter_is_placed_and_the_others_stay(workload: Make, in_force: Path) -> None:
    made = replanned(workload(*ADAPTERS, ("new", 8, 0.1)), in_force)
    assert [move.adapter for move in made.moves] == ["new"]
    assert made.moves[0].from_group is None
    assert made.moves[0].to_group in {group.id for group in made.groups}


def scaled(factor: float) -> tuple[tuple[str, int, float], ...]:
    return tuple((name, rank, factor * rate) for name, rank, rate in ADAPTERS)


@pytest.mark.parametrize("factor", [1.1, 2.0])
def test_a_change_moves_few_adapters_on_no_more_gpus(workload: Make, in_force: Path, factor: float) -> None:
    spec = workload(*scaled(factor))
    made, scratch = replanned(spec, in_force), plan(spec, gpus=8, seeds=1)
    assert made.verification.ok
    assert made.totals.gpus <= scratch.totals.gpus
    assert len(Plan.from_json(in_force).groups) > 1
    assert made.provenance["moved_adapters"] <= len(ADAPTERS) // 3


def test_a_plan_from_scratch_replaces_a_near_one_that_repairs_made_larger(
    workload: Make, tmp_path: Path
) -> None:
    """A quarter of an overloaded GPU moves to an unused one, which a placement from scratch does not need."""
    spec, path = workload(*((f"a{i}", 8, 6.0) for i in range(10))), tmp_path / "plan.json"

    def placing(counts: Sequence[int], near: Sequence[int]) -> Solver:
        def place(problem: Problem, context: SolverContext) -> list[Assignment]:
            shares, on_gpus = iter(problem.shares), near if context.previous else counts
            if not on_gpus:
                raise InfeasibleError("gpus: none", "gpus")
            return [Assignment(tuple(islice(shares, count)), count) for count in on_gpus]

        return Solver("fixed", "", "", place, supports=frozenset(Requirement))

    plan(spec, gpus=4, seeds=1, solver=placing((5, 5), ())).to_json(path)
    repaired = replanned(spec, path, solver=placing((), near=(9, 1)))
    assert repaired.verification.ok
    assert repaired.totals.gpus > 2
    made = replanned(spec, path, solver=placing((5, 5), near=(9, 1)))
    assert made.verification.ok
    assert made.totals.gpus == 2
    assert made.moves == ()


def test_no_start_is_built_twice_on_one_size(workload: Make, in_force: Path) -> None:
    """The second search, which may improve starts, does not repeat the first, which leaves them."""
    problem = make_problem(workload(*scaled(1.5)), 8, None)
    old = previous_instances(Plan.from_json(in_force))
    built: Counter[tuple[int, ...]] = Counter()

    def start(data: SearchData, pools: Sequence[int]) -> PlacementState | None:
        built[tuple(pools)] += 1
        return warm_start(old)(data, pools)

    twin = TwinEstimator(problem, 0)
    data = build_search_data(problem)
    local = LocalSearch(data, Evaluator(data, twin, twin), time.monotonic() + 60.0, (start,))
    search = MoveSearch(problem, old, local)
    first = search.search(None)
    second = search.search(first)
    assert first is not None
    assert second is not None
    assert search.cost(second) <= search.cost(first)
    assert set(built.values()) == {1}


def test_fewer_moves_on_more_gpus_are_a_choice_at_its_price(workload: Make, tmp_path: Path) -> None:
    """The load falls: fewer GPUs are needed if adapters move, and none moves if they stay."""
    path = tmp_path / "large.json"
    large = plan(workload(*scaled(2.0)), gpus=8, seeds=1)
    large.to_json(path)
    light = workload(*scaled(0.5))
    free = replanned(light, path)
    choices: Any = free.provenance["choices"]
    assert choices
    for choice, cheaper in zip(
        choices, [free.provenance | {"gpus": free.totals.gpus}, *choices], strict=False
    ):
        assert choice["gpus"] > cheaper["gpus"]
        assert choice["moved_adapters"] < cheaper["moved_adapters"]
    assert choices[-1]["gpus"] == large.totals.gpus
    assert choices[-1]["moved_adapters"] == 0
    for choice in choices:
        priced = replanned(light.replace(move_cost=choice["move_cost"]), path)
        assert priced.verification.ok
        assert priced.totals.gpus == choice["gpus"]
        assert priced.provenance["moved_adapters"] == choice["moved_adapters"]
    assert "choices" not in replanned(light.replace(move_cost=1.0), path).provenance


def test_the_price_of_moves_needs_a_cost_to_compare_with(workload: Make) -> None:
    with pytest.raises(InputError, match="min_gpus or min_cost"):
        workload(*ADAPTERS, objective="min_latency", move_cost=0.1)


def test_moves_turn_the_old_shares_into_the_new_ones_at_three_times_the_load(
    workload: Make, in_force: Path
) -> None:
    """More instances, and split adapters."""
    made = replanned(workload(*scaled(3.0)), in_force)
    old = previous_instances(Plan.from_json(in_force))
    after = {group.id: {a.name: a.share for a in group.adapters} for group in made.groups}
    assert_difference({i.name: dict(i.fractions) for i in old}, after, made.moves)


Placed = dict[str, dict[str, float]]


def assert_difference(before: Placed, after: Placed, moves: Sequence[Move]) -> None:
    """Check that the moves turn the shares of one plan into those of the other."""
    shares = {(group, name): share for group, held in before.items() for name, share in held.items()}
    for move in moves:
        for group, sign in ((move.from_group, -1.0), (move.to_group, 1.0)):
            if group is not None:
                key = (group, move.adapter)
                shares[key] = shares.get(key, 0.0) + sign * move.share
    new = {(group, name): share for group, held in after.items() for name, share in held.items()}
    for key in {*shares, *new}:
        assert shares.get(key, 0.0) == pytest.approx(new.get(key, 0.0), abs=1e-4)


NAMES = tuple(f"a{i}" for i in range(8))


@st.composite
def placements(draw: st.DrawFn) -> list[dict[str, float]]:
    """Draw instances that hold each of some adapters in one to three equal shares."""
    instances: list[dict[str, float]] = [{} for _ in range(draw(st.integers(1, 5)))]
    for name in draw(st.sets(st.sampled_from(NAMES), min_size=1)):
        numbers = st.sets(st.integers(0, len(instances) - 1), min_size=1, max_size=3)
        holders = draw(numbers)
        for instance in holders:
            instances[instance][name] = 1.0 / len(holders)
    return [each for each in instances if each]


@settings(max_examples=60, deadline=None)
@given(before=placements(), after=placements())
def test_moves_are_exactly_the_difference(
    before: list[dict[str, float]], after: list[dict[str, float]]
) -> None:
    """Renaming groups alone moves nothing."""
    names = {name for held in after for name in held}
    adapters = [Adapter(name=name, rank=8, rate_rps=1.0) for name in NAMES if name in names]
    lengths = {"prompt_tokens": Lengths(mean=100), "output_tokens": Lengths(mean=100)}
    spec = Workload(base_model=MODEL, profile=PROFILE, gpus={"count": 4}, adapters=adapters, **lengths)
    problem = make_problem(spec, 8, None)
    old = [PreviousInstance(f"old-{i}", None, held) for i, held in enumerate(before)]
    share = {adapter.name: AdapterShare.of(adapter) for adapter in adapters}
    new = [Assignment(tuple(replace(share[n], fraction=f) for n, f in held.items()), 1) for held in after]
    groups, moves = name_groups(problem, new, old)
    assert_difference({i.name: dict(i.fractions) for i in old}, dict(zip(groups, after, strict=True)), moves)
    assert moved_adapters(moves) <= len(names)
    if sorted(map(sorted, before)) == sorted(map(sorted, after)):
        assert moved_bytes(problem, moves, old) == 0


def test_a_removed_adapter_is_taken_away_and_the_others_stay(workload: Make, in_force: Path) -> None:
    made = replanned(workload(*ADAPTERS[:-1]), in_force)
    assert [(move.adapter, move.to_group, move.share) for move in made.moves] == [("a19", None, 1.0)]
    assert made.provenance["moved_adapters"] == made.provenance["moved_bytes"] == 0


def test_a_missing_plan_is_named(workload: Make, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json"):
        replanned(workload(*ADAPTERS), tmp_path / "nowhere.json")
