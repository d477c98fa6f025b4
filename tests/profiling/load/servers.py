"""Valid and faulty servers on loopback ports, each with an event loop in its own thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.stand_in_servers import STREAM_HEAD, NullServer, ToyServer, chunk, event, plain, usage

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


__all__ = [
    "STREAM_HEAD",
    "chunk",
    "event",
    "listening",
    "null_server",
    "paced",
    "plain",
    "server",
    "usage",
]


@contextmanager
def listening(start: Callable[[], Awaitable[asyncio.Server]]) -> Iterator[str]:
    """Yield the address of a server that `start` starts."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    ports: list[int] = []

    async def serve() -> None:
        server = await start()
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        await asyncio.Event().wait()

    def run() -> None:
        task = loop.create_task(serve())
        loop.run_forever()
        for each in asyncio.all_tasks(loop):
            each.cancel()
        loop.run_until_complete(asyncio.gather(task, *asyncio.all_tasks(loop), return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


@contextmanager
def null_server() -> Iterator[str]:
    """Yield the address of a server that answers at once."""

    async def start() -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(NullServer, "127.0.0.1", 0)

    with listening(start) as url:
        yield url


@contextmanager
def server(answer: Answer, seen: list[dict[str, Any]] | None = None) -> Iterator[str]:
    """Yield the address of a server whose completions `answer` writes; other requests get an empty object."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", "0")))
                if head.startswith("GET"):
                    await plain(writer, 404, b"{}")
                    continue
                request = json.loads(body)
                if seen is not None:
                    seen.append(request | {"authorization": fields.get("authorization")})
                if request.get("stream"):
                    await answer(request, writer)
                else:
                    await plain(writer, 200, b'{"choices": [{"text": "a"}]}')
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(connected, "127.0.0.1", 0)

    with listening(start) as url:
        yield url


async def paced(request: dict[str, Any], writer: asyncio.StreamWriter, gap_s: float = 0.002) -> None:
    """Answer with a token every `gap_s`."""
    writer.write(STREAM_HEAD)
    tokens = request["max_tokens"]
    for _ in range(tokens):
        writer.write(chunk(event()))
        await writer.drain()
        await asyncio.sleep(gap_s)
    writer.write(chunk(usage(len(request["prompt"]), tokens)) + b"0\r\n\r\n")
    await writer.drain()


class RecordingServer(ToyServer):
    """Toy server that keeps the bodies of its completions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.asked: list[dict[str, Any]] = []

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if body:
            self.asked.append(json.loads(body))
        await super()._answer(path, body, writer)


@contextmanager
def toy_server(**settings: Any) -> Iterator[tuple[str, RecordingServer]]:
    """Yield the address of a server and the server."""
    server = RecordingServer(**settings)
    with listening(server.start) as url:
        yield url, server
