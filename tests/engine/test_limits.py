"""Limits of headers, bodies and connections: hostile clients are refused, others are answered."""

import asyncio
import contextlib
import json
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from capplan import InputError
from capplan.fleet._app import ForwardedRequest
from capplan.server import ApiError, ServerLimits, parsed
from capplan.server._state import ByteBudget
from tests.engine.live import Live, live

pytestmark = pytest.mark.process

LIMITS = ServerLimits(
    max_body_bytes=100_000,
    max_buffered_bytes=300_000,
    max_header_bytes=20_000,
    max_header_count=30,
    header_timeout_s=0.3,
    body_timeout_s=20.0,
    max_connections=8,
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def shared() -> Iterator[Live]:
    with live({}, limits=LIMITS) as running:
        yield running


@pytest.fixture
def server(shared: Live) -> Iterator[Live]:
    """A server that is checked for leaks after the test."""
    yield shared
    with connected(shared) as client:
        assert answer(client, HEALTH)[0] == 200
    deadline = time.monotonic() + 20
    while shared.service.budget.used_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert shared.service.budget.used_bytes == 0
    shared.check_idle()


def connected(server: Live) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def wait_for(server: Live, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not server.on_loop(holds):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def answer(client: socket.socket, data: bytes) -> tuple[int, dict[str, Any]]:
    """Send bytes and return status and body; status 0 if the connection is closed without a response."""
    with contextlib.suppress(ConnectionError):
        client.sendall(data)
    received = b""
    with contextlib.suppress(ConnectionError):
        while b"\r\n\r\n" not in received and (part := client.recv(65536)):
            received += part
        if not received:
            return 0, {}
        head, _, body = received.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        while len(body) < int(fields[b"content-length"]):
            body += client.recv(65536)
        return int(head.split()[1]), json.loads(body)
    return 0, {}


def error_code(found: tuple[int, dict[str, Any]]) -> tuple[int, str | None]:
    status, body = found
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return status, body["error"]["code"]


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 21_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 21_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"x" * 400_000,
        b"GET /health HTTP/1.1\r\n" + b"x" * 400_000,
        b"GET /" + b"x" * 400_000,
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 31 + b"\r\n",
        b"GET /health HTTP/1.1\r\n" + (b"x: " + b"y" * 900 + b"\r\n") * 25 + b"\r\n",
    ],
    ids=["url", "header", "endless-header", "endless-name", "endless-url", "many", "large-in-all"],
)
def test_large_headers_are_refused(server: Live, head: bytes) -> None:
    with connected(server) as client:
        assert error_code(answer(client, head)) == (431, "headers_too_large")
        with contextlib.suppress(ConnectionResetError):  # bytes were not read
            assert client.recv(1) == b""


def test_requests_beyond_limits_of_time_and_size_are_counted(server: Live) -> None:
    before = server.on_loop(lambda: Counter(server.service.refusals))
    chunk = b"%x\r\n" % 60_000 + b"x" * 60_000 + b"\r\n"
    for sent, status in (
        (b"GET /" + b"x" * 21_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (POST + b"Content-Length: 100001\r\n\r\n", 413),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n" + 2 * chunk, 413),
        (b"GET /health HTTP/1.1\r\nX: y", 408),
        (b"nonsense\r\n\r\n", 400),
    ):
        with connected(server) as client:
            assert answer(client, sent)[0] == status
    after = server.on_loop(lambda: Counter(server.service.refusals))
    assert after - before == {431: 1, 413: 2, 408: 1}
    with connected(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        page = b"".join(iter(lambda: client.recv(65536), b""))
        assert b'capplan:requests_refused_total{status="431"}' in page


def test_headers_within_the_limits_are_accepted(server: Live) -> None:
    head = b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 28 + b"x: " + b"y" * 19_000 + b"\r\n\r\n"
    with connected(server) as client:
        assert answer(client, head)[0] == 200
        for byte in HEALTH:  # on the same connection
            client.sendall(bytes([byte]))
        assert answer(client, b"")[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX: y", b"\r\n\r\n"])
def test_headers_that_do_not_come_in_time_end_the_connection(server: Live, sent: bytes) -> None:
    with connected(server) as client:
        begin_s = time.monotonic()
        found = answer(client, sent)
        assert error_code(found) == (408, "timeout")
        assert 0.2 < time.monotonic() - begin_s < 5


def test_jumps_of_the_wall_clock_change_no_time_limit(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a machine may be set while requests run: 30 years ahead, and back."""
    real, jumps = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + (-1) ** next(jumps) * 1e9)
    for _ in range(3):
        test_headers_that_do_not_come_in_time_end_the_connection(server, b"GET /health HTTP/1.1\r\nX: y")
        with connected(server) as client:
            fields = b'{"model": "base", "prompt": [1], "max_tokens": 300, "ignore_eos": true}'
            head = POST + b"Content-Length: %d\r\n\r\n" % len(fields)
            begin_s = time.monotonic()
            status, document = answer(client, head + fields)
            assert (status, document["usage"]["completion_tokens"]) == (200, 300)
            assert time.monotonic() - begin_s < 20
    with connected(server) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        page = b"".join(iter(lambda: client.recv(65536), b"")).decode()
    latencies = [float(line.split()[-1]) for line in page.splitlines() if "latency_seconds_sum" in line]
    assert latencies
    assert all(0 <= seconds < 1000 for seconds in latencies)


def test_a_length_may_have_spaces_around_it(server: Live) -> None:
    fields = b'{"model": "base", "prompt": [1], "max_tokens": 1}'
    with connected(server) as client:
        assert answer(client, POST + b"Content-Length:   %d \t\r\n\r\n" % len(fields) + fields)[0] == 200


def test_trickled_headers_do_not_extend_the_time(server: Live) -> None:
    with connected(server) as client:
        begin_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - begin_s < 5:
                client.sendall(b"\r\n")
                time.sleep(0.05)
        assert time.monotonic() - begin_s < 2


def test_trailers_are_limited_like_headers(server: Live) -> None:
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: "
    with connected(server) as client:
        status, _ = answer(client, head + b"x" * 400_000)
        assert status == 431


def test_pipelined_requests_are_answered_in_order_up_to_a_limit(server: Live) -> None:
    with connected(server) as client:
        client.sendall(HEALTH * 10)
        received = b""
        while received.count(b"HTTP/1.1 200") < 10:
            received += client.recv(65536)
    with connected(server) as client:
        client.sendall(HEALTH * 1000)
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := client.recv(65536):
                received += part
        assert received.count(b"HTTP/1.1 200") < 30


def test_the_rest_of_a_refused_body_is_discarded_for_a_limited_time(server: Live) -> None:
    head = b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n"
    with connected(server) as client:
        assert answer(client, head)[0] == 404
        assert answer(client, b" " * 5000 + HEALTH)[0] == 200  # on the same connection
        assert answer(client, head)[0] == 404
        assert answer(client, b" " * 10) == (0, {})  # one response to one request


def test_a_body_in_tiny_chunks_is_refused(server: Live) -> None:
    chunks = POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000
    with connected(server) as client:
        assert error_code(answer(client, chunks)) == (413, "too_large")


@pytest.mark.parametrize(("item", "code"), [("[]", 400), ("{}", 400), ('"[{"', 200), ('"\\\\","[\\"{"', 200)])
def test_lists_and_objects_are_counted_outside_of_texts(item: str, code: int) -> None:
    items = ",".join([item] * 50_001)
    body = f'{{"model": "base", "user": [{items}]}}'.encode()
    if code == 200:
        assert parsed(body, ForwardedRequest).model == "base"
    else:
        with pytest.raises(ApiError, match="lists and objects"):
            parsed(body, ForwardedRequest)


def test_bytes_that_are_not_http_are_refused(server: Live) -> None:
    with connected(server) as client:
        assert error_code(answer(client, b"\x16\x03\x01\x02\x00\x01\x00")) == (400, None)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX: y"])
def test_waiting_connections_give_way_to_new_ones(server: Live, sent: bytes) -> None:
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(connected(server)) for _ in range(15)]
        refused = server.service.refusals[503]
        for client in waiting:
            client.sendall(sent)
            with connected(server) as other:
                assert answer(other, HEALTH)[0] == 200
        assert error_code(answer(waiting[0], b"")) == (503, "overloaded")
        assert server.service.refusals[503] > refused


def test_an_idle_connection_gives_way_without_a_response(server: Live) -> None:
    with contextlib.ExitStack() as stack:
        idle = stack.enter_context(connected(server))
        assert answer(idle, HEALTH)[0] == 200
        for _ in range(8):
            stack.enter_context(connected(server))
        assert answer(idle, b"") == (0, {})


def test_a_stalled_body_gives_way_to_new_ones(server: Live) -> None:
    """Five bodies of 90 kB exceed the budget of 300 kB; the oldest are refused."""
    with contextlib.ExitStack() as stack:
        stalled = []
        refused = server.service.refusals[503]
        for _ in range(5):
            client = stack.enter_context(connected(server))
            client.sendall(POST + b"Content-Length: 95000\r\n\r\n" + b" " * 90_000)
            stalled.append(client)
            time.sleep(0.05)
        assert error_code(answer(stalled[0], b"")) == (503, "overloaded")
        assert error_code(answer(stalled[1], b"")) == (503, "overloaded")
        assert server.service.refusals[503] == refused + 2
        body = b'{"model": "base", "prompt": [1], "max_tokens": 1}' + b" " * 40_000
        length = f"Content-Length: {len(body)}\r\n\r\n".encode()
        with connected(server) as client:
            assert answer(client, POST + length + body)[0] == 200
        status, _ = answer(stalled[4], b" " * 5000)
        assert status == 400  # no JSON, but whole


def test_prompts_that_wait_for_their_tokens_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete requests count against the budget and the queue until their prompts are submitted."""
    with live({}, {"max_model_len": 500}, limits=LIMITS, max_requests=4) as server:
        continues = threading.Event()
        tokens = server.service.tokenizer.encode

        def slow(text: str, **options: Any) -> list[int]:
            assert continues.wait(60)
            return tokens(text, **options)

        monkeypatch.setattr(server.service.tokenizer, "encode", slow)
        for size, codes in ((90_000, [(503, "overloaded")] * 3), (55_000, [(429, "queue_full")] * 2)):
            body = json.dumps({"model": "base", "prompt": "x" * size, "max_tokens": 1}).encode()
            asked = POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
            with contextlib.ExitStack() as stack:
                clients = [stack.enter_context(connected(server)) for _ in range(6)]
                for client in clients:
                    client.sendall(asked)
                accepted = len(clients) - len(codes)
                wait_for(server, lambda n=accepted: server.service.in_flight == n)  # type: ignore[misc]
                late = [each for each in clients if select.select([each], (), (), 1.0)[0]]
                assert [error_code(answer(each, b"")) for each in late] == codes
                with connected(server) as probe:
                    assert answer(probe, HEALTH)[0] == 200
                continues.set()
                rest = [error_code(answer(each, b"")) for each in clients if each not in late]
                assert rest == [(400, "context_length_exceeded")] * accepted
            continues.clear()
            assert (server.service.budget.used_bytes, server.service.in_flight) == (0, 0)


def test_a_burst_of_conversations_is_refused_by_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with live({}, max_requests=2) as server, contextlib.ExitStack() as stack:
        continues = threading.Event()
        monkeypatch.setattr(server.service.template, "render", lambda *_: "x" * continues.wait(60))
        fields = {"model": "base", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        body = json.dumps(fields).encode()
        head = POST.replace(b"completions", b"chat/completions") + f"Content-Length: {len(body)}".encode()
        clients = [stack.enter_context(connected(server)) for _ in range(8)]
        for client in clients:
            client.sendall(head + b"\r\n\r\n" + body)
        wait_for(server, lambda: server.service.refusals[429] == 6)
        continues.set()
        assert sorted(answer(each, b"")[0] for each in clients) == [200] * 2 + [429] * 6


def test_a_late_server_refuses_generation_alone(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b'{"model": "base", "prompt": [1], "max_tokens": 1}'
    asked = POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    with connected(server) as client:
        monkeypatch.setattr(server.service.concurrency, "admits", lambda: False)
        assert error_code(answer(client, asked)) == (503, "overloaded")
        assert answer(client, HEALTH)[0] == 200
        monkeypatch.undo()
        assert answer(client, asked)[0] == 200


async def late_event_loop(pauses: int) -> None:
    """Hold the event loop up several times in a row; a single pause is no overload."""
    for _ in range(pauses):
        time.sleep(1.5)
        await asyncio.sleep(0.02)


def test_a_server_with_a_late_event_loop_is_overloaded_until_its_requests_end() -> None:
    body = b'{"model": "base", "prompt": [1], "max_tokens": 1}'
    asked = POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    fields = {"model": "base", "prompt": [[1]] * 140, "max_tokens": 480, "ignore_eos": True}
    many = json.dumps(fields).encode()
    engine = {"max_model_len": 500, "max_num_seqs": 1}
    with live({}, engine, limits=LIMITS, max_requests=150) as server:
        with connected(server) as busy:
            busy.sendall(POST + f"Content-Length: {len(many)}\r\n\r\n".encode() + many)
            wait_for(server, lambda: server.service.in_flight == 140)
            server.run(late_event_loop(pauses=3))
            with connected(server) as client:
                assert answer(client, HEALTH)[0] == 200
                assert error_code(answer(client, asked)) == (503, "overloaded")
            assert server.service.refusals[503] == 1
        wait_for(server, lambda: server.service.in_flight == 0)
        with connected(server) as client:
            assert answer(client, asked)[0] == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"max_body_bytes": 0},
        {"max_header_count": -1},
        {"header_timeout_s": 0.0},
        {"body_timeout_s": float("nan")},
        {"send_timeout_s": float("inf")},
        {"max_connections": 0},
        {"max_buffered_bytes": 1000},
        {"max_buffered_bytes": 1000, "max_body_bytes": 1001},
    ],
)
def test_limits_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(fields))):
        ServerLimits(**fields)


def test_the_default_body_grows_with_the_context() -> None:
    assert ServerLimits().body_bytes(2048) == 2**20
    assert ServerLimits().body_bytes(131_072) == 2**21
    assert ServerLimits(max_body_bytes=5).body_bytes(131_072) == 5
    assert ServerLimits().buffered_bytes(2048) == 64 * 2**20


class Request:
    """Incomplete request that records its end."""

    refused = False

    def refuse_overload(self) -> None:
        self.refused = True


def test_a_budget_refuses_the_oldest_first_and_never_what_is_reserved() -> None:
    budget = ByteBudget(100)
    first, second, third = Request(), Request(), Request()
    budget.hold(first, 40)
    budget.hold(second, 40)
    budget.hold(first, 50)  # growth does not make it younger
    budget.hold(third, 20)
    assert (first.refused, second.refused, third.refused) == (True, False, False)
    assert budget.used_bytes == 60
    with budget.reserved(70) as has_room:
        assert has_room
        assert (second.refused, third.refused, budget.used_bytes) == (True, False, 90)
        with budget.reserved(40) as more:
            assert not more
            assert (third.refused, budget.used_bytes) == (True, 70)
    assert budget.used_bytes == 0
