"""Load tests of valid and faulty servers on the loopback interface."""

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.stand_in_servers import whole
from capplan import InputError, Workload
from capplan.profiling.load import BenchResult, LoadProgress, LoadSettings, RequestFile, Target, bench
from capplan.profiling.load._bench import OpenLoop, bench_result
from capplan.profiling.load._requests import PromptWriter, RequestBodies, schedule_of
from capplan.spec import BaseTraffic
from tests.profiling.load import servers
from tests.profiling.load.servers import STREAM_HEAD, chunk, event, null_server, plain, server, usage
from tests.profiling.load.test_requests import workload

pytestmark = pytest.mark.process

SHORT = LoadSettings(duration_s=0.4, timeout_s=20.0, drain_s=10.0)
IMPATIENT = LoadSettings(duration_s=0.4, timeout_s=1.0, drain_s=10.0)


def load(
    url: str, settings: LoadSettings = SHORT, rate_rps: float = 8.0, due_s: float | None = None, **more: Any
) -> OpenLoop:
    """Run without preflight; requests are due up to `due_s`, or all the time."""
    schedule = schedule_of(workload(rate_rps), due_s or settings.horizon_s, 0, 256)
    bodies = RequestBodies(PromptWriter(), schedule.names, {})

    async def run() -> OpenLoop:
        loop = OpenLoop(schedule, bodies, Target(url), settings, **more)
        await loop.run(asyncio.Event())
        return loop

    return asyncio.run(run())


def failures(measured: OpenLoop) -> dict[str, int]:
    result = bench_result(measured, workload(), Target("http://x"), {}, "")
    return {each.kind: each.requests for each in result.failures}


def test_every_request_is_sent_once_when_due_with_its_lengths_and_adapter() -> None:
    seen: list[dict[str, Any]] = []
    with server(servers.paced, seen) as url:
        measured = load(url, LoadSettings(duration_s=2.5), due_s=0.5)
    schedule = schedule_of(workload(8.0), 0.5, 0, 256)
    sent = sorted((each["model"], len(each["prompt"]), each["max_tokens"]) for each in seen)
    columns = (schedule.adapter, schedule.prompt_tokens, schedule.output_tokens)
    wanted = sorted((schedule.names[a], p, o) for a, p, o in zip(*columns, strict=True))
    assert sent == wanted
    record = measured.record
    assert record.of_kind("finished").all()
    assert (record.sent_s >= record.due_s).all()
    assert np.array_equal(record.events, record.output_tokens)
    assert np.array_equal(record.output_tokens, schedule.output_tokens)
    assert (record.first_s > record.sent_s).all()
    assert (record.last_s >= record.first_s).all()


def test_requests_of_the_base_model_name_it() -> None:
    seen: list[dict[str, Any]] = []
    mixed = workload(4.0).replace(base=BaseTraffic(rate_rps=20.0))
    with server(servers.paced, seen) as url:
        result = bench(mixed, Target(url), SHORT)
    names = Counter(each["model"] for each in seen if each.get("stream"))
    assert names[mixed.base_model] == sum(schedule_of(mixed, 0.4).adapter == 0) > 3
    assert names.total() == result.overall.submitted
    (base,) = [each for each in result.adapters if each.name == ""]
    assert base.submitted == names[mixed.base_model]
    assert base.completed > 0


def test_an_open_loop_does_not_wait_for_a_silent_server() -> None:
    async def silent(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    with server(silent) as url:
        measured = load(url, LoadSettings(duration_s=2.5, drain_s=0.2), due_s=0.5)
    assert measured.record.of_kind("unfinished").all()
    assert not np.isnan(measured.record.sent_s).any()
    assert failures(measured) == {}


async def stalls(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def hangs_up(writer: asyncio.StreamWriter) -> None:
    writer.close()


async def resets(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def goes_on(writer: asyncio.StreamWriter) -> None:
    """Wait for the next request of the connection."""


def streamed(body: bytes) -> bytes:
    return STREAM_HEAD + chunk(body) + b"0\r\n\r\n"


UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
OUT_OF_MEMORY = b'data: {"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n'
FAULTS = {
    "half a stream": (STREAM_HEAD + chunk(event()), stalls, "timeout"),
    "half an event": (STREAM_HEAD + chunk(event()) + b"50\r\ndata: {", hangs_up, "disconnected"),
    "no end": (UNTIL_CLOSED + event() * 3, hangs_up, "disconnected"),
    "nothing": (b"", hangs_up, "disconnected"),
    "a reset": (b"", resets, "disconnected"),
    "an error": (whole(b'{"error": {"message": "engine died"}}', 500), goes_on, "http_500"),
    "overload": (whole(b"busy", 503), goes_on, "http_503"),
    "no HTTP": (b"\x00\x01 not HTTP at all\r\n\r\n", stalls, "bad_response"),
    "a web page": (whole(b"<html>hello</html>"), goes_on, "bad_response"),
    "a broken chunk": (STREAM_HEAD + b"zz\r\n" + event(), stalls, "bad_response"),
    "a negative chunk": (STREAM_HEAD + b"-5\r\n" + event(), stalls, "bad_response"),
    "broken JSON": (streamed(b"data: {broken\n\ndata: [DONE]\n\n"), goes_on, "bad_response"),
    "deep JSON": (streamed(event() + b'data: {"choices": ' + b"[" * 1500 + b"\n\n"), goes_on, "bad_response"),
    "absurd counts": (streamed(event() + usage(3, 10**12)), goes_on, "bad_response"),
    "an error in the stream": (streamed(event() + OUT_OF_MEMORY), goes_on, "bad_response"),
}
"""What a server sends, what it does then, and the kind of the failure."""


@pytest.mark.parametrize(("sent", "then", "kind"), FAULTS.values(), ids=FAULTS)
def test_failures_are_counted_by_kind(
    sent: bytes, then: Callable[[asyncio.StreamWriter], Awaitable[None]], kind: str
) -> None:
    """A server that fails every third request: the others are served, the run ends."""
    number = 0

    async def answer(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal number
        number += 1
        if number % 3:
            await quick(request, writer)
            return
        writer.write(sent)
        await writer.drain()
        await then(writer)

    with server(answer) as url:
        measured = load(url, IMPATIENT if kind == "timeout" else SHORT)
    counted = failures(measured)
    assert counted == {kind: number // 3}
    assert int(measured.record.of_kind("finished").sum()) == number - number // 3
    assert set(measured.recorder.messages) == {kind}


async def quick(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    tokens = request["max_tokens"]
    body = event() * tokens + usage(len(request["prompt"]), tokens)
    writer.write(STREAM_HEAD + chunk(body) + b"0\r\n\r\n")
    await writer.drain()


def test_without_a_server_every_request_is_refused() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        measured = load(url, LoadSettings(duration_s=2.0), due_s=0.4)
    assert failures(measured) == {"refused": len(measured.record)}


def test_tokens_are_as_counted_by_the_server_if_events_hold_several() -> None:
    async def in_pairs(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        tokens = request["max_tokens"]
        writer.write(STREAM_HEAD)
        for _ in range(tokens // 2 or 1):
            writer.write(chunk(event("a b")))
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(chunk(usage(3, tokens)) + b"0\r\n\r\n")

    with server(in_pairs) as url:
        record = load(url, LoadSettings(duration_s=2.0), due_s=0.4).record
    assert record.of_kind("finished").all()
    assert np.array_equal(record.events, np.maximum(record.output_tokens // 2, 1))
    assert (record.prompt_tokens == 3).all()


def test_requests_beyond_the_limit_are_rejected_not_sent() -> None:
    async def silent(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(60)

    seen: list[dict[str, Any]] = []
    with server(silent, seen) as url:
        measured = load(url, LoadSettings(duration_s=2.0, drain_s=0.1, max_in_flight=3), due_s=0.4)
    assert len(seen) == 3
    assert int(measured.record.of_kind("rejected").sum()) == len(measured.record) - 3


def test_a_stopped_run_is_partial_and_its_window_ends_there() -> None:
    async def stopped(url: str) -> OpenLoop:
        stop = asyncio.Event()
        schedule = schedule_of(workload(), 60.0, 0, 256)
        bodies = RequestBodies(PromptWriter(), schedule.names, {})

        def on_tick(now: LoadProgress) -> None:
            if now.completed > 5:
                stop.set()

        settings = LoadSettings(duration_s=60.0)
        loop = OpenLoop(schedule, bodies, Target(url), settings)
        await loop.run(stop, on_tick)
        return loop

    with null_server() as url:
        measured = asyncio.run(stopped(url))
    assert measured.partial
    assert measured.window.end_s < 60.0
    assert (measured.record.due_s < measured.window.end_s).all()
    result = bench_result(measured, workload(), Target("http://x"), {}, "")
    assert result.overall.completed > 0
    assert result.partial


def test_the_file_of_requests_has_every_request_and_every_event(tmp_path: Path) -> None:
    with server(servers.paced) as url, RequestFile(tmp_path / "r.parquet") as file:
        record = load(url, LoadSettings(duration_s=2.5), due_s=0.5, file=file).record
        assert not (tmp_path / "r.parquet").exists()
        file.keep()
    table = pq.read_table(tmp_path / "r.parquet").sort_by("number").to_pydict()
    assert table["number"] == list(range(len(record)))
    assert [len(each) for each in table["event_ms"]] == record.events.tolist()
    assert np.allclose(table["arrival_s"], record.due_s)
    assert np.allclose(table["ttft_s"], record.first_s - record.due_s)
    ends = np.array([each[-1] for each in table["event_ms"]]) / 1e3
    assert np.allclose(ends, record.last_s - record.sent_s, atol=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["r.parquet"]


def test_metrics_are_sampled_only_with_an_interval() -> None:
    with null_server() as url:
        assert load(url).samples == []
        samples = load(url, LoadSettings(duration_s=0.8, metrics_interval_s=0.1)).samples
    assert len(samples) >= 2
    assert samples[0].values == {"running": 0.0, "waiting": 0.0, "kv_used": 0.0}


def measured_by(url: str, chosen: Workload, **more: Any) -> BenchResult:
    return bench(chosen, Target(url, **more), LoadSettings(duration_s=0.5))


def test_a_result_reads_back_unchanged(tmp_path: Path) -> None:
    with null_server() as url:
        result = measured_by(url, workload())
    result.to_json(tmp_path / "r.json")
    assert BenchResult.from_json(tmp_path / "r.json") == result
    assert result.workload_digest == workload().digest()
    assert 0 < result.overall.completed <= result.overall.submitted
    assert not result.partial


def test_the_api_key_is_sent_and_never_written() -> None:
    seen: list[dict[str, Any]] = []
    with server(servers.paced, seen) as url:
        result = measured_by(url, workload(), api_key="secret-key")
    assert {each["authorization"] for each in seen} == {"bearer secret-key"}
    assert "secret-key" not in result.to_json()
    assert "secret-key" not in repr(Target("http://x", "secret-key"))


def test_a_server_without_token_ids_gets_text_of_the_same_length() -> None:
    async def words_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        import json

        while head := await reader.readuntil(b"\r\n\r\n"):
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            request = json.loads(await reader.readexactly(int(length[0].split(b":")[1]))) if length else {}
            if not isinstance(request.get("prompt"), str):
                await plain(writer, 400, b'{"error": {"message": "prompt must be a string"}}')
                continue
            tokens = 1 + len(request["prompt"].split())  # and one for the beginning
            counted = usage(tokens, request["max_tokens"])
            if request.get("stream"):
                body = event() * request["max_tokens"] + counted
                writer.write(STREAM_HEAD + chunk(body) + b"0\r\n\r\n")
            else:
                answer = {"choices": [{"text": "a"}], "usage": {"prompt_tokens": tokens}}
                await plain(writer, 200, json.dumps(answer).encode())

    async def start() -> asyncio.Server:
        return await asyncio.start_server(words_only, "127.0.0.1", 0)

    chosen = workload().replace(prompt_tokens=workload().prompt_tokens.__class__(mean=40))
    with servers.listening(start) as url:
        result = measured_by(url, chosen)
    assert result.settings["prompt_form"] == "text"
    overall = result.overall
    assert overall.input_tok_s * result.duration_s == 40 * overall.completed


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "ftp://x", "http://", "", "http://localhost:80x0", "http://[::1", "http://h:99999"],
)
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(InputError, match="url: must be the http"):
        Target(url)


@pytest.mark.parametrize(
    "url", ["http://me:hush@h:1", "http://me@h:1/v1", "me:hush@h", "http://me:hush@[::1"]
)
def test_a_password_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InputError, match="no password") as caught:
        Target(url)
    assert "hush" not in str(caught.value)


def test_a_server_that_lists_no_models_is_one_clear_line() -> None:
    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await plain(writer, 200, b'{"data": 5}')

    with (
        servers.listening(lambda: asyncio.start_server(odd, "127.0.0.1", 0)) as url,
        pytest.raises(InputError, match="must list models at /v1/models"),
    ):
        measured_by(url, workload())


def test_a_server_without_http_is_one_clear_line() -> None:
    async def greets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await writer.drain()
        await asyncio.sleep(5)

    with (
        servers.listening(lambda: asyncio.start_server(greets, "127.0.0.1", 0)) as url,
        pytest.raises(InputError, match="does not answer") as caught,
    ):
        measured_by(url, workload())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_url_may_end_in_v1(url: str) -> None:
    assert Target(url).at("/v1/completions") == "http://h:1/v1/completions"
