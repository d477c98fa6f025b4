"""Differences of plans."""

from __future__ import annotations

import json
from pathlib import Path

from capplan.planner import diff_plans
from tests.cli.conftest import Run, error_line, run
from tests.cli.examples import group, plan_of, small_plan

__all__ = ["run"]

A, B, C = ("a", 8, 1.0, "org/a"), ("b", 8, 1.0, "org/b"), ("c", 16, 1.0, "org/c")


def test_a_plan_does_not_differ_from_itself() -> None:
    found = diff_plans(small_plan(), small_plan())
    assert found.is_empty
    assert found.copied_adapters == 0


def test_groups_are_matched_by_their_adapters_and_not_by_their_ids() -> None:
    old = plan_of(group("x", adapters=(A, B)), group("y", adapters=(C,)))
    new = plan_of(group("y", adapters=(A, B)), group("x", adapters=(C,)))
    assert diff_plans(old, new).is_empty


def test_moved_added_and_removed_adapters_are_told_apart() -> None:
    old = plan_of(group("x", adapters=(A, B)), group("y", adapters=(C,)))
    new = plan_of(group("x", adapters=(A,)), group("y", adapters=(C, B, ("d", 8, 1.0, "org/d"))))
    found = diff_plans(old, new)
    assert (found.added, found.removed, found.moved) == (("d",), (), ("b",))
    assert found.copied_adapters == 2
    assert (
        found.copied_bytes == 2 * 8 * 2 * 32 * 81_920
    )  # two adapters of rank 8 on all layers of Llama-3.1-8B
    assert {change.new: (change.arriving, change.leaving) for change in found.groups} == {
        "x": ((), ("b",)),
        "y": (("b", "d"), ()),
    }
    back = diff_plans(new, old)
    assert (back.added, back.removed, back.moved) == ((), ("d",), ("b",))


def test_settings_and_replicas_of_a_group_are_compared() -> None:
    old = plan_of(group("x", adapters=(A, B)))
    changed = group("x", adapters=(A, B), replicas=3, max_loras=7)
    found = diff_plans(old, plan_of(changed))
    (change,) = found.groups
    assert change.settings["replicas"] == (1, 3)
    assert change.settings["max_loras"][1] == 7
    assert found.plan["GPUs"] == (1, 3)
    assert not found.moved


def test_an_adapter_of_another_rank_is_copied_again() -> None:
    old = plan_of(group("x", adapters=(A, B)), group("y", adapters=(C,)))
    new = plan_of(group("x", adapters=(("a", 16, 1.0, "org/a"), B)), group("y", adapters=(C,)))
    found = diff_plans(old, new)
    assert (found.changed, found.moved, found.copied_adapters) == (("a",), (), 1)
    assert found.copied_bytes == 16 * 2 * 32 * 81_920


def test_predictions_stand_side_by_side() -> None:
    """Throughputs add up; of other metrics the worst group counts."""
    old, new = plan_of(group("x", adapters=(A, B))), plan_of(group("x", adapters=(A, B), replicas=2))
    found = diff_plans(old, new).predicted
    assert found["throughput_tok_s"] == (1234.0, 2468.0)
    assert found["ttft_p99_s"] == (0.35, 0.35)
    assert found["served_fraction"] == (0.975, 0.975)


def test_the_command_says_what_changes_and_exits_as_diff_does(tmp_path: Path, run: Run) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    plan_of(group("x", adapters=(A, B))).to_json(old)
    plan_of(group("x", adapters=(A,)), group("z", adapters=(B,))).to_json(new)
    same = run("diff", old, old)
    assert (same.exit_code, same.output.strip()) == (0, "both plans deploy the same")
    other = run("diff", old, new)
    assert other.exit_code == 1
    assert "1 adapter moved: b" in other.output
    assert "throughput_tok_s" in other.output
    assert "to copy: 1 adapter" in other.output
    assert json.loads(run("diff", old, new, "--json").output)["plan"]["GPUs"] == [1, 2]
    assert "cannot be read" in error_line(run("diff", old, tmp_path / "none.json"))
    foreign = tmp_path / "foreign.json"
    plan_of(group("x", adapters=(A,)), base_model="org/other").to_json(foreign)
    assert "must be for base model" in error_line(run("diff", old, foreign))
