"""What the search learns from the twin's answers."""

from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.planner.problem import Assignment, Estimate, Problem
from capplan.planner.search.data import build_search_data
from capplan.planner.search.evaluator import Evaluator
from capplan.planner.search.local_search import improve
from capplan.planner.search.placement import balanced
from capplan.testing import example_problem


@dataclass
class Upto:
    """Holds up to a rate, and remembers what it was asked."""

    rps: float
    asked: list[Assignment] = field(default_factory=list)

    def __call__(self, assignment: Assignment) -> Estimate:
        self.asked.append(assignment)
        load = sum(share.rate_rps for share in assignment.shares)
        short = max(0.0, 1.0 - self.rps / load)
        return Estimate(min(load, self.rps), starved=short > 0.0, utilization=load / 1e3, overload=short)


def alike(seed: int, adapters: int, gpus: int) -> Problem:
    """Return a problem whose adapters differ in name only."""
    problem = example_problem(seed, adapters, gpus)
    one: dict[str, Any] = {"rank": 8, "rate_rps": 1.0}
    workload = problem.workload.model_copy(
        update={"adapters": tuple(a.model_copy(update=one) for a in problem.workload.adapters)}
    )
    return replace(problem, workload=workload, shares=tuple(replace(p, **one) for p in problem.shares))


def test_instances_that_are_alike_are_confirmed_by_samples() -> None:
    problem = alike(0, adapters=240, gpus=60)
    exact = Upto(rps=5.0)
    ground = build_search_data(problem)
    board = balanced(ground, [0] * 60)
    assert board is not None
    answers = Evaluator(ground, Upto(rps=1e9), exact).confirm(board)
    assert all(answer is not None for answer in answers)
    assert len({assignment.shares for assignment in exact.asked}) == 10
    assert {share for answer in answers if answer for share in answer.shares} == set(problem.shares)


@settings(max_examples=25, derandomize=True)
@given(seed=st.integers(0, 1_000), adapters=st.integers(30, 90), overload=st.floats(0.02, 0.08))
def test_what_the_twin_refuses_must_take_as_much_less_as_it_fell_short(
    seed: int, adapters: int, short: float
) -> None:
    problem = example_problem(seed, adapters, gpus=6)
    ground = build_search_data(problem)
    board = balanced(ground, [0] * 6)
    assert board is not None
    loads = [sum(share.rate_rps for share in ground.shares(frozenset(m))) for m in board.members]
    limit_rps = max(loads) * (1.0 - short)
    judge = Evaluator(ground, Upto(rps=1e9), Upto(limit_rps))
    before = board.taken()
    answers = judge.confirm(board)
    refused = [at for at, answer in enumerate(answers) if answer is None]
    assert refused
    for at in refused:
        assert board.limit[at] <= before[at] * (1.0 - min(0.1, max(0.0, 1.0 - limit_rps / loads[at])))
    if improve(board, judge, rounds=200):
        assert (board.taken() <= board.limit + 1e-12).all()
