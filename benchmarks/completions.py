"""The bytes of an OpenAI-compatible server's answers, for servers that stand in for real ones."""

from __future__ import annotations

import asyncio
import json

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


async def plain(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    """Write a whole answer."""
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
    await writer.drain()


def event(text: str = "a", reason: str | None = None) -> bytes:
    """Return an event with a token."""
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"id": "0", "choices": [choice]}).encode() + b"\n\n"


def usage(prompt: int, output: int) -> bytes:
    """Return the event that counts the tokens, and the last."""
    counted = {"prompt_tokens": prompt, "completion_tokens": output}
    return b"data: " + json.dumps({"choices": [], "usage": counted}).encode() + b"\n\ndata: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """Return a chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)
