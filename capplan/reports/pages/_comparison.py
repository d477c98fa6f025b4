"""The report of a comparison of solvers: one HTML page that works offline."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

from capplan.planner.solvers import registry
from capplan.reports._console import Cell, Mark, Table, counted, number, percent
from capplan.reports.pages import _page as page
from capplan.reports.pages._figures import Axis, bar_rows, bounds_of
from capplan.reports.tables._plan import rows_table, solver_cells, solver_verdict, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from capplan.planner import SolverComparison, SolverResult

_TERMS: Final = {
    "raw answer": "placement of a solver, without the repair that capplan plan adds",
    "GPUs": "used by the answer; with tensor parallelism, all GPUs of its instances",
    "starved": "instances that serve less than served_fraction of all tokens, or of an adapter's requests, "
    "on at least one seed",
    "late": "other instances that break a latency bound of the workload, on at least one seed",
    "memory errors": "instances that would not start: their slots leave no room for one request of "
    "max_model_len, or their adapters do not fit on the host",
    "short of headroom": "other instances that fail at the load over (1 - headroom)",
    "holds": "every instance starts and keeps every bound at the planned load, on every seed",
    "served": "share of the tokens served, on the worst instance and seed",
    "tok/s": "input and output tokens of completed requests, all instances together, mean over seeds",
    "ITL": "mean time between tokens, instances weighted by their output tokens, mean over seeds",
    "TTFT p99": "99th percentile of the time to first token, of the slowest instance, mean over seeds",
    "solve": "seconds of splitting and placing on this machine, without verification",
    **page.terms("lower bound"),
}


def comparison_page(
    result: SolverComparison, workload: str, bounds: Mapping[str, float] | None = None
) -> str:
    """Return the report.

    Parameters
    ----------
    result
        Comparison.
    workload
        File or name of the workload.
    bounds
        Latency bounds of the workload by key, such as ``ttft_p99_s``.
    """
    load = f"{counted(result.adapters, 'adapter')} at {number(result.rate_rps, 2)} req/s"
    return page.page(
        f"Solvers on {workload}",
        _answers(result),
        _solver_charts(result, bounds or {}),
        _solvers(result.rows),
        subtitle=f"{load}, {result.profile}, at most {counted(result.gpus, 'GPU')}, "
        f"headroom {result.headroom:g}",
        cards=_cards(result, bounds or {}),
        terms=_TERMS,
    )


def _answers(result: SolverComparison) -> page.Section:
    rows: list[tuple[Cell, ...]] = [(*solver_cells(row)[:-1], _verdict(row)) for row in result.rows]
    head = [re.sub(r"\n(m?s)$", r", \1", name).replace("\n", " ") for name in rows_table(result).head]
    parts: list[page.Block | Table] = [Table(head, rows).text_second()]
    failures = {row.solver: row.failure for row in result.rows if not row.answered}
    if failures:
        parts += [page.heading("Solvers without an answer"), page.definitions(failures)]
    return page.section("Answers", *parts, intro=f"{summary(result)}.")


def _cards(result: SolverComparison, bounds: Mapping[str, float]) -> list[page.Card]:
    holding = [row for row in result.rows if row.holds]
    best = min(holding, key=lambda row: row.gpus, default=None)
    seeds = counted(len(result.seeds), "seed")
    trust = page.Card("Verified by the twin", f"{len(holding)} of {len(result.rows)} hold", f"on {seeds}")
    if best is None:
        return [page.Card("GPUs", page.bad("no answer holds")), trust]
    bound = f"{best.solver}; lower bound {result.lower_bound_gpus}, available {result.gpus}"
    return [
        page.Card("Fewest GPUs that hold", page.good(f"{best.gpus}"), bound),
        page.latency_card("Worst TTFT p99", "ttft_p99_s", best.ttft_s_p99, bounds),
        page.Card("Mean ITL", f"{number(best.itl_ms_mean, 1)} ms", f"of {best.solver}"),
        page.Card("Tokens served", percent(best.served_fraction), "on the worst instance and seed"),
        trust,
    ]


def _verdict(row: SolverResult) -> Mark:
    return (page.good if row.holds else page.bad)(solver_verdict(row))


def _solver_charts(result: SolverComparison, bounds: Mapping[str, float]) -> page.Section:
    rows = result.rows
    names = [row.solver for row in rows]

    def values(measure: Callable[[SolverResult], float]) -> list[float]:
        return [measure(row) if row.answered else math.nan for row in rows]

    fine = values(lambda row: row.gpus * (1 - _failing(row)))
    seconds = values(lambda row: row.solve_s)
    ttft = values(lambda row: row.ttft_s_p99)
    return page.section(
        "Side by side",
        page.charts(
            bar_rows(
                "GPUs used",
                names,
                {"that hold": fine, "that fail": values(lambda row: row.gpus * _failing(row))},
                Axis(""),
                bounds={"lower bound": result.lower_bound_gpus},
                note="no bar: no answer",
                stacked=True,
            ),
            bar_rows("Throughput", names, {"": values(lambda row: row.throughput_tok_s)}, Axis("tok/s")),
            bar_rows(
                "Time between tokens",
                names,
                {"": values(lambda row: row.itl_ms_mean)},
                Axis("ITL, ms"),
                bounds=bounds_of(bounds, "itl"),
            ),
            bar_rows(
                "Time to first token",
                names,
                {"": ttft},
                _log("TTFT p99, s", ttft),
                bounds=bounds_of(bounds, "ttft"),
                note="logarithmic",
            ),
            bar_rows("Time to solve", names, {"": seconds}, _log("s", seconds), note="logarithmic"),
        ),
    )


def _log(label: str, values: Sequence[float]) -> Axis:
    """Return a logarithmic axis that starts below the smallest value, to show its bar."""
    return Axis(label, log=True, low=min((value for value in values if value > 0.0), default=0.1) / 2)


def _failing(row: SolverResult) -> float:
    """Return the share of instances that starve, are late or do not start."""
    return (row.starved + row.late + row.memory_errors) / row.instances


def _solvers(rows: Sequence[SolverResult]) -> page.Section:
    table = [
        (
            row.solver,
            solver.summary,
            solver.source,
            row.estimator or str(solver.required_estimator),
            _counts(row.adapters_per_gpu),
            _counts(row.slots_per_gpu),
        )
        for row in rows
        if (solver := registry().get(row.solver)) is not None
    ]
    head = ("solver", "what it does", "from", "estimator", "adapters per GPU", "slots per GPU")
    return page.section("Solvers", Table(head, table, numbers_from=None))


def _counts(values: Sequence[int]) -> str:
    """Return counts, the first dozen of them."""
    shown = ", ".join(f"{value:,}" for value in values[:12])
    return shown + (", ..." if len(values) > 12 else "")
