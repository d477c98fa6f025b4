"""Evaluation of instances, choice of slots, and parallel estimates."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from capplan import Assignment, Lengths, Profile, Slo, Workload
from capplan.planner.problem import AdapterShare, Estimate
from capplan.planner.problem._evaluate import evaluate, evaluate_cluster, told_from
from capplan.planner.problem._execution import parallel_map
from capplan.planner.problem._problem import estimate_all
from capplan.planner.problem._settings import choose_slots
from capplan.planner.problem._setup import make_problem
from capplan.spec import Diurnal, Renewal, Trace, describe_latency
from capplan.testing import example_problem

Make = Callable[..., Workload]


def test_a_trace_at_twice_the_speed_offers_twice_the_load(workload: Make, profile: Profile) -> None:
    """The simulation ends with the trace, without an idle second half."""
    arrivals = np.arange(0.0, 60.0, 0.5)
    count = arrivals.size
    trace = Trace.from_arrays(arrivals, ["a"] * count, np.full(count, 50), np.full(count, 5), 60.0)
    constant = {"prompt_tokens": Lengths(mean=50), "output_tokens": Lengths(mean=5)}
    problem = make_problem(workload(("a", 8, 2.0), trace=trace, **constant), 1, profile)
    one, two = (evaluate(problem, Assignment(problem.shares, 1), 0, scale).result for scale in (1.0, 2.0))
    assert (one.duration_s, two.duration_s) == (60.0, 30.0)
    assert two.offered_tok_s == pytest.approx(2 * one.offered_tok_s)


@pytest.mark.parametrize("bound", ["ttft_p99_s", "e2e_p95_s"])
def test_waiting_requests_break_a_percentile_that_completed_ones_keep(
    workload: Make, profile: Profile, bound: str
) -> None:
    """A hot adapter occupies the only slot."""
    cold = tuple((f"cold-{i}", 8, 0.02) for i in range(60))
    problem = make_problem(workload(("hot", 8, 12.0), *cold, slo=Slo(**{bound: 60.0})), 1, profile)
    alone = evaluate(problem, Assignment(problem.shares, 1), 0)
    assert getattr(alone.result, bound.replace("_s", "").replace("_p", "_s_p")) < 60.0
    assert any(
        words.startswith(describe_latency(bound)[0]) and "still wait" in words for words in alone.violations
    )
    assert not evaluate(problem, Assignment(problem.shares, 32), 0).violations


def test_an_adapter_without_a_slot_starves_beside_one_that_is_served(
    workload: Make, profile: Profile
) -> None:
    """The hot adapter occupies the only slot, and nine tenths of all tokens are served."""
    problem = make_problem(workload(("hot", 8, 12.0), ("cold", 8, 0.1), ("idle", 8, 0.0)), 2, profile)
    placed = Assignment(problem.shares, 1)
    alone = evaluate(problem, placed, 0)
    assert alone.result.served_fraction > 0.98
    assert [words.partition(":")[0].partition(" leaves ")[0] for words in alone.violations] == [
        "the queue grows",
        "adapter cold",
    ]
    assert not evaluate(problem, Assignment(problem.shares, 2), 0).violations
    (together, _) = evaluate_cluster(problem, [placed, Assignment((problem.shares[2],), 1)], 0)
    assert together.violations[-1].startswith("adapter cold leaves ")


def test_rare_adapters_without_a_slot_starve_together(workload: Make, profile: Profile) -> None:
    """Each has too few requests for a verdict of its own."""
    rare = tuple((f"rare-{i}", 8, 0.00005) for i in range(200))
    problem = make_problem(workload(("hot", 8, 12.0), *rare), 1, profile)
    alone = evaluate(problem, Assignment(problem.shares, 1), 0)
    assert alone.result.served_fraction > 0.98
    assert [words.partition(" leave ")[0] for words in alone.violations] == ["adapters with few requests"]
    assert not evaluate(problem, Assignment(problem.shares, 8), 0).violations


def test_every_instance_of_a_plan_is_judged_by_the_bound_relative_to_the_base_model(
    workload: Make, profile: Profile
) -> None:
    slo = Slo(tpt_over_base=1.0, attainment=0.99)
    problem = make_problem(workload(("a", 8, 0.5), ("b", 8, 0.5), slo=slo), 2, profile)
    placed = [Assignment((share,), 1) for share in problem.shares]
    evaluations = evaluate_cluster(problem, placed, 0, duration_s=300.0)
    assert all(each.violations and each.violations[-1].startswith("attainment") for each in evaluations)


def test_a_plan_simulates_the_busiest_hour_of_a_day(workload: Make, profile: Profile) -> None:
    day = Renewal(modulation=Diurnal(amplitude=0.8))
    problem = make_problem(workload(("a", 8, 1.0), ("b", 8, 1.0), arrivals=day), 2, profile)
    placed = [Assignment((share,), 1) for share in problem.shares]
    alone = evaluate(problem, placed[0], 0).result
    (together, _) = evaluate_cluster(problem, placed, 0)
    assert alone.submitted == pytest.approx(1.8 * 3600, rel=0.05)
    assert together.result.submitted == pytest.approx(1.8 * 3600, rel=0.05)


def test_slots_with_the_shortest_wait_are_chosen_at_equal_throughput() -> None:
    problem = example_problem(0, 7, 1)

    def estimator(assignment: Assignment) -> Estimate:
        a_max = assignment.a_max
        return Estimate(
            1000.0 + 5.0 * (a_max == 4), starved=False, e2e_s_mean={4: 12.0, 7: 0.09}.get(a_max, 90.0)
        )

    assert choose_slots(problem, problem.shares, estimator, estimator) == 7


def test_slots_with_more_throughput_are_chosen_over_a_shorter_wait() -> None:
    problem = example_problem(0, 7, 1)

    def estimator(assignment: Assignment) -> Estimate:
        a_max = assignment.a_max
        return Estimate(1000.0 if a_max == 2 else 900.0, starved=False, e2e_s_mean=5.0 if a_max == 2 else 0.1)

    assert choose_slots(problem, problem.shares, estimator, estimator) == 2


ASSIGNMENTS = [Assignment((AdapterShare("a", 8, 1.0),), a_max) for a_max in range(1, 40)]


def slots(assignment: Assignment) -> Estimate:
    return Estimate(float(assignment.a_max), starved=False)


class TogetherOnly:
    """Estimator with a batch method."""

    def __call__(self, assignment: Assignment) -> Estimate:
        raise AssertionError("called one by one")

    def estimate_all(self, assignments: Sequence[Assignment]) -> list[Estimate]:
        return [slots(assignment) for assignment in assignments]


@pytest.mark.parametrize("estimator", [slots, TogetherOnly()])
def test_estimates_are_in_the_order_of_the_assignments(estimator: object) -> None:
    estimates = estimate_all(estimator, ASSIGNMENTS)  # type: ignore[arg-type]
    assert [estimate.throughput_tok_s for estimate in estimates] == [a.a_max for a in ASSIGNMENTS]
    assert estimate_all(estimator, []) == []  # type: ignore[arg-type]


def test_parallel_results_are_counted() -> None:
    counted: list[int] = []
    assert parallel_map(lambda x: x * x, range(5), counted.append) == [0, 1, 4, 9, 16]
    assert counted == [1, 2, 3, 4, 5]


def test_an_error_of_a_parallel_call_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        parallel_map(lambda x: 1 / x, [1, 0, 2])


@pytest.mark.parametrize(
    ("value", "limit", "text"),
    [
        (69.84, 90.0, "69.8"),
        (89.97, 90.0, "89.97"),
        (5.0004, 5.0, "5.0004"),
        (5.24, 5.0, "5.24"),
        (5.0, 5.0, "5"),
    ],
)
def test_a_broken_bound_reads_as_broken(value: float, limit: float, text: str) -> None:
    """A plan said that 90.0 % of the tokens are served, with a limit of 90 %."""
    assert told_from(value, limit) == text
