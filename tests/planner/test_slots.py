from capplan import Assignment
from capplan.planner.problem import Estimate
from capplan.planner.slots import choose_slots
from capplan.testing import example_problem


def test_of_slots_that_serve_as_much_those_with_the_shortest_wait_are_taken() -> None:
    """A nearly idle GPU serves its whole load with any number of slots; the wait tells them apart."""
    problem = example_problem(0, 7, 1)

    def estimator(assignment: Assignment) -> Estimate:
        a_max = assignment.a_max
        return Estimate(
            1000.0 + 5.0 * (a_max == 4), starved=False, e2e_s_mean={4: 12.0, 7: 0.09}.get(a_max, 90.0)
        )

    assert choose_slots(problem, problem.shares, estimator, estimator) == 7


def test_more_throughput_beats_a_shorter_wait() -> None:
    problem = example_problem(0, 7, 1)

    def estimator(assignment: Assignment) -> Estimate:
        a_max = assignment.a_max
        return Estimate(1000.0 if a_max == 2 else 900.0, starved=False, e2e_s_mean=5.0 if a_max == 2 else 0.1)

    assert choose_slots(problem, problem.shares, estimator, estimator) == 2
