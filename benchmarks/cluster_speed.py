"""Speed of the cluster twin: ``python -m benchmarks.cluster_speed`` prints tables of the docs.

CPU seconds of the public `simulate_cluster()` in this process, after compilation: drawing of requests, sizing
of the instances and reduction to metrics included. The hour is Toppings' simulation: 60 instances, 340
requests per second, 40,000 adapters that every instance holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.common import command_line, cpu_timed, emit, in_fresh_process, peak_mib, records_table
from capplan import Workload
from capplan.reproduce.toppings import simulation
from capplan.serving.routers import ROUTERS
from capplan.twin.cluster import ClusterResult, Instance, simulate_cluster

HOUR_S: Final = 3600.0


Setting = tuple[Workload, list[Instance]]


def timed(setting: Setting, router: str, duration_s: float) -> tuple[float, ClusterResult]:
    def call() -> ClusterResult:
        load, engines = setting
        return simulate_cluster(load, engines, router=router, duration_s=duration_s)

    return cpu_timed(call)


def router_table(duration_s: float) -> str:
    setting, rows = simulation(), []
    load, engines = setting
    name = f"{len(engines)} instances, {load.total_rate_rps:.0f} req/s, {len(load.adapters):,} adapters"
    for router in ROUTERS:
        cpu_s, result = timed(setting, router, duration_s)
        per_look_ns = 1e9 * cpu_s / result.submitted / len(engines)
        rows.append(
            {
                f"{name}, {duration_s:,.0f} s": router,
                "CPU s": f"{cpu_s:.1f}",
                "ns per request and instance": f"{per_look_ns:.0f}",
                "requests": f"{result.submitted:,}",
                "steps": f"{result.steps:,}",
            }
        )
    return records_table(rows)


def growth_table(duration_s: float) -> str:
    rows = []
    for instances in (1, 8, 60, 240):
        setting = simulation(adapters=4_000, rps=340.0 / 60 * instances, instances=instances)
        cpu_s, result = timed(setting, "least-loaded", duration_s)
        rows.append(
            {
                "least-loaded, 5.7 req/s each": f"{instances} instances",
                "CPU s": f"{cpu_s:.2f}",
                "CPU us per request": f"{1e6 * cpu_s / result.submitted:.2f}",
                "requests": f"{result.submitted:,}",
            }
        )
    return records_table(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--duration", dest="duration_s", type=float, default=HOUR_S)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file, too")
    parser.add_argument("--peak-rss", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.peak_rss:
        timed(simulation(), "toppings", HOUR_S)
        print(peak_mib())
        return
    timed(simulation(adapters=100), "toppings", 1.0)  # compile first
    tables = [router_table(chosen.duration_s), growth_table(chosen.duration_s)]
    peak = float(in_fresh_process("cluster_speed", "--peak-rss"))
    tables.append(records_table([{"peak memory of the hour, `toppings`": f"{peak:,.0f} MiB"}]))
    emit("\n\n".join(tables) + "\n", chosen.markdown)


if __name__ == "__main__":
    main()
