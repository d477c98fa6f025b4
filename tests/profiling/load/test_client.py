"""Events of streamed answers, however their bytes are split."""

import itertools
import json

from hypothesis import given
from hypothesis import strategies as st

from capplan.profiling.load.client import EventCounter
from tests.profiling.load.servers import event, usage

texts = st.lists(st.text(max_size=12) | st.just("\ndata: x"), min_size=1, max_size=40)


def fed(data: bytes, cuts: list[int]) -> EventCounter:
    counter = EventCounter()
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        counter.feed(data[low:high], float(number))
    return counter


@given(texts, st.lists(st.integers(0, 10_000), max_size=30))
def test_event_counts_do_not_depend_on_chunks_or_text(tokens: list[str], cuts: list[int]) -> None:
    data = b"".join(map(event, tokens)) + usage(7, len(tokens) + 1)
    counter = fed(data, cuts)
    ending = counter.ending()
    assert len(counter.times) - ending.without_token == len(tokens)
    assert (ending.complete, ending.error) == (True, "")
    assert (ending.prompt_tokens, ending.output_tokens) == (7, len(tokens) + 1)


@given(texts, st.lists(st.integers(0, 10_000), max_size=30))
def test_event_times_are_those_of_the_chunks(tokens: list[str], cuts: list[int]) -> None:
    counter = fed(b"".join(map(event, tokens)), cuts)
    assert counter.times == sorted(counter.times)
    assert len(counter.times) == len(tokens)


def test_an_answer_without_an_ending_is_incomplete() -> None:
    assert not fed(event() + event(), []).ending().complete
    assert fed(event() + event(reason="length"), []).ending().complete


def test_an_error_inside_the_stream_is_reported() -> None:
    ending = fed(event() + b'data: {"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n', []).ending()
    assert "out of memory" in ending.error
    assert not ending.complete


def test_events_that_are_no_completions_are_errors() -> None:
    shapes = (b'{"choices": 5}', b'{"choices": {"0": {}}}', b'{"choices": [[{}]]}', b"[" * 1500, b"9" * 1500)
    for line in (b"hello", b"[1, 2]", b'"text"', *shapes):
        assert fed(b"data: " + line + b"\n\n", []).ending().error


def test_lines_may_end_with_carriage_returns() -> None:
    data = (event() + event() + usage(1, 2)).replace(b"\n", b"\r\n")
    counter = fed(data, [5, 50])
    assert len(counter.times) - counter.ending().without_token == 2


def test_an_impossible_token_count_is_an_error() -> None:
    ending = fed(event() + usage(3, 10**12), []).ending()
    assert ending.error
    assert not ending.complete


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)

events = st.fixed_dictionaries(
    {}, optional={"choices": json_values, "usage": json_values, "error": json_values}
)


@given(json_values | events)
def test_events_of_any_shape_raise_no_exception(value: object) -> None:
    ending = fed(b"data: " + json.dumps(value).encode() + b"\n\n", []).ending()
    for count in (ending.prompt_tokens, ending.output_tokens):
        assert count is None or 0 <= count < 2**31


@given(texts, st.lists(st.integers(0, 10_000), max_size=30))
def test_comments_and_event_names_are_ignored(tokens: list[str], cuts: list[int]) -> None:
    between = b": keep-alive\n\nevent: token\n"
    data = b"".join(between + event(each) for each in tokens) + between + usage(7, 3) + b": bye\n\n"
    counter = fed(data, cuts)
    ending = counter.ending()
    assert len(counter.times) - ending.without_token == len(tokens)
    assert (ending.error, ending.prompt_tokens, ending.output_tokens) == ("", 7, 3)
