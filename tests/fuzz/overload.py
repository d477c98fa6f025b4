"""Servers beyond their capacity, and faults under load: ``python -m tests.fuzz.overload``.

Starts a single server, then a router over two instances, with the tiny model, and measures its capacity in
closed loops. Phases follow, in which requests arrive at a multiple of the capacity (open loop, independent of
responses), each on a connection of its own: three times the capacity; for a router the same while instances
are killed and stopped (SIGKILL, SIGSTOP, SIGTERM, their engine cores alone); and twice the capacity while the
server itself gets SIGTERM. Every request is counted by its end. Exit status 1 if one is neither answered nor
refused with a reason, if a stopped instance is in the rotation for more than 5 s or does not come back, or if
a process is left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil

from benchmarks.common import command_line, emit, markdown
from capplan.processes import raise_file_limit
from tests.fuzz.servers import KINDS, served

MODELS: Final = ("base", "a", "b")
TOKENS: Final = 32
ROTATION_S: Final = 5.0
_ANSWER_S: Final = 120.0
_STOP_S: Final = 60.0
_STREAMS: Final = 64
REFUSED: Final = "connection refused"
_DONE: Final = b"data: [DONE]\n\n"


@dataclass
class Phase:
    """Requests of one phase by their end."""

    name: str
    rate_rps: float
    ends_server: bool = False
    ends: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    @property
    def unexplained(self) -> int:
        """Number of requests that were neither answered nor refused with a reason."""
        return sum(count for end, count in self.ends.items() if not self._is_explained(end))

    def _is_explained(self, end: str) -> bool:
        words = end.split()
        if words[0] in ("429", "503"):  # not 400 or 408: the requests are whole and valid
            return words[-1] != "reason"
        return end == "answered" or words[:2] == ["error", "event"] or (end == REFUSED and self.ends_server)

    def row(self, kind: str) -> list[str]:
        """Return the row of the report."""
        ends = ", ".join(f"{count} {end}" for end, count in self.ends.most_common())
        counts = [f"{self.rate_rps:.0f}", str(self.ends.total()), ends, f"{self.slowest_s:.1f}"]
        return [kind, self.name, *counts, str(self.unexplained)]


HEADER: Final = ("server", "phase", "requests/s", "requests", "ends", "slowest, s", "unexplained")


def request(number: int) -> bytes:
    """Return a request; every second one is streamed."""
    fields = {"model": MODELS[number % len(MODELS)], "prompt": [1 + number % 200] * 16, "max_tokens": TOKENS}
    body = json.dumps(fields | {"stream": number % 2 == 0, "ignore_eos": True, "temperature": 0}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


def end_of(response: bytes) -> str:
    """Return the end of a request: its status, and the reason of an error."""
    head, _, body = response.partition(b"\r\n\r\n")
    if not head:
        return "closed without an answer"
    status = head.split(b" ", 2)[1].decode()
    if status == "200":
        if _DONE in body or (b"content-length" in head.lower() and b'"usage"' in body):
            return "answered"
        event = body.rpartition(b'data: {"error": ')[2] if b'data: {"error": ' in body else b""
        code = _code(event)
        return f"error event {code}" if code else "cut off without a reason"
    return f"{status} {_code(body) or 'without a reason'}"


def _code(text: bytes) -> str:
    return text.partition(b'"code": "')[2].partition(b'"')[0].decode() if b'"code": "' in text else ""


class Load:
    """Requests to a server, one connection each."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = str(parts.hostname), int(parts.port or 0)
        self._number = 0

    async def send(self, phase: Phase) -> str:
        """Send the next request and count its end."""
        self._number += 1
        begin_s = time.perf_counter()
        end = await self._end(request(self._number))
        phase.slowest_s = max(phase.slowest_s, time.perf_counter() - begin_s)
        phase.ends[end] += 1
        return end

    async def _end(self, data: bytes) -> str:
        writer = None
        response = b""
        try:
            async with asyncio.timeout(_ANSWER_S):
                try:
                    reader, writer = await asyncio.open_connection(*self._address)
                except ConnectionRefusedError:
                    return REFUSED
                writer.write(data)
                while part := await reader.read(65536):
                    response += part
        except TimeoutError:
            return "timeout"
        except OSError as error:
            return end_of(response) if response else type(error).__name__
        finally:
            if writer is not None:
                writer.close()
        return end_of(response)

    async def closed_loop(self, phase: Phase, duration_s: float) -> None:
        """Send the next request of a stream whenever the last one has ended."""
        until_s = time.perf_counter() + duration_s

        async def stream() -> None:
            while time.perf_counter() < until_s:
                await self.send(phase)

        await asyncio.gather(*(stream() for _ in range(_STREAMS)))

    @asynccontextmanager
    async def open_loop(self, phase: Phase) -> AsyncIterator[None]:
        """Send requests at the rate of a phase in the context, and wait for their ends."""
        tasks: set[asyncio.Task[str]] = set()

        async def arrivals() -> None:
            rng, at_s = random.Random(0), time.perf_counter()
            while True:
                at_s += rng.expovariate(phase.rate_rps)
                await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
                task = asyncio.create_task(self.send(phase))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

        arriving = asyncio.create_task(arrivals())
        try:
            yield
        finally:
            arriving.cancel()
            while tasks:
                await asyncio.wait(set(tasks))


@dataclass
class Soak:
    """A running server under load, and its report."""

    kind: str
    process: subprocess.Popen[str]
    load: Load
    log: Path
    args: argparse.Namespace
    phases: list[Phase] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Run all phases."""
        warm, capacity = Phase("warm-up", 0.0), Phase("capacity", 0.0)
        await self.load.closed_loop(warm, self.args.settle_s)
        await self.load.closed_loop(capacity, self.args.settle_s)
        capacity_rps = capacity.ends["answered"] / self.args.settle_s
        print(f"{self.kind}: capacity {capacity_rps:.0f} requests/s of {TOKENS} tokens", flush=True)
        async with self._phase("3 x capacity", 3.0 * capacity_rps):
            await asyncio.sleep(self.args.duration_s)
        if self.kind == "router":
            async with self._phase("3 x capacity, with faults", 3.0 * capacity_rps):
                await self._faults()
        family = psutil.Process(self.process.pid).children(recursive=True)
        async with self._phase("SIGTERM at 2 x capacity", 2.0 * capacity_rps, ends_server=True):
            await asyncio.sleep(self.args.settle_s)
            self.process.send_signal(signal.SIGTERM)
            status = await asyncio.to_thread(self.process.wait, _STOP_S)
        if status != 0:
            self.broken.append(f"exit status {status}")
        _, left = psutil.wait_procs(family, timeout=5.0)
        if left:
            self.broken.append(f"{len(left)} processes are left")

    @asynccontextmanager
    async def _phase(self, name: str, rate_rps: float, ends_server: bool = False) -> AsyncIterator[None]:
        phase = Phase(name, rate_rps, ends_server)
        self.phases.append(phase)
        async with self.load.open_loop(phase):
            yield
        print(" | ".join(phase.row(self.kind)), flush=True)

    async def _faults(self) -> None:
        """Hurt instances one after the other; each is up again before the next."""
        for name, target, number in (
            ("SIGKILL of an instance", "instance", signal.SIGKILL),
            ("SIGSTOP of an instance", "instance", signal.SIGSTOP),
            ("SIGKILL of a core", "core", signal.SIGKILL),
            ("SIGSTOP of a core", "core", signal.SIGSTOP),
            ("SIGTERM of an instance", "instance", signal.SIGTERM),
        ):
            instance = psutil.Process(self.process.pid).children()[0]
            victim = instance if target == "instance" else instance.children()[0]
            subject = f"instance {instance.cmdline()[-1]}"
            seen = len(self.log.read_text())
            victim.send_signal(number)
            out_s = await self._logged(seen, (f"{subject} is stalled", f"{subject} has ended"))
            print(f"{name}: out of the rotation after {out_s:.1f} s", flush=True)
            if out_s > ROTATION_S:
                self.broken.append(f"{name}: in the rotation for {out_s:.1f} s")
            await asyncio.sleep(self.args.settle_s)
            if number == signal.SIGSTOP:
                victim.send_signal(signal.SIGCONT)
            back_s = await self._logged(seen, (f"{subject} is back", f"{subject} responds again"))
            if back_s > _ANSWER_S:
                self.broken.append(f"{name}: not back in the rotation after {_ANSWER_S:.0f} s")

    async def _logged(self, seen: int, events: Sequence[str]) -> float:
        """Wait until the router logs an event after some characters of its log.

        Returns
        -------
        float
            The time; infinite if there is none within a time.
        """
        begin_s = time.perf_counter()
        while time.perf_counter() - begin_s < _ANSWER_S:
            new = self.log.read_text()[seen:]
            if any(event in new for event in events):
                return time.perf_counter() - begin_s
            await asyncio.sleep(0.05)
        return math.inf


def soak(kind: str, args: argparse.Namespace) -> Soak:
    """Serve, run all phases and return their report."""
    with tempfile.TemporaryDirectory() as name, served(kind, Path(name)) as (process, url):
        made = Soak(kind, process, Load(url), Path(name) / "log", args)
        asyncio.run(made.run())
        log = (Path(name) / "log").read_text()
    made.broken += [
        f"{phase.name}: {phase.unexplained} unexplained" for phase in made.phases if phase.unexplained
    ]
    print(log, end="", flush=True)
    if "Traceback" in log:
        made.broken.append("a traceback was printed")
    return made


def main() -> int:
    """Run the soak and print its report."""
    parser = command_line(__doc__)
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: both")
    parser.add_argument("--duration", dest="duration_s", type=float, default=60.0, help="of the overload")
    parser.add_argument("--settle-s", type=float, default=5.0, help="of other phases, and of a fault")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the report there, too")
    args = parser.parse_args()
    raise_file_limit()
    soaks = [soak(kind, args) for kind in args.kind or KINDS]
    rows: Sequence[Sequence[str]] = [phase.row(each.kind) for each in soaks for phase in each.phases]
    broken = [f"{each.kind}: {text}" for each in soaks for text in each.broken]
    emit(f"{markdown(HEADER, rows)}\n\n{'; '.join(broken) or 'all bars hold'}\n", args.out)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
