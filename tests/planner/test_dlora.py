"""dLoRA's proactive placement: replicas, errors, and equality with the published loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import Assignment, InfeasibleError, Problem, Workload, plan
from capplan.planner import SolverContext
from capplan.planner.solvers import registry
from capplan.planner.solvers._dlora import BurstTolerance, replicate
from capplan.testing import Capacity, example_problem

Make = Callable[..., Workload]


def placed(problem: Problem, time_limit_s: float = 60.0) -> list[Assignment]:
    nobody = Capacity(rps=0.0)
    context = SolverContext(estimator=nobody, twin=nobody, time_limit_s=time_limit_s)
    return list(registry()["dlora-proactive"].place(problem, context))


def with_rates(problem: Problem, rates_rps: list[float]) -> Problem:
    adapters = tuple(
        a.replace(rate_rps=rate) for a, rate in zip(problem.workload.adapters, rates_rps, strict=True)
    )
    return replace(problem, workload=problem.workload.replace(adapters=adapters))


def replicas(answer: list[Assignment]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for assignment in answer:
        for share in assignment.shares:
            counts[share.name] = counts.get(share.name, 0) + 1
    return counts


@given(adapters=st.integers(1, 30), engines=st.integers(1, 8))
def test_uniform_rates_give_replica_counts_that_differ_by_at_most_one(adapters: int, engines: int) -> None:
    problem = with_rates(example_problem(0, adapters, engines), [0.5] * adapters)
    counts = replicas(placed(problem)).values()
    assert max(counts) - min(counts) <= 1


def test_a_hot_adapter_gets_more_replicas_with_equal_shares_and_a_slot_each() -> None:
    problem = with_rates(example_problem(0, 12, 6), [5.0] + [0.1] * 11)
    answer = placed(problem)
    counts = replicas(answer)
    assert counts["a0"] == 6
    assert sum(counts.values()) >= 6 + 12 - 1
    for assignment in answer:
        assert assignment.a_max == len(assignment.shares)
        for share in assignment.shares:
            assert share.fraction == pytest.approx(1.0 / counts[share.name])


def test_max_replicas_is_kept() -> None:
    problem = with_rates(example_problem(0, 6, 6), [5.0] + [0.1] * 5)
    limited = tuple(a.replace(max_replicas=2) if a.name == "a0" else a for a in problem.workload.adapters)
    problem = replace(problem, workload=problem.workload.replace(adapters=limited))
    assert replicas(placed(problem))["a0"] == 2


def test_too_little_memory_is_infeasible_at_once() -> None:
    """As published, the search would not end."""
    problem = example_problem(0, adapters=2000, gpus=2)
    started = time.monotonic()
    with pytest.raises(InfeasibleError, match=r"of 2000 find no place on 2 instance") as error:
        placed(problem, time_limit_s=3600.0)
    assert error.value.reason == "memory"
    assert time.monotonic() - started < 60.0


def test_the_time_limit_is_kept() -> None:
    with pytest.raises(InfeasibleError, match="not over after 0 s") as error:
        placed(example_problem(0, adapters=20, gpus=2), time_limit_s=0.0)
    assert error.value.reason == "time"


def test_a_plan_routes_by_the_shares_of_the_replicas(workload: Make) -> None:
    made = plan(workload(("hot", 8, 3.0), ("cold", 8, 0.1)), solver="dlora-proactive", verify=False)
    shares = [a.share for group in made.groups for a in group.adapters if a.name == "hot"]
    assert len(shares) == 4
    assert sum(shares) == pytest.approx(1.0)


def literal(shares: list[float], engines: int, free: float, slot: float) -> list[set[int]]:
    """Return the engines of each adapter by the published loop; empty if one finds no place."""
    adapters = len(shares)
    memory = [free] * engines
    holds: list[set[int]] = [set() for _ in shares]

    def tolerance() -> float:
        return min(sum(memory[e] for e in holds[a]) / shares[a] for a in range(adapters))

    best = 0.0
    while True:
        total = sum(map(len, holds))
        missing = [a for a in range(adapters) if not holds[a]]
        a = missing[0] if missing else min(range(adapters), key=lambda i: len(holds[i]) / total - shares[i])
        counts = [sum(e in h for h in holds) for e in range(engines)]
        for e in sorted((e for e in range(engines) if e not in holds[a]), key=lambda e: counts[e]):
            if memory[e] < slot:
                continue
            holds[a].add(e)
            memory[e] -= slot
            if tolerance() >= best:
                best = tolerance()
                break
            holds[a].remove(e)
            memory[e] += slot
        else:
            if missing:
                return []
            break
    e = 0
    while sum(map(len, holds)) < engines + adapters - 1:
        a = min(range(adapters), key=lambda i: len(holds[i]))
        while e in holds[a]:
            e = (e + 1) % engines
        holds[a].add(e)
        e = (e + 1) % engines
    return holds


@given(
    weights=st.lists(st.integers(1, 64), min_size=1, max_size=7),
    engines=st.integers(1, 5),
    room=st.integers(1, 12),
)
def test_equals_the_literal_loop(weights: list[int], engines: int, room: int) -> None:
    """Shares are multiples of 1/1024, so that sums in another order are equal to the last bit."""
    weights[0] += 1024 - sum(weights)
    shares = [weight / 1024 for weight in weights]
    most = np.full(len(shares), engines, dtype=np.int64)
    burst = BurstTolerance(np.array(shares), engines, free=16.0 * room, slot=16.0, most=most)
    expected = literal(shares, engines, 16.0 * room, 16.0)
    try:
        found = replicate(burst, time.monotonic() + 60.0, 60.0)
    except InfeasibleError:
        assert expected == []
    else:
        assert [set(np.flatnonzero(row).tolist()) for row in found.holds] == expected
