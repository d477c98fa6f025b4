"""Section 8.4 of the adapter-caching paper, every solver: ``python -m benchmarks.placement_grid --out DIR``.

A JSON per cell stands in DIR; a run that was broken off goes on where it stopped, and cells of which the
lower bound says that they cannot be served are not tried. `compare` has every solver answer, and the twin
judge the answers on fresh seeds of one hour each.

``summary --out DIR`` prints the tables. ``drop --out DIR --solvers NAMES`` forgets solvers, which the next
run then asks anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.placement_grid_cells import ADAPTERS, Cell, Settings, chosen, workload
from benchmarks.placement_grid_solvers import ALL, find_all, suits
from benchmarks.placement_grid_store import Record, Store
from benchmarks.placement_grid_summary import report
from capplan.errors import CapplanError
from capplan.planner import compare
from capplan.planner.bound import busy_gpus, lower_bound_gpus
from capplan.planner.problem import make_problem
from capplan.spec import write_text_atomic
from capplan.twin.sweep import in_parallel


@dataclass(frozen=True)
class Run:
    """What is asked in every cell, and where answers go."""

    store: Store
    settings: Settings
    solvers: tuple[str, ...]

    def record(self, cell: Cell) -> Record:
        """Return what is known of a cell, or its empty record."""
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
    """Ask the solvers that have not answered yet; return the record, and the seconds that it took."""
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
    """Ask in every cell, and tell of each."""
    records = []
    for record, wall_s in in_parallel(partial(run_cell, run), cells, workers=workers):
        records.append(record)
        if not quiet:
            print(f"{len(records):4}/{len(cells)} {wall_s:6.1f} s  {in_a_line(record)}", flush=True)
    return records


def in_a_line(record: Record) -> str:
    """Return the cell, its lower bound, and on how many GPUs each solver holds it."""
    if not record.possible:
        return f"{record.name}: at least {record.lower_bound_gpus} GPUs"
    holding = [f"{row.solver} {row.gpus}" for row in record.rows if row.holds]
    return f"{record.name} (>= {record.lower_bound_gpus}): {', '.join(holding) or 'nobody'}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.placement_grid",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
            print(text, end="")
            if given.markdown:
                write_text_atomic(given.markdown, text)
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
