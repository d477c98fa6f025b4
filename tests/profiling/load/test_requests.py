"""Schedules are the twin's requests, and prompts have exact lengths."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import Adapter, InputError, Lengths, Profile, Workload, simulate_detailed
from capplan.profiling.load import PromptForm
from capplan.profiling.load._requests import PromptWriter, RequestBodies, scaled, schedule_of
from capplan.spec import Trace
from tests.cli.examples import profile_document


def workload(rate_rps: float = 2.0, adapters: int = 5) -> Workload:
    return Workload(
        base_model="meta-llama/Llama-3.1-8B-Instruct",
        adapters=[Adapter(name=f"a{i}", rank=8, rate_rps=rate_rps * (1 + i)) for i in range(adapters)],
        prompt_tokens=Lengths(mean=60, std=50),
        output_tokens=Lengths(mean=20, std=30),
    )


@pytest.mark.parametrize("correlation", [None, -0.6])
@pytest.mark.parametrize("rate_scale", [1.0, 0.4])
def test_the_schedule_is_what_the_twin_draws(correlation: float | None, rate_scale: float) -> None:
    profile = Profile.model_validate(profile_document() | {"length_correlation": correlation or 0.0})
    drawn = schedule_of(workload(), 30.0, 3, 256, rate_scale=rate_scale, profile=profile)
    twin = simulate_detailed(
        scaled(workload(), rate_scale), profile, a_max=4, s_max=8, duration_s=30.0, seed=3, max_model_len=256
    ).requests
    assert np.array_equal(drawn.due_s, twin.arrival_s)
    assert np.array_equal(drawn.adapter, twin.adapter)
    assert drawn.names == twin.adapters
    assert np.array_equal(drawn.prompt_tokens, twin.prompt_tokens)
    assert np.array_equal(drawn.output_tokens, twin.output_tokens)


@given(st.integers(0, 100))
def test_requests_are_within_max_model_len(seed: int) -> None:
    drawn = schedule_of(workload(), 10.0, seed, 100)
    assert (drawn.prompt_tokens + drawn.output_tokens <= 100).all()
    assert min(drawn.prompt_tokens.min(), drawn.output_tokens.min()) >= 1


def test_a_trace_is_replayed_faster_by_the_scale() -> None:
    trace = Trace.from_arrays([0.0, 1.0, 4.0], ["a0", "a1", "a0"], [5, 6, 7], [1, 2, 3], duration_s=5.0)
    drawn = schedule_of(workload().replace(trace=trace), 10.0, rate_scale=2.0)
    assert drawn.due_s.tolist() == [0.0, 0.5, 2.0]
    assert drawn.prompt_tokens.tolist() == [5, 6, 7]
    assert [drawn.names[number] for number in drawn.adapter] == ["a0", "a1", "a0"]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_is_a_finite_number_above_zero(scale: float) -> None:
    with pytest.raises(InputError, match="rate_scale"):
        scaled(workload(), scale)


WRITERS = {form: PromptWriter(form, salt=5) for form in PromptForm}

IDS = (PromptForm.IDS, PromptForm.TOY_IDS)


def tokens_of(form: PromptForm, text: str) -> list[object]:
    prompt = json.loads(text)
    return prompt.split() if form is PromptForm.TEXT else prompt


@given(st.sampled_from(PromptForm), st.integers(0, 10**9), st.integers(1, 3000), st.integers(0, 4000))
def test_a_prompt_has_exactly_the_requested_tokens(
    form: PromptForm, number: int, tokens: int, shared: int
) -> None:
    assert len(tokens_of(form, WRITERS[form].written(number, tokens, shared))) == tokens


def test_very_long_prompts_are_exact() -> None:
    assert len(json.loads(PromptWriter().written(65_000, 300_000))) == 300_000


@given(st.sampled_from(PromptForm), st.sets(st.integers(0, 10**6), min_size=2, max_size=2))
def test_two_prompts_differ_within_their_first_tokens(form: PromptForm, numbers: set[int]) -> None:
    first, second = (tokens_of(form, WRITERS[form].written(number, 64)) for number in numbers)
    assert first[:4] != second[:4]


@given(
    st.sampled_from(PromptForm), st.integers(1, 50), st.sets(st.integers(0, 10**6), min_size=2, max_size=2)
)
def test_prompts_share_the_requested_prefix_only(form: PromptForm, shared: int, numbers: set[int]) -> None:
    first, second = (tokens_of(form, WRITERS[form].written(number, 100, shared)) for number in numbers)
    assert first[:shared] == second[:shared]
    assert first[shared : shared + 4] != second[shared : shared + 4]


def test_another_salt_gives_other_prompts() -> None:
    assert PromptWriter(salt=1).written(0, 64)[:20] != PromptWriter(salt=2).written(0, 64)[:20]


@pytest.mark.parametrize(("form", "low", "high"), [(IDS[0], 1000, 9999), (IDS[1], 100, 299)])
def test_ids_are_within_the_range_of_their_form(form: PromptForm, low: int, high: int) -> None:
    ids = json.loads(PromptWriter(form).written(3, 20_000))
    assert low <= min(ids) <= max(ids) <= high


def test_text_leaves_room_for_added_tokens() -> None:
    assert len(json.loads(PromptWriter(PromptForm.TEXT, extra_tokens=1).written(0, 10)).split()) == 9


def test_a_body_holds_model_prompt_and_max_tokens() -> None:
    bodies = RequestBodies(PromptWriter(), ["", 'a"b'], {"top_k": 1, "ignore_eos": False})
    request = json.loads(bodies.body(7, 1, 12, 34))
    assert (request["model"], request["max_tokens"], len(request["prompt"])) == ('a"b', 34, 12)
    assert (request["stream"], request["stream_options"], request["temperature"]) == (
        True,
        {"include_usage": True},
        0,
    )
    assert (request["top_k"], request["ignore_eos"]) == (1, False)


def test_the_poisson_test_rejects_another_rate() -> None:
    pytest.importorskip("psutil", reason="the benchmark reads its own memory")
    from benchmarks.load_generator import KS_BAR, poisson

    sent_s = np.cumsum(np.random.default_rng(0).exponential(1.0 / 10.0, 600))
    assert poisson(sent_s, 10.0)[1] > KS_BAR
    assert poisson(sent_s, 12.5)[1] < KS_BAR
