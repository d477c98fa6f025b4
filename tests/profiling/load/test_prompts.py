import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.profiling.load.requests import PromptForm, PromptWriter, RequestBodies

WRITERS = {form: PromptWriter(form, salt=5) for form in PromptForm}
IDS = (PromptForm.IDS, PromptForm.TOY_IDS)


def tokens_of(form: PromptForm, text: str) -> list[object]:
    prompt = json.loads(text)
    return prompt.split() if form is PromptForm.TEXT else prompt


@given(st.sampled_from(PromptForm), st.integers(0, 10**9), st.integers(1, 3000), st.integers(0, 4000))
def test_a_prompt_has_exactly_the_tokens_asked_for(
    form: PromptForm, number: int, tokens: int, shared: int
) -> None:
    assert len(tokens_of(form, WRITERS[form].written(number, tokens, shared))) == tokens


def test_very_long_prompts_are_exact_too() -> None:
    assert len(json.loads(PromptWriter().written(65_000, 300_000))) == 300_000


@given(st.sampled_from(PromptForm), st.sets(st.integers(0, 10**6), min_size=2, max_size=2))
def test_two_prompts_differ_within_their_first_tokens(form: PromptForm, numbers: set[int]) -> None:
    first, second = (tokens_of(form, WRITERS[form].written(number, 64)) for number in numbers)
    assert first[:4] != second[:4]


@given(
    st.sampled_from(PromptForm), st.integers(1, 50), st.sets(st.integers(0, 10**6), min_size=2, max_size=2)
)
def test_prompts_share_the_beginning_asked_for_and_no_more(
    form: PromptForm, shared: int, numbers: set[int]
) -> None:
    first, second = (tokens_of(form, WRITERS[form].written(number, 100, shared)) for number in numbers)
    assert first[:shared] == second[:shared]
    assert first[shared : shared + 4] != second[shared : shared + 4]


def test_another_salt_gives_other_prompts() -> None:
    assert PromptWriter(salt=1).written(0, 64)[:20] != PromptWriter(salt=2).written(0, 64)[:20]


@pytest.mark.parametrize(("form", "low", "high"), [(IDS[0], 1000, 9999), (IDS[1], 100, 299)])
def test_ids_are_of_every_vocabulary_of_that_size(form: PromptForm, low: int, high: int) -> None:
    ids = json.loads(PromptWriter(form).written(3, 20_000))
    assert low <= min(ids) <= max(ids) <= high


def test_a_text_leaves_room_for_what_the_server_adds() -> None:
    assert len(json.loads(PromptWriter(PromptForm.TEXT, extra_tokens=1).written(0, 10)).split()) == 9


def test_a_body_asks_for_exactly_so_many_tokens_of_this_model() -> None:
    bodies = RequestBodies.of(PromptWriter(), ["", 'a"b'], {"top_k": 1, "ignore_eos": False})
    asked = json.loads(bodies.body(7, 1, 12, 34))
    assert (asked["model"], asked["max_tokens"], len(asked["prompt"])) == ('a"b', 34, 12)
    assert (asked["stream"], asked["stream_options"], asked["temperature"]) == (
        True,
        {"include_usage": True},
        0,
    )
    assert (asked["top_k"], asked["ignore_eos"]) == (1, False)
