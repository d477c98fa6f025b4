"""Server under three times its capacity: `python -m benchmarks.engine_overload`.

Measures the server's capacity in closed loops, then its latency at a third of that, then offers three times
the capacity for a minute, then a third again. Prints resident memory throughout. The server must reject with
429, bound its memory, and return to its former latency.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

from benchmarks.common import command_line
from capplan.profiling.server._process import ServerCommand, flag_words, running_server
from capplan.spec import write_text_atomic

ADAPTERS = 16
TOKENS = 32
PROMPT = list(range(3, 35))


@dataclass
class Phase:
    """Client-side observations of one phase."""

    name: str
    duration_s: float
    latencies_s: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    retry_after_s: list[int] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        ranked = sorted(self.latencies_s) or [float("nan")]
        waits = self.retry_after_s
        return {
            "phase": self.name,
            "answered_rps": round(len(self.latencies_s) / self.duration_s, 1),
            "statuses": dict(self.statuses),
            "latency_p50_s": round(statistics.median(ranked), 3),
            "latency_p99_s": round(ranked[int(0.99 * (len(ranked) - 1))], 3),
            "retry_after_s": [min(waits), max(waits)] if waits else None,
        }


@dataclass
class Client:
    session: aiohttp.ClientSession
    url: str

    async def send(self, phase: Phase, number: int) -> None:
        body = {"model": f"a{number % ADAPTERS}", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        started = time.perf_counter()
        try:
            url = f"{self.url}/v1/completions"
            async with self.session.post(url, json=body | {"stream": True, "ignore_eos": True}) as response:
                text = await response.text()
                phase.statuses[str(response.status)] += 1
                if response.status == 200 and text.endswith("data: [DONE]\n\n"):
                    phase.latencies_s.append(time.perf_counter() - started)
                if response.status == 429:
                    phase.retry_after_s.append(int(response.headers["Retry-After"]))
        except (aiohttp.ClientError, OSError) as error:
            phase.statuses[type(error).__name__] += 1

    async def closed_loop(self, phase: Phase, streams: int) -> None:
        """Measure the capacity with closed loops."""
        end = time.perf_counter() + phase.duration_s

        async def stream(number: int) -> None:
            while time.perf_counter() < end:
                await self.send(phase, number)
                number += 1

        await asyncio.gather(*map(stream, range(streams)))

    async def open_loop(self, phase: Phase, rate_rps: float, seed: int) -> None:
        """Send requests at a rate."""
        rng = random.Random(seed)
        start = at = time.perf_counter()
        async with asyncio.TaskGroup() as requests:
            for number in itertools.count():
                if at >= start + phase.duration_s:
                    break
                at += rng.expovariate(rate_rps)
                await asyncio.sleep(max(0.0, at - time.perf_counter()))
                requests.create_task(self.send(phase, number))


async def watch_memory(pid: int, every_s: float, samples: list[tuple[float, float]]) -> None:
    process, start = psutil.Process(pid), time.perf_counter()
    while True:
        samples.append((time.perf_counter() - start, process.memory_info().rss / 2**20))
        print(f"  {samples[-1][0]:6.1f} s  {samples[-1][1]:8.1f} MiB", flush=True)
        await asyncio.sleep(every_s)


async def run(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    timeout, samples = aiohttp.ClientTimeout(total=None), []
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        watching = asyncio.create_task(watch_memory(pid, 5.0, samples))
        client, phases = Client(session, url), [Phase("capacity", args.settle_s)]
        await client.closed_loop(phases[0], args.max_num_seqs)
        capacity_rps = len(phases[0].latencies_s) / args.settle_s
        print(f"capacity {capacity_rps:.1f} requests/s of {TOKENS} tokens", flush=True)
        for name, load in (("before", 0.3), ("overload", 3.0), ("after", 0.3)):
            phases.append(Phase(name, args.duration_s if name == "overload" else args.settle_s))
            await client.open_loop(phases[-1], load * capacity_rps, len(phases) - 1)
            print(json.dumps(phases[-1].summary()), flush=True)
        watching.cancel()
    return {
        "capacity_rps": round(capacity_rps, 1),
        "phases": [phase.summary() for phase in phases],
        "rss_mib": [(round(at, 1), round(size, 1)) for at, size in samples],
    }


def server_command(args: argparse.Namespace) -> ServerCommand:
    adapters = {f"a{number}": (8, 16)[number % 2] for number in range(ADAPTERS)}
    flags = {"--max-num-seqs": args.max_num_seqs, "--max-queue": args.max_queue, "--max-loras": 4}
    return ServerCommand(args.model, adapters, [*flag_words(flags), "--dtype", "float32"])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--duration", dest="duration_s", type=float, default=60.0, help="of the overload")
    parser.add_argument("--settle-s", type=float, default=15.0, help="of each other phase")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-queue", type=int, default=32)
    parser.add_argument("--json", dest="out", help="write the numbers there, too")
    args = parser.parse_args()
    with running_server(server_command(args)) as url:
        (pid,) = (child.pid for child in psutil.Process().children())
        result = asyncio.run(run(url, pid, args))
    if args.out:
        write_text_atomic(args.out, json.dumps(result, indent=1))
    before, overload, after = result["phases"][1:]
    grown = max(size for _, size in result["rss_mib"]) - result["rss_mib"][0][1]
    print(f"shed {overload['statuses'].get('429', 0)} of {sum(overload['statuses'].values())}")
    print(f"resident memory grew by at most {grown:.1f} MiB")
    print(f"median latency {before['latency_p50_s']} s before, {after['latency_p50_s']} s after")


if __name__ == "__main__":
    main()
