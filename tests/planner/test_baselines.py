"""Baseline solvers of the papers: latency, MaxBase, random, contiguous."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import Assignment, InfeasibleError, Lengths, Problem, Profile, Workload
from capplan.planner import SolverContext
from capplan.planner.problem import GpuPool, distinct_adapters, whole_adapters
from capplan.planner.solvers import registry
from capplan.planner.solvers._maxbase import base_model_tok_s, fill_gpus
from capplan.planner.solvers._random_placement import contiguous_by_rank
from capplan.testing import Capacity, example_problem

Make = Callable[..., Workload]
ANY = Capacity(rps=1e6, adapters_per_slot=1e6)


def placed(name: str, problem: Problem, estimator: Capacity = ANY, seed: int = 0) -> list[Assignment]:
    return list(
        registry()[name].place(problem, SolverContext(estimator=estimator, twin=estimator, seed=seed))
    )


def problem_of(workload: Workload, profile: Profile, gpus: int) -> Problem:
    problem = Problem(workload, (GpuPool(None, profile, gpus),), workload.engine.complete(), ())
    return replace(problem, shares=whole_adapters(problem))


@given(seed=st.integers(0, 10_000), adapters=st.integers(1, 60), gpus=st.integers(1, 9))
def test_latency_gives_each_adapter_to_the_gpu_with_the_lowest_rate_so_far(
    seed: int, adapters: int, gpus: int
) -> None:
    problem = example_problem(seed, adapters, gpus)
    rates = [0.0] * gpus
    expected: list[list[str]] = [[] for _ in range(gpus)]
    for adapter in problem.workload.adapters:
        lowest = rates.index(min(rates))
        rates[lowest] += adapter.rate_rps
        expected[lowest].append(adapter.name)
    answer = placed("latency", problem)
    assert [[share.name for share in a.shares] for a in answer] == [names for names in expected if names]
    assert all(a.a_max == len(a.shares) for a in answer)


def test_latency_tests_all_gpus_at_the_end() -> None:
    problem = example_problem(0, adapters=20, gpus=2)
    with pytest.raises(InfeasibleError, match=r"GPU 0 with 10 slots fail: no bound breaks") as error:
        placed("latency", problem, Capacity(rps=1.0))
    assert error.value.reason == "gpus"
    crowded = example_problem(0, adapters=400, gpus=1, largest_rps=0.001)
    with pytest.raises(InfeasibleError, match="no room for a request") as error:
        placed("latency", crowded)
    assert error.value.reason == "memory"


@given(seed=st.integers(0, 10_000), adapters=st.integers(1, 60), limit_tok_s=st.floats(1.0, 3000.0))
def test_maxbase_fills_gpus_in_input_order_up_to_the_limit(
    seed: int, adapters: int, limit_tok_s: float
) -> None:
    problem = example_problem(seed, adapters, gpus=99)
    gpus = fill_gpus(problem, limit_tok_s)
    assert [p for shares in gpus for p in shares] == list(problem.shares)
    for shares, following in pairwise(gpus):
        load = list(accumulate(map(problem.offered_tok_s, shares)))[-1]
        assert load <= limit_tok_s or len(shares) == 1
        assert load + problem.offered_tok_s(following[0]) > limit_tok_s


def test_slots_of_maxbase_and_maxbase_half() -> None:
    problem = example_problem(3, adapters=9, gpus=4)
    (whole,), (half,) = placed("maxbase", problem), placed("maxbase-half", problem)
    assert (whole.a_max, half.a_max) == (9, 5)
    assert whole.shares == half.shares


def test_maxbase_ignores_memory_but_not_throughput(workload: Make, profile: Profile) -> None:
    crowded = problem_of(workload(*((f"a{i}", 64, 0.001) for i in range(300))), profile, 1)
    (only,) = placed("maxbase", crowded)
    assert not crowded.fits_in_memory(only)
    busy = problem_of(workload(*((f"a{i}", 8, 10.0) for i in range(12))), profile, 1)
    with pytest.raises(InfeasibleError, match="without adapters") as error:
        placed("maxbase", busy)
    assert error.value.reason == "gpus"


def test_the_base_model_serves_more_than_with_adapters_and_less_for_longer_outputs(
    workload: Make, profile: Profile
) -> None:
    from capplan import simulate

    spec = workload(*((f"a{i}", 32, 4.0) for i in range(16)))
    bare = base_model_tok_s(problem_of(spec, profile, 1), seed=0)
    served = simulate(spec, profile, a_max=16, s_max=32, duration_s=600.0).throughput_tok_s
    assert 0.0 < served < bare
    longer = spec.replace(output_tokens=Lengths(mean=400, std=240))
    assert base_model_tok_s(problem_of(longer, profile, 1), seed=0) < bare


def test_base_model_throughput_does_not_depend_on_the_load(workload: Make, profile: Profile) -> None:
    one, many = (
        base_model_tok_s(problem_of(workload(("a", 8, rate), ("b", 8, rate)), profile, 1), seed=0)
        for rate in (0.01, 40.0)
    )
    assert one == pytest.approx(many, rel=1e-6)
    idle = problem_of(workload(("a", 8, 0.0)), profile, 1)
    assert math.isinf(base_model_tok_s(idle, seed=0))


def test_random_draws_gpus_and_slots_uniformly() -> None:
    problem = example_problem(0, adapters=400, gpus=4)
    answers = [placed("random", problem, seed=seed) for seed in range(30)]
    counts = np.array([[len(a.shares) for a in answer] for answer in answers])
    assert abs(counts.mean(axis=0) - 100.0).max() < 10.0
    shares = np.array([a.a_max / len(a.shares) for answer in answers for a in answer])
    assert abs(shares.mean() - 0.5) < 0.1
    assert shares.min() < 0.1
    assert shares.max() > 0.9


@given(seed=st.integers(0, 10_000), adapters=st.integers(1, 60), gpus=st.integers(1, 9))
def test_contiguous_runs_are_sorted_by_rank_and_equally_long(seed: int, adapters: int, gpus: int) -> None:
    runs = contiguous_by_rank(example_problem(seed, adapters, gpus))
    assert len(runs) == min(gpus, adapters)
    ranks = [share.rank for run in runs for share in run]
    assert ranks == sorted(ranks)
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@given(seed=st.integers(0, 10_000), adapters=st.integers(1, 60), gpus=st.integers(1, 9))
def test_slora_random_places_equally_many_adapters_on_every_gpu(seed: int, adapters: int, gpus: int) -> None:
    answer = placed("slora-random", example_problem(seed, adapters, gpus), seed=seed)
    counts = [len(each.shares) for each in answer]
    assert len(counts) == min(gpus, adapters)
    assert max(counts) - min(counts) <= 1
    names = [share.name for each in answer for share in each.shares]
    assert len(names) == len(set(names)) == adapters


def test_slora_random_draws_the_authors_sizes_in_any_order() -> None:
    """The stored random map of LoRAServe has 7, 6, 6 and 6 of 25 adapters."""
    problem = example_problem(0, adapters=25, gpus=4)
    answers = [placed("slora-random", problem, seed=seed) for seed in range(5)]
    assert [[len(a.shares) for a in answer] for answer in answers] == [[7, 6, 6, 6]] * 5
    assert len({tuple(share.name for share in answer[0].shares) for answer in answers}) == 5


def test_slora_placements_get_the_best_slots_by_the_estimator() -> None:
    problem = example_problem(0, adapters=40, gpus=2)
    for name in ("slora-random", "slora-contiguous"):
        for assignment in placed(name, problem, Capacity(rps=100.0, rps_per_slot_of_rank_16=0.1)):
            assert -(-distinct_adapters(assignment.shares) // 4) <= assignment.a_max <= len(assignment.shares)
