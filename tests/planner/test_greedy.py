from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import Assignment, EngineConfig, InfeasibleError, Problem, load_surrogate
from capplan.planner.problem import AdapterShare, Estimate, Estimator
from capplan.planner.problem._estimate import SurrogateEstimator
from capplan.planner.problem._problem import GRID
from capplan.planner.solvers._greedy import PAPER_GRID, compiled_fill, priority_order, solve_greedy
from capplan.testing import Capacity, example_problem


def literal_order(shares: Sequence[AdapterShare]) -> list[AdapterShare]:
    """Rank descending; inside a rank highest, lowest, second highest, second lowest rate, ..."""
    ordered = []
    for rank in sorted({p.rank for p in shares}, reverse=True):
        left = sorted((p for p in shares if p.rank == rank), key=lambda p: (-p.rate_rps, p.name))
        while left:
            ordered.append(left.pop(0))
            left.reverse()  # the other end comes next
    return ordered


Allocated = tuple[list[AdapterShare], int]


class Transcription:
    """State of algorithm 1, and algorithm 2, which tests an allocation."""

    def __init__(self, problem: Problem, estimator: Estimator, grid: Sequence[int]) -> None:
        self.problem, self.estimator, self.grid = problem, estimator, grid
        self.a_q, self.g_q = literal_order(problem.shares), list(range(problem.gpus))
        self.alloc: dict[int, list[AdapterShare]] = {g: [] for g in self.g_q}
        self.prov: dict[int, list[AdapterShare]] = {g: [] for g in self.g_q}
        self.a_max = dict.fromkeys(self.g_q, 0)

    def test_allocation(self, g: int) -> bool:
        p, everything = self.a_max[g], tuple(self.alloc[g] + self.prov[g])
        p_next = min((value for value in self.grid if value > p), default=p)
        fits = [c for c in (p, p_next) if c > 0 and self.problem.fits_in_memory(Assignment(everything, c))]
        throughput = {c: self.estimator(Assignment(everything, c)).throughput_tok_s for c in fits}
        best = max((c for c in fits if throughput[c] == max(throughput.values())), default=0)
        if not best or self.estimator(Assignment(everything, best)).starved:
            return False
        self.alloc[g], self.prov[g], self.a_max[g] = list(everything), [], best
        return True

    def place(self, is_point: Callable[[int], bool]) -> None:
        """Give adapters to GPUs, and test an allocation at every testing point."""
        while self.a_q:
            a = self.a_q.pop(0)
            if not self.g_q:
                raise InfeasibleError("starvation", "gpus")
            g = self.g_q.pop(0)
            self.prov[g].append(a)
            if not is_point(len(self.alloc[g]) + len(self.prov[g])):
                self.g_q.insert(0, g)
            elif not self.test_allocation(g):
                self.a_q, self.prov[g] = self.prov[g] + self.a_q, []
            elif len(self.alloc[g]) < self.grid[-1]:
                self.g_q.insert(0, g)

    def allocated(self) -> list[Allocated]:
        used = (g for g in self.alloc if self.alloc[g])
        return [(self.alloc[g], min(self.a_max[g], len(self.alloc[g]))) for g in used]


def literal_greedy(problem: Problem, estimator: Estimator) -> list[Allocated]:
    """Algorithms 1 and 2 line by line; an untested rest that fails goes to the next GPU, as published."""
    run = Transcription(problem, estimator, GRID)
    run.place(lambda count: count in GRID or not run.a_q)
    return run.allocated()


def to_the_letter(problem: Problem, estimator: Estimator) -> list[Allocated]:
    """Algorithm 1 line by line, its last loop and its errors included."""
    run = Transcription(problem, estimator, PAPER_GRID)
    run.place(lambda count: count in PAPER_GRID)
    if any(run.prov[g] and not run.test_allocation(g) for g in run.prov):
        raise InfeasibleError("starvation", "starvation")
    return run.allocated()


def outcome(solve: Any, problem: Problem, estimator: Estimator) -> list[Allocated] | None:
    try:
        answer = solve(problem, estimator)
    except InfeasibleError:
        return None
    return [(list(a.shares), a.a_max) if isinstance(a, Assignment) else a for a in answer]


@given(
    seed=st.integers(0, 10_000),
    adapters=st.integers(1, 150),
    gpus=st.integers(1, 12),
    rps=st.floats(0.5, 40.0),
    slot_rps=st.floats(0.0, 0.1),
    per_slot=st.sampled_from([1.0, 2.0, 8.0]),
)
def test_equals_a_literal_transcription_of_the_paper(
    seed: int, adapters: int, gpus: int, rps: float, slot_rps: float, per_slot: float
) -> None:
    problem = example_problem(seed, adapters, gpus)
    estimator = Capacity(rps, slot_rps, per_slot)
    assert outcome(solve_greedy, problem, estimator) == outcome(literal_greedy, problem, estimator)


@given(seed=st.integers(0, 10_000), adapters=st.integers(1, 60), salt=st.integers(0, 99))
def test_equals_the_transcription_under_a_random_estimator(seed: int, adapters: int, salt: int) -> None:
    """Surrogates are not monotone."""

    def capricious(assignment: Assignment) -> Estimate:
        shares, a_max = assignment.shares, assignment.a_max
        dice = (salt + 31 * a_max + sum(int(p.name[1:]) * 7 + p.rank for p in shares)) % 11
        return Estimate(float(dice), starved=dice < 3 and len(shares) > 1)

    problem = example_problem(seed, adapters, gpus=40)
    assert outcome(solve_greedy, problem, capricious) == outcome(literal_greedy, problem, capricious)


@given(
    seed=st.integers(0, 10_000),
    adapters=st.integers(1, 150),
    gpus=st.integers(1, 12),
    rps=st.floats(3.0, 40.0),
    slot_rps=st.floats(0.0, 0.1),
    per_slot=st.sampled_from([1.0, 2.0, 8.0]),
)
def test_strict_equals_the_paper_to_the_letter(
    seed: int, adapters: int, gpus: int, rps: float, slot_rps: float, per_slot: float
) -> None:
    problem, estimator = example_problem(seed, adapters, gpus), Capacity(rps, slot_rps, per_slot)
    strict = partial(solve_greedy, strict=True)
    assert outcome(strict, problem, estimator) == outcome(to_the_letter, problem, estimator)


def rates(*rates_rps: float) -> Problem:
    """Return a problem of adapters of one rank with these rates."""
    problem = example_problem(0, len(rates_rps), gpus=8)
    shares = tuple(AdapterShare(f"a{i}", 8, rate) for i, rate in enumerate(rates_rps))
    return replace(problem, shares=shares)


@pytest.mark.parametrize(
    ("adapters", "rps", "placed", "told", "reason"),
    [(8, 5.0, [4, 4], "8 stay empty", "gpus"), (12, 9.0, [8, 4], "last 4 adapters", "starvation")],
)
def test_strict_fails_if_the_first_eight_or_the_rest_fails(
    adapters: int, rps: float, placed: list[int], told: str, reason: str
) -> None:
    problem, estimator = rates(*[1.0] * adapters), Capacity(rps=rps)
    assert [len(a.shares) for a in solve_greedy(problem, estimator)] == placed
    with pytest.raises(InfeasibleError, match=told) as error:
        solve_greedy(problem, estimator, strict=True)
    assert error.value.reason == reason


def test_the_reference_trace() -> None:
    """Eighteen equal adapters, at most ten on a GPU; more slots serve more."""
    asked: list[tuple[int, int]] = []

    def estimator(assignment: Assignment) -> Estimate:
        shares, a_max = assignment.shares, assignment.a_max
        asked.append((len(shares), a_max))
        return Estimate(float(min(a_max, len(shares))), starved=len(shares) > 10 or 2 * a_max < len(shares))

    problem = rates(*[1.0] * 18)
    answer = solve_greedy(problem, estimator, strict=True)
    assert sorted(set(asked)) == [(8, 8), (10, 8), (10, 16), (16, 8), (16, 16)]
    assert [(len(a.shares), a.a_max) for a in answer] == [(8, 8), (10, 10)]


def test_ranks_descend_and_rates_zigzag_within_a_rank() -> None:
    shares = [
        AdapterShare("x", 8, 1.0),
        *(AdapterShare(f"a{i}", 16, float(i)) for i in range(5)),
        AdapterShare("z", 64, 0.1),
    ]
    assert [share.name for share in priority_order(shares)] == ["z", "a4", "a0", "a3", "a1", "a2", "x"]


def test_a_gpu_is_full_at_the_largest_testing_point() -> None:
    problem = example_problem(0, adapters=385, gpus=2, largest_rps=0.01)
    answer = solve_greedy(problem, Capacity(rps=1e6, adapters_per_slot=1e6))
    assert [len(a.shares) for a in answer] == [384, 1]


def test_the_rest_is_tested_at_its_size() -> None:
    asked: list[int] = []

    def estimator(assignment: Assignment) -> Estimate:
        shares = assignment.shares
        asked.append(len(shares))
        return Estimate(1.0, starved=False)

    (only,) = solve_greedy(example_problem(0, adapters=11, gpus=1), estimator)
    assert sorted(set(asked)) == [1, 2, 4, 8, 11]
    assert only.a_max <= 11


def test_slots_never_exceed_adapters() -> None:
    (only,) = solve_greedy(
        example_problem(0, adapters=5, gpus=1), lambda assignment: Estimate(float(assignment.a_max), False)
    )
    assert only.a_max == 5


def test_slots_that_do_not_fit_in_memory_are_never_tested() -> None:
    problem = example_problem(0, adapters=150, gpus=20, engine=EngineConfig(max_lora_rank=320))
    asked: set[int] = set()

    def estimator(assignment: Assignment) -> Estimate:
        a_max = assignment.a_max
        asked.add(a_max)
        return Estimate(float(a_max), starved=False)

    solve_greedy(problem, estimator)
    refused = [value for value in GRID if not problem.fits_in_memory(Assignment(problem.shares, value))]
    assert refused
    assert asked.isdisjoint(refused)


def test_an_adapter_that_fails_alone_is_named() -> None:
    problem = example_problem(0, adapters=4, gpus=4)
    with pytest.raises(InfeasibleError, match="adapter a") as error:
        solve_greedy(problem, lambda assignment: Estimate(0.0, starved=True))
    assert error.value.reason == "starvation"


def test_an_adapter_that_does_not_fit_in_memory_is_named() -> None:
    problem = example_problem(0, adapters=4, gpus=4)
    tight = replace(problem, engine=problem.engine.replace(max_model_len=10_000_000))
    with pytest.raises(InfeasibleError, match="memory") as error:
        solve_greedy(tight, Capacity(rps=4.0))
    assert error.value.reason == "memory"


@given(
    seed=st.integers(0, 10_000),
    adapters=st.integers(1, 150),
    largest_rps=st.sampled_from([0.05, 0.3, 2.0]),
    engine=st.builds(
        EngineConfig,
        max_loras=st.sampled_from([None, None, 4, 32]),
        max_cpu_loras=st.sampled_from([None, None, 48]),
        max_num_batched_tokens=st.sampled_from([None, 1024]),
    ),
    extrapolates=st.booleans(),
    strict=st.booleans(),
)
def test_a_compiled_fill_decides_as_one_that_queries_the_surrogate(
    seed: int, adapters: int, largest_rps: float, engine: EngineConfig, extrapolates: bool, strict: bool
) -> None:
    """Outside the surrogate's range both query the twin."""
    problem = example_problem(seed, adapters, 12, engine, largest_rps)
    surrogate = load_surrogate(problem.profile, "tree")
    estimator = SurrogateEstimator(problem, surrogate, Capacity(20.0, 0.05), extrapolates)
    assert compiled_fill(problem, estimator, problem.shares, GRID) is not None
    solve = partial(solve_greedy, strict=strict)
    by_query = outcome(solve, problem, lambda assignment: estimator(assignment))
    assert outcome(solve, problem, estimator) == by_query
