"""Estimators: choice by name, surrogates within their training range, and the twin outside."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import Assignment, EngineConfig, InputError, Lengths, Problem, Profile, Slo, Workload
from capplan.models import Surrogate
from capplan.models.surrogates import KINDS
from capplan.planner.problem import AdapterShare, Estimate, GpuPool, whole_adapters
from capplan.planner.problem import _estimate as estimate
from capplan.planner.problem._estimate import (
    SurrogateEstimator,
    TwinEstimator,
    estimator_name,
    make_estimator,
)
from capplan.planner.problem._splitting import split_evenly
from capplan.spec import Arrivals, Renewal, Stickiness
from tests.models.surrogates import making

Make = Callable[..., Workload]
Change = Callable[[Workload], Workload]
TWINS_ANSWER = Estimate(1.0, starved=True)


class Twin:
    """Stand-in for the twin that records its calls."""

    def __init__(self) -> None:
        self.asked: list[Assignment] = []

    def __call__(self, assignment: Assignment) -> Estimate:
        self.asked.append(assignment)
        return TWINS_ANSWER


@pytest.fixture
def twin() -> Twin:
    return Twin()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kinds of surrogates that were loaded; all exist."""
    kinds: list[str] = []

    def load(profile: Profile, kind: str) -> Surrogate:
        kinds.append(kind)
        return making.surrogates()[kind]

    monkeypatch.setattr(estimate, "load_surrogate", load)
    return kinds


@pytest.fixture
def usual(workload: Make) -> Workload:
    return workload(*((f"a{i}", 32, 0.1 + 0.01 * i) for i in range(24)))


def problem_of(workload: Workload, profile: Profile) -> Problem:
    problem = Problem(workload, (GpuPool(None, profile, 2),), workload.engine.complete(), ())
    return replace(problem, shares=whole_adapters(problem))


def made(problem: Problem, name: str, twin: Twin) -> Any:
    return make_estimator(problem, name, cast(TwinEstimator, twin))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_its_surrogate_at_the_load_with_headroom(
    usual: Workload, profile: Profile, twin: Twin, loaded: list[str], kind: str
) -> None:
    problem = problem_of(usual, profile)
    estimator = made(problem, kind, twin)
    answer = making.surrogates()[kind].predict(
        problem.subworkload(problem.shares, 1 / (1 - usual.headroom)), a_max=8, s_max=32
    )
    assert answer.in_range
    said = estimator(Assignment(problem.shares, 8))
    assert (said.throughput_tok_s, said.starved) == (answer.throughput_tok_s, answer.starved)
    assert said.utilization == answer.starvation_probability
    assert loaded == [kind]
    assert twin.asked == []
    assert estimator_name(estimator) == kind


def test_auto_is_the_best_surrogate(usual: Workload, profile: Profile, twin: Twin, loaded: list[str]) -> None:
    assert estimator_name(made(problem_of(usual, profile), "auto", twin)) == "best"
    assert loaded == ["best"]


def test_the_twin_estimates_outside_the_training_range(
    usual: Workload, profile: Profile, twin: Twin, loaded: list[str]
) -> None:
    first, *others = usual.adapters
    problem = problem_of(usual.replace(adapters=(first.replace(rank=512), *others)), profile)
    common = [share for share in problem.shares if share.rank < 512]
    for kind in KINDS:
        estimator = made(problem, kind, twin)
        assert estimator(Assignment(problem.shares, 4)) == TWINS_ANSWER
        assert estimator(Assignment(tuple(common), 8)) != TWINS_ANSWER
    assert [assignment.a_max for assignment in twin.asked] == [4] * len(KINDS)


ONLY_THE_TWIN: dict[str, Change] = {
    "a bound on latency": lambda w: w.replace(slo=Slo(ttft_p99_s=2.0)),
    "another served fraction": lambda w: w.replace(slo=Slo(served_fraction=0.95)),
    "other arrivals": lambda w: w.replace(arrivals=Arrivals.DETERMINISTIC),
    "stickiness": lambda w: w.replace(stickiness=Stickiness(last=3, probability=0.5)),
    "lengths of their own": lambda w: w.replace(
        adapters=(w.adapters[0].replace(prompt_tokens=Lengths(mean=50)), *w.adapters[1:])
    ),
    "fewer adapters on the host": lambda w: w.replace(engine=EngineConfig(max_cpu_loras=6)),
    "shorter requests": lambda w: w.replace(engine=EngineConfig(max_model_len=2048)),
}


@pytest.mark.parametrize("what", ONLY_THE_TWIN)
def test_auto_is_the_twin_if_no_surrogate_covers_the_workload(
    usual: Workload, profile: Profile, twin: Twin, loaded: list[str], what: str
) -> None:
    problem = problem_of(ONLY_THE_TWIN[what](usual), profile)
    assert made(problem, "auto", twin) is twin
    assert loaded == []


KNOWN: dict[str, Change] = {
    "bursts": lambda w: w.replace(arrivals=Renewal(process="gamma", cv=2.0)),
    "lengths that go together": lambda w: w.replace(length_correlation=0.2),
    "all adapters on the host": lambda w: w.replace(engine=EngineConfig(max_cpu_loras=24)),
    "longer requests": lambda w: w.replace(engine=EngineConfig(max_model_len=16_384)),
    "other limits": lambda w: w.replace(engine=EngineConfig(max_num_seqs=64, max_num_batched_tokens=512)),
}


@pytest.mark.parametrize("what", KNOWN)
def test_auto_is_the_surrogate_within_its_training_data(
    usual: Workload, profile: Profile, twin: Twin, loaded: list[str], what: str
) -> None:
    problem = problem_of(KNOWN[what](usual), profile)
    estimator = made(problem, "auto", twin)
    assert estimator_name(estimator) == "best"
    assert estimator(Assignment(problem.shares, 8)) != TWINS_ANSWER


def test_a_profile_without_surrogate(usual: Workload, unsurrogated: Profile, twin: Twin) -> None:
    problem = problem_of(usual, unsurrogated)
    assert made(problem, "auto", twin) is twin
    assert made(problem, "twin", twin) is twin
    for kind in KINDS:
        with pytest.raises(InputError, match=f"capplan train {unsurrogated.name}"):
            made(problem, kind, twin)


def asked_of(problem: Problem, kind: str = "tree") -> tuple[SurrogateEstimator, Twin]:
    twin = Twin()
    return SurrogateEstimator(problem, making.surrogates()[kind], twin), twin


def predicted_alone(problem: Problem, kind: str, assignment: Assignment) -> Estimate | None:
    """Return the surrogate's prediction for the workload of an instance; None outside its range."""
    answer = making.surrogates()[kind].predict(
        problem.subworkload(assignment.shares, 1.0 / (1.0 - problem.workload.headroom)),
        a_max=assignment.a_max,
        s_max=problem.s_max(assignment.shares),
        max_num_seqs=problem.engine_args(assignment).max_num_seqs,
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
def mixed_ranks(workload: Make, profile: Profile) -> Problem:
    return problem_of(workload(*((f"a{i}", 8 << i % 3, 0.1 + 0.01 * i) for i in range(24))), profile)


@pytest.mark.parametrize("kind", KINDS)
def test_instances_are_estimated_as_their_workloads(mixed_ranks: Problem, kind: str) -> None:
    estimator, _ = asked_of(mixed_ranks, kind)
    instances = [
        Assignment(shares, a_max, knobs=EngineConfig(max_num_seqs=seqs))
        for shares in (mixed_ranks.shares, mixed_ranks.shares[:16], mixed_ranks.shares[4:20])
        for a_max in (4, 8, 16)
        for seqs in (None, 64)
    ]
    known = 0
    for instance, answer in zip(instances, estimator.estimate_all(instances), strict=True):
        expected = predicted_alone(mixed_ranks, kind, instance)
        if expected is not None:
            known += 1
            assert same(answer, expected)
            assert same(estimator(instance), expected)
    assert known > len(instances) / 2


@given(order=st.permutations(range(8)))
def test_batches_are_estimated_in_order(order: Sequence[int]) -> None:
    problem = problem_of(making.asked(adapters=24), making.profile())
    estimator, _ = asked_of(problem)
    ranks_apart = tuple(replace(share, rank=512) for share in problem.shares[:8])
    instances = [
        Assignment(shares, a_max) for shares in (problem.shares, ranks_apart) for a_max in (2, 4, 8, 16)
    ]
    alone = [estimator(instance) for instance in instances]
    assert estimator.estimate_all([instances[i] for i in order]) == [alone[i] for i in order]


def test_shares_of_one_adapter_are_one_adapter(mixed_ranks: Problem) -> None:
    estimator, _ = asked_of(mixed_ranks)
    first, *others = mixed_ranks.shares
    apart: tuple[AdapterShare, ...] = (*split_evenly(first, 2), *others)
    assert same(estimator(Assignment(apart, 8)), estimator(Assignment(mixed_ranks.shares, 8)))


def test_a_batch_uses_the_twin_outside_the_range_only(mixed_ranks: Problem) -> None:
    estimator, twin = asked_of(mixed_ranks)
    strange = Assignment(tuple(replace(share, rank=512) for share in mixed_ranks.shares), 8)
    common = Assignment(mixed_ranks.shares, 8)
    answers = estimator.estimate_all([common, strange, common])
    assert answers[1] == TWINS_ANSWER
    assert answers[0] == answers[2] != TWINS_ANSWER
    assert twin.asked == [strange]


def test_a_very_light_load_is_estimated_by_the_surrogate() -> None:
    idle = problem_of(making.asked(rate_rps=0.001), making.profile())
    estimator, twin = asked_of(idle)
    instance = Assignment(idle.shares, 16)
    assert predicted_alone(idle, "tree", instance) is None
    assert not estimator(instance).starved
    assert twin.asked == []


def test_adapters_with_their_own_lengths_are_estimated_by_the_twin(mixed_ranks: Problem) -> None:
    first, *others = mixed_ranks.workload.adapters
    own = (first.replace(prompt_tokens=Lengths(mean=50)), *others)
    problem = replace(mixed_ranks, workload=mixed_ranks.workload.replace(adapters=own))
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
def test_unsupported_workloads_are_estimated_by_the_twin(
    mixed_ranks: Problem, change: Callable[[Workload], Workload]
) -> None:
    problem = replace(mixed_ranks, workload=change(mixed_ranks.workload))
    estimator, twin = asked_of(problem)
    assert estimator.estimate_all([Assignment(problem.shares, a) for a in (4, 8)]) == [TWINS_ANSWER] * 2
    assert len(twin.asked) == 2
