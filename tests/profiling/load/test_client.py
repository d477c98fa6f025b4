"""Tokens of streamed answers, however their bytes are split and whatever is between them."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.profiling.load._client import EventCounter
from tests.profiling.load.servers import event, usage

texts = st.lists(st.text(min_size=1, max_size=12) | st.just("\ndata: x"), min_size=1, max_size=40)
cuts = st.lists(st.integers(0, 10_000), max_size=30)
DONE = b"data: [DONE]\n\n"


def fed(data: bytes, cuts: list[int]) -> EventCounter:
    counter = EventCounter()
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        counter.feed(data[low:high], float(number))
    counter.end(float(len(edges)))
    return counter


def data(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def choice(**fields: Any) -> dict[str, Any]:
    return {"id": "0", "choices": [{"index": 0, "finish_reason": None, **fields}]}


def text(text: str = " a", **more: Any) -> bytes:
    return data(choice(text=text) | more)


def delta(**fields: Any) -> bytes:
    return data(choice(delta=fields))


def counted(prompt: int, output: int) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": output}}


def arrivals(*events: bytes) -> list[float]:
    """Return the positions of the events with tokens."""
    counter = EventCounter()
    for number, each in enumerate(events):
        counter.feed(each, float(number))
    counter.end(float(len(events)))
    return counter.token_times()


@given(texts, cuts)
def test_tokens_do_not_depend_on_chunks_or_text(tokens: list[str], cuts: list[int]) -> None:
    counter = fed(b"".join(map(event, tokens)) + usage(7, len(tokens) + 1), cuts)
    assert len(counter.token_times()) == len(tokens)
    assert (counter.complete, counter.error) == (True, "")
    assert (counter.prompt_tokens, counter.output_tokens) == (7, len(tokens) + 1)


@given(texts, cuts)
def test_a_token_arrives_with_the_last_byte_of_its_event(tokens: list[str], cuts: list[int]) -> None:
    events = list(map(event, tokens))
    body = b"".join(events)
    edges = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    ends = itertools.accumulate(map(len, events))
    expected = [next(n for n, high in enumerate(edges[1:]) if high >= end) for end in ends]
    assert fed(body, cuts).token_times() == expected


@given(texts, cuts, st.sampled_from([b"\r\n", b"\r"]))
def test_lines_may_end_in_any_way(tokens: list[str], cuts: list[int], end: bytes) -> None:
    body = b"".join(map(event, tokens)) + usage(7, len(tokens))
    expected, found = fed(body, []), fed(body.replace(b"\n", end), cuts)
    assert len(found.token_times()) == len(expected.token_times()) == len(tokens)
    assert (found.complete, found.error) == (True, "")


@given(texts, cuts)
def test_comments_names_and_keep_alives_are_no_tokens(tokens: list[str], cuts: list[int]) -> None:
    empty = b': keep-alive\n\ndata: {}\n\ndata:\n\ndata: {"id":"c","choices":[],"model":"m"}\n\n'
    between = empty + b"event: token\nid: 5\nretry: 10\n"
    body = b"\xef\xbb\xbf" + b"".join(between + event(each) for each in tokens) + empty + usage(7, 3)
    counter = fed(body, cuts)
    assert len(counter.token_times()) == len(tokens)
    assert (counter.error, counter.prompt_tokens, counter.output_tokens) == ("", 7, 3)


FILTER = data({"choices": [], "prompt_filter_results": [{"content_filter_results": {"text": "a"}}]})


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([FILTER, text(), text(), usage(5, 2)], [1, 2], id="filter"),
        pytest.param([data({"choices": []} | counted(5, 0)), text(), DONE], [1], id="usage-first"),
        pytest.param(
            [delta(role="assistant", content=""), delta(content="a"), delta(content="b")], [1, 2], id="role"
        ),
        pytest.param([delta(role="assistant", content="a"), delta(content="b")], [0, 1], id="role-and-text"),
        pytest.param(
            [delta(role="assistant"), delta(reasoning_content="a"), delta(content="b")], [1, 2], id="thought"
        ),
        pytest.param([delta(role="assistant"), delta(reasoning="a", content=None)], [1], id="reasoning"),
        pytest.param([delta(content=None), delta(tool_calls=[{"index": 0}])], [1], id="tool"),
        pytest.param([text(""), text(), text(), usage(5, 2)], [1, 2], id="greeting"),
        pytest.param([text(""), text(), text(), DONE], [1, 2], id="greeting-without-counts"),
        pytest.param([text(""), text(), text(), usage(5, 3)], [0, 1, 2], id="invisible-first"),
        pytest.param([text(""), text(), text(), usage(5, 9)], [1, 2], id="doubt-before-the-first-text"),
        pytest.param([text(), text(""), text(""), usage(5, 9)], [0, 1, 2], id="doubt-after-it"),
        pytest.param([text(), text(), data(choice(text="") | counted(5, 2))], [0, 1], id="reason-alone"),
        pytest.param([text("", **counted(5, 1)), text("a", **counted(5, 2))], [0, 1], id="running-usage"),
        pytest.param(
            [text("", **counted(5, 0)), text("a", **counted(5, 3))], [1], id="running-usage-of-none"
        ),
        pytest.param(
            [data(choice(text="", token_ids=[])), data(choice(text="", token_ids=[4]))], [1], id="ids"
        ),
        pytest.param([data(choice(text="", logprobs={"tokens": ["a", "b"]})), DONE], [0], id="logprobs"),
        pytest.param([b'data: {"choices": [{"te', b'xt": "\xc3', b'\xa4"}]}\n', b"\n"], [3], id="split"),
        pytest.param([b'data: {"choices":\ndata: [{"text": "a"}]}\n\n'], [0], id="several-lines"),
        pytest.param([b'data: {"choices": [{"text": "\\ud83d"}]}\n\n', DONE], [0], id="half-a-pair"),
        pytest.param([data({"choices": [{"text": ""}, {"text": "a"}]})], [0], id="several-choices"),
        pytest.param([text(""), text(""), data(choice(text="")), usage(5, 2)], [1, 2], id="invisible"),
        pytest.param([text(""), text(""), usage(5, 9)], [1], id="invisible-together"),
        pytest.param([text(""), text("a"), text(""), usage(5, 2)], [1, 2], id="invisible-or-reason"),
        pytest.param([data(choice(text="") | counted(5, 3)), DONE], [0], id="total-beside-the-reason"),
        pytest.param([text(""), text(""), usage(5, 0)], [], id="none"),
        pytest.param([text(""), text(""), DONE], [], id="none-without-counts"),
    ],
)
def test_the_first_token_is_the_first_generated_text(events: list[bytes], expected: list[float]) -> None:
    assert arrivals(*events) == expected


def test_an_event_like_one_before_holds_a_token_only_with_text() -> None:
    """Events that differ from one before in their text alone are not parsed as JSON."""
    quoted = 'he said: "text": "b", \\'
    events = [text("a"), text("b"), text(""), text(quoted), text("c"), data(choice(text="d", logprobs=None))]
    assert arrivals(*events, DONE) == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        ([text(), text(), usage(5, 7)], 7),
        ([text("", **counted(5, 2)), text("a", **counted(5, 5))], 5),
        ([data(choice(text="a", token_ids=[4, 5])), data(choice(text="a", token_ids=[6])), DONE], 3),
        ([text(), text(), usage(5, 0)], None),
        ([text(), text(), DONE], None),
    ],
)
def test_tokens_are_counted_by_the_server(events: list[bytes], tokens: int | None) -> None:
    assert fed(b"".join(events), []).output_tokens == tokens


def test_an_answer_without_an_ending_is_incomplete() -> None:
    assert not fed(event() + event(), []).complete
    assert not fed(text("a", **counted(5, 1)), []).complete
    assert not fed(data({"choices": []} | counted(5, 0)) + event(), []).complete
    assert fed(event() + event(reason="length"), []).complete
    assert fed(event() + b"data: [DONE]", []).complete


@pytest.mark.parametrize(
    "failed",
    [
        b'data: {"error": {"message": "out of memory"}}\n\n',
        b'data: {"object": "error", "message": "out of memory"}\n\n',
        b"event: error\ndata: out of memory\n\n",
        b'event: error\ndata: {"message": "out of memory"}\n\n',
        data(
            choice(text="") | {"choices": [{"finish_reason": {"type": "abort", "message": "out of memory"}}]}
        ),
    ],
)
def test_an_error_inside_the_stream_is_reported(failed: bytes) -> None:
    assert "out of memory" in fed(event() + failed + DONE, []).error


def test_an_answer_that_the_engine_gave_up_is_an_error() -> None:
    assert "abort" in fed(event() + event(reason="abort") + DONE, []).error


def test_an_answer_that_is_no_stream_is_an_error() -> None:
    answer = b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}'
    assert '"text": "a"' in fed(answer, []).error
    assert "it is empty" in fed(b": ping\n\n", []).error


def test_events_that_are_no_completions_are_errors() -> None:
    shapes = (b'{"choices": 5}', b'{"choices": {"0": {}}}', b'{"choices": [[{}]]}', b"[" * 1500, b"9" * 1500)
    for line in (b"hello", b"[1, 2]", b'"text"', *shapes):
        assert fed(b"data: " + line + b"\n\n", []).error


def test_an_event_without_end_is_an_error() -> None:
    counter = EventCounter()
    for _ in range(40):
        counter.feed(b"data: " + b"x" * 65536, 0.0)
    assert "more than" in counter.error


def test_an_impossible_token_count_is_an_error() -> None:
    assert fed(event() + usage(3, 10**12), []).error


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = ("text", "delta", "message", "finish_reason", "logprobs", "token_ids", "content", "role")
choices = st.fixed_dictionaries({}, optional=dict.fromkeys(fields, json_values))
events = st.fixed_dictionaries(
    {}, optional={"choices": json_values | st.lists(choices), "usage": json_values, "error": json_values}
)


@given(json_values | events)
def test_events_of_any_shape_raise_no_exception(value: object) -> None:
    counter = fed(b"data: " + json.dumps(value).encode() + b"\n\n", [])
    for count in (counter.prompt_tokens, counter.output_tokens):
        assert count is None or 0 <= count < 2**31
