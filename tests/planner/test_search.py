"""The local search of the solver `capplan`: initial solutions, confirmation by the twin, divided adapters."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import Adapter, Assignment, InfeasibleError, Lengths, Problem, Workload
from capplan.datasets import gpu_sheet, model_arch
from capplan.models import EngineChoice, roofline_profile
from capplan.planner import SolverContext
from capplan.planner.problem import Estimate, Estimator
from capplan.planner.problem._problem import KnobSearch
from capplan.planner.problem._setup import make_problem
from capplan.planner.problem._splitting import split_evenly
from capplan.planner.search._local_search import Evaluator, improve
from capplan.planner.search._placement import (
    INITIAL_SOLUTIONS,
    InitialSolution,
    balanced,
    build_search_data,
    by_rank,
    split_heavy_adapters,
)
from capplan.planner.solvers import registry
from capplan.planner.solvers._greedy import solve_greedy
from capplan.spec import Kernel, Slo
from capplan.testing import Capacity, example_problem

pytestmark = pytest.mark.long


@dataclass
class UpToRate:
    """Holds up to a rate, and records its calls."""

    rps: float
    calls: list[Assignment] = field(default_factory=list)

    def __call__(self, assignment: Assignment) -> Estimate:
        self.calls.append(assignment)
        load = sum(share.rate_rps for share in assignment.shares)
        overload = max(0.0, 1.0 - self.rps / load)
        return Estimate(min(load, self.rps), overload > 0.0, utilization=load / 1e3, overload=overload)


def capplan(problem: Problem, estimator: Estimator) -> Sequence[Assignment]:
    return registry()["capplan"].place(problem, SolverContext(estimator=estimator, twin=estimator))


def uniform(seed: int, adapters: int, gpus: int) -> Problem:
    """Return a problem whose adapters differ in name only."""
    problem = example_problem(seed, adapters, gpus)
    one: dict[str, Any] = {"rank": 8, "rate_rps": 1.0}
    workload = problem.workload.model_copy(
        update={"adapters": tuple(a.model_copy(update=one) for a in problem.workload.adapters)}
    )
    return replace(problem, workload=workload, shares=tuple(replace(s, **one) for s in problem.shares))


@settings(max_examples=15, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    adapters=st.integers(1, 100),
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
    assert len(capplan(problem, estimator)) <= len(greedy)


@pytest.mark.parametrize("construct", INITIAL_SOLUTIONS)
@given(seed=st.integers(0, 10_000), adapters=st.integers(1, 60), gpus=st.integers(1, 12))
def test_an_initial_solution_places_every_group_once_and_adds_up_shares(
    construct: InitialSolution, seed: int, adapters: int, gpus: int
) -> None:
    problem = example_problem(seed, adapters, gpus)
    count = min(gpus, 1 + seed % 4)
    shares = (*split_evenly(problem.shares[0], count), *problem.shares[1:])
    data = build_search_data(replace(problem, shares=shares))
    state = construct(data, [0] * gpus)
    assert state is not None
    assert sorted(group for members in state.members for group in members) == list(range(len(shares)))
    served = [data.shares(frozenset(members)) for members in state.members]
    for each in served:
        assert len({share.name for share in each}) == len(each)
    first = problem.shares[0].name
    fractions = [share.fraction for each in served for share in each if share.name == first]
    assert sum(fractions) == pytest.approx(1.0)


def padded(gpus: int, skew: float) -> Problem:
    """Return a problem of 40 adapters of five ranks, whose kernel pads to the largest rank of a batch."""
    engine = EngineChoice(rules="slora", kernel=Kernel.BGMV)
    profile = roofline_profile(gpu_sheet("a100-40g"), model_arch("llama-7b"), engine)
    workload = Workload(
        base_model=profile.model.hf_ids[0],
        adapters=tuple(
            Adapter(name=f"r{rank}-{i}", rank=rank, rate_rps=(8.0 / rank) ** skew)
            for rank in (8, 16, 32, 64, 128)
            for i in range(8)
        ),
        prompt_tokens=Lengths(mean=100.0),
        output_tokens=Lengths(mean=50.0),
    )
    return make_problem(workload, gpus, profile)


def test_an_instance_whose_kernel_pads_is_charged_the_largest_rank_for_every_request() -> None:
    data = build_search_data(padded(gpus=4, skew=0.0))
    smallest, largest = (np.flatnonzero(data.rank == rank) for rank in (0, len(data.ranks) - 1))
    alone, together = data.load(frozenset(smallest.tolist()), 0), data.loads[0, -1, smallest].sum()
    assert together == pytest.approx(data.load(frozenset(largest.tolist()), 0), rel=0.05)
    assert together > 1.5 * alone


@settings(max_examples=20)
@given(gpus=st.integers(2, 8), skew=st.floats(0.0, 2.0))
def test_filling_by_rank_loads_padded_instances_less_than_mixing_ranks(gpus: int, skew: float) -> None:
    data = build_search_data(padded(gpus, skew))
    filled, mixed = by_rank(data, [0] * gpus), balanced(data, [0] * gpus)
    assert filled is not None
    assert mixed is not None
    assert filled.loads().max() < mixed.loads().max()


@given(seed=st.integers(0, 10_000), gpus=st.integers(1, 8))
def test_balanced_instances_of_one_rank_differ_by_at_most_the_heaviest_group(seed: int, gpus: int) -> None:
    problem = example_problem(seed, 40, gpus)
    shares = tuple(replace(share, rank=8) for share in problem.shares)
    data = build_search_data(replace(problem, shares=shares))
    state = balanced(data, [0] * gpus)
    assert state is not None
    assert state.loads().max() - state.loads().min() <= data.weight.max() + 1e-9


def test_instances_of_one_kind_are_confirmed_by_samples() -> None:
    problem = uniform(0, adapters=240, gpus=60)
    twin = UpToRate(rps=5.0)
    data = build_search_data(problem)
    state = balanced(data, [0] * 60)
    assert state is not None
    answers = Evaluator(data, UpToRate(rps=1e9), twin).confirm(state)
    assert all(answer is not None for answer in answers)
    assert len({assignment.shares for assignment in twin.calls}) == 10
    assert {share for answer in answers if answer for share in answer.shares} == set(problem.shares)


@settings(max_examples=25, derandomize=True)
@given(seed=st.integers(0, 1_000), adapters=st.integers(30, 90), overload=st.floats(0.02, 0.08))
def test_the_load_limit_of_a_refused_instance_drops_by_its_overload(
    seed: int, adapters: int, overload: float
) -> None:
    problem = example_problem(seed, adapters, gpus=6)
    data = build_search_data(problem)
    state = balanced(data, [0] * 6)
    assert state is not None
    rates = [sum(share.rate_rps for share in data.shares(frozenset(m))) for m in state.members]
    limit_rps = max(rates) * (1.0 - overload)
    evaluator = Evaluator(data, UpToRate(rps=1e9), UpToRate(limit_rps))
    before = state.loads()
    refused = [at for at, answer in enumerate(evaluator.confirm(state)) if answer is None]
    assert refused
    for at in refused:
        assert state.load_limit[at] <= before[at] * (1.0 - min(0.1, max(0.0, 1.0 - limit_rps / rates[at])))
    if improve(state, evaluator, rounds=200):
        assert (state.loads() <= state.load_limit + 1e-12).all()


@settings(max_examples=30, derandomize=True)
@given(seed=st.integers(0, 10_000), adapters=st.integers(1, 40), factor=st.floats(0.1, 20.0))
def test_heavy_adapters_are_divided_into_light_shares_that_add_up(
    seed: int, adapters: int, factor: float
) -> None:
    problem = example_problem(seed, adapters, gpus=4)
    shares = tuple(replace(share, rate_rps=share.rate_rps * factor) for share in problem.shares)
    data = build_search_data(replace(problem, shares=shares))
    lighter = split_heavy_adapters(data)
    for name in {share.name for share in shares}:
        assert sum(share.fraction for share in lighter.shares if share.name == name) == pytest.approx(1.0)
    if lighter is not data.problem:
        assert len(lighter.shares) > len(shares)


def test_no_more_shares_than_max_replicas() -> None:
    problem = example_problem(0, 3, gpus=4)
    hot = tuple(
        adapter.model_copy(update={"rate_rps": 50.0, "max_replicas": 2})
        for adapter in problem.workload.adapters
    )
    workload = problem.workload.model_copy(update={"adapters": hot})
    shares = tuple(replace(share, rate_rps=50.0) for share in problem.shares)
    lighter = split_heavy_adapters(build_search_data(replace(problem, workload=workload, shares=shares)))
    assert sorted(share.number for share in lighter.shares) == [0, 0, 0, 1, 1, 1]


def bounded(problem: Problem) -> Problem:
    """Return the problem with a latency bound and the default knobs."""
    workload = problem.workload.replace(slo=Slo(tpot_p99_ms=50.0))
    return replace(problem, workload=workload, knobs=KnobSearch.DEFAULT)


@settings(max_examples=10, derandomize=True)
@given(seed=st.integers(0, 10_000), adapters=st.integers(2, 60), rps=st.floats(1.5, 10.0))
def test_a_latency_bound_does_not_change_the_number_of_gpus(seed: int, adapters: int, rps: float) -> None:
    """Bisection finds the fleet size that trying all of them in order does."""
    problem, estimator = example_problem(seed, adapters, gpus=8), Capacity(rps)
    try:
        found = capplan(problem, estimator)
    except InfeasibleError:
        return
    assert len(capplan(bounded(problem), estimator)) <= len(found)


def test_fleets_on_which_every_instance_is_refused_cost_few_estimates() -> None:
    """The surrogate ignores latency bounds: it takes two GPUs where the twin needs twelve."""
    problem = bounded(example_problem(1, adapters=24, gpus=16))
    problem = replace(problem, shares=tuple(replace(share, rate_rps=1.0) for share in problem.shares))
    twin = UpToRate(2.0)
    context = SolverContext(estimator=UpToRate(12.0), twin=twin)
    assert len(registry()["capplan"].place(problem, context)) == 12
    assert len(twin.calls) < 250
