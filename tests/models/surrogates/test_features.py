"""Features of a workload and its GPU, and unsupported workloads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import Adapter, Lengths, Workload
from capplan.models.surrogates import FEATURES, feature_of, feature_vector, unsupported_workload
from capplan.models.surrogates._features import expected_tok_s, held_tokens, offered_tok_s
from capplan.spec import Arrivals, Diurnal, LengthPairs, Renewal, Stickiness, Trace, Unpredictable
from capplan.twin.instance import engine_args
from tests.models.memory import kv_tokens
from tests.models.surrogates.making import SETTINGS, asked, profile

Named = dict[str, float]


def named(workload: Workload, **changes: Any) -> Named:
    vector = feature_vector(workload, profile(), engine_args(workload, SETTINGS | changes))
    assert vector.dtype == np.float32
    return dict(zip(FEATURES, vector.tolist(), strict=True))


@pytest.mark.parametrize("correlation", [-0.8, -0.4, 0.0, 0.5])
def test_held_tokens_are_those_of_the_average_moment_of_decoding(correlation: float) -> None:
    scores = np.random.default_rng(0).multivariate_normal(
        [0, 0], [[1, correlation], [correlation, 1]], 400_000
    )
    prompt, output = np.exp(np.array([5.0, 4.5]) + [0.8, 0.7] * scores).T
    held = held_tokens(prompt.mean(), prompt.std(), output.mean(), output.std(), correlation)
    assert held == pytest.approx(float((output * (prompt + output / 2)).sum() / output.sum()), rel=0.02)


def test_constant_lengths_hold_the_prompt_and_half_the_output() -> None:
    for correlation in (-0.5, 0.0, 0.5):
        assert held_tokens(200.0, 0.0, 100.0, 0.0, correlation) == pytest.approx(250.0)


def test_features_are_what_their_names_say() -> None:
    adapters = (
        Adapter(name="a", rank=8, rate_rps=0.5),
        Adapter(name="b", rank=16, rate_rps=1.5, prompt_tokens=Lengths(mean=164)),
    )
    workload = asked(prompt_tokens=Lengths(mean=64), output_tokens=Lengths(mean=16)).replace(
        adapters=adapters
    )
    x = named(workload, a_max=4, max_num_seqs=64, max_num_batched_tokens=1024)
    assert [x[name] for name in FEATURES[:7]] == pytest.approx([2, 2.0, 0.5, 16, 12, 4, 4])
    assert (x["rate_max_rps"], x["s_max"], x["max_num_seqs"], x["max_num_batched_tokens"]) == (
        1.5,
        32,
        64,
        1024,
    )
    assert x["prompt_mean_tokens"] == pytest.approx(0.25 * 64 + 0.75 * 164)
    assert x["prompt_std_tokens"] == pytest.approx(100 * (0.25 * 0.75) ** 0.5)
    assert (x["output_mean_tokens"], x["output_std_tokens"]) == (16, 0)
    assert x["offered_tok_s"] == pytest.approx(0.5 * 80 + 1.5 * 180) == offered_tok_s(workload)
    assert x["kv_tokens"] == kv_tokens(profile(), 4, 32, 0.9, 64)
    assert (x["adapters_over_slots"], x["load_outside_slots"]) == (0.5, 0.0)
    assert x["prompt_over_budget"] == pytest.approx(139 / 1024)
    assert x["arrivals_cv"] == 1.0
    assert x["length_correlation"] == pytest.approx(profile().length_correlation)


def test_the_load_outside_slots_is_that_of_the_coldest_adapters() -> None:
    rates = [5.0, 1.0, 3.0, 1.0]
    adapters = tuple(Adapter(name=str(i), rank=8, rate_rps=rate) for i, rate in enumerate(rates))
    x = named(asked().replace(adapters=adapters), a_max=2)
    assert x["load_outside_slots"] == pytest.approx(0.2)
    assert x["slots_share"] <= 1.0


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (Arrivals.POISSON, 1.0),
        (Arrivals.DETERMINISTIC, 0.0),
        (Renewal(process="gamma", cv=3.0), 3.0),
        (Renewal(process="poisson", modulation=Diurnal(amplitude=0.5)), 1.0),
    ],
)
def test_gaps_vary_as_in_the_arrival_process(arrivals: Any, cv: float) -> None:
    assert named(asked(arrivals=arrivals))["arrivals_cv"] == cv


@given(
    rates=st.lists(st.sampled_from([0.0, 1e-9, 0.003, 0.2, 5.0, 400.0]), min_size=1, max_size=40),
    rank=st.sampled_from([1, 8, 64, 512]),
    a_max=st.integers(1, 60),
    prompt=st.floats(1, 20_000),
    output=st.floats(1, 20_000),
    spread=st.floats(0, 3),
    seqs=st.sampled_from([1, 16, 4096]),
    utilization=st.sampled_from([0.3, 0.5, 0.95]),
)
def test_features_are_finite_and_expect_no_more_than_is_offered(
    rates: list[float],
    rank: int,
    a_max: int,
    prompt: float,
    output: float,
    spread: float,
    seqs: int,
    utilization: float,
) -> None:
    workload = asked(
        prompt_tokens=Lengths(mean=prompt, std=spread * prompt),
        output_tokens=Lengths(mean=output, std=spread * output),
    ).replace(adapters=tuple(Adapter(name=str(i), rank=rank, rate_rps=r) for i, r in enumerate(rates)))
    settings = SETTINGS | {"a_max": a_max, "s_max": rank, "max_num_seqs": seqs}
    settings["gpu_memory_utilization"] = utilization
    vector = feature_vector(workload, profile(), engine_args(workload, settings))
    assert np.all(np.isfinite(vector))
    assert np.all(vector[[i for i, name in enumerate(FEATURES) if name != "length_correlation"]] >= 0.0)
    assert 0.0 <= feature_of(vector, "expected_share") <= 1.0
    assert 0.0 <= expected_tok_s(vector) <= max(1e-6, feature_of(vector, "offered_tok_s") * (1 + 1e-6))


@given(st.permutations(range(12)))
def test_the_order_of_adapters_does_not_matter(order: list[int]) -> None:
    workload = asked(adapters=12)
    shuffled = workload.replace(adapters=tuple(workload.adapters[i] for i in order))
    assert named(shuffled) == pytest.approx(named(workload), rel=1e-5, abs=1e-6)


def test_lengths_given_to_every_adapter_are_those_given_once() -> None:
    workload = asked()
    own = workload.replace(
        adapters=tuple(
            a.replace(prompt_tokens=workload.prompt_tokens, output_tokens=workload.output_tokens)
            for a in workload.adapters
        )
    )
    assert named(own) == pytest.approx(named(workload), rel=1e-6)


def test_what_surrogates_are_trained_on_is_known() -> None:
    for arrivals in (Arrivals.POISSON, Renewal(process="gamma", cv=3.0)):
        assert unsupported_workload(asked(arrivals=arrivals), profile()) is None
    assert unsupported_workload(asked(length_correlation=0.3), profile()) is None


def recorded() -> Trace:
    lengths = np.full(10, 100)
    return Trace.from_arrays(np.arange(10.0), ["a0"] * 10, lengths, lengths, 10.0)


UNKNOWN: dict[str, Callable[[], Workload]] = {
    "trace": lambda: asked(trace=recorded()),
    "arrivals": lambda: asked(arrivals=Arrivals.DETERMINISTIC),
    "arrivals other": lambda: asked(arrivals=Renewal(process="lognormal", cv=2.0)),
    "than poisson": lambda: asked(arrivals=Unpredictable()),
    "and gamma": lambda: asked(arrivals=Renewal(process="gamma", cv=2.0, modulation=Diurnal(amplitude=0.1))),
    "stickiness": lambda: asked(stickiness=Stickiness(last=2, probability=0.1)),
    "pairs": lambda: asked(length_pairs=LengthPairs.from_arrays([10, 20], [5, 6])),
    "own": lambda: asked().replace(
        adapters=(*asked().adapters[1:], asked().adapters[0].replace(output_tokens=Lengths(mean=9)))
    ),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_no_surrogate_was_trained_on_is_named(what: str) -> None:
    assert what in str(unsupported_workload(UNKNOWN[what](), profile()))


def test_shared_prefixes_are_unknown_where_the_engine_caches_them() -> None:
    workload = asked(shared_prefix_tokens=64)
    for caching, known in ((False, True), (True, False), (None, False)):
        engine = profile().engine.replace(prefix_caching=caching)
        assert (unsupported_workload(workload, profile().replace(engine=engine)) is None) == known
