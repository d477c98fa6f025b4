"""Which estimator answers: a surrogate where it knows enough, the twin everywhere else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from capplan import Assignment, EngineConfig, InputError, Lengths, Problem, Profile, Slo, Workload
from capplan.models import Surrogate
from capplan.models.surrogates.files import KINDS
from capplan.planner import estimate
from capplan.planner.estimate import ESTIMATORS, TwinEstimator, estimator_name, make_estimator
from capplan.planner.problem import Estimate, GpuPool, whole_adapters
from capplan.spec import Arrivals, Renewal, Stickiness
from tests.models.surrogates import making

Make = Callable[..., Workload]
Change = Callable[[Workload], Workload]
TWINS_ANSWER = Estimate(1.0, starved=True)


class Twin:
    """Stands in for the twin, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, assignment: Assignment) -> Estimate:
        a_max = assignment.a_max
        self.asked.append(a_max)
        return TWINS_ANSWER


@pytest.fixture
def twin() -> Twin:
    return Twin()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of surrogates that were asked for; all of them are there."""
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


def test_names_are_those_of_the_documentation() -> None:
    assert ESTIMATORS == ("auto", "best", "forest", "tree", "twin")


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_answers_as_its_surrogate_does_at_the_load_with_headroom(
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


def test_outside_the_range_the_twin_is_asked(
    usual: Workload, profile: Profile, twin: Twin, loaded: list[str]
) -> None:
    first, *others = usual.adapters
    problem = problem_of(usual.replace(adapters=(first.replace(rank=512), *others)), profile)
    common = [share for share in problem.shares if share.rank < 512]
    for kind in KINDS:
        estimator = made(problem, kind, twin)
        assert estimator(Assignment(problem.shares, 4)) == TWINS_ANSWER
        assert estimator(Assignment(tuple(common), 8)) != TWINS_ANSWER
    assert twin.asked == [4] * len(KINDS)


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
def test_auto_asks_the_twin_what_only_it_knows(
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
def test_auto_asks_the_surrogate_what_it_was_trained_on(
    usual: Workload, profile: Profile, twin: Twin, loaded: list[str], what: str
) -> None:
    problem = problem_of(KNOWN[what](usual), profile)
    estimator = made(problem, "auto", twin)
    assert estimator_name(estimator) == "best"
    assert estimator(Assignment(problem.shares, 8)) != TWINS_ANSWER


def test_without_a_surrogate_auto_is_the_twin_and_a_kind_says_how_to_make_one(
    usual: Workload, unsurrogated: Profile, twin: Twin
) -> None:
    problem = problem_of(usual, unsurrogated)
    assert made(problem, "auto", twin) is twin
    assert made(problem, "twin", twin) is twin
    for kind in KINDS:
        with pytest.raises(InputError, match=f"capplan train {unsurrogated.name}"):
            made(problem, kind, twin)


def test_another_name_is_refused_with_the_names_there_are(
    usual: Workload, profile: Profile, twin: Twin
) -> None:
    with pytest.raises(InputError, match="estimator: must be one of auto, best, forest, tree, twin"):
        made(problem_of(usual, profile), "oracle", twin)
