"""Solvers of the placement benchmarks, and their answers in a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from capplan import Assignment, InfeasibleError, InputError, Plan, Problem, plan
from capplan.planner import RequiredEstimator, Solver, SolverContext, SolverResult
from capplan.planner.problem import AdapterShare
from capplan.planner.solvers import REGISTRY, find_solver
from capplan.planner.solvers.milp import MOST_GPUS, MOST_PARTS
from capplan.spec import write_text_atomic

PROPOSED: Final = replace(
    find_solver("greedy-strict"),
    name="proposed",
    summary="greedy to the letter with random forests, which is how the adapter-caching paper ran it",
    estimator="forest",
)


def assignments_of(made: Plan) -> tuple[Assignment, ...]:
    """Return the assignments of a plan."""
    placed: dict[str, int] = {}
    answers = []
    for group in made.groups:
        for _ in range(group.replicas):
            shares = []
            for adapter in group.adapters:
                number, share = placed.get(adapter.name, 0), adapter.share / group.replicas
                shares.append(
                    AdapterShare(adapter.name, adapter.rank, adapter.rate_rps * share, share, number)
                )
                placed[adapter.name] = number + 1
            args = group.engine_args
            answers.append(Assignment(tuple(shares), args.max_loras, args.max_num_seqs))
    return tuple(answers)


def _planned(problem: Problem, context: SolverContext) -> tuple[Assignment, ...]:
    made = plan(
        problem.workload,
        gpus=problem.gpus * problem.profile.tp,
        profile=problem.profile,
        seed=context.seed + 1,
        time_limit_s=context.time_limit_s,
    )
    if not made.verification.ok:
        notes = "; ".join(f"{g.id}: {g.note}" for g in made.verification.groups if not g.ok)
        raise InfeasibleError(f"gpus: the plan says of itself that it does not hold ({notes})", reason="gpus")
    return assignments_of(made)


PLAN: Final = Solver(
    name="plan",
    summary=(
        "what `plan` makes of capplan's answer: verified on five seeds and mended; planned with the next "
        "seed, so that the seeds it is judged on are as new to it as to the others"
    ),
    source="ours",
    place=_planned,
    required_estimator=RequiredEstimator.TWIN,
    divides=True,
)


ALL: Final = MappingProxyType({**REGISTRY, PROPOSED.name: PROPOSED, PLAN.name: PLAN})


def find_all(names: Iterable[str]) -> list[Solver]:
    """Return solvers by name.

    Raises
    ------
    InputError
        For a name that no solver has.
    """
    wanted = list(names)
    for name in wanted:
        if name not in ALL:
            raise InputError(f"must be some of {','.join(ALL)}", name, "--solvers")
    return [ALL[name] for name in wanted]


def suits(solver: Solver, adapters: int, gpus: int) -> bool:
    return solver.name != "milp" or (adapters <= MOST_PARTS and gpus <= MOST_GPUS)


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

    @property
    def possible(self) -> bool:
        return self.lower_bound_gpus <= self.gpus

    def row(self, solver: str) -> SolverResult | None:
        return next((row for row in self.rows if row.solver == solver), None)

    def fewest_gpus(self, but: str = "") -> int | None:
        """Return the fewest GPUs of a holding result, optionally without one solver."""
        return min((row.gpus for row in self.rows if row.holds and row.solver != but), default=None)

    def missing(self, solvers: Iterable[str]) -> list[str]:
        return [name for name in solvers if self.row(name) is None]

    def with_rows(self, rows: Iterable[SolverResult], order: Iterable[str]) -> Record:
        together = {row.solver: row for row in (*self.rows, *rows)}
        position = {name: at for at, name in enumerate(order)}
        ordered = sorted(together.values(), key=lambda row: position.get(row.solver, len(position)))
        return replace(self, rows=tuple(ordered))


@dataclass(frozen=True)
class Store:
    folder: Path

    def get(self, name: str, settings: Mapping[str, Any]) -> Record | None:
        """Return the record of a case, None if there is none yet.

        Raises
        ------
        InputError
            When it was made with other settings.
        """
        path = self._path(name)
        if not path.exists():
            return None
        record = _read(path)
        if record.settings != settings:
            rule = f"must hold cases of the same settings; {path.name} has {dict(record.settings)}"
            raise InputError(rule, location="--out")
        return record

    def put(self, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        document: dict[str, Any] = {
            **{field.name: getattr(record, field.name) for field in fields(Record)},
            "rows": [_without_nan(row) for row in record.rows],
        }
        write_text_atomic(self._path(record.name), json.dumps(document, indent=1, allow_nan=False) + "\n")

    def all(self) -> Iterator[Record]:
        yield from map(_read, sorted(self.folder.glob("*.json"), key=lambda path: _natural(path.stem)))

    def drop(self, solvers: Iterable[str]) -> int:
        """Remove solvers from all records; return the number of changed records."""
        gone, changed = set(solvers), 0
        for record in self.all():
            kept = tuple(row for row in record.rows if row.solver not in gone)
            if len(kept) < len(record.rows):
                self.put(replace(record, rows=kept))
                changed += 1
        return changed

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def _read(path: Path) -> Record:
    document = json.loads(path.read_text(encoding="utf-8"))
    rows = tuple(_with_nan(row) for row in document.pop("rows"))
    return Record(**document, rows=rows)


def _without_nan(row: SolverResult) -> dict[str, Any]:
    return {key: None if value != value else value for key, value in asdict(row).items()}


def _with_nan(document: Mapping[str, Any]) -> SolverResult:
    return SolverResult(**{key: _typed(value) for key, value in document.items()})


def _typed(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return math.nan if value is None else value


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    shares = name.replace("-", ".").split(".")
    return tuple(("", int(part)) if part.isdigit() else (part, 0) for part in shares)
