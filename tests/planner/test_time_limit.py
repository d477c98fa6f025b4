"""The time limit of planning, and calls that it ends."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from capplan import InfeasibleError, InputError, Lengths, Plan, Profile, Workload, plan
from capplan.planner import SolverContext
from capplan.planner.problem import Assignment, Problem
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._evaluate import Evaluation, evaluate, evaluate_cluster
from capplan.planner.problem._execution import NEVER, Deadline, OutOfTimeError, TimeBudget, parallel_until
from capplan.planner.problem._settings import with_queues
from capplan.planner.problem._setup import make_problem
from capplan.planner.solvers import find_solver
from capplan.planner.solvers._base import broken_when_spread, solve
from capplan.planner.verification._verify import make_verifier
from capplan.spec import OUT_OF_TIME

pytestmark = pytest.mark.long

Make = Callable[..., Workload]


@dataclass(frozen=True)
class Countdown(Deadline):
    """Deadline that passes after a number of checks."""

    checks: list[int] = field(default_factory=lambda: [0])

    @property
    def is_limited(self) -> bool:
        return True

    @property
    def passed(self) -> bool:
        self.checks[0] -= 1
        return self.checks[0] < 0


FEW = tuple((f"a{i}", 8, 2.0) for i in range(4))


def test_calls_that_a_deadline_ends_have_no_result_and_leave_no_thread() -> None:
    deadline, threads = Deadline.after(0.2), threading.active_count()

    def wait(seconds: float) -> float:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            deadline.check()
            time.sleep(0.01)
        return seconds

    started = time.monotonic()
    assert parallel_until(wait, [0.0, 60.0, 0.01] + 20 * [60.0], deadline) == [0.0, None, 0.01] + 20 * [None]
    assert time.monotonic() - started < 5.0
    assert threading.active_count() == threads


def test_an_answer_reported_before_the_time_ends_is_used(workload: Make) -> None:
    """The number of GPUs named for want of time is not above one on which an answer was found."""

    def ends(problem: Problem, context: SolverContext) -> Sequence[Assignment]:
        context.on_answer([Assignment((share,), 1) for share in problem.shares])
        context.on_answer([Assignment(problem.shares, len(problem.shares))])
        raise InfeasibleError("time: no placement found", "time")

    solver = replace(find_solver("greedy"), name="ends", place=ends)
    assert plan(workload(*FEW), gpus=4, seeds=1, solver=solver).totals.gpus == 1


def test_errors_of_a_call_are_raised_and_later_calls_do_not_start() -> None:
    called = []

    def fail(number: int) -> None:
        called.append(number)
        raise KeyError(number)

    with pytest.raises(KeyError):
        parallel_until(fail, range(1000), Deadline.after(60.0))
    assert len(called) < 1000


def test_stages_of_a_budget_follow_each_other() -> None:
    for verify in (True, False):
        budget = TimeBudget(10.0, verify, start_s=100.0)
        assert 100.0 < budget.search.at_s <= budget.shortage.at_s <= budget.end.at_s == 110.0
        latest_s = max(budget.search.at_s, budget.search.latest_s)
        assert budget.search_s(60.0) == pytest.approx(latest_s - 100.0)
        assert latest_s <= budget.shortage.at_s
        assert budget.search.at_s < budget.verification.at_s <= budget.end.at_s
    assert TimeBudget(None, True).verification.at_s == TimeBudget(None, True).search.at_s == float("inf")
    assert TimeBudget(None, True).search_s(60.0) == 60.0


def test_a_search_without_an_answer_has_more_time() -> None:
    found: list[int] = []
    now_s = time.monotonic()
    late = Deadline(now_s - 1.0, now_s + 60.0, lambda: not found)
    late.check()
    found.append(1)
    assert late.passed
    assert Deadline(now_s - 2.0, now_s - 1.0, lambda: True).passed
    assert not Deadline(now_s + 60.0).passed


def test_a_cluster_simulation_ends_at_its_deadline(workload: Make) -> None:
    problem = make_problem(workload(*FEW), 2, None)
    halves = [Assignment(problem.shares[:2], 2), Assignment(problem.shares[2:], 2)]
    with pytest.raises(OutOfTimeError):
        evaluate_cluster(problem, halves, 0, deadline=Countdown(checks=[5]))
    whole, limited = (
        evaluate_cluster(problem, halves, 0, deadline=deadline, duration_s=600.0)
        for deadline in (NEVER, Deadline.after(600.0))
    )
    assert limited == whole


def test_a_simulation_of_one_instance_ends_at_a_deadline(workload: Make) -> None:
    """Its own or that of the problem; one that does not pass changes nothing."""
    problem = make_problem(workload(*FEW), 1, None)
    whole = Assignment(problem.shares, 4)

    def evaluated(problem: Problem, deadline: Deadline) -> Evaluation:
        found = evaluate(problem, whole, 0, duration_s=1200.0, deadline=deadline)
        return replace(found, result=replace(found.result, wall_s=0.0))

    expected = evaluated(problem, Deadline())
    with pytest.raises(OutOfTimeError):
        evaluate(problem, whole, 0, duration_s=1200.0, deadline=Countdown(checks=[5]))
    with pytest.raises(OutOfTimeError):
        evaluate(replace(problem, deadline=Countdown(checks=[5])), whole, 0, duration_s=1200.0)
    assert evaluated(problem, Countdown(checks=[1000])) == expected
    assert evaluated(replace(problem, deadline=Deadline.after(600.0)), Deadline()) == expected


def test_the_simulation_without_adapters_ends_at_a_deadline(workload: Make) -> None:
    spec = workload(*FEW, slo={"tpt_over_base": 4.0, "attainment": 0.9})
    problem, bare = make_problem(spec, 1, None), make_problem(workload(*FEW), 1, None)
    instance, countdown = Assignment(problem.shares, 4), Countdown(checks=[1000])
    evaluate(bare, instance, 0, duration_s=1200.0, deadline=countdown)
    with_adapters = 1000 - countdown.checks[0]
    assert with_adapters >= 20
    with pytest.raises(OutOfTimeError):
        evaluate(problem, instance, 0, duration_s=1200.0, deadline=Countdown(checks=[with_adapters + 10]))


def test_the_sample_that_queues_are_designed_from_ends_at_the_deadline(workload: Make) -> None:
    spec = workload(*FEW, scheduler="chameleon", cache="chameleon")
    problem = replace(make_problem(spec, 1, None), deadline=Countdown(checks=[2]))
    with pytest.raises(OutOfTimeError):
        with_queues(problem, Assignment(problem.shares, 4))


def test_words_about_a_failure_are_left_out_at_the_deadline(workload: Make) -> None:
    problem = make_problem(workload(*FEW, slo={"ttft_p99_s": 0.001}), 1, None)
    assert "TTFT p99" in broken_when_spread(problem)
    assert broken_when_spread(replace(problem, deadline=Countdown(checks=[2]))) == ""


def test_words_about_a_failure_pass_over_gpus_without_adapters(workload: Make) -> None:
    problem = make_problem(workload(*FEW, slo={"ttft_p99_s": 0.001}), 8, None)
    assert "TTFT p99" in broken_when_spread(problem)


def test_the_best_reported_answer_is_returned_at_the_deadline(workload: Make) -> None:
    problem = make_problem(workload(*FEW), 4, None)
    capplan = find_solver("capplan")

    def places(problem: Problem, context: SolverContext) -> Sequence[Assignment]:
        for size in (1, 4, 2):  # on four, one and two instances
            parts = [problem.shares[i : i + size] for i in range(0, 4, size)]
            context.on_answer([Assignment(shares, 1) for shares in parts])
        raise OutOfTimeError

    twin = TwinEstimator(problem, 0)
    run = solve(problem, replace(capplan, place=places), twin, time_limit_s=60.0)
    assert len(run.assignments) == 1


def test_seeds_that_a_deadline_ends_leave_the_verdict_open(workload: Make) -> None:
    problem = make_problem(workload(*FEW), 1, None)
    verifier = make_verifier(replace(problem, simulated_s=0.5), TwinEstimator(problem, 0), 0)
    (only,) = replace(verifier, deadline=Countdown(checks=[3])).whole([Assignment(problem.shares, 4)])
    assert len(only.seeds) == len(only.results) == 3
    assert set(only.seeds) < set(verifier.seeds)
    assert not only.ok
    assert only.violations == ()
    assert only.undecided == f"{OUT_OF_TIME} after 3 of 5 simulations"
    assert verifier.verdict([only]).verdict == "undecided"
    with pytest.raises(OutOfTimeError):
        replace(verifier, deadline=Countdown(checks=[0])).whole([Assignment(problem.shares, 4)])


def test_a_search_reports_a_placement_on_few_gpus_first(workload: Make) -> None:
    """Placements on as many GPUs as the lower bound, and twice as many and so on, come before the search."""
    problem = make_problem(workload(*FEW, slo={"ttft_p99_s": 2.0}), 4, None)
    capplan, found = find_solver("capplan"), list[int]()
    twin = TwinEstimator(problem, 0, deadline=Deadline.after(3600.0))
    context = SolverContext(
        twin, twin, deadline=twin.deadline, on_answer=lambda each: found.append(len(each))
    )
    fewest = capplan.place(problem, context)
    assert found[0] < 4
    assert len(fewest) == min(found)
    unlimited = capplan.place(problem, SolverContext(twin, replace(twin, deadline=Deadline())))
    assert fewest == unlimited


def test_a_search_for_the_highest_load_begins_with_a_placement_as_it_is(workload: Make) -> None:
    """The twin confirms the first placement before any is improved or the load is raised."""
    problem = make_problem(workload(*FEW, objective="max_throughput"), 4, None)
    simulated = list[Assignment]()

    class Counted(TwinEstimator):
        def __call__(self, assignment: Assignment) -> Evaluation:
            simulated.append(assignment)
            return super().__call__(assignment)

    twin, found = Counted(problem, 0, deadline=Deadline.after(3600.0)), list[int]()
    context = SolverContext(
        twin, twin, deadline=twin.deadline, on_answer=lambda _: found.append(len(simulated))
    )
    find_solver("capplan").place(problem, context)
    assert found[0] <= 8, found


def test_the_time_limit_bounds_search_and_verification(workload: Make) -> None:
    """Whatever is found by then is returned with its verdict, or the error says that time ran out."""
    many = tuple((f"a{i}", 8 * (1 + i % 4), 0.1 + 0.002 * (i % 50)) for i in range(600))
    large = workload(*many, slo={"ttft_p99_s": 1.0})
    plan(workload(*FEW), seeds=1)  # compiled before time is measured
    started = time.monotonic()
    answer = answer_within(large, 2.0)
    assert time.monotonic() - started < 15.0
    if isinstance(answer, InfeasibleError):
        assert answer.reason == "time"
    else:
        assert answer.verification.ok or any(group.note for group in answer.verification.groups)


def answer_within(spec: Workload, time_limit_s: float) -> Plan | InfeasibleError:
    try:
        return plan(spec, gpus=64, time_limit_s=time_limit_s)
    except InfeasibleError as error:
        return error


def test_a_simulation_that_is_longer_than_the_limit_ends_with_it(workload: Make, profile: Profile) -> None:
    """Steps of microseconds: one simulation of an hour has a billion, and takes ten times the limit."""
    step = profile.step_latency
    coefficients = {name: each.replace(value=each.value / 1e4) for name, each in step.coefficients.items()}
    fast = profile.replace(step_latency=step.replace(coefficients=coefficients))
    spec = workload(("a", 8, 100.0), output_tokens=Lengths(mean=4000), slo={"ttft_p99_s": 1.0})
    problem = make_problem(spec, 1, fast)
    evaluate(problem, Assignment(problem.shares, 1), 0, duration_s=1.0)  # compiled before time is measured
    with pytest.raises(OutOfTimeError):
        evaluate(problem, Assignment(problem.shares, 1), 0, deadline=Deadline.after(2.0))
    started = time.monotonic()
    with pytest.raises(InfeasibleError) as error:
        plan(spec, gpus=1, profile=fast, time_limit_s=1.0)
    assert time.monotonic() - started < 1.1 + 2.0
    assert error.value.reason == "time"


def test_a_long_time_limit_changes_nothing(workload: Make) -> None:
    made, limited = plan(workload(*FEW), seeds=2), plan(workload(*FEW), seeds=2, time_limit_s=300.0)
    assert limited == made


def test_a_time_limit_is_positive(workload: Make) -> None:
    with pytest.raises(InputError, match="time_limit_s: must be > 0"):
        plan(workload(*FEW), time_limit_s=0.0)
