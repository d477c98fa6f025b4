"""Results of solvers on random placement problems, in a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from capplan import Adapter, EngineConfig, InputError, Workload
from capplan.planner import SolverResult, compare
from capplan.planner.problem._bound import busy_gpus, lower_bound_gpus
from capplan.planner.problem._setup import make_problem
from capplan.planner.solvers import registry
from capplan.reproduce.twin._placement import paper_workload
from capplan.spec import write_text_atomic


def workload_of(model: str, adapters: tuple[Adapter, ...], **fields: Any) -> Workload:
    """Return a workload with the profile, and by default the lengths, of a model's published runs."""
    return paper_workload(model, adapters, **{"engine": EngineConfig(), **fields})


def busy_gpus_of(workload: Workload) -> float:
    """Return the GPUs that the tokens of a workload keep busy."""
    return busy_gpus(make_problem(workload, 1, None))


@dataclass(frozen=True)
class Settings:
    """Settings of all cases of a folder."""

    draw: int = 0
    """Number of the random draw of the cases."""
    seed: int = 0
    """Planning seed."""
    seeds: int = 5
    """Verification seeds."""
    time_limit_s: float = 60.0


@dataclass(frozen=True)
class Record:
    """Case and results of solvers."""

    name: str
    case: Mapping[str, Any]
    settings: Mapping[str, Any]
    """Settings that later runs must share."""
    gpus: int
    """Available GPUs."""
    busy_gpus: float
    lower_bound_gpus: int
    """Exceeds `gpus` if no plan exists."""
    rows: tuple[SolverResult, ...] = ()

    def row(self, solver: str) -> SolverResult | None:
        return next((row for row in self.rows if row.solver == solver), None)

    def with_rows(self, rows: Iterable[SolverResult]) -> Record:
        order = list(registry())
        return replace(self, rows=tuple(sorted((*self.rows, *rows), key=lambda row: order.index(row.solver))))


@dataclass(frozen=True)
class Store:
    """Folder of records, one JSON file per case."""

    folder: Path

    def get(self, name: str, settings: Mapping[str, Any]) -> Record | None:
        """Return the record of a case, None if missing.

        Raises
        ------
        InputError
            If it was made with other settings.
        """
        path = self.folder / f"{name}.json"
        if not path.exists():
            return None
        record = _read(path)
        if record.settings != settings:
            rule = f"must hold cases of the same settings; {path.name} has {dict(record.settings)}"
            raise InputError(rule, location="--out")
        return record

    def put(self, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        document = asdict(record)
        for row in document["rows"]:  # JSON has no NaN
            row |= {key: None for key, value in row.items() if value != value}
        write_text_atomic(
            self.folder / f"{record.name}.json", json.dumps(document, indent=1, allow_nan=False) + "\n"
        )

    def all(self) -> Iterator[Record]:
        yield from map(_read, sorted(self.folder.glob("*.json"), key=lambda path: _natural(path.stem)))

    def start(
        self, name: str, case: Mapping[str, Any], workload: Workload, gpus: int, settings: Settings
    ) -> Record:
        """Return the record of a case, a new one if missing."""
        known = self.get(name, asdict(settings))
        if known is not None:
            return known
        problem = make_problem(workload, gpus, None)
        return Record(name, case, asdict(settings), gpus, busy_gpus(problem), lower_bound_gpus(problem))

    def complete(
        self, record: Record, workload: Workload, solvers: Iterable[str], settings: Settings
    ) -> Record:
        """Run the solvers missing in a record, and store it."""
        missing = [solver for solver in solvers if record.row(solver) is None]
        if missing:
            made = compare(
                workload,
                missing,
                gpus=record.gpus,
                seed=settings.seed,
                seeds=settings.seeds,
                time_limit_s=settings.time_limit_s,
            )
            record = record.with_rows(made.rows)
        self.put(record)
        return record


def _read(path: Path) -> Record:
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = tuple(
        SolverResult(**{key: _typed(value) for key, value in row.items()}) for row in document.pop("rows")
    )
    return Record(**document, rows=rows)


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return math.nan if value is None else value


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    shares = name.replace("-", ".").split(".")
    return tuple(("", int(part)) if part.isdigit() else (part, 0) for part in shares)
