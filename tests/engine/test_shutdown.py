"""End of a server: every accepted connection is answered, and nothing but its end is logged."""

import asyncio
import contextlib
import json
import socket
import time

import pytest

from capplan.server import bind
from capplan.server._process import ignore_new_connections
from tests.engine.live import Live, live

pytestmark = pytest.mark.process

ADAPTERS = {"a": 8}


def head(path: str, body: bytes) -> bytes:
    fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


async def status_of(server: Live, body: bytes, pause_s: float) -> int:
    """Return the status of a request on a connection of its own; -1: reset or closed without an answer."""
    host, port = server.url.removeprefix("http://").split(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except ConnectionRefusedError:
        return 0
    with contextlib.closing(writer):
        try:
            writer.write(head("/v1/completions", body))
            await asyncio.sleep(pause_s)
            writer.write(body)
            line = await reader.readline()
            await reader.read()
        except ConnectionError:
            return -1
    return int(line.split()[1]) if line else -1


def test_every_connection_is_answered_while_the_server_ends() -> None:
    """Connections come without a pause, before, during and after the end of the server."""
    body = json.dumps({"model": "a", "prompt": [1, 2], "max_tokens": 30, "ignore_eos": True}).encode()

    async def attack(server: Live) -> list[int]:
        tasks = []
        while not server._thread.is_alive() or not tasks or len(tasks) < 3000:
            tasks.append(asyncio.create_task(status_of(server, body, 0.001 * (len(tasks) % 3))))
            if len(tasks) == 100:
                server.loop.call_soon_threadsafe(server.server.end)
            await asyncio.sleep(0.001)
            if not server._thread.is_alive():
                break
        return await asyncio.gather(*tasks)

    with live(ADAPTERS, {"max_num_seqs": 4}, max_requests=40) as server:
        statuses = asyncio.run(attack(server))
        server.join()
    assert set(statuses) <= {0, 200, 429, 503}
    assert statuses.count(200) >= 40
    assert statuses.count(503) > 0


@pytest.mark.parametrize("signals", [1, 2])
def test_connections_without_whole_headers_are_answered(signals: int) -> None:
    with live(ADAPTERS) as server, contextlib.ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")
        clients = [stack.enter_context(socket.create_connection((host, int(port)), 30)) for _ in range(3)]
        for client, sent in zip(clients, (b"", b"POST /v1/comple", b"GET / HTTP/1.1\r\nA: b"), strict=True):
            client.sendall(sent)
        while server.on_loop(lambda: len(server.server.server_state.connections)) != 3:
            time.sleep(0.01)
        for _ in range(signals):
            server.loop.call_soon_threadsafe(server.server.end)
        server.join()
        for client in clients:
            response = client.recv(65536)
            assert response.startswith(b"HTTP/1.1 503 ")
            assert b'"shutting_down"' in response


def test_a_server_that_cannot_drain_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def drain() -> None:
        raise ZeroDivisionError

    with live(ADAPTERS) as server:
        monkeypatch.setattr(server.service, "drain", drain)
        server.loop.call_soon_threadsafe(server.server.end)
        server.join()
    assert "draining has failed" in caplog.text


def test_an_idle_connection_is_closed_without_a_response() -> None:
    with live(ADAPTERS) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 30) as idle:
            idle.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
            assert idle.recv(65536).startswith(b"HTTP/1.1 200 ")
            server.loop.call_soon_threadsafe(server.server.end)
            server.join()
            assert idle.recv(65536) == b""


def test_connections_are_accepted_faster_than_one_per_iteration() -> None:
    with live(ADAPTERS) as server, contextlib.ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")

        async def connected() -> int:
            for _ in range(64):
                stack.enter_context(socket.create_connection((host, int(port))))
            for _ in range(20):
                await asyncio.sleep(0)
            return len(server.server.server_state.connections)

        assert asyncio.run_coroutine_threadsafe(connected(), server.loop).result(60) >= 64


def test_connections_in_the_queue_of_the_kernel_remain() -> None:
    with bind("127.0.0.1", 0) as listener, socket.socket() as late:
        listener.listen(8)
        address = listener.getsockname()
        with socket.create_connection(address) as early:
            ignore_new_connections(listener)
            late.settimeout(0.2)
            with pytest.raises(TimeoutError):
                late.connect(address)
            accepted, _ = listener.accept()
            early.sendall(b"x")
            with accepted:
                assert accepted.recv(1) == b"x"


def test_a_second_signal_answers_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with live(ADAPTERS, {"max_num_seqs": 1}, drain_timeout_s=600) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({"model": "a", "prompt": [1], "max_tokens": 500, "stream": True}).encode()
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(2)]
            for client in clients:  # the second waits for a row, and so has no status yet
                client.sendall(head("/v1/completions", body) + body)
                if client is clients[0]:
                    client.recv(100)
            while server.on_loop(lambda: server.service.engine.in_flight) != 2:
                time.sleep(0.01)
            server.loop.call_soon_threadsafe(server.server.end)
            server.loop.call_soon_threadsafe(server.server.end)
            server.join()
            response = clients[1].recv(65536)
            assert response.startswith(b"HTTP/1.1 503 ")
            assert b'"aborted"' in response
    assert "Traceback" not in capfd.readouterr().err


def test_responses_while_draining_close_their_connection() -> None:
    with live(ADAPTERS, drain_timeout_s=2.0) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as busy:
            asked = {"model": "a", "prompt": [[1]] * 60, "max_tokens": 500, "stream": True}
            body = json.dumps(asked | {"ignore_eos": True}).encode()
            busy.sendall(head("/v1/completions", body) + body)
            assert busy.recv(65536).startswith(b"HTTP/1.1 200 ")
            server.loop.call_soon_threadsafe(server.server.end)
            server.on_loop(lambda: None)
            with socket.create_connection((host, int(port))) as late:
                late.sendall(head("/v1/completions", body) + body)
                refused = late.recv(65536)
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"connection: close" in refused
            for path in ("/health", "/ping"):
                with socket.create_connection((host, int(port))) as probe:
                    probe.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                    state = b"".join(iter(lambda: probe.recv(65536), b""))
                assert state.startswith(b"HTTP/1.1 503 ")
                assert json.loads(state.partition(b"\r\n\r\n")[2])["reason"] == "shutting_down"
        server.join()
