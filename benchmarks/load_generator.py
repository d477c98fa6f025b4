"""Throughput of the load generator: ``python -m benchmarks.load_generator`` prints tables with a verdict.

A null server in a child process answers every request immediately with a stream of events; both share the
processor. Requests are those of a workload of Poisson arrivals, sent when due, each written to a Parquet file
with the times of its events, as `capplan bench --requests-out` does. Measured: completed requests per second,
lag of sending, CPU time per request in this process, and growth of its memory from the first tenth of the run
to its end.

A second, slower run tests the times of sending against a Poisson process (Kolmogorov-Smirnov, gaps against an
exponential distribution): slower, since an event loop wakes on whole milliseconds.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
import psutil
from numpy.typing import NDArray
from scipy.stats import kstest

from benchmarks.common import command_line, equal_adapters, records_table
from benchmarks.stand_in_servers import running
from capplan import Lengths, Workload
from capplan.profiling.load import BenchResult, LoadProgress, LoadSettings, RequestFile, Target, bench

RATE_BAR_RPS: Final = 1500.0
LAG_BAR_MS: Final = 5.0
GROWTH_BAR_MIB: Final = 64.0
KS_BAR: Final = 0.01
_MIB: Final = 2**20


@dataclass(frozen=True)
class Measured:
    result: BenchResult
    cpu_us: float
    """CPU time of the client per request."""
    growth_mib: float
    sent_s: NDArray[np.float64]

    @property
    def holds(self) -> bool:
        overall, lag = self.result.overall, self.result.client.lag_ms
        return (
            overall.request_rate_rps >= RATE_BAR_RPS
            and (lag.p50 or 0.0) < LAG_BAR_MS
            and self.growth_mib < GROWTH_BAR_MIB
            and overall.failed == 0
        )

    def row(self) -> dict[str, str]:
        overall, lag = self.result.overall, self.result.client.lag_ms
        return {
            "requests": f"{overall.submitted:,}",
            "per s": f"{overall.request_rate_rps:,.0f}",
            "lag p50, ms": f"{lag.p50:.2f}",
            "lag p99, ms": f"{lag.p99:.2f}",
            "CPU us each": f"{self.cpu_us:.0f}",
            "RSS growth, MiB": f"{self.growth_mib:.1f}",
            "holds": "yes" if self.holds else "NO",
        }


def workload(rate_rps: float, adapters: int = 20) -> Workload:
    return Workload(
        base_model="null",
        adapters=equal_adapters(adapters, 8, rate_rps),
        prompt_tokens=Lengths(mean=200),
        output_tokens=Lengths(mean=16),
    )


def measure(rate_rps: float, requests: int) -> Measured:
    this = psutil.Process()
    memory: list[int] = []

    def on_tick(now: LoadProgress) -> None:
        if now.completed >= requests // 10:
            memory.append(this.memory_info().rss)

    with (
        running("null") as url,
        tempfile.TemporaryDirectory() as folder,
        RequestFile(Path(folder) / "requests.parquet") as file,
    ):
        settings = LoadSettings(duration_s=requests / rate_rps)
        before = time.process_time()
        result = bench(workload(rate_rps), Target(url), settings, file=file, on_tick=on_tick)
        cpu_s = time.process_time() - before
        return Measured(
            result=result,
            cpu_us=1e6 * cpu_s / result.overall.submitted,
            growth_mib=(max(memory) - memory[0]) / _MIB if memory else float("nan"),
            sent_s=np.sort(pd.read_parquet(file.finished(), columns=["sent_s"])["sent_s"]),
        )


def poisson(sent_s: NDArray[np.float64], rate_rps: float) -> tuple[float, float]:
    """Return distance and p-value of the gaps against the exponential distribution of the rate.

    The rate is given, not fitted to the gaps, which would raise p-values.
    """
    found = kstest(np.diff(sent_s), "expon", args=(0.0, 1.0 / rate_rps))
    return float(found.statistic), float(found.pvalue)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rate-rps", type=float, default=1600.0)
    parser.add_argument("--requests", type=int, default=105_000)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--slow-rate-rps", type=float, default=10.0)
    parser.add_argument("--slow-requests", type=int, default=600)
    given = parser.parse_args()
    runs = [measure(given.rate_rps, given.requests) for _ in range(given.runs)]
    print(records_table(each.row() for each in runs))
    slow = measure(given.slow_rate_rps, given.slow_requests)
    distance, p = poisson(slow.sent_s, given.slow_rate_rps)
    print(f"\nsent times at {given.slow_rate_rps:g} requests/s: KS distance {distance:.4f}, p = {p:.2f}")
    print(
        f"bars: at least {RATE_BAR_RPS:g} requests/s, median lag below {LAG_BAR_MS:g} ms, "
        f"growth below {GROWTH_BAR_MIB:g} MiB, p above {KS_BAR:g}, no failure"
    )
    return 0 if all(each.holds for each in runs) and p > KS_BAR else 1


if __name__ == "__main__":
    raise SystemExit(main())
