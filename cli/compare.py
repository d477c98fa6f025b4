"""`capplan compare`: solvers on the same workload, verified by the twin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from capplan.cli import options
from capplan.cli.output import require_writable_files
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.planner import SOLVERS
from capplan.reports import print_json, print_table
from capplan.reports.tables import rows_table, summary

if TYPE_CHECKING:
    from capplan.planner import SolverComparison

_ALL = "all"


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Options of `capplan compare`."""

    workload: options.WorkloadFile
    solvers: str = typer.Option(_ALL, metavar="NAME[,NAME...]", help=f"all, or some of {', '.join(SOLVERS)}.")
    profile: options.ProfileName = None
    gpus: int | None = typer.Option(
        None, metavar="N", help="GPUs a solver may use; default: the workload's, or as needed."
    )
    seeds: int = typer.Option(5, metavar="K", help="Fresh seeds that answers are verified on.")
    seed: options.Seed = 0
    solver_time_limit: float = typer.Option(
        60.0, metavar="SECONDS", help="Limit of one solver: dlora-proactive, milp."
    )
    html: options.HtmlFile = None
    as_json: options.AsJson = False


@options.command
def compare(args: CompareArgs) -> None:
    """Compare solvers on a workload: raw answers, and the verdict of the twin on fresh seeds."""
    from capplan.spec import write_text_atomic
    from capplan.workload import load_workload

    require_writable_files(args.html)
    solvers = SOLVERS if args.solvers == _ALL else options.names(args.solvers, "--solvers")
    workload = load_workload(args.workload)
    chosen = options.chosen_profile(workload, args.profile)
    announce_compilation()
    from capplan import planner

    with progress_bars() as on_progress:
        result = planner.compare(
            workload,
            solvers,
            gpus=args.gpus,
            profile=chosen,
            seed=args.seed,
            seeds=args.seeds,
            time_limit_s=args.solver_time_limit,
            progress=on_progress,
        )
    if args.html is not None:
        from capplan.reports.pages import comparison_page

        write_text_atomic(args.html, comparison_page(result, args.workload, workload.slo.latency_bounds()))
    if args.as_json:
        print_json(document(result))
    else:
        print_table(rows_table(result))
        typer.echo(summary(result) + ("" if args.html is None else f"; report in {args.html}"))
    _exit(result)


def document(result: SolverComparison) -> dict[str, Any]:
    """Return the comparison as JSON data."""
    from dataclasses import asdict

    whole = asdict(result)
    rows = whole.pop("rows")
    return whole | {
        "solvers": [
            {**each, "answered": row.answered, "holds": row.holds}
            for each, row in zip(rows, result.rows, strict=True)
        ]
    }


def _exit(result: SolverComparison) -> None:
    """Exit with 1 if no answer holds, or with the worst error if there is no answer."""
    if any(row.holds for row in result.rows):
        return
    if any(row.answered for row in result.rows):
        raise typer.Exit(options.FAILED)
    worst = max(result.rows, key=lambda row: row.exit_code)
    typer.echo(f"error: no solver has an answer; {worst.solver}: {worst.failure}", err=True)
    raise typer.Exit(worst.exit_code)
