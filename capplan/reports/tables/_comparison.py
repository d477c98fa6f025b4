"""Table of a comparison of solvers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capplan.reports._console import DASH, Table, counted, number, percent

if TYPE_CHECKING:
    from capplan.planner import SolverComparison, SolverResult


def rows_table(result: SolverComparison) -> Table:
    """Return one row per solver, in the order given."""
    head = (
        *("solver", "GPUs", "starved", "late", "memory\nerrors", "short of\nheadroom", "served", "tok/s"),
        *("ITL\nms", "TTFT p99\ns", "solve\ns", "verdict"),
    )
    return Table(head, [solver_cells(row) for row in result.rows], text_last=True)


def solver_cells(row: SolverResult) -> tuple[str, ...]:
    """Return the cells of a solver."""
    if not row.answered:
        return (row.solver, *(DASH,) * 10, row.failure)
    counts = (row.gpus, row.starved, row.late, row.memory_errors, row.short_of_headroom)
    return (
        row.solver,
        *(f"{count:,}" for count in counts),
        percent(row.served_fraction),
        number(row.throughput_tok_s),
        number(row.itl_ms_mean, 1),
        number(row.ttft_s_p99, 2),
        number(row.solve_s, 3),
        solver_verdict(row),
    )


def solver_verdict(row: SolverResult) -> str:
    """Return the verdict of the twin on an answer."""
    if not row.answered:
        return "no answer"
    if row.holds:
        return "holds" if not row.short_of_headroom else "holds, but not the headroom"
    return "fails"


def summary(result: SolverComparison) -> str:
    """Return the best answers and the size of the comparison in one line."""
    holding = [row for row in result.rows if row.holds]
    best = min(holding, key=lambda row: row.gpus, default=None)
    if best is None:
        words = "no answer holds"
    else:
        names = ", ".join(row.solver for row in holding if row.gpus == best.gpus)
        words = f"fewest GPUs that hold: {best.gpus} ({names})"
    tried = f"{counted(len(result.seeds), 'seed')} × {result.duration_s:g} s"
    return (
        f"{words}; lower bound {result.lower_bound_gpus}, available {result.gpus}; "
        f"{counted(result.adapters, 'adapter')} at {number(result.rate_rps, 2)} req/s, raw answers on {tried}"
    )
