"""Request bodies of public load and evaluation tools, as recorded, and their order of events.

Recorded with GuideLLM 0.8.1, AIPerf 0.13.0, lm-eval 0.4.13 and `vllm bench serve` of vLLM 0.32.0.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.live import Live, live
from tests.engine.test_faults import post, send

CASES = Path(__file__).parents[3] / "shared" / "cases"
TEXT = "Question 0: which is larger?"
COUNTED = {"include_usage": True, "continuous_usage_stats": True}
PARTS = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
LIVE = STREAMED | {"stream_options": COUNTED}
VLLM = STREAMED | {"prompt": TEXT, "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None}
SAMPLED = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
ONE_TEXT = [{"role": "user", "content": TEXT}]
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("guidellm", "completions", LIVE | {"prompt": TEXT, "max_tokens": 8}),
    ("guidellm", "chat/completions", LIVE | {"messages": PARTS, "max_completion_tokens": 8}),
    (
        "aiperf --extra-inputs ignore_eos:true min_tokens:8",
        "completions",
        STREAMED | {"prompt": TEXT, "max_tokens": 8, "min_tokens": 8},
    ),
    (
        "aiperf --per-chunk-usage",
        "chat/completions",
        LIVE | {"messages": ONE_TEXT, "max_completion_tokens": 8},
    ),
    ("vllm bench serve", "completions", VLLM),
    ("vllm bench serve --top-k 20 --min-p 0.05", "completions", VLLM | SAMPLED),
    ("vllm bench serve", "chat/completions", STREAMED | {"messages": PARTS, "max_completion_tokens": 8}),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live({"legal": 16, "support": 8, "acme/sql-v1": 8}) as running:
        yield running
        running.check_idle()


@pytest.mark.parametrize(("tool", "path", "body"), BODIES, ids=[f"{tool} {path}" for tool, path, _ in BODIES])
def test_a_load_tool_gets_the_tokens_that_it_asks_for(
    server: Live, tool: str, path: str, body: dict[str, Any]
) -> None:
    answer = post(server, f"/v1/{path}", model="legal", **body)
    assert answer.status == 200, answer.body
    assert answer.body.endswith(b"data: [DONE]\n\n")
    events = [
        json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line.startswith("data: {")
    ]
    assert events[-1]["usage"]["completion_tokens"] == 8
    counted = [event["usage"] for event in events[:-1]]
    if body["stream_options"] == COUNTED:
        assert [usage["completion_tokens"] for usage in counted][-1] == 8
    else:
        assert counted == [None] * len(counted)


def test_lm_eval_scores_a_continuation_by_its_echo(server: Live) -> None:
    prompt = list(f"{TEXT} the sun".encode())
    asked = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True}
    answer = post(server, "/v1/completions", model="legal", prompt=[prompt, prompt[:-3]], **asked)
    assert answer.status == 200, answer.body
    first, second = (choice["logprobs"] for choice in json.loads(answer.body)["choices"])
    assert len(first["token_logprobs"]) == len(first["top_logprobs"]) == len(prompt) + 1
    # As the tool reads it: the prompt without its first token and the output.
    continuation = first["token_logprobs"][len(TEXT) : -1]
    assert len(continuation) == len(" the sun")
    assert all(value < 0 for value in continuation)
    assert first["token_logprobs"][1:-4] == pytest.approx(second["token_logprobs"][1:-1], abs=1e-4)


@pytest.mark.parametrize("path", ["/metrics", "/health", "/ping", "/v1/models"])
def test_a_probe_by_head_gets_the_head_of_get(server: Live, path: str) -> None:
    head, get = send(server, "HEAD", path), send(server, "GET", path)
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert send(server, "HEAD", "/v1/completions").status == 405


_REFUSED = {
    "chat response_format json_object": "response_format",
    "responses API": "Not Found",
    "unknown model": "nope",
    "prompt too long": "prompt",
    "max_tokens over": "max_tokens",
    "max_tokens=0": "max_tokens",
    "empty prompt": "prompt",
    "reasoning_effort": "reasoning_effort",
}
"""Requests of the case that are invalid or not supported, and a part of the error."""


def test_the_public_clients_of_case_13_are_answered(server: Live, capsys: pytest.CaptureFixture[str]) -> None:
    """Every request of ../shared/cases/13-openai-clients/client.py, in order."""
    source = CASES / "13-openai-clients" / "client.py"
    if not source.is_file():
        pytest.skip("no ../shared/cases beside the checkout")
    program = source.read_text().replace("http://127.0.0.1:8011", server.url)
    exec(compile(program, str(source), "exec"), {"openai": openai})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(re.findall(r"^t\(", program, flags=re.MULTILINE))
    for line in lines:
        refused = next((part for name, part in _REFUSED.items() if f" {name} " in line), None)
        if refused is None:
            assert line.startswith("OK "), line
        else:
            assert line.startswith("HTTP "), line
            assert refused in line
            assert "did you mean" not in line
