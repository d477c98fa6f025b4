"""A lab: cases simulated once, on all cores, and kept in a folder, so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from capplan._jit import cache_dir
from capplan.errors import InputError
from capplan.reproduce._recipe import Recipe, vary
from capplan.reproduce._results import Findings
from capplan.spec import write_text_atomic
from capplan.twin import in_parallel

Answer = TypeVar("Answer")
Item = TypeVar("Item")


@dataclass(frozen=True)
class Lab:
    """What experiments run with."""

    recipe: Recipe
    folder: Path
    """Kept results of cases."""
    seeds: tuple[int, ...]
    quick: bool = False
    traces: Path | None = None
    measured: Path | None = None
    """Published measurements."""
    workers: int | None = None
    ray_address: str | None = None
    progress: Callable[[int, int], None] | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of the setting that differ from the recipe's."""

    def each(self, simulate: Callable[[Item], Answer], cases: Sequence[Item]) -> list[Answer]:
        """Return ``simulate(case)`` of every case, in order; what is kept is not simulated again.

        `simulate` is a function of a module, whose results are JSON values. Cases are frozen dataclasses,
        whose ``repr`` says all that a result depends on beside the recipe's setting.
        """
        paths = [self.folder / f"{simulate.__name__}-{self._digest(case)}.json" for case in cases]
        first = {path: number for number, path in reversed(list(enumerate(paths))) if not path.exists()}
        missing = sorted(first.values())
        found = in_parallel(
            partial(_named, simulate, self.recipe.paper, self.numbers),
            [cases[number] for number in missing],
            workers=self.workers,
            ray_address=self.ray_address,
            progress=self.progress,
            chunk=1,
        )
        with closing(found):
            for number, result in zip(missing, found, strict=True):
                write_text_atomic(paths[number], json.dumps({"case": repr(cases[number]), "result": result}))
        return [json.loads(path.read_text(encoding="utf-8"))["result"] for path in paths]

    def by_seed(self, simulate: Callable[[Any], Answer], cases: Sequence[Any]) -> list[list[Answer]]:
        """Return ``simulate(case)`` of every case with each seed: by case, in the order of the seeds."""
        found = iter(self.each(simulate, [replace(case, seed=seed) for case in cases for seed in self.seeds]))
        return [[next(found) for _ in self.seeds] for _ in cases]

    def trace(self, name: str) -> str:
        """Return the path of a public trace."""
        if self.traces is None or not (self.traces / name).is_file():
            raise InputError(f"must be a folder that holds {name}", self.traces, "--traces")
        return str(self.traces / name)

    def measurements(self) -> Path:
        """Return the folder of published measurements."""
        if self.measured is None:
            raise InputError("must be a folder of published measurements", location="--measured")
        return self.measured

    def _digest(self, case: Any) -> str:
        """Return a name for what a result depends on: the setting, the rules and the case."""
        setting = json.dumps([self.recipe.setting, self.recipe.systems], sort_keys=True, default=str)
        return hashlib.sha256(f"{cache_dir().name}{setting}{case!r}".encode()).hexdigest()[:24]


Experiment: TypeAlias = Callable[[Lab], Findings]
"""Simulates a figure: the values of every row of its recipe, and its curves."""


def _named(simulate: Callable[[Item], Answer], paper: str, numbers: Mapping[str, Any], case: Item) -> Answer:
    vary(paper, numbers)
    try:
        return simulate(case)
    except Exception as error:
        error.add_note(f"in {case!r}")
        raise


SMALLEST_RPS: Final = 1e-3


def highest(
    holds: Callable[[float], bool], start: float, step: float = 1.25, precision: float = 0.01
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
