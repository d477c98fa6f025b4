"""Routers in Toppings' settings: ``python -m benchmarks.toppings_cluster`` prints a table of docs/cluster.md.

SLO attainment is the share of requests whose TPT (end to end / output tokens) is at most 1.5 times the mean
TPT of the same requests on the same instances without adapters, where they go to the least loaded instance
(section 7.4). A request that does not finish within the horizon does not keep it. Every instance holds every
adapter, but for "dlora, placed". What the engines are made of stands in `benchmarks.toppings_setting`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal

from benchmarks.toppings_setting import Setting, cluster, profile_with, simulation
from capplan.spec import Kernel, write_text_atomic
from capplan.twin.cluster import (
    ROUTERS,
    ClusterResult,
    NamedRouter,
    Toppings,
    simulate_cluster,
    simulate_without_adapters,
)

SLO_FACTOR: Final = 1.5
RATES_RPS: Final = (30.0, 40.0, 50.0)
WITHOUT: Final = "(no LoRA, least-loaded)"
PLACED: Final = "dlora, placed"


@dataclass(frozen=True)
class Row:
    """One router in one setting."""

    setting: str
    kernel: str
    router: str
    bound_tpt_ms: float
    attainment: float
    tpt_ms_mean: float
    tpt_ms_p99: float
    ttft_s_p99: float
    submitted: int
    completed: int
    adapter_loads: int
    migrations: int
    busiest: int
    """Requests of the instance that got most."""
    idlest: int
    steps: int
    cpu_s: float
    """CPU time of the whole call, drawing of requests and reduction to metrics included."""


def compare(
    setting: Setting, kernel: Kernel, routers: Sequence[str], duration_s: float, seed: int
) -> Iterator[Row]:
    """Yield a row for the reference without adapters, and one per router."""
    profile = profile_with(kernel)
    engines = setting.engines(profile)
    load = setting.workload
    base, cpu_s = timed(lambda: simulate_without_adapters(load, engines, duration_s=duration_s, seed=seed))
    bound_ms = SLO_FACTOR * base.tpt_ms_mean
    yield _row(setting, kernel, WITHOUT, bound_ms, base, cpu_s)
    form: Literal["bgmv", "mbgmv"] = "mbgmv" if kernel is Kernel.MBGMV else "bgmv"
    for router in routers:
        chosen: NamedRouter = router
        instances = engines
        if router == "toppings":
            chosen = Toppings(form, slo_ms=bound_ms)
        elif router == PLACED:
            chosen, instances = "dlora", setting.placed(profile)
        call = partial(simulate_cluster, load, instances, router=chosen, duration_s=duration_s, seed=seed)
        result, cpu_s = timed(call)
        yield _row(setting, kernel, router, bound_ms, result, cpu_s)


def timed(call: Callable[[], ClusterResult]) -> tuple[ClusterResult, float]:
    """Return the answer of a call and its CPU seconds."""
    begin_s = time.process_time()
    answer = call()
    return answer, time.process_time() - begin_s


def _row(
    setting: Setting, kernel: Kernel, router: str, bound_ms: float, result: ClusterResult, cpu_s: float
) -> Row:
    return Row(
        setting=setting.name,
        kernel=kernel.value,
        router=router,
        bound_tpt_ms=bound_ms,
        attainment=result.attainment(bound_ms),
        tpt_ms_mean=result.tpt_ms_mean,
        tpt_ms_p99=result.tpt_ms_p99,
        ttft_s_p99=result.ttft_s_p99,
        submitted=result.submitted,
        completed=result.completed,
        adapter_loads=result.adapter_loads,
        migrations=result.migrations,
        busiest=max(result.requests_per_instance),
        idlest=min(result.requests_per_instance),
        steps=result.steps,
        cpu_s=cpu_s,
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a markdown table."""
    titles = ["setting", "router", "SLO attainment", "TPT mean, p99 ms", "TTFT p99 s"]
    titles += ["loads", "moved", "most / fewest requests", "CPU s"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = (
            row.setting,
            row.router,
            f"{row.attainment:.2%}",
            f"{row.tpt_ms_mean:.1f}, {row.tpt_ms_p99:.1f}",
            f"{row.ttft_s_p99:.2f}",
            f"{row.adapter_loads:,}",
            f"{row.migrations:,}",
            f"{row.busiest:,} / {row.idlest:,}",
            f"{row.cpu_s:.1f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.toppings_cluster", description=__doc__)
    parser.add_argument("--setting", choices=("cluster", "simulation", "both"), default="both")
    parser.add_argument("--kernel", type=Kernel, choices=tuple(Kernel), default=Kernel.BGMV)
    parser.add_argument("--popularity", choices=("functions", "zipf"), default="functions")
    parser.add_argument("--routers", nargs="+", choices=(*ROUTERS, PLACED), default=[*ROUTERS, PLACED])
    parser.add_argument("--duration-s", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    chosen = parser.parse_args(arguments)
    settings = [cluster(rps) for rps in RATES_RPS] if chosen.setting != "simulation" else []
    if chosen.setting != "cluster":
        settings.append(simulation(chosen.popularity))
    rows: list[Row] = []
    next(compare(settings[0], chosen.kernel, [], 1.0, 0))  # compile first
    for setting in settings:
        rows += compare(setting, chosen.kernel, chosen.routers, chosen.duration_s, chosen.seed)
    print(table(rows), end="")
    if chosen.json:
        write_text_atomic(chosen.json, json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
