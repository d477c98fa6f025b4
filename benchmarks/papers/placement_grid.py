"""Section 8.4 of the adapter-caching paper, every solver:

    python -m benchmarks.papers.placement_grid run --out DIR

DIR has a JSON file per cell; an interrupted run is resumed. Cells beyond the lower bound are not tried. Each
solver's answer is verified by the twin (`compare`) on fresh seeds of one hour each.

``summary --out DIR`` prints the tables. ``drop --out DIR --solvers NAMES`` removes the results of solvers.
"""

from __future__ import annotations

import fnmatch
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Final

import numpy as np

from benchmarks.common import command_line, emit, numbered_adapters, records_table, user_errors
from benchmarks.papers.placement_records import (
    ALL,
    MODELS,
    Record,
    Settings,
    Store,
    find_all,
    suits,
    workload_of,
)
from capplan import EngineConfig, InputError, Workload
from capplan.datasets.published._runs import MAX_NUM_SEQS, TOKEN_BUDGET
from capplan.planner import SolverResult
from capplan.twin._sweep import in_parallel

RATES_RPS: Final = MappingProxyType(
    {
        "high": (2.4, 1.2, 0.6, 0.3, 0.15),
        "low": (0.075, 0.0375, 0.01875, 0.009375, 0.0046875),
        "mixed": (0.6, 0.3, 0.15, 0.075, 0.0375),
    }
)
SIZES: Final = MappingProxyType({"high": (32,), "low": (8,), "mixed": (8, 16, 32)})
ADAPTERS: Final = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1152, 1280)
GPUS: Final = (1, 4)
CI: Final = (
    "llama.1gpu.mixed-rates.mixed-sizes.160",
    "llama.4gpu.low-rates.mixed-sizes.1280",
    "qwen.1gpu.low-rates.high-sizes.384",
    "qwen.4gpu.high-rates.low-sizes.96",
)
OURS: Final = ("capplan", "plan")
DASH: Final = "-"


@dataclass(frozen=True)
class Cell:
    model: str
    gpus: int
    rates: str
    sizes: str
    adapters: int

    @property
    def curve(self) -> str:
        """Name without the number of adapters."""
        return f"{self.model}.{self.gpus}gpu.{self.rates}-rates.{self.sizes}-sizes"

    @property
    def name(self) -> str:
        return f"{self.curve}.{self.adapters}"


@dataclass(frozen=True)
class GridSettings(Settings):
    headroom: float = 0.0
    """0 in the paper."""
    max_num_seqs: int | None = MAX_NUM_SEQS
    """As on the paper's servers; None: chosen by the planner."""


def cells(counts: Sequence[int] = ADAPTERS) -> Iterator[Cell]:
    for model, gpus, rates, sizes in itertools.product(MODELS, GPUS, RATES_RPS, SIZES):
        for count in counts:
            yield Cell(model, gpus, rates, sizes, count)


def chosen(pattern: str, counts: Sequence[int] = ADAPTERS) -> list[Cell]:
    """Return the cells whose names match a pattern, or one of several between commas; ``ci``: the subset.

    Raises
    ------
    InputError
        When there is none.
    """
    patterns = CI if pattern == "ci" else pattern.split(",")
    found = [cell for cell in cells(counts) if any(fnmatch.fnmatchcase(cell.name, each) for each in patterns)]
    if not found:
        rule = f"must match names of cells, such as {next(cells()).name}"
        raise InputError(rule, pattern, "--cells")
    return found


def workload(cell: Cell, settings: GridSettings) -> Workload:
    """Return the workload of a cell, with the lengths of its model's published runs."""
    rates, sizes = RATES_RPS[cell.rates], SIZES[cell.sizes]
    sets = (list(RATES_RPS).index(cell.rates), list(SIZES).index(cell.sizes))
    random = np.random.default_rng((settings.draw, *sets))
    most = max(ADAPTERS[-1], cell.adapters)
    rate_rps, rank = random.choice(rates, most), random.choice(sizes, most)
    return workload_of(
        cell.model,
        numbered_adapters(rank[: cell.adapters], rate_rps[: cell.adapters]),
        headroom=settings.headroom,
        engine=EngineConfig(max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=TOKEN_BUDGET),
    )


def report(records: Sequence[Record]) -> str:
    tried = [record for record in records if record.rows]
    possible = [record for record in records if record.possible]
    solvable = [record for record in tried if record.fewest_gpus() is not None]
    names = solvers_of(tried)
    parts = [
        f"{len(records)} cells: {len(records) - len(possible)} need more GPUs than there are by the lower "
        f"bound; of the other {len(possible)}, {len(tried)} were tried, and a solver holds {len(solvable)} "
        "of these on every seed.",
        "## Solvers",
        records_table(_total(tried, name) for name in names),
    ]
    for name in OURS:
        parts += [f"## Where `{name}` does worse than another", _worse(tried, name), _bound(tried, name)]
    groups = groupby(records, key=lambda record: record.name.rpartition(".")[0])
    curves = [(curve, list(members)) for curve, members in groups]
    parts += [
        "## The most adapters that a solver holds",
        "All cells of the curve up to this number of adapters are held; in brackets GPUs there.",
        records_table(
            {"curve": curve, **{name: _reach(group, name) for name in names}} for curve, group in curves
        ),
        "## Cells",
        "GPUs; otherwise s: instances that starve, m: do not start, l: are late; -: no answer.",
        records_table(
            {
                "cell": record.name,
                "busy": f"{record.busy_gpus:.2f}",
                "at least": record.lower_bound_gpus,
                **{name: _entry(row) if (row := record.row(name)) else "" for name in names},
            }
            for record in tried
        ),
    ]
    return "\n\n".join(parts) + "\n"


def solvers_of(records: Iterable[Record]) -> list[str]:
    found = {row.solver for record in records for row in record.rows}
    return [name for name in (*ALL, *sorted(found - ALL.keys())) if name in found]


def _total(records: Sequence[Record], name: str) -> dict[str, object]:
    tried = [(record, row) for record in records if (row := record.row(name)) is not None]
    answers = [row for _, row in tried if row.answered]
    over = [row.gpus / fewest for record, row in tried if row.holds and (fewest := record.fewest_gpus())]
    solvable = sum(record.fewest_gpus() is not None for record, _ in tried)
    times = [row.solve_s for row in answers]
    return {
        "solver": name,
        "cells": len(tried),
        "answers": len(answers),
        "holds": len(over),
        "of those that someone holds": f"{len(over) / solvable:.1%}" if solvable else DASH,
        "starves": sum(row.starved > 0 for row in answers),
        "memory errors": sum(row.memory_errors > 0 for row in answers),
        "GPUs over the fewest": f"{fmean(over):.3f}" if over else DASH,
        "worst": f"{max(over):g}" if over else DASH,
        "median solve s": f"{median(times):.3g}" if times else DASH,
        "longest": f"{max(times):.3g}" if times else DASH,
    }


def worse(records: Iterable[Record], name: str) -> list[dict[str, object]]:
    """Return cells where another solver holds and this one does not or needs more GPUs."""
    lines: list[dict[str, object]] = []
    for record in records:
        row, fewest = record.row(name), record.fewest_gpus(but=name)
        if row is None or fewest is None or (row.holds and row.gpus <= fewest):
            continue
        others = [r.solver for r in record.rows if r.holds and r.solver != name and r.gpus == fewest]
        line = {
            "cell": record.name,
            "at least": record.lower_bound_gpus,
            "solver": name,
            "it says": _said(row),
        }
        lines.append(line | {"fewest GPUs of others": fewest, "by": ", ".join(others)})
    return lines


def _worse(records: Sequence[Record], name: str) -> str:
    lines = worse(records, name)
    rows = [row for record in records if (row := record.row(name)) is not None]
    fails = sum(row.answered and not row.holds for row in rows)
    head = f"{len(lines)} of {len(rows)} cells; {fails} of its answers do not hold on every seed."
    return "\n\n".join([head, records_table(lines)] if lines else [head])


def _said(row: SolverResult) -> str:
    if not row.answered:
        return row.failure.replace("|", "/")
    return (
        f"{row.gpus} GPUs"
        if row.holds
        else f"{row.gpus} GPUs, served {row.served_fraction:.3f}: {_entry(row)}"
    )


def _bound(records: Sequence[Record], name: str) -> str:
    """Return GPUs over the lower bound, and cells below it."""
    rows = [(record, row) for record in records for row in record.rows if row.holds]
    own = [row.gpus / record.lower_bound_gpus for record, row in rows if row.solver == name]
    beaten = sorted({record.name for record, row in rows if row.gpus < record.lower_bound_gpus})
    parts = [f"Held on fewer GPUs than the lower bound by someone: {', '.join(beaten) or 'no cell'}."]
    if own:
        ratios = f"GPUs over the lower bound where it holds: mean {fmean(own):.3f}, median {median(own):g}"
        parts.insert(0, f"{ratios}, worst {max(own):g}.")
    return " ".join(parts)


def _reach(records: Sequence[Record], name: str) -> str:
    """Return the reach of a solver on a curve (figure 11 of the paper)."""
    last = DASH
    for record in sorted(records, key=lambda record: record.case["adapters"]):
        row = record.row(name)
        if row is None or not row.holds:
            break
        last = f"{record.case['adapters']} ({row.gpus})"
    return last


def _entry(row: SolverResult) -> str:
    if not row.answered:
        return DASH
    marks = (("s", row.starved), ("m", row.memory_errors), ("l", row.late))
    failing = " ".join(f"{count}{mark}" for mark, count in marks if count)
    return f"{row.gpus}: {failing}" if failing else f"{row.gpus}"


@dataclass(frozen=True)
class Run:
    store: Store
    settings: GridSettings
    solvers: tuple[str, ...]


def run_cell(run: Run, cell: Cell) -> tuple[Record, float]:
    """Run the missing solvers; return the record and the seconds."""
    started = time.perf_counter()
    work = workload(cell, run.settings)
    record = run.store.start(cell.name, asdict(cell), work, cell.gpus, run.settings)
    wanted = [name for name in run.solvers if suits(ALL[name], cell.adapters, cell.gpus)]
    record = run.store.complete(record, work, wanted if record.possible else [], run.settings)
    return record, time.perf_counter() - started


def run_cells(run: Run, cells: Sequence[Cell], workers: int = 1, quiet: bool = False) -> list[Record]:
    records = []
    for record, wall_s in in_parallel(partial(run_cell, run), cells, workers=workers):
        records.append(record)
        if not quiet:
            print(f"{len(records):4}/{len(cells)} {wall_s:6.1f} s  {in_a_line(record)}", flush=True)
    return records


def in_a_line(record: Record) -> str:
    if not record.possible:
        return f"{record.name}: at least {record.lower_bound_gpus} GPUs"
    holding = [f"{row.solver} {row.gpus}" for row in record.rows if row.holds]
    return f"{record.name} (>= {record.lower_bound_gpus}): {', '.join(holding) or 'none'}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("action", nargs="?", choices=("run", "summary", "drop"), default="run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--cells", default="*", metavar="PATTERN", help="names, with * and ?; ci: the subset")
    parser.add_argument("--counts", default=",".join(map(str, ADAPTERS)), metavar="N,...", help="adapters")
    parser.add_argument("--solvers", default=",".join(ALL), metavar="NAME,...")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="cells at a time")
    parser.add_argument("--headroom", type=float, default=GridSettings.headroom, metavar="SHARE")
    parser.add_argument("--draw", type=int, default=GridSettings.draw, metavar="N", help="of rates and sizes")
    parser.add_argument("--max-num-seqs", type=int, default=MAX_NUM_SEQS, help="0: left to the planner")
    parser.add_argument("--seed", type=int, default=GridSettings.seed, metavar="N", help="planning seed")
    parser.add_argument("--seeds", type=int, default=GridSettings.seeds, help="verification seeds")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="of the summary")
    given = parser.parse_args(arguments)
    store = Store(given.out)
    with user_errors():
        solvers = tuple(solver.name for solver in find_all(given.solvers.split(",")))
        if given.action == "summary":
            emit(report(list(store.all())), given.markdown)
        elif given.action == "drop":
            print(f"{store.drop(solvers)} cells have no answer of {', '.join(solvers)} any more")
        else:
            settings = GridSettings(
                draw=given.draw,
                seed=given.seed,
                seeds=given.seeds,
                headroom=given.headroom,
                max_num_seqs=given.max_num_seqs or None,
            )
            counts = [int(count) for count in given.counts.split(",")]
            run_cells(Run(store, settings, solvers), chosen(given.cells, counts), given.workers)


if __name__ == "__main__":
    main()
