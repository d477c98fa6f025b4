"""A server that answers every completion at once: what a load generator can do when nobody holds it up.

``python -m benchmarks.null_server`` prints its port and serves until it is ended.
"""

from __future__ import annotations

import asyncio
import json
import sys
from functools import lru_cache
from typing import Final

_HEAD_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"content-length:"
_STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_BACKLOG: Final = 4096
_METRICS: Final = (
    b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n"
)


class NullServer(asyncio.Protocol):
    """One connection: HTTP/1.1 as load generators speak it, kept open."""

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every request that is whole."""
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
    """Return an answer of so many events, all at once."""
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
    """Start to listen on the loopback interface; port 0: any that is free."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(NullServer, "127.0.0.1", port, backlog=_BACKLOG)


async def _main() -> None:
    server = await serve()
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
