"""Plans of which other seeds may break a bound: more verification seeds, and repairs that end."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from capplan import Assignment, EngineConfig, Problem, Slo, Workload, plan
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._setup import make_problem
from capplan.planner.verification._verify import Verifier, further_seeds, make_verifier
from tests.planner.test_plan import CARELESS, LONG, crowd
from tests.planner.test_time_limit import Countdown

pytestmark = pytest.mark.long

Make = Callable[..., Workload]
HALF = Slo(served_fraction=0.5, stable=False)
"""Bound that an instance with a growing queue keeps."""


def verifier_of(spec: Workload, duration_s: float = 600.0) -> tuple[Verifier, Assignment]:
    problem = make_problem(spec, 1, None, duration_s)
    made = make_verifier(problem, TwinEstimator(problem, 0), 0)
    made = replace(made, further_seeds=further_seeds(made.seeds))
    return made, Assignment(problem.shares, 8)


@pytest.mark.parametrize(("rate_rps", "seeds"), [(0.05, 5), (0.2, 20)], ids=["no queue", "a growing queue"])
def test_a_queue_at_the_end_asks_for_more_seeds(workload: Make, rate_rps: float, seeds: int) -> None:
    verifier, instance = verifier_of(crowd(workload, rate_rps=rate_rps, slo=HALF, headroom=0.0, **LONG))
    for (verdict,) in (verifier([instance]), verifier.whole([instance])):
        assert verdict.ok
        assert len(verdict.results) == len(set(verdict.seeds)) == seeds
        assert verdict.seeds[:5] == verifier.seeds
        assert (min(result.served_fraction for result in verdict.results[:5]) < 0.99) == (seeds > 5)


def test_further_seeds_that_a_deadline_ends_leave_the_verdict(workload: Make) -> None:
    verifier, instance = verifier_of(crowd(workload, rate_rps=0.2, slo=HALF, headroom=0.0, **LONG))
    many = 10**9
    unlimited = Countdown(checks=[many])
    (verdict,) = replace(verifier, deadline=unlimited).whole([instance])
    assert len(verdict.seeds) == 20
    used = many - unlimited.checks[0]
    (verdict,) = replace(verifier, deadline=Countdown(checks=[2 * used // 3])).whole([instance])
    assert verdict.ok
    assert 5 < len(verdict.seeds) < 20


def test_a_plan_that_fails_is_not_simulated_further(workload: Make) -> None:
    verifier, instance = verifier_of(crowd(workload, rate_rps=0.35, headroom=0.0, **LONG))
    for (verdict,) in (verifier([instance]), verifier.whole([instance])):
        assert not verdict.ok
        assert len(verdict.seeds) == 5


@pytest.mark.parametrize(("count", "further"), [(1, 0), (4, 0), (5, 15), (8, 24)])
def test_few_seeds_that_the_user_asks_for_stay_few(count: int, further: int) -> None:
    seeds = tuple(range(100, 100 + count))
    more = further_seeds(seeds)
    assert len(more) == further
    assert not set(more) & set(seeds)


@pytest.mark.parametrize("rate_rps", [2.0, 6.0])
def test_a_repair_never_ends_worse_than_it_began(workload: Make, rate_rps: float) -> None:
    """Two GPUs with two slots each cannot hold the load, so that load moves until no placement is left."""

    def halves(problem: Problem, *_: object) -> tuple[Assignment, ...]:
        middle = len(problem.shares) // 3
        return Assignment(problem.shares[:middle], 2), Assignment(problem.shares[middle:], 2)

    solver = replace(CARELESS, name="uneven", place=halves)
    fields: dict[str, Any] = {"gpus": {"count": 2}, "engine": EngineConfig(max_loras=2), "headroom": 0.0}
    spec = workload(*((f"a{i}", 8, rate_rps * 2.0**-i) for i in range(6)), **fields)
    before, after = (plan(spec, solver=solver, repair=repair) for repair in (False, True))
    failing = [sum(not each.ok for each in made.verification.groups) for made in (before, after)]
    assert failing[1] <= failing[0]
    assert {a.name for g in after.groups for a in g.adapters} == {a.name for a in spec.adapters}
    repairs = list(after.provenance["repairs"])  # type: ignore[call-overload]
    assert bool(repairs) == (after.groups != before.groups)
