"""How fast the cluster twin is: ``python -m benchmarks.cluster_speed`` prints tables of docs/cluster.md.

CPU seconds of the public `simulate_cluster()` in this process, after compilation: drawing of requests, sizing
of the instances and reduction to metrics included. The hour is Toppings' simulation: 60 instances, 340
requests per second, 40,000 adapters that every instance holds.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.common import command_line, emit, markdown, peak_mib
from benchmarks.toppings_cluster import ClusterSetting, profile_with, simulation
from capplan.spec import Kernel
from capplan.twin.cluster import ROUTERS, ClusterResult, simulate_cluster

ROOT = Path(__file__).resolve().parents[1]
HOUR_S: Final = 3600.0
BAR_S: Final = 120.0


def timed(setting: ClusterSetting, router: str, duration_s: float) -> tuple[float, ClusterResult]:
    begin_s = time.process_time()
    engines = setting.engines(profile_with(Kernel.BGMV))
    result = simulate_cluster(setting.workload, engines, router=router, duration_s=duration_s)
    return time.process_time() - begin_s, result


def router_table(duration_s: float) -> str:
    setting, rows = simulation(), []
    for router in ROUTERS:
        cpu_s, result = timed(setting, router, duration_s)
        per_look_ns = 1e9 * cpu_s / result.submitted / setting.instances
        rows.append(
            (router, f"{cpu_s:.1f}", f"{per_look_ns:.0f}", f"{result.submitted:,}", f"{result.steps:,}")
        )
    title = f"{setting.name}, {duration_s:,.0f} s"
    return markdown((title, "CPU s", "ns per request and instance", "requests", "steps"), rows)


def growth_table(duration_s: float) -> str:
    rows = []
    for instances in (1, 8, 60, 240):
        setting = simulation(adapters=4_000, rps=340.0 / 60 * instances, instances=instances)
        cpu_s, result = timed(setting, "least-loaded", duration_s)
        per_request_us = 1e6 * cpu_s / result.submitted
        rows.append(
            (f"{instances} instances", f"{cpu_s:.2f}", f"{per_request_us:.2f}", f"{result.submitted:,}")
        )
    return markdown(("least-loaded, 5.7 req/s each", "CPU s", "CPU us per request", "requests"), rows)


def own_peak() -> float:
    timed(simulation(), "toppings", HOUR_S)
    return peak_mib()


def peak_of_the_hour_mib() -> float:
    command = [sys.executable, "-m", "benchmarks.cluster_speed", "--peak-rss"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--duration-s", type=float, default=HOUR_S)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file, too")
    parser.add_argument("--peak-rss", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.peak_rss:
        print(own_peak())
        return
    timed(simulation(adapters=100), "toppings", 1.0)  # compile first
    tables = [router_table(chosen.duration_s), growth_table(chosen.duration_s)]
    peak = markdown(("peak memory of the hour, `toppings`",), [(f"{peak_of_the_hour_mib():,.0f} MiB",)])
    text = "\n\n".join([*tables, peak]) + "\n"
    emit(text, chosen.markdown)


if __name__ == "__main__":
    main()
