"""Cases simulated once and stored in a folder, by several processes, so that an interrupted run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from benchmarks.papers.chameleon.runs import Case, Numbers, highest, numbers, occupancy, p99_s
from benchmarks.papers.chameleon.setting import A40, SLO_S, SLORA_KNEE_RPS, Platform
from capplan.spec import write_text_atomic

Item = TypeVar("Item")
Found = TypeVar("Found")

BASELINE: Final = "slora"


@dataclass(frozen=True)
class Lab:
    """Folders of traces and results, seeds, and the function that maps over cases."""

    traces: str
    out: Path
    seeds: int
    map: Callable[..., Iterator[Any]]

    def measure(self, cases: Sequence[Case]) -> list[Numbers]:
        """Return what the table reads of each case."""
        return self._each(
            cases, partial(numbers, traces=self.traces), lambda case: f"{case.group}.{case.rps:.4g}rps"
        )

    def occupancy(self, system: str, rps: float) -> list[Numbers]:
        """Return the memory in use and the arithmetic of prompts, per seed."""
        return self._each(
            self.cases(system, rps),
            partial(occupancy, traces=self.traces),
            lambda case: f"{case.group}.{case.rps:.4g}rps.occupancy",
        )

    def knees(self, system: str, mix: str = "up", platform: Platform = A40) -> list[float]:
        """Return the highest load within the SLO per seed."""
        cases = self.cases(system, SLORA_KNEE_RPS, mix, platform)
        return self._each(cases, partial(knee_rps, traces=self.traces), lambda case: f"{case.group}.knee")

    def knee(self, mix: str = "up", platform: Platform = A40) -> float:
        """Return the mean knee of S-LoRA, the unit of loads."""
        found = self.knees(BASELINE, mix, platform)
        return sum(found) / len(found)

    def cases(self, system: str, rps: float, mix: str = "up", platform: Platform = A40) -> list[Case]:
        """Return a case per seed."""
        return [Case(system, rps, seed, mix, platform) for seed in range(self.seeds)]

    def at(self, system: str, rps: float, mix: str = "up", platform: Platform = A40) -> list[Numbers]:
        """Return what the table reads, per seed."""
        return self.measure(self.cases(system, rps, mix, platform))

    def _each(
        self, cases: Sequence[Case], find: Callable[[Case], Found], name: Callable[[Case], str]
    ) -> list[Found]:
        paths = [self.out / f"{name(case)}.json" for case in cases]
        missing = [i for i, path in enumerate(paths) if not path.exists()]
        found = self.map(find, [cases[i] for i in missing])
        for i, result in zip(missing, found, strict=True):
            write_text_atomic(paths[i], json.dumps(result))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def knee_rps(case: Case, traces: str) -> float:
    """Return the highest load within the SLO, from the rate of the case."""
    return highest(lambda rps: p99_s(case.at(rps), traces) <= SLO_S, case.rps)


@contextmanager
def opened(traces: str, out: Path, seeds: int, workers: int) -> Iterator[Lab]:
    """Open a folder of results with so many processes."""
    out.mkdir(parents=True, exist_ok=True)
    if workers == 1:
        yield Lab(traces, out, seeds, map)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield Lab(traces, out, seeds, pool.map)
