"""Hostile HTTP interactions with a server: a table of bytes to send, and how.

Each is sent as it is over plain connections. A server answers with a refusal, or closes the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

MIB: Final = 2**20
BODY: Final = MIB
"""Default limit of a body for models with a short context."""
CLOSED: Final = 0
_READ_BYTES: Final = 65536
_COMPLETIONS: Final = "/v1/completions"
_CHAT: Final = "/v1/chat/completions"
_LOAD: Final = "/v1/load_lora_adapter"
_UNLOAD: Final = "/v1/unload_lora_adapter"
_END: Final = b"\r\n\r\n"


@dataclass(frozen=True)
class Interaction:
    """Bytes to send, and what to do after them.

    Attributes
    ----------
    parts
        Returns the bytes, in parts.
    connections
        Number of connections that send them at the same time.
    pause_s
        Time between two parts.
    rounds
        Times that every connection is made, one after the other.
    reads
        Whether to read the response; otherwise the connection is held for `hold_s` and aborted.
    """

    name: str
    parts: Callable[[], Iterable[bytes]]
    connections: int = 1
    rounds: int = 1
    pause_s: float = 0.0
    reads: bool = True
    hold_s: float = 0.0

    async def run(self, host: str, port: int, timeout_s: float) -> list[int]:
        """Return the status of each connection; `CLOSED` for one without a response."""
        statuses: list[int] = []
        for _ in range(self.rounds):
            runs = (self._run_one(host, port, timeout_s) for _ in range(self.connections))
            statuses += await asyncio.gather(*runs)
        return statuses

    async def _run_one(self, host: str, port: int, timeout_s: float) -> int:
        received = b""
        writer: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host, port)
                with contextlib.suppress(ConnectionError):
                    for part in self.parts():
                        writer.write(part)
                        await writer.drain()
                        await asyncio.sleep(self.pause_s)
                if not self.reads:
                    await asyncio.sleep(self.hold_s)
                while self.reads and _END not in received and (part := await reader.read(_READ_BYTES)):
                    received += part
        if writer is not None:
            writer.transport.abort()
        words = received.split(maxsplit=2)
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else CLOSED


def interactions() -> Iterator[Interaction]:
    """Yield all interactions."""
    yield from _heads()
    yield from _malformed()
    yield from _slow()
    yield from _tiny_items()
    yield from _documents()
    yield from _values()


def request(path: str, body: bytes, *headers: bytes, method: str = "POST") -> bytes:
    """Return a request with a JSON body."""
    head = [f"{method} {path} HTTP/1.1".encode(), b"Host: x", b"Content-Type: application/json"]
    head += [b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(head) + _END + body


def _begun(path: str, declared: int, sent: bytes = b"") -> bytes:
    """Return a request with a part of its body."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {declared}"
    return head.encode() + _END + sent


def _sends(name: str, *parts: bytes, **options: Any) -> Interaction:
    return Interaction(name, lambda: parts, **options)


def _repeats(name: str, first: bytes, part: bytes, times: int, **options: Any) -> Interaction:
    def parts() -> Iterator[bytes]:
        yield first
        for _ in range(times):
            yield part

    return Interaction(name, parts, **options)


def _heads() -> Iterator[Interaction]:
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    for size in (70_000, MIB, 16 * MIB, 100 * MIB):
        block, times = b"x" * min(size, 65536), max(1, size // 65536)
        yield _repeats(f"url of {size} bytes", b"GET /", block, times)
        yield _repeats(f"query of {size} bytes", b"GET /health?", block, times)
        yield _repeats(f"header of {size} bytes", get + b"X: ", block, times)
        yield _repeats(f"header name of {size} bytes", get, block, times)
        yield _repeats(f"method of {size} bytes", b"", block, times)
        yield _repeats(f"headers of {size} bytes", get, b"a: b\r\n" * (len(block) // 6), times)
        yield _repeats(f"line breaks of {size} bytes", b"", b"\r\n" * (len(block) // 2), times)
    for count in (101, 5000):
        yield _sends(f"{count} headers", get + b"a: b\r\n" * count + b"\r\n")
        yield _sends(f"{count} cookies", get + b"Cookie: a=b\r\n" * count + b"\r\n")
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    for size in (MIB, 16 * MIB):
        times = size // 65536
        yield _repeats(f"trailer of {size} bytes", chunked + b"2\r\n{}\r\n0\r\nX: ", b"x" * 65536, times)
        yield _repeats(f"chunk extension of {size} bytes", chunked + b"2;x=", b"x" * 65536, times)
        yield _repeats(f"trailers of {size} bytes", chunked + b"0\r\n", b"a: b\r\n" * 10_000, times)
    yield _repeats("chunks of 1 byte", chunked, b"1\r\n \r\n" * 8192, 200)
    yield _repeats("chunks without end", chunked, b"10000\r\n" + b" " * 65536 + b"\r\n", 256)
    yield _sends("10000 pipelined requests", (get + b"\r\n") * 10_000)
    yield _sends("10000 pipelined completions", request(_COMPLETIONS, b"{}") * 10_000)


_MALFORMED: Final = {
    "nothing": b"",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n",
    "HTTP/9.9": b"GET /health HTTP/9.9\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "bare line feeds": b"GET /health HTTP/1.1\nHost: x\n\n",
    "NUL in the path": b"GET /hea\0lth HTTP/1.1\r\n\r\n",
    "NUL in a header": b"GET /health HTTP/1.1\r\nX: a\0b\r\n\r\n",
    "escape in the path": b"GET /v1/models/%1b%5b31m%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "path traversal": b"GET /v1/models/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes in the path": b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    "bad percent": b"GET /%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    "absolute form": b"GET http://127.0.0.1:1/health HTTP/1.1\r\nHost: x\r\n\r\n",
    "asterisk": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "CONNECT": b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "unknown method": b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n",
    "folded header": b"GET /health HTTP/1.1\r\nX: a\r\n b\r\n\r\n",
    "space before the colon": b"GET /health HTTP/1.1\r\nX : a\r\n\r\n",
    "websocket": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "h2c": b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
    "length and chunks": b"POST / HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0"
    + _END,
    "negative length": b"POST /v1/completions HTTP/1.1\r\nContent-Length: -2\r\n\r\n{}",
    "length of 30 digits": b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + b"9" * 30 + _END,
    "length of 2^63": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9223372036854775808" + _END,
    "length in letters": b"POST /v1/completions HTTP/1.1\r\nContent-Length: two" + _END,
    "chunk of 2^64": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
    "negative chunk": b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    "unknown encoding": b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "unknown expectation": b"POST /v1/completions HTTP/1.1\r\nExpect: x\r\nContent-Length: 2\r\n\r\n{}",
    "HTTP/1.0 with chunks": b"POST /v1/completions HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0"
    + _END,
    "HTTP/1.0 that waits for 100": b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2" + _END,
    "garbage after a request": b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n\0\xff" + _END,
    "chunk extensions": b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2;a=b;c\r\n{}\r\n0;d" + _END,
    "lower-case method": b"post /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}",
    "length as a list": b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2, 2\r\n\r\n{}",
    "response": b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "random bytes": bytes(range(256)) * 16,
}


def _malformed() -> Iterator[Interaction]:
    for name, data in _MALFORMED.items():
        yield _sends(name, data, hold_s=0.2, reads=bool(data))


def _slow() -> Iterator[Interaction]:
    half = b"GET /health HTTP/1.1\r\nX: y"
    yield _sends("1200 silent connections", b"", connections=1200, reads=False, hold_s=2.0)
    yield _sends("1200 half-sent headers", half, connections=1200, reads=False, hold_s=2.0)
    yield _sends(
        "200 half-sent headers of 60 kB", half + b"y" * 60_000, connections=200, reads=False, hold_s=2.0
    )
    yield _repeats("trickled headers", half, b"y", 40, pause_s=0.05, connections=100)
    for path in (_COMPLETIONS, _CHAT, _LOAD, _UNLOAD, "/v1/models", "/health", "/nothing"):
        stalled = _begun(path, BODY - 1, b" " * (BODY - 2))
        yield _sends(f"stalled bodies of 1 MiB to {path}", stalled, connections=40, reads=False, hold_s=1.0)
        empty = _begun(path, 1000)
        yield _sends(f"empty bodies to {path}", empty, connections=300, reads=False, hold_s=1.0)
    yield _sends("300 stalled bodies of 1 MiB", _begun(_LOAD, BODY - 1, b" " * (BODY - 2)), connections=300,
                 reads=False, hold_s=2.0)  # fmt: skip
    yield _repeats("trickled body", _begun(_COMPLETIONS, 1000), b" ", 40, pause_s=0.05, connections=100)
    waits = _begun(_COMPLETIONS, 1000)[:-2] + b"Expect: 100-continue\r\n\r\n"
    yield _sends("300 clients that wait for 100 Continue", waits, connections=300, reads=False, hold_s=1.0)
    stream = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 200, "stream": True, "ignore_eos": True}
    unread = request(_COMPLETIONS, json.dumps(stream).encode())
    yield _sends("20 clients that do not read a stream", unread, connections=20, reads=False, hold_s=3.0)
    yield _sends("20 clients that leave", unread, connections=20, reads=False)
    yield _sends("20000 clients that leave in the midst of a stream", unread, connections=200, rounds=100)
    many = request("/v1/models", b"", method="GET") * 16
    yield _sends("100 clients that do not read", many, connections=100, reads=False, hold_s=1.0)
    yield _sends("40 requests for metrics", request("/metrics", b"", method="GET"), connections=40)
    yield _sends("body after a refusal", _begun("/v1/nothing", 64 * MIB), *[b" " * 65536] * 1024)
    yield _sends("body beyond the limit", _begun(_COMPLETIONS, 64 * MIB), *[b" " * 65536] * 1024)


_ITEMS: Final = ("1", "1.5", "-1", "[]", "{}", '""', "null", "true", "[1]", '{"a":1}')
_LISTS: Final = (
    (_COMPLETIONS, "prompt"),
    (_COMPLETIONS, "stop"),
    (_COMPLETIONS, "stop_token_ids"),
    (_COMPLETIONS, "metadata"),
    (_CHAT, "messages"),
    (_CHAT, "content"),
    (_CHAT, "tool_calls"),
)


def _tiny_items() -> Iterator[Interaction]:
    """Yield bodies of the largest size that are lists of tiny items."""
    for path, field in _LISTS:
        for item in _ITEMS:
            name = f"{field} of {item}"
            yield Interaction(name, lambda p=path, f=field, i=item: [request(p, _listed(f, i))])  # type: ignore[misc]


def _listed(field: str, item: str) -> bytes:
    count = (BODY - 300) // (len(item) + 1)
    items = f"[{','.join([item] * count)}]"
    if field in ("content", "tool_calls"):
        content = f'"content":{items}' if field == "content" else f'"content":"x","tool_calls":{items}'
        return f'{{"model":"base","messages":[{{"role":"user",{content}}}],"max_tokens":1}}'.encode()
    prompt = "" if field in ("prompt", "messages") else '"prompt":"x",'
    return f'{{"model":"base","max_tokens":1,{prompt}"{field}":{items}}}'.encode()


def _documents() -> Iterator[Interaction]:
    """Yield bodies that are no valid JSON, or valid and unusual."""
    base = b'{"model":"base","prompt":"x","max_tokens":1'
    keys = ",".join(f'"k{i}":1' for i in range(100_000)).encode()[: BODY - 200].rpartition(b",")[0]
    same = b",".join([b'"user":"x"'] * 90_000)
    documents = {
        "deep lists": b'{"prompt":' + b"[" * 500_000,
        "deep objects": b'{"a":' * 200_000,
        "closed deep lists": b'{"model":"base","prompt":' + b"[" * 500_000 + b"]" * 500_000 + b"}",
        "long number": base + b',"seed":' + b"9" * 1_000_000 + b"}",
        "long fraction": base + b',"temperature":0.' + b"1" * 1_000_000 + b"}",
        "huge exponent": base + b',"temperature":1e999999999}',
        "many keys": base + b"," + keys + b"}",
        "equal keys": base + b"," + same + b"}",
        "long key": base + b',"' + b"k" * 1_000_000 + b'":1}',
        "long value": base + b',"user":"' + b"\\u0000" * 170_000 + b'"}',
        "long model": b'{"model":"' + b"m" * 1_000_000 + b'","prompt":"x"}',
        "control characters in the model": b'{"model":"\\u001b[31m\\n\\u0000","prompt":"x"}',
        "surrogates": b'{"model":"base","prompt":"' + b"\\ud800" * 170_000 + b'"}',
        "invalid UTF-8": b'{"model":"base","prompt":"' + b"\xff" * 1_000_000 + b'"}',
        "UTF-16": '{"model":"base","prompt":"x"}'.encode("utf-16"),
        "byte order mark": b"\xef\xbb\xbf" + base + b"}",
        "spaces": b" " * 1_000_000 + base + b"}",
        "escapes": b'{"model":"base","prompt":"' + b'\\"' * 500_000 + b'"}',
        "long stop": base + b',"stop":"' + b"s" * 1_000_000 + b'"}',
        "long prompt": b'{"model":"base","prompt":"' + b"x" * 1_000_000 + b'"}',
        "long prompt of one letter per token": ('{"model":"base","prompt":"' + "é" * 500_000 + '"}').encode(),
        "NaN": base + b',"temperature":NaN}',
        "no object": b"[" + b"1," * 500_000 + b"1]",
        "truncated": base,
        "twice": (base + b"}") * 2,
    }
    for name, body in documents.items():
        yield _sends(name, request(_COMPLETIONS, body))
    message = '{"role":"user","content":"x"}'
    chats = {
        "10000 messages": [message] * 10_000,
        "30000 messages": [message] * 30_000,
        "30 messages of 1000 parts": [_parts(1000)] * 30,
        "one message of 30000 parts": [_parts(30_000)],
        "many keys of a message": [message[:-1] + "," + keys.decode() + "}"],
        "long role": ['{"role":"' + "r" * 1_000_000 + '","content":"x"}'],
    }
    for name, messages in chats.items():
        body = f'{{"model":"base","max_tokens":1,"messages":[{",".join(messages)}]}}'.encode()[: 2 * BODY]
        yield _sends(name, request(_CHAT, body))
    bomb = gzip.compress(b" " * 64 * MIB)
    yield _sends("gzip", request(_COMPLETIONS, bomb, b"Content-Encoding: gzip"))
    yield _sends(
        "form",
        request(_COMPLETIONS, b"a=b&" * 200_000).replace(
            b"application/json", b"application/x-www-form-urlencoded"
        ),
    )
    parts = b"--b\r\nContent-Disposition: form-data; name=a\r\n\r\nx\r\n" * 10_000
    multipart = request(_COMPLETIONS, parts).replace(b"application/json", b"multipart/form-data; boundary=b")
    yield _sends("multipart", multipart)


def _parts(count: int) -> str:
    return '{"role":"user","content":[' + ",".join(['{"type":"text","text":"x"}'] * count) + "]}"


_VALUES: Final[tuple[dict[str, Any], ...]] = (
    {"max_tokens": 10**18},
    {"max_tokens": True},
    {"prompt": [2**31]},
    {"prompt": [2**70]},
    {"prompt": [[1]] * 5000},
    {"prompt": "x" * 5000},
    {"temperature": 1e308},
    {"temperature": 5e-324},
    {"top_p": 5e-324},
    {"seed": 2**63 - 1},
    {"logprobs": 20, "prompt": [[1]] * 8, "max_tokens": 64},
    {"stop": ["x" * 1000] * 16, "max_tokens": 64},
    {"stop_token_ids": list(range(1000))},
    {"stream": True, "stream_options": {"x" * 1000: 1}},
    {"model": "\x1b[2J\x9b31m\u202e"},
    {"model": "a/../../etc/passwd"},
    {"user": "\ud800"},
)
_ADAPTERS: Final = ("../../etc", "/etc", "a\0b", "x" * 100_000, "\x1b[31m", "/dev/zero", "/proc/self/fd/0")


def _values() -> Iterator[Interaction]:
    for number, fields in enumerate(_VALUES):
        body = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 4} | fields
        yield _sends(
            f"values {number}: {', '.join(fields)}", request(_COMPLETIONS, json.dumps(body).encode())
        )
    for at in _ADAPTERS:
        load, unload = {"lora_name": "x", "lora_path": at}, {"lora_name": at}
        yield _sends(f"load {at[:20]!r}", request(_LOAD, json.dumps(load).encode()))
        yield _sends(f"unload {at[:20]!r}", request(_UNLOAD, json.dumps(unload).encode()))
    yield _sends("load without a body", request(_LOAD, b""))
    yield _sends("unload without a body", request(_UNLOAD, b""))
