"""LoRAServe's setting (section V): ``python -m benchmarks.loraserve_setting --traces DIR --out DIR``.

Four servers, 25 adapters of ranks 8 to 128, six traces: {uniform, Poisson} arrivals x {Uniform, Shifting
skew, Exponential} popularity of ranks, with the lengths of the Azure conversations of 2023. For every system:
the highest request rate with a P95 TTFT within 10 s, and the servers needed for 95 % of LoRAServe's rate on
four.

Rates are bracketed and bisected to 1 %, per seed with common random numbers. DIR has a JSON file per cell; an
interrupted run is resumed. ``--quick`` is a subset.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.common import H100_LLAMA, command_line, markdown, preset_workload
from benchmarks.loraserve_systems import (
    DRAWS,
    PREFILL_RATIO,
    SYSTEMS,
    Scene,
    declared_tok_s,
    load_at,
    p95_ttft_s,
    standin,
)
from capplan import load_profile
from capplan.spec import write_text_atomic

TRACES: Final = tuple(
    f"{arrivals}-{skew}"
    for arrivals in ("uniform", "poisson")
    for skew in ("uniform", "shifting", "exponential")
)
LENGTHS: Final = "azure_llm_2023_conv.parquet"
SERVERS: Final = 4
BOUND_S: Final = 10.0
FIRST_RPS: Final = 16.0
SMALLEST_RPS: Final = 0.1
STEP_S: Final = 300.0
PRECISION: Final = 0.01
MOST_SERVERS: Final = 12
OF_LORASERVE: Final = 0.95


@dataclass(frozen=True)
class CellSettings:
    """Settings of all cells."""

    duration_s: float = 3600.0
    seeds: int = 5
    prefill_ratio: float = PREFILL_RATIO


@dataclass(frozen=True)
class Run:
    """Folders of traces and results, and settings."""

    traces: Path
    out: Path
    settings: CellSettings

    def cell(self, name: str, find: Callable[[], Any]) -> Any:
        """Return the stored result for these settings, or compute and store it."""
        path, settings = self.out / f"{name}.json", asdict(self.settings)
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["settings"] == settings:
                return known["found"]
        found = find()
        write_text_atomic(path, json.dumps({"settings": settings, "found": found}))
        print(f"{name}: {found}", flush=True)
        return found

    def scene(self, trace: str) -> Scene:
        profile = standin(load_profile(H100_LLAMA), self.settings.prefill_ratio)
        workload = preset_workload(f"loraserve-{trace}", traces=str(self.traces))
        return Scene(trace, workload, profile, STEP_S, self.out / f"ratio-{self.settings.prefill_ratio:g}")

    def holds(self, scene: Scene, system: str, servers: int, seed: int, draw: int, rps: float) -> bool:
        load = load_at(scene.workload, scene.profile, rps, self.settings.duration_s, seed)
        return p95_ttft_s(load, scene.ttft_s(system, load, servers, draw), BOUND_S) <= BOUND_S

    def highest_rps(self, scene: Scene, system: str) -> list[float]:
        """Return the highest sustained rate on four servers, per seed and random placement."""
        draws = range(DRAWS if system == "slora-random" else 1)
        return [
            highest(partial(self.holds, scene, system, SERVERS, seed, draw), FIRST_RPS)
            for seed in range(self.settings.seeds)
            for draw in draws
        ]

    def servers_for(self, scene: Scene, system: str, rps: float) -> int | None:
        """Return the fewest servers that keep the bound on every seed; None: over twelve.

        The search starts at the number needed if every adapter had the cheapest rank.
        """
        load = load_at(scene.workload, scene.profile, rps, self.settings.duration_s, 0)
        fewest = math.ceil(sum(declared_tok_s(load)) / max(scene.points(SERVERS).values()))
        for servers in range(fewest, MOST_SERVERS + 1):
            if all(self.holds(scene, system, servers, seed, 0, rps) for seed in range(self.settings.seeds)):
                return servers
        return None

    def rates(self, trace: str, systems: Sequence[str]) -> dict[str, list[float]]:
        scene = self.scene(trace)
        return {s: self.cell(f"{trace}.{s}", partial(self.highest_rps, scene, s)) for s in systems}

    def servers(self, trace: str, systems: Sequence[str]) -> tuple[float, dict[str, int | None]]:
        """Return 95 % of LoRAServe's rate on a trace, and the servers that each system needs for it."""
        scene, (sustained,) = self.scene(trace), self.rates(trace, ["loraserve"]).values()
        rps = OF_LORASERVE * min(sustained)
        return rps, {
            s: self.cell(f"{trace}.{s}.servers", partial(self.servers_for, scene, s, rps)) for s in systems
        }


def highest(holds: Callable[[float], bool], start: float) -> float:
    """Return a rate that holds and is within 1 % of one that does not; 0 if none holds."""
    low = start
    while not holds(low):
        low /= 2.0
        if low < SMALLEST_RPS:
            return 0.0
    high = 2.0 * low
    while holds(high):
        low, high = high, 2.0 * high
    while high / low > 1.0 + PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def rates_cell(rps: Sequence[float], loraserve_rps: Sequence[float]) -> str:
    """Return mean and range of rates, and LoRAServe's mean over it."""
    spread = f" ({min(rps):.1f} to {max(rps):.1f})" if len(rps) > 1 else ""
    ratio = f"{fmean(loraserve_rps) / fmean(rps):.2f} x" if fmean(rps) else "never"
    return f"{fmean(rps):.1f}{spread}, {ratio}"


def tables(run: Run, traces: Sequence[str], systems: Sequence[str], rates_only: bool) -> str:
    rates, servers = [], []
    for trace in traces:
        found = run.rates(trace, systems)
        rates.append([trace, *(rates_cell(found[system], found["loraserve"]) for system in systems)])
        if rates_only:
            continue
        rps, needed = run.servers(trace, systems)
        servers.append([trace, f"{rps:.1f}", *(str(n or f"> {MOST_SERVERS}") for n in needed.values())])
    if rates_only:
        return markdown(["trace", *systems], rates)
    return f"{markdown(['trace', *systems], rates)}\n\n{markdown(['trace', 'req/s', *systems], servers)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--traces", type=Path, required=True, help=f"folder that holds {LENGTHS}")
    parser.add_argument("--out", type=Path, required=True, help="folder of the answers")
    parser.add_argument("--quick", action="store_true", help="two traces, three systems, one seed of 900 s")
    parser.add_argument("--seeds", type=int, default=CellSettings.seeds)
    parser.add_argument("--duration-s", type=float, default=CellSettings.duration_s)
    parser.add_argument("--rates-only", action="store_true", help="without the servers for LoRAServe's rate")
    parser.add_argument("--ratio", type=float, default=PREFILL_RATIO, help="prefill at rank 128 over rank 8")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--only", nargs="+", choices=TRACES, default=TRACES, help="traces")
    given = parser.parse_args(arguments)
    if not (given.traces / LENGTHS).is_file():
        print(f"skipped: {given.traces} does not hold {LENGTHS}")
        return 0
    systems = ["loraserve", *(s for s in given.systems if s != "loraserve")]
    settings, traces = CellSettings(given.duration_s, given.seeds, given.ratio), given.only
    if given.quick:
        settings = CellSettings(duration_s=900.0, seeds=1, prefill_ratio=given.ratio)
        systems, traces = ["loraserve", "slora-random", "toppings"], ["poisson-uniform", "poisson-shifting"]
    given.out.mkdir(parents=True, exist_ok=True)
    print(tables(Run(given.traces, given.out, settings), traces, systems, given.rates_only))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
