"""Every solver of the registry keeps the contract of its description."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from capplan import Assignment, InputError, Problem, Workload, plan
from capplan.planner import SOLVERS, RequiredEstimator, Solver, SolverContext
from capplan.planner.problem import Estimator
from capplan.planner.solvers import registry
from capplan.planner.solvers._loraserve import solve_loraserve
from capplan.testing import SolverContract

Make = Callable[..., Workload]


def called(name: str) -> Any:
    """Return a registered solver as the contract calls it, with one estimator for all."""

    def solve(problem: Problem, estimator: Estimator) -> Sequence[Assignment]:
        return registry()[name].place(problem, SolverContext(estimator=estimator, twin=estimator))

    return solve


class Registered(SolverContract):
    """The contract of the solver called `name`."""

    name: ClassVar[str]

    def __init_subclass__(cls, **_: Any) -> None:
        cls.confirms, cls.divides = registry()[cls.name].confirms, registry()[cls.name].divides
        cls.takes_shares = registry()[cls.name].splits_hot

    @pytest.fixture
    def solver(self) -> Any:
        return called(self.name)


class TestCapplan(Registered):
    name = "capplan"


class TestGreedy(Registered):
    name = "greedy"


class TestGreedyStrict(Registered):
    name = "greedy-strict"
    rps_per_gpu = 40.0  # neither the first 8 adapters nor the last rest may fail


class TestGreedyFast(Registered):
    name = "greedy-fast"


class TestLatency(Registered):
    name = "latency"


class TestMaxBase(Registered):
    name = "maxbase"


class TestMaxBaseHalf(Registered):
    name = "maxbase-half"


class TestRandom(Registered):
    name = "random"


class TestSloraRandom(Registered):
    name = "slora-random"


class TestSloraContiguous(Registered):
    name = "slora-contiguous"


class TestDloraProactive(Registered):
    name = "dlora-proactive"


class TestLoraserve(Registered):
    name = "loraserve"

    @pytest.fixture
    def solver(self) -> Any:
        """Use given operating points instead of measured ones."""
        points = {8: 5000.0, 16: 4800.0, 32: 4400.0, 64: 3500.0}
        return lambda problem, estimator: solve_loraserve(problem, points)


class TestMilp(Registered):
    name = "milp"
    most_adapters, most_gpus = 24, 4


def test_every_solver_is_tested_and_named() -> None:
    assert {each.name for each in Registered.__subclasses__()} == set(SOLVERS)
    assert tuple(registry()) == SOLVERS
    assert all(name == solver.name for name, solver in registry().items())


@pytest.mark.parametrize("solver", registry().values(), ids=lambda solver: solver.name)
def test_descriptions_are_one_line_with_a_source(solver: Solver) -> None:
    assert solver.summary
    assert solver.source
    assert "\n" not in solver.summary + solver.source
    assert len(solver.summary) <= 100


@pytest.mark.parametrize("name", [name for name in SOLVERS if name != "greedy-fast"])
def test_every_solver_makes_a_plan_that_the_twin_confirms(workload: Make, name: str) -> None:
    spec = workload(*((f"a{i}", 8 << i % 3, 0.2) for i in range(12)))
    made = plan(spec, solver=name, estimator="twin")
    assert made.verification.ok
    assert made.provenance["solver"] == name
    assert made.provenance["estimator"] == (
        "none" if registry()[name].required_estimator is RequiredEstimator.NONE else "twin"
    )


@pytest.mark.parametrize("name", ["random", "slora-random", "dlora-proactive", "milp", "maxbase"])
def test_plans_are_deterministic_and_only_random_solvers_depend_on_the_seed(
    workload: Make, name: str
) -> None:
    spec = workload(*((f"a{i}", 8, 0.2) for i in range(12)))

    def placed(seed: int) -> list[list[str]]:
        made = plan(spec, solver=name, estimator="twin", seed=seed, verify=False)
        return [[adapter.name for adapter in group.adapters] for group in made.groups]

    assert placed(1) == placed(1)
    assert (placed(1) == placed(2)) is ("random" not in name)


def test_an_estimator_other_than_the_solvers_is_rejected(workload: Make) -> None:
    with pytest.raises(InputError, match="estimator: must be tree for solver greedy-fast"):
        plan(workload(("a", 8, 0.1)), solver="greedy-fast", estimator="twin")


def test_an_unsupported_fixed_number_of_slots_is_rejected(workload: Make) -> None:
    stubborn = Solver(
        "own",
        "one line",
        "a test",
        registry()["random"].place,
        required_estimator=RequiredEstimator.NONE,
        fixed_a_max=False,
    )
    spec: Workload = workload(("a", 8, 0.1), engine={"max_loras": 1})
    with pytest.raises(InputError, match=r"engine\.max_loras: must be left open for solver own"):
        plan(spec, solver=stubborn)
