"""Section 8.4 of the adapter-caching paper, every solver: ``python -m benchmarks.placement_grid --out DIR``.

A JSON per cell stands in DIR; a run that was broken off goes on where it stopped, and cells of which the
lower bound says that they cannot be served are not tried. `compare` has every solver answer, and the twin
judge the answers on fresh seeds of one hour each.

``summary --out DIR`` prints the tables. ``drop --out DIR --solvers NAMES`` forgets solvers, which the next
run then asks anew.
"""

from __future__ import annotations

import fnmatch
import itertools
import sys
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

from benchmarks.common import command_line, emit, markdown
from benchmarks.placement_records import ALL, Record, Store, find_all, suits
from capplan import Adapter, EngineConfig, InputError, Workload
from capplan.datasets.published.runs import LENGTHS, MAX_NUM_SEQS, PUBLISHED, TOKEN_BUDGET, PublishedModel
from capplan.errors import CapplanError
from capplan.planner import SolverResult, compare
from capplan.planner.bound import busy_gpus, lower_bound_gpus
from capplan.planner.problem import make_problem
from capplan.twin.sweep import in_parallel

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
MODELS: Final = MappingProxyType({model.key.split("-")[0]: model for model in PUBLISHED})
CI: Final = (
    "llama.1gpu.mixed-rates.mixed-sizes.160",
    "llama.4gpu.low-rates.mixed-sizes.1280",
    "qwen.1gpu.low-rates.high-sizes.384",
    "qwen.4gpu.high-rates.low-sizes.96",
)
OURS: Final = ("capplan", "plan")
DASH: Final = "-"
TOTALS: Final = (
    "solver", "cells", "answers", "holds", "of those that someone holds", "starves", "memory errors",
    "GPUs over the fewest", "worst", "median solve s", "longest",
)  # fmt: skip
WORSE: Final = ("cell", "at least", "solver", "it says", "fewest GPUs of others", "by")


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

    @property
    def published(self) -> PublishedModel:
        return MODELS[self.model]


@dataclass(frozen=True)
class Settings:
    headroom: float = 0.0
    """The paper has none."""
    draw: int = 0
    """Draw of rates and sizes."""
    max_num_seqs: int | None = MAX_NUM_SEQS
    """As on the paper's servers; None: chosen by the planner."""
    seed: int = 0
    seeds: int = 5
    time_limit_s: float = 60.0


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


def workload(cell: Cell, settings: Settings) -> Workload:
    """Return the workload of a cell, with the lengths of its model's published runs."""
    rates, sizes = RATES_RPS[cell.rates], SIZES[cell.sizes]
    sets = (list(RATES_RPS).index(cell.rates), list(SIZES).index(cell.sizes))
    random = np.random.default_rng((settings.draw, *sets))
    most = max(ADAPTERS[-1], cell.adapters)
    rate_rps, rank = random.choice(rates, most), random.choice(sizes, most)
    prompt, output = LENGTHS[cell.published.key]
    return Workload(
        base_model=cell.published.arch.hf_ids[0],
        profile=cell.published.profile,
        prompt_tokens=prompt,
        output_tokens=output,
        headroom=settings.headroom,
        engine=EngineConfig(max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=TOKEN_BUDGET),
        adapters=tuple(
            Adapter(name=f"a{i}", rank=int(rank[i]), rate_rps=float(rate_rps[i]))
            for i in range(cell.adapters)
        ),
    )


def report(records: Sequence[Record]) -> str:
    tried = [record for record in records if record.rows]
    possible = [record for record in records if record.possible]
    solvable = [record for record in tried if record.fewest_gpus() is not None]
    parts = [
        f"{len(records)} cells: {len(records) - len(possible)} need more GPUs than there are by the lower "
        f"bound; of the other {len(possible)}, {len(tried)} were tried, and someone holds {len(solvable)} of "
        "these on every seed.",
        "## Solvers",
        markdown(TOTALS, totals(tried)),
    ]
    for name in OURS:
        parts += [f"## Where `{name}` does worse than another", _worse(tried, name), _bound(tried, name)]
    parts += [
        "## The most adapters that a solver holds",
        "Up to so many adapters, every cell of the curve is held; in brackets GPUs there.",
        markdown(*curves(records)),
        "## Cells",
        "GPUs; otherwise s: that many instances starve, m: do not start, l: are late; -: no answer.",
        markdown(*by_cell(tried)),
    ]
    return "\n\n".join(parts) + "\n"


def solvers_of(records: Iterable[Record]) -> list[str]:
    found = {row.solver for record in records for row in record.rows}
    return [name for name in (*ALL, *sorted(found - ALL.keys())) if name in found]


def totals(records: Sequence[Record]) -> list[tuple[str, ...]]:
    return [_total(records, name) for name in solvers_of(records)]


def _total(records: Sequence[Record], name: str) -> tuple[str, ...]:
    asked = [(record, row) for record in records if (row := record.row(name)) is not None]
    answers = [row for _, row in asked if row.answered]
    over = [row.gpus / fewest for record, row in asked if row.holds and (fewest := record.fewest_gpus())]
    solvable = sum(record.fewest_gpus() is not None for record, _ in asked)
    times = [row.solve_s for row in answers]
    return (
        name,
        f"{len(asked)}",
        f"{len(answers)}",
        f"{len(over)}",
        f"{len(over) / solvable:.1%}" if solvable else DASH,
        f"{sum(row.starved > 0 for row in answers)}",
        f"{sum(row.memory_errors > 0 for row in answers)}",
        f"{fmean(over):.3f}" if over else DASH,
        f"{max(over):g}" if over else DASH,
        f"{median(times):.3g}" if times else DASH,
        f"{max(times):.3g}" if times else DASH,
    )


def worse(records: Iterable[Record], name: str) -> list[tuple[str, ...]]:
    """Return cells where another solver holds and this one does not or needs more GPUs."""
    lines: list[tuple[str, ...]] = []
    for record in records:
        row, fewest = record.row(name), record.fewest_gpus(but=name)
        if row is None or fewest is None or (row.holds and row.gpus <= fewest):
            continue
        others = [r.solver for r in record.rows if r.holds and r.solver != name and r.gpus == fewest]
        said = f"{row.gpus} GPUs" if row.holds else _said(row)
        lines.append((record.name, f"{record.lower_bound_gpus}", name, said, f"{fewest}", ", ".join(others)))
    return lines


def _worse(records: Sequence[Record], name: str) -> str:
    lines = worse(records, name)
    asked = [record for record in records if record.row(name) is not None]
    fails = [r for r in asked if (row := r.row(name)) is not None and row.answered and not row.holds]
    head = f"{len(lines)} of {len(asked)} cells; {len(fails)} of its answers do not hold on every seed."
    return "\n\n".join([head, markdown(WORSE, lines)] if lines else [head])


def _said(row: SolverResult) -> str:
    if not row.answered:
        return row.failure.replace("|", "/")
    return f"{row.gpus} GPUs, served {row.served_fraction:.3f}: {_entry(row)}"


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


def curves(records: Sequence[Record]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the reach of each solver on each curve (figure 11 of the paper)."""
    names = solvers_of(records)
    lines = [
        (curve, *(_reach(list(group), name) for name in names))
        for curve, members in groupby(records, key=lambda record: record.name.rpartition(".")[0])
        for group in [list(members)]
    ]
    return ("curve", *names), lines


def _reach(records: Sequence[Record], name: str) -> str:
    last = None
    for record in sorted(records, key=lambda record: record.case["adapters"]):
        row = record.row(name)
        if row is None or not row.holds:
            break
        last = f"{record.case['adapters']} ({row.gpus})"
    return last or DASH


def by_cell(records: Sequence[Record]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    names = solvers_of(records)
    lines = [
        (
            record.name,
            f"{record.busy_gpus:.2f}",
            f"{record.lower_bound_gpus}",
            *("" if (row := record.row(name)) is None else _entry(row) for name in names),
        )
        for record in records
    ]
    return ("cell", "busy", "at least", *names), lines


def _entry(row: SolverResult) -> str:
    if not row.answered:
        return DASH
    marks = (("s", row.starved), ("m", row.memory_errors), ("l", row.late))
    failing = " ".join(f"{count}{mark}" for mark, count in marks if count)
    return f"{row.gpus}: {failing}" if failing else f"{row.gpus}"


@dataclass(frozen=True)
class Run:
    store: Store
    settings: Settings
    solvers: tuple[str, ...]

    def record(self, cell: Cell) -> Record:
        known = self.store.get(cell.name, asdict(self.settings))
        if known is not None:
            return known
        problem = make_problem(workload(cell, self.settings), cell.gpus, None)
        return Record(
            name=cell.name,
            case=asdict(cell),
            settings=asdict(self.settings),
            gpus=cell.gpus,
            busy_gpus=busy_gpus(problem),
            lower_bound_gpus=lower_bound_gpus(problem),
        )


def run_cell(run: Run, cell: Cell) -> tuple[Record, float]:
    """Run the missing solvers; return the record and the seconds."""
    started = time.perf_counter()
    record = run.record(cell)
    wanted = [name for name in run.solvers if suits(ALL[name], cell.adapters, cell.gpus)]
    missing = record.missing(wanted) if record.possible else []
    if missing:
        made = compare(
            workload(cell, run.settings),
            find_all(missing),
            gpus=cell.gpus,
            seed=run.settings.seed,
            seeds=run.settings.seeds,
            time_limit_s=run.settings.time_limit_s,
        )
        record = record.with_rows(made.rows, ALL)
    run.store.put(record)
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
    return f"{record.name} (>= {record.lower_bound_gpus}): {', '.join(holding) or 'nobody'}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("action", nargs="?", choices=("run", "summary", "drop"), default="run")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--cells", default="*", metavar="PATTERN", help="names, with * and ?; ci: the subset")
    parser.add_argument("--counts", default=",".join(map(str, ADAPTERS)), metavar="N,...", help="adapters")
    parser.add_argument("--solvers", default=",".join(ALL), metavar="NAME,...")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="cells at a time")
    parser.add_argument("--headroom", type=float, default=Settings.headroom, metavar="SHARE")
    parser.add_argument("--draw", type=int, default=Settings.draw, metavar="N", help="of rates and sizes")
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=Settings.max_num_seqs,
        metavar="N",
        help="of every server; 0: left to the planner",
    )
    parser.add_argument("--seed", type=int, default=Settings.seed, metavar="N", help="of planning")
    parser.add_argument("--seeds", type=int, default=Settings.seeds, metavar="N", help="of judging")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="of the summary")
    given = parser.parse_args(arguments)
    store = Store(given.out)
    try:
        solvers = tuple(solver.name for solver in find_all(given.solvers.split(",")))
        if given.action == "summary":
            text = report(list(store.all()))
            emit(text, given.markdown)
        elif given.action == "drop":
            print(f"{store.drop(solvers)} cells have no answer of {', '.join(solvers)} any more")
        else:
            settings = Settings(
                headroom=given.headroom,
                draw=given.draw,
                max_num_seqs=given.max_num_seqs or None,
                seed=given.seed,
                seeds=given.seeds,
            )
            counts = [int(count) for count in given.counts.split(",")]
            run_cells(Run(store, settings, solvers), chosen(given.cells, counts), given.workers)
    except CapplanError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
