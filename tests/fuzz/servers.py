"""Hostile HTTP interactions beside normal traffic: ``python -m tests.fuzz.servers``.

Starts a single server, then a router over two instances, with the tiny model. While each is sent every
interaction of `tests.fuzz.interactions`, another process probes ``/health`` and sends completions. Exit
status 1 if a bar breaks: ``/health`` within 0.5 s, all completions answered, no answer 500, resident memory
within 200 MiB of the start, and no open file, process or shared memory left.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import psutil

from benchmarks.common import command_line, markdown
from capplan import Plan
from capplan.spec import EngineArgs, Group, PlanAdapter, PlanEngine, Predicted, Totals, Verification
from tests.fuzz.interactions import Interaction, interactions

MIB: Final = 2**20
HEALTH_S: Final = 0.5
RSS_MIB: Final = 200
_PROBE_EVERY_S: Final = 0.1
_ANSWER_S: Final = 30.0
_INTERACTION_S: Final = 20.0
_SETTLE_S: Final = 60.0
"""Idle connections of a router to its instances are closed after 15 s."""
_STOP_S: Final = 60.0
_SERVE: Final = (sys.executable, "-m", "capplan", "serve", "--port", "0", "--json", "--model", "tiny-llama")
_SINGLE: Final = ("--served-model-name", "base", "--max-loras", "2", "--lora-modules", "a=8", "b=4")
KINDS: Final = ("server", "router")


@dataclass
class Traffic:
    """Normal traffic of a client: probes of ``/health``, and completions."""

    health: list[tuple[float, float]] = field(default_factory=list)
    """Duration and begin of each probe of ``/health``, in seconds."""
    failed_probes: int = 0
    sent: int = 0
    answered: int = 0
    failures: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Usage:
    """Resources of a server with its child processes."""

    rss_bytes: int
    rss_of: dict[int, int]
    """By process."""
    files: int
    processes: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Return the present usage."""
        server = psutil.Process(pid)
        every = [server, *server.children(recursive=True)]
        rss_of = {process.pid: process.memory_info().rss for process in every}
        return cls(sum(rss_of.values()), rss_of, sum(process.num_fds() for process in every), len(every))


@dataclass
class Result:
    """Result of a soak."""

    kind: str
    traffic: Traffic
    statuses: Counter[int]
    begins: list[tuple[float, str]]
    """Begin and name of each interaction."""
    before: Usage
    after: Usage
    peak_rss_bytes: int
    left_processes: int
    left_shared_memory: int
    exit_status: int
    log: str

    def slowest_probe(self) -> tuple[float, str]:
        """Return the duration of the slowest probe of ``/health``, and the interaction at its end."""
        duration_s, begin_s = max(self.traffic.health)
        during = [name for each_s, name in self.begins if each_s <= begin_s + duration_s]
        return duration_s, during[-1] if during else "the start"

    def broken(self) -> list[str]:
        """Return the bars that do not hold."""
        traffic, grown = self.traffic, (self.after.rss_bytes - self.before.rss_bytes) / MIB
        health_s, during = self.slowest_probe()
        checks = {
            f"/health took {health_s:.2f} s during {during}": health_s > HEALTH_S,
            f"{traffic.failed_probes} probes of /health failed": traffic.failed_probes > 0,
            f"{traffic.sent - traffic.answered} requests were not answered": traffic.answered < traffic.sent,
            "no request was sent": traffic.sent == 0,
            f"{self.statuses[500]} answers had status 500": self.statuses[500] > 0,
            f"memory grew by {grown:.0f} MiB": grown > RSS_MIB,
            f"{self.after.files - self.before.files} files are open": self.after.files > self.before.files,
            f"{self.after.processes} processes": self.after.processes > self.before.processes,
            f"{self.left_processes} processes are left": self.left_processes > 0,
            f"{self.left_shared_memory} segments of shared memory are left": self.left_shared_memory > 0,
            f"exit status {self.exit_status}": self.exit_status != 0,
            "a traceback was printed": "Traceback" in self.log,
        }
        return [text for text, is_broken in checks.items() if is_broken]

    def row(self) -> list[str]:
        """Return the row of the report."""
        traffic = self.traffic
        return [
            self.kind,
            str(sum(self.statuses.values())),
            f"{self.slowest_probe()[0]:.2f}",
            f"{traffic.answered} of {traffic.sent}",
            f"{(self.after.rss_bytes - self.before.rss_bytes) / MIB:.0f}",
            f"{(self.peak_rss_bytes - self.before.rss_bytes) / MIB:.0f}",
            f"{self.after.files - self.before.files}",
            f"{self.left_processes}",
            f"{self.left_shared_memory}",
            "; ".join(self.broken()) or "all hold",
        ]


HEADER: Final = (
    *("server", "connections", "/health max, s", "normal requests answered", "RSS growth, MiB"),
    *("RSS peak, MiB", "files", "processes left", "shared memory left", "bars"),
)


def plan() -> Plan:
    """Return a plan of two instances of the tiny model."""
    sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_model_len": 2048}
    engine = EngineArgs(max_loras=2, max_lora_rank=16, gpu_memory_utilization=0.9, **sizes)
    predicted = Predicted(throughput_tok_s=1.0, served_fraction=1.0, kv_tokens=1, source="none")
    groups = tuple(
        Group(
            id=f"g{number}",
            replicas=1,
            gpu="CPU",
            profile="none",
            engine_args=engine,
            adapters=(PlanAdapter(name=name, rank=8, rate_rps=1.0, share=1.0),),
            predicted=predicted,
        )
        for number, name in enumerate("ab")
    )
    return Plan(
        created_by="tests.fuzz",
        base_model="base",
        engine=PlanEngine(name="vllm", version="0.8.5", rules="vllm-0.8"),
        objective="min_gpus",
        workload_digest="0" * 64,
        groups=groups,
        totals=Totals(gpus=2, lower_bound_gpus=1),
        provenance={},
        verification=Verification(ok=False, seeds=(), duration_s=0.0, min_served_fraction=0.0),
    )


@contextmanager
def served(kind: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a server and yield its process and URL; its log is `folder`/log."""
    plan().to_json(folder / "plan.json")
    words = [*_SERVE, *(_SINGLE if kind == "server" else (str(folder / "plan.json"), "--unverified"))]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise SystemExit((folder / "log").read_text())
            yield process, str(json.loads(line)["url"])
        finally:
            process.kill()
            process.wait()


def soak(kind: str, chosen: Sequence[Interaction], quiet: bool) -> Result:
    """Send interactions to a server, and measure it."""
    shared_memory = _shared_memory()
    with tempfile.TemporaryDirectory() as name, served(kind, Path(name)) as (process, url):
        host, port = str(urlsplit(url).hostname), int(urlsplit(url).port or 0)
        ours, theirs = multiprocessing.Pipe()
        client = multiprocessing.Process(target=_traffic_process, args=(url, theirs))
        asyncio.run(_warm_up(url))
        before = Usage.of(process.pid)
        client.start()
        statuses, begins, peak = asyncio.run(_send_all(chosen, host, port, process.pid, quiet))
        ours.send(None)
        traffic: Traffic = ours.recv()
        client.join()
        after = _settled(process.pid, before)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        status = process.wait(_STOP_S)
        _, alive = psutil.wait_procs(family, timeout=5.0)
        log = (Path(name) / "log").read_text()
    left = _shared_memory() - shared_memory
    return Result(kind, traffic, statuses, begins, before, after, peak, len(alive), len(left), status, log)


async def _send_all(
    chosen: Sequence[Interaction], host: str, port: int, pid: int, quiet: bool
) -> tuple[Counter[int], list[tuple[float, str]], int]:
    """Send interactions in turn; return statuses, their begins, and the peak of memory."""
    statuses: Counter[int] = Counter()
    begins: list[tuple[float, str]] = []
    peak = 0
    for each in chosen:
        begin_s = time.monotonic()
        begins.append((begin_s, each.name))
        running = asyncio.ensure_future(each.run(host, port, _INTERACTION_S))
        while not running.done():
            await asyncio.wait((running,), timeout=0.5)
            peak = max(peak, (await asyncio.to_thread(Usage.of, pid)).rss_bytes)
        found = Counter(running.result())
        statuses += found
        if not quiet:
            took_s = time.monotonic() - begin_s
            print(f"{took_s:6.2f} s  {peak / MIB:6.0f} MiB  {dict(found)}  {each.name}", flush=True)
    return statuses, begins, peak


async def _warm_up(url: str) -> None:
    """Send conversations side by side, which start the processes of the chat template."""
    traffic = Traffic()
    async with aiohttp.ClientSession(url) as session:
        await asyncio.gather(*(_complete(session, number, traffic) for number in range(64)))


def _settled(pid: int, before: Usage) -> Usage:
    """Return the usage once connections are closed, or after some time."""
    deadline = time.monotonic() + _SETTLE_S
    while (usage := Usage.of(pid)).files > before.files and time.monotonic() < deadline:
        time.sleep(0.5)
    return usage


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _traffic_process(url: str, connection: Connection) -> None:
    connection.send(asyncio.run(_traffic(url, connection)))


async def _traffic(url: str, connection: Connection) -> Traffic:
    """Send normal traffic until told to stop."""
    traffic = Traffic()
    connector = aiohttp.TCPConnector(force_close=True)  # every probe needs a new connection
    async with (
        aiohttp.ClientSession(url, connector=connector) as fresh,
        aiohttp.ClientSession(url) as session,
    ):
        tasks = {asyncio.ensure_future(_probe(fresh, traffic))}
        for number in itertools.count():
            if connection.poll():
                break
            tasks.add(asyncio.ensure_future(_complete(session if number % 2 else fresh, number, traffic)))
            tasks = {task for task in tasks if not task.done()}
            await asyncio.sleep(_PROBE_EVERY_S)
        for task in tasks:
            if "_probe" in str(task.get_coro()):
                task.cancel()
        await asyncio.wait(tasks)
    return traffic


async def _probe(session: aiohttp.ClientSession, traffic: Traffic) -> None:
    while True:
        begin_s = time.monotonic()
        try:
            async with session.get("/health", timeout=aiohttp.ClientTimeout(_ANSWER_S)) as response:
                traffic.failed_probes += response.status != 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            traffic.failed_probes += 1
        traffic.health.append((time.monotonic() - begin_s, begin_s))
        await asyncio.sleep(_PROBE_EVERY_S)


async def _complete(session: aiohttp.ClientSession, number: int, traffic: Traffic) -> None:
    chat = number % 4 == 3
    fields = {"model": ("base", "a", "b")[number % 3], "max_tokens": 4, "stream": number % 2 == 0}
    fields |= {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": [1, 2, 3]}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    traffic.sent += 1
    try:
        async with session.post(path, json=fields, timeout=aiohttp.ClientTimeout(_ANSWER_S)) as response:
            text = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        traffic.failures[type(error).__name__] += 1
        return
    if response.status == 200 and (b"[DONE]" in text or b'"usage"' in text):
        traffic.answered += 1
    else:
        traffic.failures[str(response.status)] += 1


def main() -> int:
    """Run the soak and print its report."""
    parser = command_line(__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: both")
    parser.add_argument(
        "--only", default=[], metavar="TEXT", nargs="+", help="interactions with it in the name"
    )
    parser.add_argument("--quiet", action="store_true", help="print the report alone")
    args: argparse.Namespace = parser.parse_args()
    chosen = [each for each in interactions() if not args.only or any(t in each.name for t in args.only)]
    results = [soak(kind, chosen, args.quiet) for kind in args.kind or KINDS]
    print(f"{len(chosen)} interactions\n")
    print(markdown(HEADER, [result.row() for result in results]))
    for result in results:
        print(f"{result.kind}: statuses {dict(sorted(result.statuses.items()))}; ", end="")
        print(f"failures {dict(result.traffic.failures)}; slowest probe {result.slowest_probe()}")
        grown = (result.after.rss_of[pid] - rss for pid, rss in result.before.rss_of.items())
        print(f"growth by process, MiB: {', '.join(f'{each / MIB:.0f}' for each in grown)}")
        print(result.log[-2000:], file=sys.stderr)
    return int(any(result.broken() for result in results))


if __name__ == "__main__":
    sys.exit(main())
