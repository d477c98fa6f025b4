"""Demand that the router measures: tokens of the requests that arrived, by adapter."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.fleet._rebalancing import DemandMeter

NAMES = (None, "x", "y")


@given(
    st.lists(
        st.tuples(st.sampled_from(NAMES), st.integers(0, 50), st.integers(0, 50), st.sampled_from("fdo")),
        max_size=30,
    ),
    st.floats(0.1, 100.0),
)
def test_every_valid_request_counts_once_in_the_window_of_its_arrival(
    requests: list[tuple[str | None, int, int, str]], duration_s: float
) -> None:
    meter = DemandMeter(NAMES, prior_output_tokens=7.0)
    meter.close_window(now_s=0.0)
    expected, open_ = dict.fromkeys(NAMES, 0.0), []
    answers, tokens = 1.0, 7.0
    for adapter, prompt, output, fate in requests:
        request = meter.arrive(adapter, prompt)
        request.output_tokens = output
        if fate == "f":
            request.finish()
            answers, tokens = answers + 1.0, tokens + output
            expected[adapter] += prompt + output
        elif fate == "d":
            request.drop()
        else:
            open_.append(request)
    assert meter.mean_output_tokens == pytest.approx(tokens / answers)
    for request in open_:
        expected[request.adapter] += request.prompt_tokens + max(request.output_tokens, tokens / answers)
    window = meter.close_window(now_s=duration_s)
    assert window.tok_s == pytest.approx({name: each / duration_s for name, each in expected.items()})
    assert window.unfinished == len(open_)
    valid = [adapter for adapter, *_, fate in requests if fate != "d"]
    assert window.requests == {name: valid.count(name) for name in NAMES}
    for request in open_:
        request.finish()
    assert meter.close_window(now_s=2 * duration_s).tok_s == dict.fromkeys(NAMES, 0.0)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_token_counts_of_the_response_replace_the_estimate(separators: tuple[str, str]) -> None:
    meter = DemandMeter(NAMES, 1.0)
    document = {
        "choices": [{"text": 'of "usage": {"prompt_tokens": 1, "completion_tokens": 1}' + "x" * 5000}],
        "usage": {"prompt_tokens": 12, "total_tokens": 19, "completion_tokens": 7},
    }
    request = meter.arrive("x", 99)
    request.answer(json.dumps(document, separators=separators).encode())
    assert (request.prompt_tokens, request.output_tokens) == (12, 7)


def test_events_of_a_stream_are_tokens_unless_it_ends_with_counts() -> None:
    meter = DemandMeter(NAMES, 1.0)
    plain, counted = meter.arrive("x", 9), meter.arrive("x", 9)
    for request in (plain, counted):
        request.stream(b'data: {"a": 1}\n\ndata: {"a": 2}\n\n')
        request.stream(b'data: {"a": 3}\n\n')
    counted.stream(b'data: {"usage":{"prompt_tokens":5,"completion_tokens":4,"total_tokens":9}}\n\n')
    for request in (plain, counted):
        request.stream(b"data: [DONE]\n\n")
    assert (plain.prompt_tokens, plain.output_tokens) == (9, 3)
    assert (counted.prompt_tokens, counted.output_tokens) == (5, 4)


def test_windows_without_an_answer_leave_the_prior() -> None:
    meter = DemandMeter(NAMES, 7.0)
    meter.arrive("x", 1).finish()
    for _ in range(2000):
        meter.close_window()
    assert meter.mean_output_tokens == pytest.approx(7.0)
    meter.arrive("x", 3)
    assert meter.close_window().unfinished == 1
