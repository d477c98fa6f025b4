"""Predictions of all kinds of surrogates, and their training range."""

import numpy as np
import pytest

from capplan import Lengths, Workload, errors, load_surrogate
from capplan.datasets._profile_files import profiles_with_surrogates
from capplan.models import Surrogate
from capplan.models.surrogates import FEATURES, KINDS, feature_vector
from capplan.spec import Arrivals, Diurnal, LengthPairs, Renewal, Stickiness, Trace
from capplan.twin.instance import engine_args
from tests.models.surrogates.making import SETTINGS, asked, drawn, made, profile


def test_many_rows_are_answered_as_each_row_alone(surrogate: Surrogate) -> None:
    rows = made().features[:60]
    together = surrogate.predict_many(rows)
    for i, row in enumerate(rows):
        alone = surrogate.predict_features(row)
        assert alone.throughput_tok_s == together.throughput_tok_s[i]
        assert (alone.low_tok_s, alone.high_tok_s) == (together.low_tok_s[i], together.high_tok_s[i])
        assert alone.starvation_probability == together.starvation_probability[i]
        assert alone.in_range == together.in_range[i]
        assert alone.novelty == pytest.approx(together.novelty[i], rel=1e-9)


def test_a_workload_is_answered_by_its_features(surrogate: Surrogate) -> None:
    features = feature_vector(asked(), surrogate.profile, engine_args(asked(), SETTINGS))
    assert surrogate.predict(asked(), **SETTINGS) == surrogate.predict_features(features)


def test_answers_to_scenarios_not_seen_are_near_and_within_their_interval(surrogate: Surrogate) -> None:
    fresh = made(256, seed=5)
    answers = surrogate.predict_many(fresh.features)
    off = np.abs(np.log(answers.throughput_tok_s / fresh.throughput_tok_s))
    assert np.median(off) < 0.1
    assert np.all(answers.low_tok_s <= answers.throughput_tok_s)
    assert np.all(answers.throughput_tok_s <= answers.high_tok_s)
    assert np.mean((answers.starvation_probability >= 0.5) == fresh.starved) > 0.9


def test_answers_are_sound_far_from_all_that_was_learned(surrogate: Surrogate) -> None:
    far = np.exp(np.random.default_rng(0).normal(0, 4, (300, len(FEATURES)))).astype(np.float32)
    answers = surrogate.predict_many(far)
    for end in (answers.low_tok_s, answers.throughput_tok_s, answers.high_tok_s):
        assert np.all(end >= 0.0)
    assert np.all(answers.low_tok_s <= answers.throughput_tok_s)
    assert np.all(answers.throughput_tok_s <= answers.high_tok_s)
    assert np.all((answers.starvation_probability >= 0.0) & (answers.starvation_probability <= 1.0))
    assert not answers.in_range.any()


def test_the_probability_rises_with_the_score(surrogate: Surrogate) -> None:
    scores = surrogate.starvation.predict(made().features)
    order = np.argsort(scores)
    assert np.all(np.diff(surrogate.calibration.probability(scores)[order]) >= 0.0)
    assert np.unique(scores).size > 1


def beyond_adapters(count: int) -> Workload:
    return asked(adapters=count, rate_rps=0.2 * 32 / count)


def pairs() -> LengthPairs:
    return LengthPairs.from_arrays(*np.random.default_rng(0).integers(50, 400, (2, 500)))


def recorded() -> Workload:
    names = [f"a{i}" for i in range(32)]
    seconds = np.linspace(0.0, 99.0, 320)
    lengths = np.full(320, 100)
    return asked(trace=Trace.from_arrays(seconds, names * 10, lengths, lengths, 100.0))


def own_lengths() -> Workload:
    first, *others = asked().adapters
    return asked().replace(adapters=(first.replace(prompt_tokens=Lengths(mean=250)), *others))


STRANGE = {
    "rank": lambda: (asked(rank=256), {"s_max": 256}),
    "slot size": lambda: (asked(), {"s_max": 512}),
    "longer prompts": lambda: (asked(prompt_tokens=Lengths(mean=9000, std=200)), {}),
    "longer outputs": lambda: (asked(output_tokens=Lengths(mean=2000, std=100)), {}),
    "prompts with longer tails": lambda: (asked(prompt_tokens=Lengths(mean=3900, std=20_000)), {}),
    "larger rates": lambda: (asked(rate_rps=100.0), {}),
    "no load": lambda: (asked(rate_rps=0.0), {}),
    "more adapters": lambda: (beyond_adapters(1500), {}),
    "more running requests": lambda: (asked(), {"max_num_seqs": 8192, "max_num_batched_tokens": 8192}),
    "larger steps": lambda: (asked(), {"max_num_batched_tokens": 65_536}),
    "less memory": lambda: (asked(), {"gpu_memory_utilization": 0.29}),
    "burstier": lambda: (asked(arrivals=Renewal(process="gamma", cv=20.0)), {}),
    "regular": lambda: (asked(arrivals=Arrivals.DETERMINISTIC), {}),
    "weibull": lambda: (asked(arrivals=Renewal(process="weibull", cv=2.0)), {}),
    "diurnal": lambda: (
        asked(arrivals=Renewal(process="poisson", modulation=Diurnal(amplitude=0.5))),
        {},
    ),
    "a trace": lambda: (recorded(), {}),
    "stickiness": lambda: (asked(stickiness=Stickiness(last=4, probability=0.5)), {}),
    "lengths in pairs": lambda: (asked(length_pairs=pairs()), {}),
    "own lengths": lambda: (own_lengths(), {}),
    "lengths that go together": lambda: (asked(length_correlation=0.95), {}),
}


def test_a_common_question_is_in_range(surrogate: Surrogate) -> None:
    answer = surrogate.predict(asked(), **SETTINGS)
    assert answer.in_range
    assert 0.0 < answer.novelty < 1.0


@pytest.mark.parametrize("what", STRANGE)
def test_a_workload_outside_the_training_range_is_flagged(surrogate: Surrogate, what: str) -> None:
    workload, changes = STRANGE[what]()
    assert not surrogate.predict(workload, **(SETTINGS | changes)).in_range


def test_most_scenarios_like_those_of_training_are_in_range(surrogate: Surrogate) -> None:
    assert surrogate.predict_many(drawn(256, seed=9)).in_range.mean() > 0.7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", profiles_with_surrogates())
def test_shipped_surrogates_predict_and_flag_their_range(name: str, kind: str) -> None:
    surrogate = load_surrogate(name, kind)
    assert surrogate.predict(asked(), **SETTINGS).in_range
    for what, make in STRANGE.items():
        workload, changes = make()
        assert not surrogate.predict(workload, **(SETTINGS | changes)).in_range, what


def test_an_unknown_kind_is_named() -> None:
    with pytest.raises(errors.InputError, match="must be one of best, forest, tree"):
        load_surrogate(profiles_with_surrogates()[0], kind="oracle")


def test_a_profile_without_surrogates_names_the_command_that_makes_them() -> None:
    with pytest.raises(errors.InputError, match=f"capplan train {profile().name}"):
        load_surrogate(profile())
