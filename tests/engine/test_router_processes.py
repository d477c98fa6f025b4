"""`capplan serve PLAN` with real engine processes and the tiny model."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import IncompleteRead
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest

from capplan.fleet import ServingOptions, instances_of
from tests.cli.conftest import command, environment
from tests.engine.fake_instances import events, tiny_plan

pytestmark = pytest.mark.process


class Served:
    """A plan served by real processes."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        tiny_plan().to_json(folder / "plan.json")
        arguments = ["serve", folder / "plan.json", "--model", "tiny-llama", "--port", port, "--json"]
        self.errors = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            command(arguments),
            env=environment() | {"OMP_NUM_THREADS": "1", "CAPPLAN_API_KEY": "secret"},
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log()
        self.url = json.loads(line)["url"]

    def log(self) -> str:
        self.errors.seek(0)
        return self.errors.read()

    def instances(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def get(self, path: str) -> str:
        with urlopen(Request(self.url + path, headers={"Authorization": "Bearer secret"}), timeout=60) as it:
            return str(it.read().decode())

    def open(self, model: str, max_tokens: int, **fields: Any) -> Any:
        body = {"model": model, "prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True, **fields}
        headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
        return urlopen(Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers), timeout=60)

    def status(self, model: str) -> int:
        try:
            with self.open(model, 1) as answer:
                return int(answer.status)
        except HTTPError as error:
            return error.code if "error" in json.loads(error.read()) else -1

    def wait_until_healthy(self) -> None:
        end = time.monotonic() + 120
        while self.status("a") != 200 or self.status("b") != 200:
            assert time.monotonic() < end, self.log()
            time.sleep(0.2)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    left = made.instances()
    yield made
    made.process.kill()
    made.process.communicate()
    made.errors.close()
    psutil.wait_procs(left, 20)


def test_a_served_plan_survives_a_killed_instance_and_drains(served: Served) -> None:
    """One test, because every start takes seconds."""
    check_shares(served)
    check_http_1_0(served)
    killed, survivor = check_restart_after_kill(served)
    check_drain(served, killed, "b" if killed == "a" else "a", survivor)


def check_shares(served: Served) -> None:
    assert sorted(each.cmdline()[-1] for each in served.instances()) == ["g0-1", "g1-1"]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda _: served.status("shared"), range(200))) == [200] * 200
    done = {
        name: float(line.split()[-1])
        for line in served.get("/metrics").splitlines()
        for name in ("g0-1", "g1-1")
        if line.startswith("vllm:request_success_total") and f'instance="{name}"' in line and "length" in line
    }
    assert abs(done["g0-1"] - 50) <= 1
    assert done["g0-1"] + done["g1-1"] == 200


def check_http_1_0(served: Served) -> None:
    """A stream of the router is not in chunks, and ends with the connection."""
    body = b'{"model": "a", "prompt": [1], "max_tokens": 3, "stream": true}'
    head = (
        b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nAuthorization: Bearer secret\r\n"
    )
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        fields, _, received = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in fields.lower()
    assert events(received)[-1] == b"[DONE]"


def check_restart_after_kill(served: Served) -> tuple[str, psutil.Process]:
    """Return the adapter of the instance that was killed, and the other instance."""
    victim, survivor = served.instances()
    streams = {model: [served.open(model, 400, stream=True) for _ in range(4)] for model in ("a", "b")}
    for stream in (*streams["a"], *streams["b"]):
        assert stream.readline().startswith(b"data: ")
        stream.readline()
    victim.send_signal(signal.SIGKILL)
    ends = {model: [events(each.read())[-1] for each in opened] for model, opened in streams.items()}
    hit = [model for model in ends if ends[model] != [b"[DONE]"] * 4]
    assert len(hit) == 1
    assert all(end["error"]["code"] == "instance_failed" for end in ends[hit[0]])
    assert served.status("shared") == 200
    served.wait_until_healthy()
    assert json.loads(served.get("/health"))["status"] == "ok"
    assert len(served.instances()) == 2
    assert "by SIGKILL" in served.log()
    return hit[0], survivor


def check_drain(served: Served, model: str, stopped_model: str, stopped: psutil.Process) -> None:
    """The first SIGTERM waits for running requests, the second one does not."""
    family = psutil.Process(served.process.pid).children(recursive=True)
    with (
        served.open(model, 300, stream=True) as running,
        served.open(stopped_model, 400, stream=True) as held,
    ):
        assert held.readline().startswith(b"data: ")
        stopped.send_signal(signal.SIGSTOP)
        running.readline()
        running.readline()
        served.process.send_signal(signal.SIGTERM)
        assert events(running.read())[-1] == b"[DONE]"
        assert served.process.poll() is None
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
        try:
            last = events(held.read())[-1]
        except IncompleteRead:
            last = None  # cut off by the second signal
        assert last is None or last["error"]["code"]
    _, left = psutil.wait_procs(family, 10)
    assert left == []
    assert "Traceback" not in served.log()


def test_a_killed_router_is_restarted_on_its_port_at_once(served: Served, tmp_path: Path) -> None:
    """Clients in the midst of streams are cut off, and no instance of the first router is left."""
    first = served.instances()
    streams = [served.open(model, 400, stream=True) for model in ("a", "b") for _ in range(4)]
    assert all(stream.readline().startswith(b"data: ") for stream in streams)
    served.process.kill()
    served.process.wait()
    (tmp_path / "again").mkdir()
    again = Served(tmp_path / "again", int(served.url.rpartition(":")[2]))
    family = psutil.Process(again.process.pid).children(recursive=True)
    try:
        assert again.url == served.url
        assert [again.status(model) for model in ("a", "b", "shared")] == [200] * 3
        for stream in streams:
            with contextlib.suppress(IncompleteRead, ConnectionError):
                assert b"[DONE]" not in stream.read()
        assert psutil.wait_procs(first, 20)[1] == []
    finally:
        again.process.terminate()
        status = again.process.wait(60)
        again.process.communicate()
        again.errors.close()
    assert status == 0
    assert psutil.wait_procs(family, 20)[1] == []


def test_an_engine_process_does_not_outlive_its_parent() -> None:
    """The system closes the pipe of a parent that ended in any way."""
    [spec] = instances_of(tiny_plan(), ServingOptions("tiny-llama", "base"), ["g0"])
    read, write = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-m", "capplan.fleet._launcher"],
        stdin=read,
        stdout=subprocess.DEVNULL,
        env=environment(),
    )
    os.close(read)
    os.write(write, spec.message("127.0.0.1", "key"))
    os.close(write)
    try:
        assert child.wait(60) == 1
    finally:
        child.kill()
        child.wait()
