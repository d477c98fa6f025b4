"""The engine core in its own process, behind a real server: equal outputs, faults, and no process left."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import aiohttp
import psutil
import pytest

from capplan import __version__
from capplan._jit import ENGINE_ENTRY, is_compiled
from capplan.engine import (
    CoreProcess,
    CoreSettings,
    Engine,
    FrameReader,
    Reply,
    StepTokens,
    device_name,
    frame,
)
from capplan.engine._affinity import allowed_cpus
from capplan.engine._core_process import AWAKE_S
from capplan.errors import InputError
from tests.cli.conftest import environment
from tests.engine.test_generate import write_adapter

pytestmark = pytest.mark.process

ADAPTERS = {"a": 8, "b": 16, "c": 4}
PROMPTS = ([1, 2, 3], [7] * 40, [200, 5])


class Server:
    """`capplan serve` as a process."""

    def __init__(self, *flags: object) -> None:
        words = [sys.executable, "-m", "capplan", "serve", "--model", "tiny-llama", "--port", "0", "--json"]
        words += [str(each) for each in flags]
        words += ["--lora-modules", *(f"{name}={rank}" for name, rank in ADAPTERS.items())]
        pipe = subprocess.PIPE
        env = environment() | {"OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.url = json.loads(line)["url"]
        [self.core] = psutil.Process(self.process.pid).children()

    def post(self, path: str, **fields: Any) -> Any:
        body = json.dumps(fields).encode()
        headers = {"Content-Type": "application/json", "Authorization": "Bearer admin"}
        return urlopen(Request(f"{self.url}{path}", body, headers), timeout=60)

    def tokens(self, **fields: Any) -> list[int]:
        asked = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
        with self.post("/v1/completions", **asked) as answer:
            [choice] = json.loads(answer.read())["choices"]
        found: list[int] = choice["token_ids"]
        return found

    def metric(self, name: str) -> float:
        with urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def end(self) -> tuple[int, str]:
        errors = self.process.communicate(timeout=60)[1]
        return self.process.returncode, errors

    def gone(self) -> bool:
        """Whether the core ends within a while."""
        until_s = time.monotonic() + 20
        while time.monotonic() < until_s:
            if not self.core.is_running() or self.core.status() == psutil.STATUS_ZOMBIE:
                return True
            time.sleep(0.01)
        return False


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    with Engine("tiny-llama", num_kv_blocks=64) as engine:
        write_adapter(folder / "new", engine)
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    cpus = allowed_cpus()
    affinity = cpus[-1] if len(cpus) > 1 else "none"
    keys = ("--admin-api-key", "admin", "--lora-root", root)
    running = Server(*keys, "--max-loras", 2, "--max-num-seqs", 64, "--cpu-affinity", affinity)
    yield running
    running.process.terminate()
    status, errors = running.end()
    assert status == 0
    assert "rror" not in errors
    assert running.gone()


def test_core_and_server_are_bound_to_different_cpus(server: Server) -> None:
    cpus = allowed_cpus()
    assert server.core.cpu_affinity() == [cpus[-1]]
    assert psutil.Process(server.process.pid).cpu_affinity() == (list(cpus[:-1]) or [cpus[-1]])
    assert server.metric(f'capplan:engine_core_info{{cpus="{cpus[-1]}"}}') == 1
    labels = f'device="{device_name("cpu")}",version="{__version__}"'
    assert server.metric(f"capplan:engine_info{{{labels}}}") == 1


def test_questions_about_its_state_do_not_keep_the_core_awake(server: Server) -> None:
    server.tokens(model="a", prompt=[1, 2, 3], max_tokens=2)
    time.sleep(AWAKE_S + 0.5)
    begin_s = sum(server.core.cpu_times()[:2])
    for _ in range(20):
        server.metric("vllm:num_requests_running")
        time.sleep(0.1)
    assert sum(server.core.cpu_times()[:2]) - begin_s < 1.0


def test_outputs_equal_those_of_the_engine_in_process(server: Server) -> None:
    with Engine("tiny-llama", ADAPTERS, max_loras=2, num_kv_blocks=200) as engine:
        for sampling in ({}, {"temperature": 0.9, "top_p": 0.8, "seed": 5}):
            for name, prompt in zip((*ADAPTERS,), PROMPTS, strict=True):
                [right] = engine.generate([prompt], name, max_tokens=20, ignore_eos=True, **sampling)
                got = server.tokens(model=name, prompt=prompt, max_tokens=20, **sampling)
                assert got == list(right.token_ids)


def test_adapters_come_and_go_during_traffic(server: Server) -> None:
    alone = server.tokens(model="a", prompt=[9] * 5, max_tokens=60)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(server.tokens, model="a", prompt=[9] * 5, max_tokens=60) for _ in range(8)]
        for _ in range(3):
            assert server.post("/v1/load_lora_adapter", lora_name="new", lora_path="new").status == 200
            assert len(server.tokens(model="new", prompt=[1], max_tokens=3)) == 3
            assert server.post("/v1/unload_lora_adapter", lora_name="new").status == 200
        with pytest.raises(HTTPError, match="400"):
            server.post("/v1/load_lora_adapter", lora_name="a", lora_path="new")
        assert [each.result() for each in running] == [alone] * 8


def test_two_hundred_streams_and_disconnects(server: Server) -> None:
    async def stream(session: aiohttp.ClientSession, number: int) -> int:
        body = {"model": "abc"[number % 3], "prompt": [1 + number % 9] * 8, "max_tokens": 20, "stream": True}
        events = 0
        async with session.post(f"{server.url}/v1/completions", json=body | {"ignore_eos": True}) as answer:
            async for line in answer.content:
                events += line.startswith(b"data: {")
                if number % 10 == 0:
                    return 0  # leave early
        return events

    async def all_at_once() -> list[int]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            return await asyncio.gather(*(stream(session, number) for number in range(200)))

    before = server.metric("vllm:generation_tokens_total")
    events = asyncio.run(all_at_once())
    assert all(0 < count <= 20 for number, count in enumerate(events) if number % 10)
    while server.metric("vllm:num_requests_running") or server.metric("vllm:num_requests_waiting"):
        pass
    assert server.metric('vllm:request_success_total{engine="0",finished_reason="abort"') > 0
    assert server.metric("vllm:generation_tokens_total") - before >= 180 * 20
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_started_engine_has_compiled_what_others_look_for(server: Server) -> None:
    assert server.process.poll() is None
    assert is_compiled(ENGINE_ENTRY)


def test_a_stopped_core_refuses_requests_until_it_continues(server: Server) -> None:
    server.core.suspend()
    try:
        time.sleep(1.1)  # the state of the core is looked at once in a second
        with pytest.raises(HTTPError, match="503") as refused:
            server.tokens(model="a", prompt=[1], max_tokens=1)
        assert json.loads(refused.value.read())["error"]["code"] == "engine_stopped"
        for path in ("/health", "/ping"):
            with pytest.raises(HTTPError, match="503"):
                urlopen(f"{server.url}{path}", timeout=10)
        with urlopen(f"{server.url}/metrics", timeout=10) as metrics:
            assert metrics.status == 200
    finally:
        server.core.resume()
    time.sleep(1.1)
    assert len(server.tokens(model="a", prompt=[1], max_tokens=2)) == 2


def test_a_killed_core_fails_its_requests_and_the_server() -> None:
    server = Server()
    asked = {"model": "a", "prompt": [1], "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with server.post("/v1/completions", **asked) as running:
        running.readline()
        server.core.send_signal(signal.SIGKILL)
        last = running.read().decode().strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "instance_failed"
    status, errors = server.end()
    assert status == 1
    assert errors.splitlines()[-1] == "error: the engine core has ended; its process ended by SIGKILL"


def test_the_core_ends_with_its_server() -> None:
    server = Server()
    server.process.kill()
    server.end()
    assert server.gone()


def test_a_core_that_refuses_its_settings_reports_the_rule() -> None:
    with pytest.raises(InputError, match="must be a rank"):
        CoreProcess(CoreSettings("tiny-llama", {"a": 900}, {}))


def test_frames_are_whole_messages_however_they_arrive() -> None:
    sent = [Reply(at, os.urandom(at), None) for at in range(50)]
    data = b"".join(map(frame, sent))
    for size in (1, 7, 4096):
        reader = FrameReader()
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert [message for part in parts for message in reader.feed(part)] == sent


def test_a_step_of_many_requests_is_a_short_message() -> None:
    message = StepTokens(None, array("q", range(200)), array("i", range(200)), {}, {}, {})
    assert len(frame(message)) < 200 * 12 + 400
