"""nginx with the configuration of a gateway, and small servers behind it."""

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from capplan import Plan
from capplan.deploy._gateway import CONFIG, gateway_files

MODULE = Path("/usr/lib/nginx/modules/ngx_http_js_module.so")
TEMPORARY = "".join(
    f"    {name}_temp_path {name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
)


def nginx() -> str:
    """Return the program, or skip the test."""
    found = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None or not MODULE.exists():
        pytest.skip("no nginx with njs: apt-get install nginx libnginx-mod-http-js")
    return found


def resolves_names() -> bool:
    """Return whether nginx follows the addresses of names, as 1.27.3 and later ones do."""
    words = subprocess.run([nginx(), "-v"], capture_output=True, text=True, check=True).stderr
    version = words.rpartition("/")[2].split()[0]
    return tuple(map(int, version.split("."))) >= (1, 27, 3)


def written(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Write a gateway; return the command that starts it, apart from folders that belong to root."""
    for name, text in files.items():
        (folder / name).write_text(text.replace("http {\n", f"http {{\n{TEMPORARY}", 1))
    return [nginx(), "-p", str(folder), "-c", str(folder / CONFIG), "-g", f"pid {folder}/pid; daemon off;"]


class Stub:
    """Server that answers with its name and what it has got."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.requests: list[dict[str, Any]] = []
        self.resume = threading.Event()
        """Set by the test when a stream goes on."""
        self.fails = False
        """Whether it closes connections without an answer."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._answer(reader, writer)
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.requests.append({"target": first.split()[1], "headers": headers, "body": body})
        if self.fails:
            return
        if body.get("stream"):
            await self._stream(writer, breaks=bool(body.get("breaks")))
            return
        text = json.dumps({"server": self.name, "model": body["model"]}).encode()
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(text)
        writer.write(head + text)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, *, breaks: bool) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n6\r\nfirst\n\r\n")
        await writer.drain()
        while not self.resume.is_set():
            await asyncio.sleep(0.01)
        if not breaks:
            writer.write(b"7\r\nsecond\n\r\n0\r\n\r\n")
            await writer.drain()


@contextlib.contextmanager
def stubs(*names: str) -> Iterator[tuple[Stub, ...]]:
    """Run servers on ports of their own, in a thread."""
    made = tuple(map(Stub, names))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)

    async def start() -> None:
        for each in made:
            server = await asyncio.start_server(each.serve, "127.0.0.1", 0)
            each.port = server.sockets[0].getsockname()[1]

    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield made
    finally:
        for each in made:
            each.resume.set()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


class Gateway:
    """A running gateway."""

    def __init__(self, port: int) -> None:
        self.port = port

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)

    def ask(self, model: object, **fields: Any) -> tuple[int, Any]:
        """Return status and document of the answer to a request of a model."""
        return self.post(json.dumps({"model": model, **fields}).encode())

    def post(
        self, body: bytes, path: str = "/v1/completions", headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        with contextlib.closing(self.connection()) as connection:
            connection.request("POST", path, body, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def get(self, path: str) -> tuple[int, bytes]:
        with contextlib.closing(self.connection()) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def running(folder: Path, plan: Plan, ports: Mapping[str, Sequence[int]]) -> Iterator[Gateway]:
    """Run the gateway of a plan before servers on ports of this machine."""
    gateway = Gateway(free_port())
    addresses = {group: [f"127.0.0.1:{port}" for port in each] for group, each in ports.items()}
    command = written(folder, gateway_files(plan, addresses, gateway.port))
    log = folder / "log"
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _wait(gateway, process, log)
        yield gateway
    finally:
        process.terminate()
        process.wait(30)


def _wait(gateway: Gateway, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 30
    while True:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(ConnectionError):
            if gateway.get("/health")[0] == 200:
                return
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
