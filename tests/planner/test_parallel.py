"""Many questions at once."""

from collections.abc import Sequence

import pytest

from capplan import Assignment
from capplan.planner.parallel import estimate_all, parallel_map
from capplan.planner.problem import AdapterShare, Estimate

ASSIGNMENTS = [Assignment((AdapterShare("a", 8, 1.0),), a_max) for a_max in range(1, 40)]


def slots(assignment: Assignment) -> Estimate:
    return Estimate(float(assignment.a_max), starved=False)


class TogetherOnly:
    """An estimator that answers many questions in a way of its own."""

    def __call__(self, assignment: Assignment) -> Estimate:
        raise AssertionError("asked one by one")

    def estimate_all(self, assignments: Sequence[Assignment]) -> list[Estimate]:
        return [slots(assignment) for assignment in assignments]


@pytest.mark.parametrize("estimator", [slots, TogetherOnly()])
def test_estimates_come_in_the_order_of_the_questions(estimator: object) -> None:
    estimates = estimate_all(estimator, ASSIGNMENTS)  # type: ignore[arg-type]
    assert [estimate.throughput_tok_s for estimate in estimates] == [a.a_max for a in ASSIGNMENTS]
    assert estimate_all(estimator, []) == []  # type: ignore[arg-type]


def test_answers_are_counted_as_they_come() -> None:
    counted: list[int] = []
    assert parallel_map(lambda x: x * x, range(5), counted.append) == [0, 1, 4, 9, 16]
    assert counted == [1, 2, 3, 4, 5]


def test_an_error_of_one_question_is_the_error_of_all() -> None:
    with pytest.raises(ZeroDivisionError):
        parallel_map(lambda x: 1 / x, [1, 0, 2])
