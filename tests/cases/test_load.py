"""Load tests of servers whose streams and metrics hold more than tokens and values."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from capplan.profiling.load import BenchResult
from tests.cli.conftest import Run
from tests.profiling.load.servers import STREAM_HEAD, chunk, event, paced, plain, server, usage

pytestmark = pytest.mark.process

pytest.importorskip("httptools", reason="the load generator needs httptools (extra `bench`)")

CASES = Path(__file__).resolve().parents[3] / "shared" / "cases"
METRICS, STREAMS = "14-metrics-both-kv-names", "15-sse-empty-events"
SHORT = ("--duration", "2", "--drain-s", "5", "--rate-scale", "2")


@contextmanager
def fake_server(case: str, metrics: str, mode: str) -> Iterator[str]:
    """Yield the address of a case's server."""
    folder = CASES / case
    if not folder.is_dir():
        pytest.skip("no ../shared/cases beside the checkout: the cases are missing")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, folder / "fake_vllm.py", str(port), folder / metrics, mode]
    with subprocess.Popen(command) as started:
        try:
            for _ in range(100):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            started.kill()


def loaded(run: Run, url: str, tmp_path: Path, *flags: object) -> tuple[BenchResult, str]:
    """Return the result of a load test, and its errors."""
    workload = tmp_path / "bench.yaml"
    adapters = [{"name": "a{i}", "count": 2, "rank": 8, "rate_rps": 2}]
    lengths = {"prompt_tokens": {"mean": 50}, "output_tokens": {"mean": 20}}
    document: dict[str, Any] = {"base_model": "meta-llama/Llama-3.1-8B-Instruct", "requests": lengths}
    document |= {"adapters": adapters, "engine": {"max_loras": 2, "max_model_len": 8192}}
    document |= {"profile": "h100-64g/llama-3.1-8b/vllm-0.8.5"}
    workload.write_text(json.dumps(document))
    done = run("bench", workload, "--url", url, *SHORT, "-o", tmp_path / "r.json", *flags)
    assert done.exit_code in (0, 1), done.output  # 1: failures, or this machine was too busy
    return BenchResult.from_json(tmp_path / "r.json"), done.stderr


@pytest.mark.parametrize("mode", ["plain", "comments", "emptydata", "emptychoice", "crlf", "split"])
def test_events_without_a_token_are_not_the_first_token(run: Run, tmp_path: Path, mode: str) -> None:
    with fake_server(STREAMS, "metrics-0.10.txt", mode) as url:
        result, errors = loaded(run, url, tmp_path)
    overall = result.overall
    assert overall.completed > 0
    assert overall.failed == 0
    assert overall.ttft_sent_s.p50 == pytest.approx(0.4, rel=0.1)
    assert overall.tpot_ms.p50 is not None
    assert 5.0 < overall.tpot_ms.p50 < 15.0  # sleeps of 5 ms and more, on a busy machine
    assert overall.output_tok_s == pytest.approx(20 * overall.request_rate_rps)
    assert "warning: " not in errors


@pytest.mark.parametrize(
    ("metrics", "running", "kv_used"), [("metrics-0.10.txt", 12.0, 0.42), ("metrics-dp2.txt", 24.0, 0.42)]
)
def test_one_quantity_under_two_names_or_of_two_engines(
    run: Run, tmp_path: Path, metrics: str, running: float, kv_used: float
) -> None:
    with fake_server(METRICS, metrics, "plain") as url:
        result, _ = loaded(run, url, tmp_path, "--metrics-interval-s", "0.5")
    assert result.server
    for sample in result.server:
        assert sample.values["kv_used"] == pytest.approx(kv_used)
        assert sample.values["running"] == running
        assert sample.values["running_adapters"] == 2.0


async def without_counts(request: dict[str, Any], writer: Any) -> None:
    """Ignore ``stream_options``."""
    tokens = request["max_tokens"]
    writer.write(STREAM_HEAD)
    for number in range(tokens):
        writer.write(chunk(event(reason="length" if number == tokens - 1 else None)))
        await writer.drain()
        await asyncio.sleep(0.001)
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def held_back(request: dict[str, Any], writer: Any) -> None:
    """Send all tokens in one packet, as proxies that buffer."""
    tokens = request["max_tokens"]
    writer.write(STREAM_HEAD + chunk(event() * tokens + usage(50, tokens)) + b"0\r\n\r\n")
    await writer.drain()


async def half_as_long(request: dict[str, Any], writer: Any) -> None:
    """Ignore ``ignore_eos``."""
    await paced(request | {"max_tokens": request["max_tokens"] // 2}, writer)


@pytest.mark.parametrize(
    ("answer", "doubt", "said"),
    [
        (without_counts, "uncounted", "without token counts"),
        (held_back, "buffered", "whose tokens arrived at once"),
        (half_as_long, "other_length", "of another length than requested"),
    ],
)
def test_uncertain_answers_are_said(run: Run, tmp_path: Path, answer: Any, doubt: str, said: str) -> None:
    with server(answer) as url:
        result, errors = loaded(run, url, tmp_path)
    overall = result.overall
    assert overall.completed > 0
    assert getattr(result.uncertain, doubt) >= overall.completed
    assert said in errors
    assert overall.output_tok_s == pytest.approx(
        (10 if answer is half_as_long else 20) * overall.request_rate_rps
    )
    if answer is held_back:
        assert (overall.tpot_ms.p50, overall.itl_ms.mean, overall.token_gap_ms_mean) == (None, None, None)
        assert overall.ttft_s.p99 == pytest.approx(overall.e2e_s.p99)


async def nothing_generated(request: dict[str, Any], writer: Any) -> None:
    writer.write(STREAM_HEAD + chunk(event("", "length") + usage(50, 0)) + b"0\r\n\r\n")
    await writer.drain()


async def fails_inside(request: dict[str, Any], writer: Any) -> None:
    writer.write(
        STREAM_HEAD + chunk(event() + b'event: error\ndata: {"error": "no memory"}\n\n') + b"0\r\n\r\n"
    )
    await writer.drain()


async def ends_early(request: dict[str, Any], writer: Any) -> None:
    writer.write(STREAM_HEAD + chunk(event() * 3) + b"0\r\n\r\n")
    await writer.drain()


async def is_no_stream(request: dict[str, Any], writer: Any) -> None:
    await plain(writer, 200, b'{"choices": [{"text": "a", "finish_reason": "stop"}]}')


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (nothing_generated, "bad_response: an answer without a token"),
        (fails_inside, "no memory"),
        (ends_early, "disconnected: the answer ended early"),
        (is_no_stream, 'an answer without a single event: {"choices"'),
    ],
)
def test_answers_that_are_none_are_failures(run: Run, tmp_path: Path, answer: Any, said: str) -> None:
    with server(answer) as url:
        result, errors = loaded(run, url, tmp_path)
    assert result.overall.completed == 0
    assert result.overall.failed > 0
    assert said in errors
