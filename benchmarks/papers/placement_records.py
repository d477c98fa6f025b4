"""Solvers of the placement benchmarks, and their results in a folder."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from capplan import Adapter, Assignment, InfeasibleError, InputError, Plan, Problem, Workload, plan
from capplan.datasets.published._runs import LENGTHS, PUBLISHED
from capplan.planner import RequiredEstimator, Solver, SolverContext, SolverResult, compare
from capplan.planner.problem import AdapterShare
from capplan.planner.problem._bound import busy_gpus, lower_bound_gpus
from capplan.planner.problem._setup import make_problem
from capplan.planner.solvers import find_solver, registry
from capplan.planner.solvers._milp import MOST_GPUS, MOST_PARTS
from capplan.spec import Slo, write_text_atomic

MODELS: Final = MappingProxyType({model.key.split("-")[0]: model for model in PUBLISHED})
PROPOSED: Final = replace(
    find_solver("greedy-strict"),
    name="proposed",
    summary="greedy-strict with random forests, as in the adapter-caching paper",
    estimator="forest",
)


def assignments_of(made: Plan) -> tuple[Assignment, ...]:
    """Return the assignments of a plan."""
    placed: Counter[str] = Counter()
    answers = []
    for group in made.groups:
        for _ in range(group.replicas):
            shares = []
            for adapter in group.adapters:
                share, number = adapter.share / group.replicas, placed[adapter.name]
                shares.append(
                    AdapterShare(adapter.name, adapter.rank, adapter.rate_rps * share, share, number)
                )
                placed[adapter.name] += 1
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
        raise InfeasibleError(f"gpus: the plan is not verified ({notes})", reason="gpus")
    return assignments_of(made)


PLAN: Final = Solver(
    name="plan",
    summary=(
        "`plan`: capplan's answer, verified on five seeds and repaired; planned with the next seed, so that "
        "the seeds of the comparison are new to it"
    ),
    source="ours",
    place=_planned,
    required_estimator=RequiredEstimator.TWIN,
    divides=True,
)
ALL: Final = MappingProxyType({**registry(), PROPOSED.name: PROPOSED, PLAN.name: PLAN})


def find_all(names: Iterable[str]) -> list[Solver]:
    """Return solvers by name.

    Raises
    ------
    InputError
        For an unknown name.
    """
    wanted = list(names)
    for name in wanted:
        if name not in ALL:
            raise InputError(f"must be some of {','.join(ALL)}", name, "--solvers")
    return [ALL[name] for name in wanted]


def suits(solver: Solver, adapters: int, gpus: int) -> bool:
    return solver.name != "milp" or (adapters <= MOST_PARTS and gpus <= MOST_GPUS)


def workload_of(model: str, adapters: tuple[Adapter, ...], **fields: Any) -> Workload:
    """Return a workload with the profile, and by default the lengths, of a model's published runs.

    Its criterion is that of their paper: nine tenths of the tokens are served.
    """
    published = MODELS[model]
    prompt, output = LENGTHS[published.key]
    lengths = {"prompt_tokens": prompt, "output_tokens": output}
    return Workload(
        base_model=published.arch.hf_ids[0],
        profile=published.profile,
        adapters=adapters,
        **{**lengths, "slo": Slo(stable=False), **fields},
    )


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

    @property
    def possible(self) -> bool:
        return self.lower_bound_gpus <= self.gpus

    def row(self, solver: str) -> SolverResult | None:
        return next((row for row in self.rows if row.solver == solver), None)

    def fewest_gpus(self, but: str = "") -> int | None:
        """Return the fewest GPUs of a holding result, optionally without one solver."""
        return min((row.gpus for row in self.rows if row.holds and row.solver != but), default=None)

    def with_rows(self, rows: Iterable[SolverResult]) -> Record:
        order = list(ALL)
        found = sorted(
            (*self.rows, *rows), key=lambda row: order.index(row.solver) if row.solver in ALL else len(order)
        )
        return replace(self, rows=tuple(found))


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

    def drop(self, solvers: Iterable[str]) -> int:
        """Remove solvers from all records; return the number of changed records."""
        gone, changed = set(solvers), 0
        for record in self.all():
            kept = tuple(row for row in record.rows if row.solver not in gone)
            if len(kept) < len(record.rows):
                self.put(replace(record, rows=kept))
                changed += 1
        return changed

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
                find_all(missing),
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
