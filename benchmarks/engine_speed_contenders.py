"""Our engine and vLLM in processes of their own, offline or as servers, with the same settings."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil

from benchmarks.engine_speed_model import SIZES, write_adapter, write_model

BLOCK_SIZE = 32  # what vLLM's attention on CPUs takes
_WORKER = Path(__file__).with_name("engine_speed_worker.py")
_ROOT = Path(__file__).resolve().parent.parent
_START_S = 600.0


class Task(NamedTuple):
    """Requests that are sent at once."""

    prompts: list[list[int]]
    adapters: list[str]
    tokens: int


class Result(NamedTuple):
    """How long a task took, and the answers, to be compared between engines."""

    seconds: float
    answers: list[Any]
    cpu_seconds: float = 0.0


class Process:
    """A process with all its children; what it prints besides its answers goes to a file."""

    answers_on_stdout = False

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as messages:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self.answers_on_stdout else messages,
                stderr=messages,
                text=True,
                env={**os.environ, **environment},
            )

    def cpu_seconds(self) -> float:
        root = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in [root, *root.children(recursive=True)]]
        return float(sum(each.user + each.system for each in times))

    def fail(self) -> SystemExit:
        return SystemExit(f"the engine has ended; its messages are in {self.log}")


class Offline(Process):
    """`generate` from Python, in `engine_speed_worker.py`."""

    answers_on_stdout = True

    def run(self, task: Task) -> Result:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        before = self.cpu_seconds()
        self.process.stdin.write(json.dumps(task._asdict()) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                result = Result(**json.loads(line), cpu_seconds=self.cpu_seconds() - before)
                assert all(len(answer) == task.tokens for answer in result.answers)
                return result
        raise self.fail()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


class Server(Process):
    """An OpenAI-compatible server, asked by streaming requests."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, port: int) -> None:
        super().__init__(command, environment, log)
        self._url = f"http://127.0.0.1:{port}"
        self._ready = False

    def run(self, task: Task) -> Result:
        return asyncio.run(self._run(task))

    async def _run(self, task: Task) -> Result:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            if not self._ready:
                await self._wait(session)
            before, start = self.cpu_seconds(), time.perf_counter()
            answers = await asyncio.gather(
                *(
                    self._ask(session, *each, task.tokens)
                    for each in zip(task.prompts, task.adapters, strict=True)
                )
            )
            seconds = time.perf_counter() - start
            return Result(seconds, list(answers), self.cpu_seconds() - before)

    async def _wait(self, session: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                async with session.get(f"{self._url}/health") as answer:
                    if answer.status == 200:
                        self._ready = True
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
        raise self.fail()

    async def _ask(self, session: aiohttp.ClientSession, prompt: list[int], adapter: str, tokens: int) -> str:
        body = {"model": adapter, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        more = {"ignore_eos": True, "stream_options": {"include_usage": True}}
        text, used = "", 0
        async with session.post(f"{self._url}/v1/completions", json=body | more) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    text += "".join(choice["text"] for choice in event["choices"])
                    used = (event.get("usage") or {}).get("completion_tokens", used)
        assert used == tokens
        # Single bytes of the random answers are no UTF-8, and servers differ in what they make of them.
        return "".join(letter for letter in text if letter.isascii())

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


def start(given: argparse.Namespace, folder: Path) -> dict[str, Offline | Server]:
    """Write the model and its adapters into a folder and start both engines on them."""
    size = SIZES[given.size]
    write_model(size, folder / "model")
    adapters = {f"a{i}": str(folder / f"a{i}") for i in range(given.adapters)}
    for seed, path in enumerate(adapters.values()):
        write_adapter(size, given.rank, seed, Path(path))
    sizes = {
        "max_num_seqs": given.concurrent,
        "max_model_len": 1024,
        "max_num_batched_tokens": 2048,
        "block_size": BLOCK_SIZE,
    }
    ours = {"OMP_NUM_THREADS": str(given.threads), "PYTHONPATH": str(_ROOT)}
    theirs = oracle_variables(given.bind, given.threads)
    if given.servers:
        return _servers(given, folder, adapters, sizes, ours, theirs)
    common = {
        "model": str(folder / "model"),
        "adapters": adapters,
        "rank": given.rank,
        "dtype": given.dtype,
        "threads": given.threads,
        "kv_tokens": 1024 * given.concurrent,
        **sizes,
    }
    mine = {"engine": "capplan", "options": json.loads(given.options)}
    other = {"engine": "vllm", "options": json.loads(given.oracle_options)}
    return {
        "capplan": Offline(
            [sys.executable, str(_WORKER), json.dumps(mine | common)], ours, folder / "capplan.log"
        ),
        "vllm": Offline(
            [given.oracle, str(_WORKER), json.dumps(other | common)], theirs, folder / "vllm.log"
        ),
    }


def _servers(
    given: argparse.Namespace,
    folder: Path,
    adapters: Mapping[str, str],
    sizes: Mapping[str, int],
    ours: Mapping[str, str],
    theirs: Mapping[str, str],
) -> dict[str, Offline | Server]:
    modules = [f"{name}={path}" for name, path in adapters.items()]
    blocks = str(1024 * given.concurrent // BLOCK_SIZE)
    common = ["--model", str(folder / "model"), "--dtype", given.dtype, "--max-lora-rank", str(given.rank)]
    common += ["--max-loras", str(len(adapters)), "--no-enable-prefix-caching"]
    for name, value in sizes.items():
        common += [f"--{name.replace('_', '-')}", str(value)]
    port, other_port = free_ports()
    mine = [sys.executable, "-m", "capplan", "serve", *common, "--num-kv-blocks", blocks]
    other = [given.oracle, "-m", "vllm.entrypoints.openai.api_server", *common, "--enable-lora"]
    other += ["--num-gpu-blocks-override", blocks, "--port", str(other_port), "--lora-modules", *modules]
    mine += ["--port", str(port), *(part for module in modules for part in ("--lora-modules", module))]
    return {
        "capplan": Server(mine, ours, folder / "capplan.log", port),
        "vllm": Server(other, theirs, folder / "vllm.log", other_port),
    }


def oracle_variables(bind: str, threads: int) -> dict[str, str]:
    """Return the environment of vLLM on a CPU: its threads, how they are bound, nothing from a network."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": bind,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
