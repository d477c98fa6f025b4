"""Highest loads and fewest servers of the systems, stored in a folder so that an interrupted run goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.papers.loraserve.hardware import hardware
from benchmarks.papers.loraserve.load import (
    BOUND_S,
    Load,
    grown,
    load_at,
    production_workload,
    trace_workload,
)
from benchmarks.papers.loraserve.systems import DRAWS, LORASERVE, RANDOM, SEARCH_S, STEP_S, Scene
from capplan import Workload
from capplan.spec import write_text_atomic

SERVERS: Final = 4
PRODUCTION: Final = "production-"
SMALLEST_RPS: Final = 0.1
PRECISION: Final = 0.01
_FAR: Final = 1.2
"""First step of a search that starts from the operating points."""
_NEAR: Final = 1.04
"""First step of a search that starts from the rate of another seed."""


@dataclass(frozen=True)
class Lab:
    """Folders of traces and results, hardware and settings."""

    traces: Path
    out: Path
    hardware: str
    duration_s: float = 900.0
    seeds: int = 5
    step_s: float = STEP_S
    search_s: float = SEARCH_S
    servers: int = SERVERS
    """Of the part equal-load."""
    first_seed: int = 0
    precision: float = PRECISION
    """Relative precision of highest rates."""

    def scene(self, name: str, servers: int = SERVERS) -> Scene:
        """Return a trace of the paper, or a stand-in of the production trace, on so many servers.

        Adapters and traffic of a trace grow with the servers beyond four.
        """
        if name.startswith(PRODUCTION):
            workload = production_workload(int(name.removeprefix(PRODUCTION)), self.traces)
        else:
            workload = grown(trace_workload(name, self.traces), max(1, servers // SERVERS))
        return self._on(name, workload, servers)

    def shared(self, scene: Scene, servers: int) -> Scene:
        """Return the same workload on another number of servers."""
        return self._on(f"{scene.name}.{len(scene.workload.adapters)}", scene.workload, servers)

    def load(self, scene: Scene, rps: float, seed: int) -> Load:
        """Return the requests of a seed."""
        return load_at(scene.workload, scene.profile, rps, self.duration_s, seed)

    def runs(self, system: str) -> Iterator[tuple[int, int]]:
        """Return seeds and numbers of random placements."""
        for seed in range(self.first_seed, self.first_seed + self.seeds):
            for draw in range(DRAWS if system == RANDOM else 1):
                yield seed, draw

    def highest_rps(self, scene: Scene, system: str) -> list[float]:
        """Return the highest sustained rate per seed and random placement."""

        def find() -> list[float]:
            found: list[float] = []
            for seed, draw in self.runs(system):

                def holds(rps: float, seed: int = seed, draw: int = draw) -> bool:
                    return scene.p95_s(system, self.load(scene, rps, seed), draw) <= BOUND_S

                near = [rps for rps in found if rps]
                start, step = (fmean(near), _NEAR) if near else (scene.sustained_rps(), _FAR)
                found.append(highest(holds, start, step, self.precision))
            return found

        return self.cell(f"{scene.name}.{scene.servers}.{system}", find)

    def p95_s(self, scene: Scene, system: str, rps: float) -> list[float]:
        """Return the P95 TTFT at a rate per seed and random placement."""

        def find() -> list[float]:
            return [
                scene.p95_s(system, self.load(scene, rps, seed), draw) for seed, draw in self.runs(system)
            ]

        return self.cell(f"{scene.name}.{scene.servers}.{system}.{rps:.4g}rps", find)

    def servers_for(self, scene: Scene, system: str, rps: float, most: int) -> int | None:
        """Return the fewest servers that keep the bound in most runs; None: over `most`.

        The search starts at the number that the system's own rate on the servers of the scene suggests.
        """

        def find() -> int | None:
            sustained = fmean(self.highest_rps(scene, system)) / scene.servers
            servers = min(most, max(1, math.floor(rps / sustained))) if sustained else most
            while servers > 1 and self._keep(scene, system, rps, servers):
                servers -= 1
            while servers <= most and not self._keep(scene, system, rps, servers):
                servers += 1
            return servers if servers <= most else None

        return self.cell(f"{scene.name}.{scene.servers}.{system}.servers-for-{rps:.4g}rps", find)

    def loraserve_rps(self, scene: Scene) -> float:
        """Return the lowest of the seeds' highest rates of LoRAServe."""
        return min(self.highest_rps(scene, LORASERVE))

    def cell(self, name: str, find: Callable[[], Any]) -> Any:
        """Return the stored result for these settings, or compute and store it."""
        path = self._folder / f"{name}.json"
        names = ("duration_s", "seeds", "first_seed", "step_s", "precision")
        settings = {name: getattr(self, name) for name in names}
        if path.exists():
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["settings"] == settings:
                return known["found"]
        found = find()
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, json.dumps({"settings": settings, "found": found}))
        return found

    @property
    def _folder(self) -> Path:
        return self.out / self.hardware.replace("/", "-")

    def _on(self, name: str, workload: Workload, servers: int) -> Scene:
        cache = self._folder / "placements"
        profile = hardware(self.hardware)
        return Scene(name, workload, profile, servers, cache, self.step_s, self.search_s)

    def _keep(self, scene: Scene, system: str, rps: float, servers: int) -> bool:
        there = self.shared(scene, servers)
        runs = list(self.runs(system))
        needed, kept, left = math.floor(len(runs) / 2) + 1, 0, len(runs)
        for seed, draw in runs:
            kept += there.p95_s(system, self.load(there, rps, seed), draw) <= BOUND_S
            left -= 1
            if kept >= needed or kept + left < needed:
                break
        return kept >= needed


def highest(
    holds: Callable[[float], bool], start: float, step: float = 2.0, precision: float = PRECISION
) -> float:
    """Return a rate that holds and is within the precision of one that does not; 0 if none holds.

    The bracket starts at `start` and widens by `step`, then its square, at most by 2.
    """
    low = high = start
    if holds(low):
        while holds(high := high * step):
            low, step = high, min(2.0, step**2)
    else:
        while not holds(low := low / step):
            high, step = low, min(2.0, step**2)
            if low < SMALLEST_RPS:
                return 0.0
    while high / low > 1.0 + precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def mean_and_range(values: Sequence[float], digits: int = 1) -> str:
    """Return mean and range, in words."""
    spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(set(values)) > 1 else ""
    return f"{fmean(values):.{digits}f}{spread}"
