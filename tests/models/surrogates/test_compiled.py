"""Compiled predictions equal those of `Surrogate.predict`."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import Adapter, Lengths, Workload
from capplan.models import Surrogate, SurrogateAnswer
from capplan.models.surrogates import FEATURES, KINDS, compile_surrogate, feature_vector
from capplan.models.surrogates._compiled import LOAD_FEATURES, Predictions
from capplan.spec import Arrivals, EngineArgs, Renewal
from capplan.twin.instance import engine_args
from tests.models.surrogates.making import SETTINGS, asked, surrogates

ANSWERS = ("throughput_tok_s", "low_tok_s", "high_tok_s", "starvation_probability", "novelty")
ENGINE = engine_args(asked(), SETTINGS)


def limits(a_max: int, s_max: int, max_num_seqs: int, max_num_batched_tokens: int = 2048) -> EngineArgs:
    return ENGINE.replace(
        max_loras=a_max,
        max_lora_rank=s_max,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def ask(surrogate: Surrogate, workload: Workload, *settings: EngineArgs) -> Predictions:
    compiled = compile_surrogate(surrogate, workload, ENGINE)
    assert compiled is not None
    rates = np.array([a.rate_rps for a in workload.adapters])
    return compiled.predict(rates, np.array([a.rank for a in workload.adapters], float), settings)


def predict(surrogate: Surrogate, workload: Workload, setting: EngineArgs) -> SurrogateAnswer:
    changed = {"a_max": setting.max_loras, "s_max": setting.max_lora_rank}
    same = {name: getattr(setting, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    return surrogate.predict(workload, **SETTINGS | changed | same)


def assert_equal(replies: Predictions, number: int, answer: SurrogateAnswer) -> None:
    for name in ANSWERS:
        assert getattr(replies, name)[number] == pytest.approx(getattr(answer, name), rel=1e-9, abs=1e-12)
    assert replies.in_range[number] == answer.in_range
    assert (replies.starvation_probability[number] >= 0.5) == answer.starved
    assert replies.is_lighter[number] or not answer.in_range


ADAPTERS = st.lists(
    st.tuples(st.sampled_from([0.0, 1e-6, 0.02, 0.1, 0.1, 0.4, 3.0]), st.sampled_from([4, 8, 16, 32, 64])),
    min_size=1,
    max_size=80,
)
SETTING = st.builds(
    limits,
    st.integers(1, 100),
    st.sampled_from([64, 128]),
    st.sampled_from([1, 64, 256, 1024]),
    st.sampled_from([256, 2048, 8192]),
)
ARRIVALS = st.sampled_from([Arrivals.POISSON, Renewal(process="gamma", cv=2.5)])


@pytest.mark.parametrize("kind", KINDS)
@given(adapters=ADAPTERS, settings=st.lists(SETTING, min_size=1, max_size=3), arrivals=ARRIVALS)
def test_predictions_equal_those_of_the_workload_under_each_setting(
    kind: str, adapters: list[tuple[float, int]], settings: list[EngineArgs], arrivals: object
) -> None:
    workload = asked(arrivals=arrivals).replace(
        adapters=tuple(
            Adapter(name=str(i), rank=rank, rate_rps=rate) for i, (rate, rank) in enumerate(adapters)
        )
    )
    surrogate = surrogates()[kind]
    replies = ask(surrogate, workload, *settings)
    for number, setting in enumerate(settings):
        assert_equal(replies, number, predict(surrogate, workload, setting))


def test_a_prediction_does_not_change_the_next(surrogate: Surrogate) -> None:
    small, large = asked(adapters=8), asked(adapters=64)
    setting = limits(8, 32, 256)
    before = ask(surrogate, small, setting)
    ask(surrogate, large, setting)
    after = ask(surrogate, small, setting)
    assert all(getattr(before, name) == getattr(after, name) for name in ANSWERS)


def test_almost_no_load_is_out_of_range_only_in_load(surrogate: Surrogate) -> None:
    light = ask(surrogate, asked(rate_rps=1e-3), limits(16, 32, 256))
    assert not light.in_range[0]
    assert light.is_lighter[0]
    assert light.starvation_probability[0] < 0.5


STRANGE: dict[str, Callable[[], Workload]] = {
    "rank": lambda: asked(rank=512, rate_rps=1e-3),
    "prompts": lambda: asked(rate_rps=1e-3, prompt_tokens=Lengths(mean=30_000)),
    "load": lambda: asked(rate_rps=1e6),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_workload_out_of_range_in_more_than_load_is_not_lighter(surrogate: Surrogate, what: str) -> None:
    workload = STRANGE[what]()
    s_max = max(a.rank for a in workload.adapters)
    assert not ask(surrogate, workload, limits(16, s_max, 256)).is_lighter[0]


def test_features_of_the_load_grow_with_it(surrogate: Surrogate) -> None:
    light, heavy = (
        feature_vector(asked(rate_rps=r), surrogate.profile, engine_args(asked(), SETTINGS))
        for r in (1e-3, 0.5)
    )
    for name in LOAD_FEATURES:
        assert light[FEATURES.index(name)] <= heavy[FEATURES.index(name)]


@pytest.mark.parametrize(
    "workload",
    [
        asked(arrivals=Arrivals.DETERMINISTIC),
        asked().replace(adapters=(asked().adapters[0].replace(output_tokens=Lengths(mean=9)),)),
    ],
)
def test_unsupported_workloads_are_not_compiled(surrogate: Surrogate, workload: Workload) -> None:
    assert compile_surrogate(surrogate, workload, ENGINE) is None
