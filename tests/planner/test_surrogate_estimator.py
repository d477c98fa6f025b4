"""Asking a surrogate about instances: as with their workloads, many at once, and the twin about the rest."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import Assignment, Lengths, Problem, Profile, Workload
from capplan.models.surrogates.files import KINDS
from capplan.planner.estimate import SurrogateEstimator
from capplan.planner.problem import AdapterShare, Estimate, GpuPool, whole_adapters
from capplan.planner.splitting import split_evenly
from capplan.spec import Arrivals
from tests.models.surrogates import making

Make = Callable[..., Workload]
TWINS_ANSWER = Estimate(1.0, starved=True)


class Twin:
    """Stands in for the twin, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Assignment] = []

    def __call__(self, assignment: Assignment) -> Estimate:
        self.asked.append(assignment)
        return TWINS_ANSWER


def problem_of(workload: Workload, profile: Profile) -> Problem:
    problem = Problem(workload, (GpuPool(None, profile, 2),), workload.engine.complete(), ())
    return replace(problem, shares=whole_adapters(problem))


def asked_of(problem: Problem, kind: str = "tree") -> tuple[SurrogateEstimator, Twin]:
    twin = Twin()
    return SurrogateEstimator(problem, making.surrogates()[kind], twin), twin


def by_its_workload(problem: Problem, kind: str, assignment: Assignment) -> Estimate | None:
    """Return what the surrogate says of the workload of an instance; None where it is out of range."""
    answer = making.surrogates()[kind].predict(
        problem.subworkload(assignment.shares, 1.0 / (1.0 - problem.workload.headroom)),
        a_max=assignment.a_max,
        s_max=problem.s_max(assignment.shares),
        max_num_seqs=problem.max_num_seqs(assignment),
    )
    if not answer.in_range:
        return None
    return Estimate(answer.throughput_tok_s, answer.starved, utilization=answer.starvation_probability)


def same(one: Estimate, other: Estimate) -> bool:
    return one.starved == other.starved and (
        (one.throughput_tok_s, one.utilization)
        == pytest.approx((other.throughput_tok_s, other.utilization), rel=1e-9)
    )


@pytest.fixture
def usual(workload: Make, profile: Profile) -> Problem:
    return problem_of(workload(*((f"a{i}", 8 << i % 3, 0.1 + 0.01 * i) for i in range(24))), profile)


@pytest.mark.parametrize("kind", KINDS)
def test_instances_are_answered_as_their_workloads(usual: Problem, kind: str) -> None:
    estimator, _ = asked_of(usual, kind)
    instances = [
        Assignment(shares, a_max, seqs)
        for shares in (usual.shares, usual.shares[:16], usual.shares[4:20])
        for a_max in (4, 8, 16)
        for seqs in (None, 64)
    ]
    known = 0
    for instance, estimate in zip(instances, estimator.estimate_all(instances), strict=True):
        expected = by_its_workload(usual, kind, instance)
        if expected is not None:
            known += 1
            assert same(estimate, expected)
            assert same(estimator(instance), expected)
    assert known > len(instances) / 2


@given(order=st.permutations(range(8)))
def test_many_questions_are_answered_in_their_order(order: Sequence[int]) -> None:
    problem = problem_of(making.asked(adapters=24), making.profile())
    estimator, _ = asked_of(problem)
    ranks_apart = tuple(replace(share, rank=512) for share in problem.shares[:8])
    instances = [
        Assignment(shares, a_max) for shares in (problem.shares, ranks_apart) for a_max in (2, 4, 8, 16)
    ]
    alone = [estimator(instance) for instance in instances]
    assert estimator.estimate_all([instances[i] for i in order]) == [alone[i] for i in order]


def test_shares_of_one_adapter_are_one_adapter(usual: Problem) -> None:
    estimator, _ = asked_of(usual)
    first, *others = usual.shares
    apart: tuple[AdapterShare, ...] = (*split_evenly(first, 2), *others)
    assert same(estimator(Assignment(apart, 8)), estimator(Assignment(usual.shares, 8)))


def test_only_what_is_out_of_range_goes_to_the_twin(usual: Problem) -> None:
    estimator, twin = asked_of(usual)
    strange = Assignment(tuple(replace(share, rank=512) for share in usual.shares), 8)
    common = Assignment(usual.shares, 8)
    answers = estimator.estimate_all([common, strange, common])
    assert answers[1] == TWINS_ANSWER
    assert answers[0] == answers[2] != TWINS_ANSWER
    assert twin.asked == [strange]


def test_next_to_no_load_is_no_reason_to_ask_the_twin() -> None:
    idle = problem_of(making.asked(rate_rps=0.001), making.profile())
    estimator, twin = asked_of(idle)
    instance = Assignment(idle.shares, 16)
    assert by_its_workload(idle, "tree", instance) is None
    assert not estimator(instance).starved
    assert twin.asked == []


def test_adapters_with_lengths_of_their_own_are_for_the_twin_and_others_are_not(usual: Problem) -> None:
    first, *others = usual.workload.adapters
    own = (first.replace(prompt_tokens=Lengths(mean=50)), *others)
    problem = replace(usual, workload=usual.workload.replace(adapters=own))
    estimator, twin = asked_of(problem)
    rest = tuple(share for share in problem.shares if share.name != first.name)
    assert estimator(Assignment(problem.shares, 8)) == TWINS_ANSWER
    assert estimator(Assignment(rest, 8)) != TWINS_ANSWER
    assert len(twin.asked) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.replace(arrivals=Arrivals.DETERMINISTIC),
        lambda w: w.replace(adapters=[a.replace(output_tokens=Lengths(mean=50)) for a in w.adapters]),
    ],
)
def test_what_no_surrogate_was_trained_on_is_for_the_twin(
    usual: Problem, change: Callable[[Workload], Workload]
) -> None:
    problem = replace(usual, workload=change(usual.workload))
    estimator, twin = asked_of(problem)
    assert estimator.estimate_all([Assignment(problem.shares, a) for a in (4, 8)]) == [TWINS_ANSWER] * 2
    assert len(twin.asked) == 2
