"""`compare`: verification of raw answers by the twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from capplan import Assignment, InfeasibleError, InputError, Problem, Slo, Workload, plan
from capplan.planner import RequiredEstimator, Solver, SolverContext, SolverResult, compare

Make = Callable[..., Workload]


def own(place: Callable[[Problem, SolverContext], Sequence[Assignment]], name: str = "own") -> Solver:
    return Solver(name, "one line", "a test", place, required_estimator=RequiredEstimator.NONE)


def all_on_one(a_max: int) -> Solver:
    return own(lambda problem, _: (Assignment(problem.shares, a_max),), f"all-{a_max}")


def one_each(problem: Problem, context: SolverContext) -> Sequence[Assignment]:
    return [Assignment((share,), 1) for share in problem.shares]


def fails(problem: Problem, context: SolverContext) -> Sequence[Assignment]:
    raise InfeasibleError("gpus: not today", reason="gpus")


def only(workload: Workload, solver: Solver | str, **options: Any) -> SolverResult:
    return compare(workload, [solver], seeds=2, **options).rows[0]


def test_a_raw_answer_is_not_repaired(workload: Make) -> None:
    """One slot for 24 adapters starves."""
    row = only(workload(*((f"a{i}", 8, 1.5) for i in range(24))), all_on_one(1))
    assert (row.instances, row.starved, row.memory_errors) == (1, 1, 0)
    assert row.answered
    assert not row.holds
    assert row.served_fraction < 0.9


def test_an_instance_on_which_an_adapter_starves_does_not_hold(workload: Make) -> None:
    """The hot adapter keeps the only slot, and enough of all requests is served."""
    row = only(workload(("hot", 8, 12.0), ("cold", 8, 0.1)), all_on_one(1))
    assert row.served_fraction > 0.98
    assert (row.starved, row.late, row.short_of_headroom) == (1, 0, 0)
    assert not row.holds


def test_slots_that_do_not_fit_are_memory_errors_and_serve_nothing(workload: Make) -> None:
    row = only(workload(*((f"a{i}", 64, 0.02) for i in range(300))), all_on_one(300))
    assert (row.starved, row.memory_errors) == (0, 1)
    assert row.throughput_tok_s == 0.0
    assert not row.holds


def test_too_few_adapters_on_the_host_are_a_memory_error(workload: Make) -> None:
    spec = workload(*((f"a{i}", 8, 0.1) for i in range(8)), engine={"max_cpu_loras": 2})
    assert only(spec, all_on_one(8)).memory_errors == 1


def test_a_broken_latency_bound_counts_as_late(workload: Make) -> None:
    spec = workload(("a", 8, 0.2), ("b", 8, 0.2), slo=Slo(ttft_p99_s=0.001))
    row = only(spec, own(one_each))
    assert (row.starved, row.late) == (0, 2)
    assert not row.holds


def test_an_instance_without_headroom_is_counted(workload: Make) -> None:
    spec = workload(("a", 8, 1.0), ("b", 8, 1.0), headroom=0.97)
    row = only(spec, all_on_one(2))
    assert row.holds
    assert row.short_of_headroom == 1


def test_a_failing_solver_is_a_row_with_the_reason(workload: Make) -> None:
    result = compare(workload(("a", 8, 0.2)), [own(fails, "none"), own(one_each)], seeds=1)
    failed, answered = result.rows
    assert (failed.solver, failed.failure, failed.exit_code) == ("none", "gpus: not today", 3)
    assert (answered.solver, answered.holds) == ("own", True)


def test_an_unsupported_size_is_a_row_with_exit_code_2(workload: Make) -> None:
    spec = workload(*((f"a{i}", 8, 0.02) for i in range(30)))
    milp, random = compare(spec, ["milp", "random"], seeds=1).rows
    assert milp.exit_code == 2
    assert random.answered


def test_results_agree_with_the_plan_of_the_same_answer(workload: Make) -> None:
    spec = workload(*((f"a{i}", 8, 0.5) for i in range(6)))
    made = plan(spec, solver="slora-contiguous", estimator="twin", repair=False)
    row = compare(spec, ["slora-contiguous"], estimator="twin").rows[0]
    assert row.gpus == made.totals.gpus
    assert row.slots_per_gpu == tuple(group.engine_args.max_loras for group in made.groups)
    total = sum(group.predicted.throughput_tok_s for group in made.groups)
    assert row.throughput_tok_s == pytest.approx(total, rel=1e-9)
    assert row.served_fraction == made.verification.min_served_fraction


def test_lower_bound_and_seeds_agree_with_plans(workload: Make) -> None:
    spec = workload(*((f"a{i}", 8, 3.0) for i in range(12)))
    made = plan(spec, estimator="twin", seed=4)
    result = compare(spec, ["random"], seed=4)
    assert result.lower_bound_gpus == made.totals.lower_bound_gpus
    assert result.seeds == made.verification.seeds


def test_a_comparison_needs_a_solver(workload: Make) -> None:
    with pytest.raises(InputError, match="at least one"):
        compare(workload(("a", 8, 0.1)), [])
