"""Contract tests for plug-ins: subclass one and supply its fixture.

`RouterContract` takes a fixture `make_router`: a function without arguments that returns a new router as
a name, the parameters of a built-in router, or a function of a request and its candidates
(`capplan.twin.cluster.PythonRouter`). `SolverContract` takes a fixture `solver`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import numpy as np

from capplan.datasets import load_profile
from capplan.errors import InfeasibleError
from capplan.planner.problem import (
    AdapterShare,
    Assignment,
    Estimate,
    Estimator,
    GpuPool,
    Problem,
    distinct_adapters,
    split_hot_adapters,
    whole_adapters,
)
from capplan.spec import Adapter, EngineConfig, Lengths, Workload
from capplan.twin.cluster import ClusterResult, Instance, NamedRouter, PythonRouter, simulate_cluster
from capplan.twin.instance import FINISHED

MakeRouter: TypeAlias = Callable[[], NamedRouter | PythonRouter]

_SECONDS = 20.0


def example_cluster(
    *, adapters: int = 9, instances: int = 3, total_rps: float = 6.0, apart: bool = False
) -> tuple[Workload, list[Instance]]:
    """Return a small workload of three ranks, and instances that hold all of it, or each a part."""
    profile = load_profile("h100-64g/llama-3.1-8b/vllm-0.8.5")
    workload = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        adapters=tuple(
            Adapter(name=f"a{i}", rank=(8, 16, 64)[i % 3], rate_rps=total_rps / adapters)
            for i in range(adapters)
        ),
        prompt_tokens=Lengths(mean=200, std=150),
        output_tokens=Lengths(mean=60, std=50),
    )
    held = [
        {a.name: 1.0 for n, a in enumerate(workload.adapters) if n % instances == i} if apart else None
        for i in range(instances)
    ]
    return workload, [Instance(profile, a_max=4, s_max=64, adapters=own) for own in held]


class RouterContract:
    """The contract; what a router is good at is for its own tests."""

    def _run(self, make_router: MakeRouter, seed: int = 0, **shape: object) -> ClusterResult:
        workload, instances = example_cluster(**shape)  # type: ignore[arg-type]
        return simulate_cluster(workload, instances, router=make_router(), duration_s=_SECONDS, seed=seed)

    def test_every_request_goes_to_one_instance(self, make_router: MakeRouter) -> None:
        """Nothing is lost, nothing is counted twice."""
        result = self._run(make_router)
        assert sum(result.requests_per_instance) == result.submitted > 0
        assert int((result.requests.status == FINISHED).sum()) == result.completed

    def test_requests_go_to_holders_only(self, make_router: MakeRouter) -> None:
        """An instance that does not hold the adapter cannot serve it."""
        result = self._run(make_router, apart=True)
        adapter, instance = result.requests.adapter, result.requests.instance
        assert np.array_equal(instance, (adapter - 1) % len(result.instances))

    def test_a_single_instance_gets_everything(self, make_router: MakeRouter) -> None:
        """A cluster of one instance leaves no choice."""
        result = self._run(make_router, instances=1)
        assert result.requests_per_instance == (result.submitted,)

    def test_the_same_seed_gives_the_same_decisions(self, make_router: MakeRouter) -> None:
        """Simulations are reproducible; a router draws from the request's own number only."""
        one, other = (self._run(make_router, seed=7) for _ in range(2))
        assert np.array_equal(one.requests.instance, other.requests.instance)

    def test_idle_instances_serve_every_request(self, make_router: MakeRouter) -> None:
        """At a low rate no routing leaves requests unserved."""
        result = self._run(make_router, total_rps=0.5)
        assert result.served_fraction == 1.0


Solver = Callable[[Problem, Estimator], Sequence[Assignment]]

_PROFILE_NAME = "h100-64g/llama-3.1-8b/vllm-0.8.5"

_RANKS = (8, 16, 32, 64)


@dataclass(frozen=True)
class Capacity:
    """Simple estimator: a GPU sustains a request rate, less with larger slots.

    It is monotone: fewer adapters, less load or smaller ranks never overload it.
    """

    rps: float
    rps_per_slot_of_rank_16: float = 0.0
    adapters_per_slot: float = 4.0

    def __call__(self, assignment: Assignment) -> Estimate:
        """Return throughput in requests per second, and whether load or adapters are too many."""
        shares, a_max = assignment.shares, assignment.a_max
        load_rps = sum(share.rate_rps for share in shares)
        slots = min(a_max, distinct_adapters(shares))
        holds_rps = self.rps - self.rps_per_slot_of_rank_16 * slots * max(p.rank for p in shares) / 16
        crowded = distinct_adapters(shares) > self.adapters_per_slot * a_max
        strain = load_rps / max(holds_rps, 1e-9) + max(0.0, distinct_adapters(shares) / a_max - 1.0)
        starved = load_rps > holds_rps or crowded
        return Estimate(max(0.0, min(load_rps, holds_rps)), starved, utilization=strain)


def example_problem(
    seed: int, adapters: int, gpus: int, engine: EngineConfig | None = None, largest_rps: float = 1.0
) -> Problem:
    """Return a problem with adapters of random ranks and rates, a few of them idle."""
    random = np.random.default_rng(seed)
    rates = np.round(largest_rps * random.random(adapters) * (random.random(adapters) > 0.1), 3)
    workload = Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        adapters=tuple(
            Adapter(name=f"a{i}", rank=int(random.choice(_RANKS)), rate_rps=float(rate))
            for i, rate in enumerate(rates)
        ),
        prompt_tokens=Lengths(mean=100.0),
        output_tokens=Lengths(mean=50.0),
        engine=engine or EngineConfig(),
    )
    pool = GpuPool(None, load_profile(_PROFILE_NAME), gpus)
    problem = Problem(workload, (pool,), workload.engine.complete(), ())
    return replace(problem, shares=whole_adapters(problem))


class SolverContract:
    """Tests of a solver, called as ``solver(problem, estimator)``; it returns assignments.

    Attributes
    ----------
    confirms
        Whether all GPUs of an answer sustain their load by the estimator and the memory model, and infeasible
        problems raise. Otherwise answers are raw, and every problem has one.
    divides
        Whether it divides adapters into shares itself; otherwise shares are placed as given.
    takes_shares
        Whether hot adapters may come in shares.
    most_adapters, most_gpus
        Largest problem that it supports.
    rps_per_gpu
        Request rate that a GPU of the tests sustains.
    """

    confirms: ClassVar[bool] = True
    divides: ClassVar[bool] = False
    takes_shares: ClassVar[bool] = True
    most_adapters: ClassVar[int] = 70
    most_gpus: ClassVar[int] = 24
    rps_per_gpu: ClassVar[float] = 4.0

    def _solved(self, solver: Solver, seed: int) -> tuple[Problem, Estimator, Sequence[Assignment]]:
        problem = example_problem(seed, min(5 + 13 * seed, self.most_adapters), gpus=self.most_gpus)
        estimator = Capacity(rps=self.rps_per_gpu, rps_per_slot_of_rank_16=0.01)
        return problem, estimator, solver(problem, estimator)

    def test_every_share_is_placed_once_on_gpus_that_sustain_it(self, solver: Solver) -> None:
        """Slots are at most the adapters; the estimator and the memory model agree, where promised."""
        for seed in range(6):
            problem, estimator, answer = self._solved(solver, seed)
            placed = [share for assignment in answer for share in assignment.shares]
            if not self.divides:
                assert sorted(placed, key=_share_key) == sorted(problem.shares, key=_share_key)
            assert _shares_sum_to_one(problem, answer)
            assert len({_share_key(share) for share in placed}) == len(placed)
            assert 1 <= len(answer) <= problem.gpus
            for assignment in answer:
                assert 1 <= assignment.a_max <= distinct_adapters(assignment.shares)
                if self.confirms:
                    assert problem.fits_in_memory(assignment)
                    assert not estimator(assignment).starved

    def test_a_fixed_number_of_slots_is_kept(self, solver: Solver) -> None:
        """The workload's settings take precedence over the solver's choice."""
        problem = example_problem(
            1, adapters=20, gpus=min(12, self.most_gpus), engine=EngineConfig(max_loras=3)
        )
        answer = solver(problem, Capacity(rps=self.rps_per_gpu))
        assert {assignment.a_max for assignment in answer} == {3}

    def test_the_same_problem_has_the_same_answer_in_any_order_of_parts(self, solver: Solver) -> None:
        """Plans are reproducible."""
        problem, estimator, answer = self._solved(solver, 3)
        shuffled = replace(problem, shares=tuple(reversed(problem.shares)))
        assert list(solver(problem, estimator)) == list(answer)
        assert [set(a.shares) for a in solver(shuffled, estimator)] == [set(a.shares) for a in answer]

    def test_shares_of_a_hot_adapter_are_all_placed(self, solver: Solver) -> None:
        """Shares of one adapter sum to 1 over the GPUs."""
        if not self.takes_shares:
            return
        few = self.most_gpus < 24
        problem = example_problem(2, adapters=3 if few else 8, gpus=self.most_gpus, largest_rps=9.0)
        estimator = Capacity(rps=6.0 if few else 4.0)
        split = replace(problem, shares=split_hot_adapters(problem, estimator))
        assert len(split.shares) > len(problem.shares)
        assert _shares_sum_to_one(split, solver(split, estimator))

    def test_too_few_gpus_are_an_error_with_a_reason(self, solver: Solver) -> None:
        """An infeasible problem raises InfeasibleError; raw answers place every share anyway."""
        problem = example_problem(4, adapters=min(40, self.most_adapters), gpus=2)
        reason = None
        try:
            answer = solver(problem, Capacity(rps=4.0))
        except InfeasibleError as error:
            reason = error.reason
        if self.confirms:
            assert reason is not None, "no two GPUs can hold that"
        else:
            assert reason is not None or _shares_sum_to_one(problem, answer)


def _shares_sum_to_one(problem: Problem, answer: Sequence[Assignment]) -> bool:
    total = dict.fromkeys((share.name for share in problem.shares), 0.0)
    for assignment in answer:
        for share in assignment.shares:
            total[share.name] += share.fraction
    return all(abs(share - 1.0) < 1e-9 for share in total.values())


def _share_key(share: AdapterShare) -> tuple[str, int]:
    return share.name, share.number
