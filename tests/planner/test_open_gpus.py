"""Pools of an open number of GPUs, and answers to too few."""

import re
from collections.abc import Callable

import pytest

from capplan import InfeasibleError, InputError, Workload, plan
from capplan.planner import SOLVERS, compare
from capplan.planner.problem._bound import lower_bound_instances
from capplan.planner.problem._problem import OPEN_FACTOR
from capplan.planner.problem._setup import make_problem
from capplan.planner.solvers import find_solver

pytestmark = pytest.mark.long

Make = Callable[..., Workload]
ADAPTERS = tuple((f"a{i}", 8, 3.0) for i in range(20))
UNHURRIED_S = 1e6
"""Time limit beyond the defaults of a search, which a busy machine exceeds."""


def test_without_a_number_of_gpus_the_plan_takes_as_many_as_it_needs(workload: Make) -> None:
    made = plan(workload(*ADAPTERS, gpus=None), seeds=1)
    assert made.verification.ok
    assert made.totals.gpus == plan(workload(*ADAPTERS), gpus=OPEN_FACTOR, seeds=1).totals.gpus


def test_open_pools_have_a_multiple_of_their_own_lower_bound(workload: Make) -> None:
    profile = workload(*ADAPTERS).profile
    pools = ({"name": "open", "profile": profile}, {"name": "closed", "profile": profile, "count": 3})
    problem = make_problem(workload(*ADAPTERS, pools=pools, profile=None, gpus=None), None, None)
    alone = make_problem(workload(*ADAPTERS), 1, None)
    assert [pool.instances for pool in problem.pools] == [OPEN_FACTOR * lower_bound_instances(alone), 3]
    assert [pool.is_open for pool in problem.pools] == [True, False]


@pytest.mark.parametrize("objective", ["min_latency", "max_throughput"])
def test_an_objective_that_uses_all_gpus_needs_their_number(workload: Make, objective: str) -> None:
    with pytest.raises(InputError, match=f"gpus: is required for objective {objective}"):
        plan(workload(*ADAPTERS, gpus=None, objective=objective))


def test_a_solver_that_uses_all_gpus_needs_their_number(workload: Make) -> None:
    """Others answer: an open number is no row of its own in a comparison."""
    free = workload(*ADAPTERS[:4], gpus=None)
    with pytest.raises(InputError, match="gpus: is required for solver random"):
        plan(free, solver="random")
    rows = {row.solver: row for row in compare(free, seeds=1).rows}
    for name in SOLVERS:
        if find_solver(name).uses_all_gpus:
            assert "gpus: is required" in rows[name].failure
        elif name != "greedy-strict":  # whose first testing point is eight adapters
            assert rows[name].answered, rows[name].failure


@pytest.mark.parametrize("solver", ["capplan", "greedy", "milp"])
def test_too_few_gpus_are_told_the_broken_bound_and_how_many_would_hold(workload: Make, solver: str) -> None:
    with pytest.raises(InfeasibleError, match=r"spread evenly, .* \(limit .*\)") as error:
        plan(workload(*ADAPTERS), gpus=1, solver=solver, time_limit_s=UNHURRIED_S)
    needed = re.search(r"(\d+) GPUs would hold", str(error.value))
    assert needed is not None
    settings = {"seeds": 1, "solver": solver, "time_limit_s": UNHURRIED_S}
    assert plan(workload(*ADAPTERS), gpus=int(needed[1]), **settings).verification.ok


def test_slots_that_keep_requests_waiting_are_named(workload: Make) -> None:
    """The fullest instance holds; one with less load has more adapters than slots."""
    busy = (("hot", 8, 15.0), ("a", 8, 3.0), ("b", 8, 3.0), ("c", 8, 3.0), ("d", 8, 3.0))
    with pytest.raises(InfeasibleError, match=r"\(limit 30 s\).* with 4 adapters in 2 slot"):
        plan(workload(*busy, engine={"max_loras": 2}), gpus=2, time_limit_s=UNHURRIED_S)


@pytest.mark.parametrize("solver", ["capplan", "greedy"])
def test_a_hot_adapter_is_told_the_broken_bound_and_the_gpus_it_needs(workload: Make, solver: str) -> None:
    hot = workload(("hot", 8, 80.0), slo={"ttft_p99_s": 2.0})
    broken = r"TTFT p99 is .* s \(limit 2 s\)|.* % of the tokens are served \(limit 90 %\)"
    with pytest.raises(InfeasibleError, match=f"adapter hot at 80 req/s fails .*: ({broken}); \\d+ GPUs"):
        plan(hot, gpus=1, solver=solver, time_limit_s=UNHURRIED_S)


def test_a_bound_that_no_number_of_gpus_keeps_is_named(workload: Make) -> None:
    tight = workload(("a", 8, 0.5), slo={"tpot_mean_ms": 0.5})
    words = r"TPOT mean is .* ms \(limit 0\.5 ms\); no number up to 8 holds"
    with pytest.raises(InfeasibleError, match=words):
        plan(tight, gpus=1, time_limit_s=UNHURRIED_S)
