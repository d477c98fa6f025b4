"""LoRAServe as a solver: operating points, demand forecast, shares, and labels from the plan in force."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from capplan import (
    Assignment,
    EngineConfig,
    InfeasibleError,
    InputError,
    Lengths,
    Problem,
    Profile,
    Slo,
    Workload,
)
from capplan.planner import SolverContext
from capplan.planner.problem import AdapterShare, distinct_adapters
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._operating_points import OperatingPoints
from capplan.planner.problem._settings import most_slots
from capplan.planner.problem._setup import make_problem
from capplan.planner.solvers import registry
from capplan.planner.solvers._loraserve import solve_loraserve
from capplan.spec import Gpus, Trace
from capplan.testing import Capacity, example_problem

pytestmark = pytest.mark.long

Make = Callable[..., Workload]
POINTS = {8: 5000.0, 16: 4800.0, 32: 4400.0, 64: 3500.0}


def placed(problem: Problem) -> list[Assignment]:
    nobody = Capacity(rps=0.0)
    return list(registry()["loraserve"].place(problem, SolverContext(estimator=nobody, twin=nobody)))


def alone(workload: Workload, profile: Profile, gpus: int = 1) -> Problem:
    return make_problem(workload, gpus, profile)


def holds(problem: Problem, rank: int, tok_s: float, count: int) -> bool:
    """Whether a server sustains this token rate of one rank in the twin."""
    rate_rps = tok_s / (problem.offered_tok_s(problem.shares[0]) / problem.shares[0].rate_rps) / count
    shares = tuple(AdapterShare(f"only-{i}", rank, rate_rps) for i in range(count))
    adapters = tuple(
        problem.workload.adapters[0].replace(name=share.name, rank=rank, rate_rps=rate_rps)
        for share in shares
    )
    workload = problem.workload.model_copy(update={"adapters": adapters, "headroom": 0.0})
    return not TwinEstimator(replace(problem, workload=workload), seed=0)(Assignment(shares, count)).starved


def test_an_operating_point_is_the_highest_rate_that_holds(workload: Make, profile: Profile) -> None:
    spec = workload(*((f"a{i}", 8, 0.2) for i in range(8)), slo=Slo(ttft_p95_s=1.0))
    problem = alone(spec, profile, gpus=2)
    (point,) = OperatingPoints(problem)([64]).values()
    assert holds(problem, 64, 0.999 * point, 4)
    assert not holds(problem, 64, 1.02 * point, 4)


def test_operating_points_fall_with_rank_and_bound(workload: Make, profile: Profile) -> None:
    loose = alone(workload(("a", 8, 1.0), ("b", 128, 1.0), slo=Slo(ttft_p95_s=5.0)), profile)
    tight = alone(workload(("a", 8, 1.0), ("b", 128, 1.0), slo=Slo(ttft_p95_s=0.1)), profile)
    points = OperatingPoints(loose)
    found = points([128, 8])
    assert list(found) == [8, 128]
    assert found[128] < found[8]
    assert OperatingPoints(tight)([8])[8] < found[8]
    assert points([8]) == {8: found[8]}, "measured once"


def test_operating_points_use_the_lengths_of_all_adapters(workload: Make, profile: Profile) -> None:
    short = workload(("a", 8, 1.0), ("b", 64, 1.0))
    other = short.adapters[1].replace(prompt_tokens=Lengths(mean=2000.0))
    mixed = short.replace(adapters=(short.adapters[0], other))
    assert OperatingPoints(alone(mixed, profile))([8]) != OperatingPoints(alone(short, profile))([8])


def test_operating_points_use_the_lengths_of_a_trace(workload: Make, profile: Profile) -> None:
    count = 200
    trace = Trace.from_arrays(
        np.linspace(0.0, 100.0, count), ["a", "b"] * (count // 2), [300] * count, [100] * count, 100.0
    )
    spec = workload(("a", 8, 1.0), ("b", 16, 1.0))
    constant = spec.replace(prompt_tokens=Lengths(mean=300.0), output_tokens=Lengths(mean=100.0))
    traced = spec.model_copy(update={"trace": trace})
    expected = OperatingPoints(alone(constant, profile))([8])[8]
    assert OperatingPoints(alone(traced, profile))([8])[8] == pytest.approx(expected, rel=0.03)


def test_a_bound_that_no_rate_keeps_is_infeasible(workload: Make, profile: Profile) -> None:
    problem = alone(workload(("a", 8, 1.0), slo=Slo(ttft_p95_s=0.001)), profile)
    with pytest.raises(InfeasibleError, match=r"slo: .* rank 8 .* there is no operating point") as error:
        placed(problem)
    assert error.value.reason == "slo"


def test_too_few_servers_are_infeasible() -> None:
    problem = example_problem(0, adapters=40, gpus=1)
    demand = sum(problem.offered_tok_s(share) for share in problem.shares)
    points = dict.fromkeys(POINTS, demand / 3.5)
    with pytest.raises(
        InfeasibleError, match=r"demand is what 3\.50 instances sustain .* it takes 4"
    ) as error:
        solve_loraserve(problem, points)
    assert error.value.reason == "gpus"


def test_every_server_is_used_and_shares_of_an_adapter_are_numbered() -> None:
    problem = example_problem(1, adapters=12, gpus=5)
    answer = solve_loraserve(problem, dict.fromkeys(POINTS, 5000.0))
    assert len(answer) == 5
    by_adapter: dict[str, list[AdapterShare]] = {}
    for assignment in answer:
        for share in assignment.shares:
            by_adapter.setdefault(share.name, []).append(share)
    rate_of = {adapter.name: adapter.rate_rps for adapter in problem.workload.adapters}
    assert max(map(len, by_adapter.values())) > 1
    for name, shares in by_adapter.items():
        assert [share.number for share in shares] == list(range(len(shares)))
        assert all(share.rate_rps == pytest.approx(share.fraction * rate_of[name]) for share in shares)


def test_every_adapter_has_a_slot_if_memory_allows() -> None:
    few = example_problem(1, adapters=12, gpus=2)
    assert all(a.a_max == distinct_adapters(a.shares) for a in solve_loraserve(few, POINTS))
    many = example_problem(1, adapters=600, gpus=1, largest_rps=0.001)
    (packed,) = solve_loraserve(many, POINTS)
    assert 1 < packed.a_max < 600
    assert many.fits_in_memory(packed)
    assert not many.fits_in_memory(replace(packed, a_max=packed.a_max + 1))


def test_a_fixed_number_of_slots_is_kept() -> None:
    problem = example_problem(1, adapters=12, gpus=2, engine=EngineConfig(max_loras=3))
    assert most_slots(problem, problem.shares) == 3


def names(answer: Sequence[Assignment]) -> list[set[str]]:
    return [{share.name for share in assignment.shares} for assignment in answer]


def test_servers_keep_their_stored_adapters() -> None:
    problem = example_problem(2, adapters=20, gpus=4)
    first = solve_loraserve(problem, POINTS)
    for turn in range(4):
        stored = [*names(first)[turn:], *names(first)[:turn]]
        assert names(solve_loraserve(problem, POINTS, stored=stored)) == stored


def test_the_plan_in_force_labels_the_servers(workload: Make, profile: Profile) -> None:
    from capplan import plan

    spec = workload(*((f"a{i}", 8 << i % 3, 0.2) for i in range(12)), gpus=Gpus(count=3))
    problem = make_problem(spec, None, profile)
    before = plan(spec, solver="loraserve", verify=False)
    turned = before.model_copy(update={"groups": (*before.groups[1:], before.groups[0])})
    nobody = Capacity(rps=0.0)
    answer = registry()["loraserve"].place(problem, SolverContext(nobody, nobody, previous=turned))
    assert names(answer) == [{adapter.name for adapter in group.adapters} for group in turned.groups]


def test_a_rank_without_operating_point_is_rejected() -> None:
    with pytest.raises(InputError, match="operating point of rank"):
        solve_loraserve(example_problem(1, adapters=12, gpus=2), {})
