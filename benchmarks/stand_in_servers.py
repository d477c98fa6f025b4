"""Servers that stand in for real ones, each on a free loopback port that it prints.

``python -m benchmarks.stand_in_servers null`` answers every completion at once: the ceiling of a load
generator. ``python -m benchmarks.stand_in_servers toy '{"base_ms": 15}'`` has known step times, adapter slots
and loads.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length:"
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_BACKLOG: Final = 4096
_METRICS: Final = (
    b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n"
)
METRICS = (
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="4000",gpu_memory_utilization="0.9"} 1.0\n'
    'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.0\n'
)


async def plain(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
    await writer.drain()


def event(text: str = "a", reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"id": "0", "choices": [choice]}).encode() + b"\n\n"


def usage(prompt: int, output: int) -> bytes:
    counted = {"prompt_tokens": prompt, "completion_tokens": output}
    return b"data: " + json.dumps({"choices": [], "usage": counted}).encode() + b"\n\ndata: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


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
            length = _content_length(head)
            if len(self._received) < body_at + length:
                return
            body = self._received[body_at : body_at + length]
            self._received = self._received[body_at + length :]
            self._transport.write(_answer(head, body))


def _content_length(head: bytes) -> int:
    at = head.lower().find(_LENGTH)
    return int(head[at + len(_LENGTH) :].split(b"\r", 1)[0]) if at >= 0 else 0


def _answer(head: bytes, body: bytes) -> bytes:
    if head.startswith(b"POST"):
        tokens = int(body.split(b'"max_tokens":', 1)[1].split(b",", 1)[0].rstrip(b"}"))
        prompt_tokens = body[body.find(b'"prompt":') :].count(b",") + 1
        if b'"stream": true' in body:
            return _stream(tokens, prompt_tokens)
        return _plain(
            json.dumps({"choices": [{"text": "a"}], "usage": _usage(tokens, prompt_tokens)}).encode()
        )
    if b"/metrics" in head.split(b"\r", 1)[0]:
        return _plain(_METRICS)
    return _plain(b'{"object": "list", "data": []}')


@lru_cache(maxsize=4096)
def _stream(tokens: int, prompt_tokens: int) -> bytes:
    event = b'data: {"id":"0","choices":[{"index":0,"text":" a","finish_reason":null}]}\n\n'
    usage = json.dumps({"id": "0", "choices": [], "usage": _usage(tokens, prompt_tokens)}).encode()
    events = event * tokens + b"data: " + usage + b"\n\ndata: [DONE]\n\n"
    return _STREAM_HEAD + b"%x\r\n" % len(events) + events + b"\r\n0\r\n\r\n"


def _usage(tokens: int, prompt_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }


def _plain(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body


async def serve(port: int = 0) -> asyncio.Server:
    loop = asyncio.get_running_loop()
    return await loop.create_server(NullServer, "127.0.0.1", port, backlog=_BACKLOG)


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
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def start(self) -> asyncio.Server:
        self._waiting: list[tuple[dict[str, Any], asyncio.StreamWriter, asyncio.Event]] = []
        self._resident: OrderedDict[str, None] = OrderedDict()
        self._work = asyncio.Event()
        self._task = asyncio.create_task(self._steps())
        return await asyncio.start_server(self._connected, "127.0.0.1", 0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                lines = [line.lower() for line in head.split("\r\n")]
                length = [int(line.split(":")[1]) for line in lines if line.startswith("content-length")]
                body = await reader.readexactly(length[0] if length else 0)
                await self._answer(head.split(" ")[1], body, writer)
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
        else:
            asked = json.loads(body)
            self.asked.append(asked)
            if asked["model"] == self.refuse and asked.get("stream"):
                await plain(writer, 500, b"no")
            elif not asked.get("stream"):
                await plain(writer, 200, b'{"choices": [{"text": "a"}]}')
            else:
                writer.write(STREAM_HEAD)
                done = asyncio.Event()
                self._waiting.append((asked, writer, done))
                self._work.set()
                await done.wait()

    async def _steps(self) -> None:
        running: list[tuple[dict[str, Any], asyncio.StreamWriter, asyncio.Event]] = []
        while True:
            if not running and not self._waiting:
                self._work.clear()
                await self._work.wait()
            running, self._waiting = running + self._waiting, []
            loads = sum(map(self._load, {asked["model"] for asked, _, _ in running}))
            tokens = sum(1 if asked.get("produced") else len(asked["prompt"]) for asked, _, _ in running)
            await asyncio.sleep((self.base_ms + self.ms_per_token * tokens + self.load_ms * loads) / 1e3)
            for each in list(running):
                asked, writer, done = each
                asked["produced"] = asked.get("produced", 0) + 1
                writer.write(chunk(event()))
                if asked["produced"] == asked["max_tokens"] or writer.is_closing():
                    writer.write(chunk(usage(len(asked["prompt"]), asked["produced"])) + b"0\r\n\r\n")
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
    """Start a server in a process of its own, yield its address, and stop it."""
    command = [sys.executable, "-m", "benchmarks.stand_in_servers", kind, json.dumps(settings)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
        finally:
            server.terminate()


async def _main(kind: str, settings: str = "{}") -> None:
    server = await serve() if kind == "null" else await ToyServer(**json.loads(settings)).start()
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
