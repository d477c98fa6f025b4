from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.errors import InfeasibleError
from capplan.planner import SolverContext
from capplan.planner.problem import Assignment, Estimator, Problem
from capplan.planner.solvers import REGISTRY
from capplan.planner.solvers.greedy import solve_greedy
from capplan.testing import Capacity, example_problem


def ours(problem: Problem, estimator: Estimator) -> Sequence[Assignment]:
    return REGISTRY["capplan"].place(problem, SolverContext(estimator=estimator, twin=estimator))


@settings(max_examples=40, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    adapters=st.integers(1, 120),
    rps=st.floats(1.5, 20.0),
    slot_rps=st.floats(0.0, 0.05),
)
def test_never_uses_more_gpus_than_the_greedy_algorithm(
    seed: int, adapters: int, rps: float, slot_rps: float
) -> None:
    problem, estimator = example_problem(seed, adapters, gpus=60), Capacity(rps, slot_rps)
    try:
        greedy = solve_greedy(problem, estimator)
    except InfeasibleError:
        return
    assert len(ours(problem, estimator)) <= len(greedy)
