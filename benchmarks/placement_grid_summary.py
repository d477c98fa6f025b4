"""Tables of the placement grid: who holds which cells, on how many GPUs, and where ours does worse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Final

from benchmarks.fidelity_figures import markdown
from benchmarks.placement_grid_solvers import ALL
from benchmarks.placement_grid_store import Record
from capplan.planner import SolverResult

OURS: Final = ("capplan", "plan")
DASH: Final = "-"
TOTALS: Final = (
    "solver", "cells", "answers", "holds", "of those that someone holds", "starves", "memory errors",
    "GPUs over the fewest", "worst", "median solve s", "longest",
)  # fmt: skip
WORSE: Final = ("cell", "at least", "solver", "it says", "fewest GPUs of others", "by")


def report(records: Sequence[Record]) -> str:
    """Return all tables."""
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
    """Return the solvers that have a row, in the usual order."""
    found = {row.solver for record in records for row in record.rows}
    return [name for name in (*ALL, *sorted(found - ALL.keys())) if name in found]


def totals(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Return a line per solver under `TOTALS`."""
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
    """Return the cells where another holds and this solver does not, or needs more GPUs; under `WORSE`."""
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
    """Return how its GPUs compare with the lower bound, and whether anyone ever beat that."""
    rows = [(record, row) for record in records for row in record.rows if row.holds]
    own = [row.gpus / record.lower_bound_gpus for record, row in rows if row.solver == name]
    beaten = sorted({record.name for record, row in rows if row.gpus < record.lower_bound_gpus})
    parts = [f"Held on fewer GPUs than the lower bound by someone: {', '.join(beaten) or 'no cell'}."]
    if own:
        ratios = f"GPUs over the lower bound where it holds: mean {fmean(own):.3f}, median {median(own):g}"
        parts.insert(0, f"{ratios}, worst {max(own):g}.")
    return " ".join(parts)


def curves(records: Sequence[Record]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and lines: how far each solver comes on each curve (figure 11 of the paper)."""
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
    """Return header and lines: what each solver says in each cell, and what becomes of it."""
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
