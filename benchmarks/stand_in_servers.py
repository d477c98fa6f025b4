"""Stand-in servers, each on a free loopback port that it prints.

``python -m benchmarks.stand_in_servers null`` answers every completion immediately: the ceiling of a load
generator. ``python -m benchmarks.stand_in_servers paced '{"gap_ms": 5}'`` writes a token to every stream per
step, as an engine does; with ``"close": true`` a connection carries one request.
``python -m benchmarks.stand_in_servers scripted '{"ttft_ms": 300, "gap_ms": 20, "before": []}'`` emits tokens
at those times after a request, and before them events without a token.
``python -m benchmarks.stand_in_servers toy '{"base_ms": 15}'`` has known step times, adapter slots and loads.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Final

STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length:"
_METRICS: Final = (
    b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n"
)
METRICS: Final = (
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="4000",gpu_memory_utilization="0.9"} 1.0\n'
    'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.0\n'
)


def whole(body: bytes, status: int = 200) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


async def plain(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(whole(body, status))
    await writer.drain()


def event(text: str = "a", reason: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"id": "0", **fields, "choices": [choice]}).encode() + b"\n\n"


def usage(prompt: int, output: int, **fields: Any) -> bytes:
    counted = {"prompt_tokens": prompt, "completion_tokens": output}
    ending = json.dumps({**fields, "choices": [], "usage": counted}).encode()
    return b"data: " + ending + b"\n\ndata: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def content_length(head: bytes) -> int:
    at = head.lower().find(_LENGTH)
    return int(head[at + len(_LENGTH) :].split(b"\r", 1)[0]) if at >= 0 else 0


class NullServer(asyncio.Protocol):
    """One connection: HTTP/1.1 as load generators speak it, kept open."""

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(_HEAD_END)) >= 0:
            head = self._received[:end]
            body_at = end + len(_HEAD_END)
            length = content_length(head)
            if len(self._received) < body_at + length:
                return
            body = self._received[body_at : body_at + length]
            self._received = self._received[body_at + length :]
            self.respond(head, body)

    def respond(self, head: bytes, body: bytes) -> None:
        """Answer a request."""
        self._transport.write(_answer(head, body))


class PacedServer(NullServer):
    """One connection to a server that writes the tokens of all streams at once, every `gap_ms`."""

    streams: ClassVar[dict[PacedServer, int]] = {}
    """Tokens left."""

    def __init__(self, close: bool) -> None:
        super().__init__()
        self._head = STREAM_HEAD.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n") if close else STREAM_HEAD
        self._close = close

    def respond(self, head: bytes, body: bytes) -> None:
        """Start a stream; the first token comes with the next step."""
        if b'"stream": true' not in body:
            super().respond(head, body)
            return
        self._transport.write(self._head)
        self.streams[self] = _max_tokens(body)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the stream."""
        self.streams.pop(self, None)

    def step(self) -> None:
        """Write a token, and the end after the last."""
        self.streams[self] -= 1
        self._transport.write(_PACED_EVENT)
        if not self.streams[self]:
            del self.streams[self]
            self._transport.write(_PACED_END)
            if self._close:
                self._transport.close()

    @classmethod
    async def steps(cls, gap_ms: float) -> None:
        """Step until cancelled."""
        while True:
            await asyncio.sleep(gap_ms / 1e3)
            for stream in list(cls.streams):
                stream.step()


class ScriptedServer(NullServer):
    """One connection to a server that emits tokens at scripted times after the last byte of a request.

    `ttft_ms` and `gap_ms` are the script; before the first token come `before`, which hold none.
    """

    ttft_ms: ClassVar[float]
    gap_ms: ClassVar[float]
    before: ClassVar[list[str]]
    emitted: ClassVar[list[tuple[float, float]]] = []
    """TTFT and TPOT of each answer in milliseconds, as emitted."""

    def respond(self, head: bytes, body: bytes) -> None:
        """Plan the events of an answer."""
        if head.startswith(b"GET /emitted"):
            self._transport.write(whole(json.dumps(self.emitted).encode()))
            self.emitted.clear()
            return
        request = json.loads(body) if body else {}
        if not request.get("stream"):
            answer = {"choices": [{"index": 0, "text": " the", "finish_reason": "length"}]}
            listed = {"object": "list", "data": [{"id": "scripted", "object": "model"}]}
            self._transport.write(whole(json.dumps(answer if body else listed).encode()))
            return
        loop = asyncio.get_running_loop()
        tokens = request.get("max_tokens") or request.get("max_completion_tokens") or 1
        prompt = request.get("prompt", "")
        counted = len(prompt.split() if isinstance(prompt, str) else prompt)
        self._transport.write(STREAM_HEAD)
        known = {"object": "text_completion", "created": int(time.time()), "model": request["model"]}
        begin_s, times = loop.time(), []

        def emit(number: int) -> None:
            times.append(loop.time() - begin_s)
            last = number == tokens - 1
            self._transport.write(chunk(event(" the", "length" if last else None, **known)))
            if last:
                self._transport.write(chunk(usage(counted, tokens, **known)) + b"0\r\n\r\n")
                gap_s = (times[-1] - times[0]) / max(1, tokens - 1)
                self.emitted.append((1e3 * times[0], 1e3 * gap_s))

        for number, text in enumerate(self.before):
            at_s = begin_s + 1e-3 * self.ttft_ms * (number + 1) / (len(self.before) + 2)
            loop.call_at(at_s, self._transport.write, chunk(text.encode()))
        for number in range(tokens):
            loop.call_at(begin_s + 1e-3 * (self.ttft_ms + number * self.gap_ms), emit, number)


def _max_tokens(body: bytes) -> int:
    return int(body.split(b'"max_tokens":', 1)[1].split(b",", 1)[0].rstrip(b"}"))


def _answer(head: bytes, body: bytes) -> bytes:
    if head.startswith(b"POST"):
        tokens = _max_tokens(body)
        if b'"stream": true' in body:
            return _stream(tokens, body[body.find(b'"prompt":') :].count(b",") + 1)
        return whole(b'{"choices": [{"text": "a"}]}')
    if b"/metrics" in head.split(b"\r", 1)[0]:
        return whole(_METRICS)
    return whole(b'{"object": "list", "data": []}')


@lru_cache(maxsize=4096)
def _stream(tokens: int, prompt_tokens: int) -> bytes:
    return STREAM_HEAD + chunk(event(" a") * tokens + usage(prompt_tokens, tokens)) + b"0\r\n\r\n"


_PACED_EVENT: Final = chunk(event(" a"))
_PACED_END: Final = chunk(usage(1, 1)) + b"0\r\n\r\n"


@dataclass
class ToyServer:
    """Server with steps of base time plus tokens, and loads of adapters without slot."""

    base_ms: float = 8.0
    ms_per_token: float = 0.1
    load_ms: float = 15.0
    slots: int = 2
    names: tuple[str, ...] = ("base", "a0", "a1", "a2", "a3")
    refuse: str = ""
    """Model whose requests fail with status 500."""

    async def start(self) -> asyncio.Server:
        self._waiting: list[tuple[dict[str, Any], asyncio.StreamWriter, asyncio.Event]] = []
        self._resident: OrderedDict[str, None] = OrderedDict()
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._steps())
        return await asyncio.start_server(self._connected, "127.0.0.1", 0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(_HEAD_END)
                body = await reader.readexactly(content_length(head))
                await self._answer(head.decode("latin-1").split(" ")[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/metrics":
            await plain(writer, 200, METRICS.encode())
        elif path == "/v1/models":
            listed = [{"id": name, "max_model_len": 512} for name in self.names]
            await plain(writer, 200, json.dumps({"data": listed}).encode())
        elif not body:
            await plain(writer, 404, b"{}")
        else:
            request = json.loads(body)
            if not request.get("stream"):
                await plain(writer, 200, b'{"choices": [{"text": "a"}]}')
            elif request["model"] == self.refuse:
                await plain(writer, 500, b"no")
            else:
                writer.write(STREAM_HEAD)
                done = asyncio.Event()
                self._waiting.append((request, writer, done))
                self._work.set()
                await done.wait()

    async def _steps(self) -> None:
        running: list[tuple[dict[str, Any], asyncio.StreamWriter, asyncio.Event]] = []
        while True:
            if not running and not self._waiting:
                self._work.clear()
                await self._work.wait()
            running, self._waiting = running + self._waiting, []
            loads = sum(map(self._load, {request["model"] for request, _, _ in running}))
            tokens = sum(
                1 if request.get("produced") else len(request["prompt"]) for request, _, _ in running
            )
            await asyncio.sleep((self.base_ms + self.ms_per_token * tokens + self.load_ms * loads) / 1e3)
            for each in list(running):
                request, writer, done = each
                request["produced"] = request.get("produced", 0) + 1
                writer.write(chunk(event()))
                if request["produced"] == request["max_tokens"] or writer.is_closing():
                    writer.write(chunk(usage(len(request["prompt"]), request["produced"])) + b"0\r\n\r\n")
                    running.remove(each)
                    done.set()

    def _load(self, model: str) -> bool:
        """Give a model a slot by LRU; return whether it had none."""
        if model == "base":
            return False
        cold = model not in self._resident
        self._resident[model] = None
        self._resident.move_to_end(model)
        while len(self._resident) > self.slots:
            self._resident.popitem(last=False)
        return cold


@contextmanager
def running(kind: str, **settings: Any) -> Iterator[str]:
    """Start a server in a child process, yield its address, and stop it."""
    command = [sys.executable, "-m", "benchmarks.stand_in_servers", kind, json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.terminate()


async def _main(kind: str, text: str = "{}") -> None:
    settings = json.loads(text)
    steps: asyncio.Task[None] | None = None
    if kind == "toy":
        server = await ToyServer(**settings).start()
    else:
        made: Callable[[], NullServer] = NullServer
        if kind == "paced":
            made = partial(PacedServer, settings.get("close", False))
            steps = asyncio.create_task(PacedServer.steps(settings["gap_ms"]))
        elif kind == "scripted":
            made = ScriptedServer
            ScriptedServer.ttft_ms, ScriptedServer.gap_ms = settings["ttft_ms"], settings["gap_ms"]
            ScriptedServer.before = settings["before"]
        loop = asyncio.get_running_loop()
        server = await loop.create_server(made, "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.gather(server.serve_forever(), *([] if steps is None else [steps]))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
