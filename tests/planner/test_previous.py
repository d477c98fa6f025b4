from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capplan import InputError, Plan, Workload, plan
from capplan.planner.previous import previous_instances

Make = Callable[..., Workload]
ADAPTERS = tuple((f"a{i}", 8 * (1 + i % 2), 0.6) for i in range(20))


@pytest.fixture(scope="module")
def in_force(tmp_path_factory: pytest.TempPathFactory, workload: Make) -> Path:
    path = tmp_path_factory.mktemp("plans") / "yesterday.json"
    plan(workload(*ADAPTERS), gpus=4, seeds=1).to_json(path)
    return path


def replanned(spec: Workload, path: Path, **options: Any) -> Plan:
    return plan(spec.replace(previous_plan=str(path)), gpus=4, seeds=1, **options)


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


def test_moves_turn_the_old_shares_into_the_new_ones(workload: Make, in_force: Path) -> None:
    """Also at three times the load, with more instances and split adapters."""
    hotter = tuple((name, rank, 3.0 * rate) for name, rank, rate in ADAPTERS)
    made = replanned(workload(*hotter), in_force)
    shares = {
        (i.name, a): s for i in previous_instances(Plan.from_json(in_force)) for a, s in i.fractions.items()
    }
    for move in made.moves:
        if move.from_group is not None:
            shares[move.from_group, move.adapter] -= move.share
        if move.to_group is not None:
            key = (move.to_group, move.adapter)
            shares[key] = shares.get(key, 0.0) + move.share
    after = {(g.id, a.name): a.share for g in made.groups for a in g.adapters}
    for key in {*shares, *after}:
        assert shares.get(key, 0.0) == pytest.approx(after.get(key, 0.0), abs=1e-9)


def test_an_adapter_missing_from_the_workload_is_named(workload: Make, in_force: Path) -> None:
    with pytest.raises(InputError, match=r"adapters of the workload only.*a19") as error:
        replanned(workload(*ADAPTERS[:-1]), in_force)
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_plan_is_named(workload: Make, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json"):
        replanned(workload(*ADAPTERS), tmp_path / "nowhere.json")
