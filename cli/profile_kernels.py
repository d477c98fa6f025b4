"""`capplan profile kernels`: timings of LoRA kernels, and the latency models that explain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from capplan.cli.options import AsJson, Quiet, command, fill, names, numbers, require_extra
from capplan.cli.output import require_writable_files, write_json
from capplan.cli.progress import progress_bars
from capplan.errors import InputError
from capplan.reports import counted, print_json, print_table
from capplan.reports.tables import fits_table, kernel_name

if TYPE_CHECKING:
    from capplan.models import Crossover, KernelReport
    from capplan.profiling.kernels import KernelProfilingOptions, KernelProfilingResult

_DISTURBED = 0.2
"""Share of disturbed visits from which a note is printed."""


@dataclass(frozen=True, kw_only=True)
class ProfileKernelsArgs:
    """Options of `capplan profile kernels`."""

    output: str = typer.Option(
        ..., "--output", "-o", metavar="DIR", help="Folder to write; an earlier run there is continued."
    )
    device: str = typer.Option("cpu", metavar="NAME", help="cpu: PyTorch's kernels; cuda: Triton's.")
    grid: str = typer.Option(
        "wide", metavar="NAME[,NAME...]", help="paper, wide, prefill, crossover or tiny."
    )
    phases: str = typer.Option(
        "decode,prefill,crossover",
        "--phases",
        metavar="NAME[,NAME...]",
        help="decode, prefill; crossover: a few tokens of each adapter, on a GPU.",
    )
    hidden: str | None = typer.Option(
        None, metavar="N[,N...]", help="Hidden sizes; default: of the built-in models."
    )
    kernels: str | None = typer.Option(
        None, metavar="NAME[,NAME...]", help="Default: all that the device has."
    )
    dtype: str | None = typer.Option(
        None, metavar="NAME", help="Default: float32 on a CPU, bfloat16 on a GPU."
    )
    threads: int = typer.Option(1, metavar="N", min=1, help="Threads of PyTorch on a CPU.")
    budget_s: float = typer.Option(600.0, metavar="SECONDS", min=0.0, help="0: only fit what is there.")
    tolerance: float = typer.Option(
        0.02, metavar="SHARE", min=0.0, help="Relative error of a converged median."
    )
    seed: int = typer.Option(0, metavar="N", min=0, help="Of drawn ranks.")
    as_json: AsJson = False
    quiet: Quiet = False


@command
def kernels(args: ProfileKernelsArgs) -> None:
    """Time shrink and expand of padded and grouped LoRA kernels, and fit Toppings' models.

    Writes the timings with their provenance, the fits, and a report. The same command continues an earlier
    run, until every median has converged or the time is up.
    """
    require_extra("engine", ["torch"] + (["triton"] if args.device.startswith("cuda") else []))
    from capplan.profiling.kernels import KernelProfilingOptions, SamplingLimits, measure

    options = fill(
        KernelProfilingOptions,
        args,
        grids=names(args.grid, "--grid"),
        phases=_phases(args.phases),
        widths=None if args.hidden is None else numbers(args.hidden, "--hidden"),
        kernels=None if args.kernels is None else names(args.kernels, "--kernels"),
        limits=SamplingLimits(budget_s=args.budget_s, tolerance=args.tolerance),
    )
    _require_folder(args.output)
    with progress_bars(quiet=args.quiet) as on_progress:
        outcome = measure(args.output, options, on_progress)
    reports, found = _fitted(outcome, args.output, options)
    if args.as_json:
        print_json(_document(outcome, options, reports) | {"crossover": found and asdict(found)})
    elif not args.quiet:
        show_fits(reports)
        if found is not None:
            typer.echo(found.summary())
        typer.echo(_summary(outcome, args.output))


def _fitted(
    outcome: KernelProfilingResult, output: str, options: KernelProfilingOptions
) -> tuple[list[KernelReport], Crossover | None]:
    from capplan.models import crossover, explain_kernels, read_kernel_table
    from capplan.reports.pages import kernels_page
    from capplan.spec import write_text_atomic

    table = read_kernel_table(outcome.table)
    reports = explain_kernels(table)
    write_json(Path(output) / "fits.json", fits_document(reports))
    write_text_atomic(Path(output) / "report.html", kernels_page(table, reports, options.settings()))
    return reports, crossover(table)


def _document(
    outcome: KernelProfilingResult, options: KernelProfilingOptions, reports: list[KernelReport]
) -> dict[str, Any]:
    return {
        "settings": options.settings(),
        "spots": outcome.points,
        "settled": outcome.converged,
        "disturbed_share": outcome.disturbed_share,
        "table": str(outcome.table),
        "fits": fits_document(reports),
    }


def _summary(outcome: KernelProfilingResult, output: str) -> str:
    text = f"{outcome.converged:,} of {counted(outcome.points, 'median')} converged; written to {output}"
    if not outcome.is_complete:
        text += "; the same command goes on"
    if outcome.disturbed_share > _DISTURBED:
        text += (
            f"\nin {100 * outcome.disturbed_share:.0f} % of the visits another process ran on the core: "
            "their times are those on the core, and an idle machine would give better ones"
        )
    return text


def _require_folder(path: str) -> None:
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise InputError("must be a directory, or nothing yet", location=path)
    require_writable_files(str(folder / "kernels.parquet" if folder.is_dir() else folder))


def _phases(text: str) -> tuple[str, ...]:
    phases = names(text, "--phases")
    for name in phases:
        if name not in ("decode", "prefill", "crossover"):
            raise InputError("must be among decode, prefill and crossover", name, "--phases")
    return phases


def fits_document(reports: Sequence[KernelReport]) -> list[dict[str, Any]]:
    """Return every fit as JSON data."""
    return [
        {
            "kernel": report.kernel,
            "phase": report.phase,
            "grid": report.grid,
            "hidden": report.width,
            "half": report.half,
            "cases": len(report.rows),
            "meant": report.meant,
            "explained_by": report.explained_by,
            "forms": {
                name: {
                    "coefficients": dict(fit.coefficients),
                    "r2": fit.r2,
                    "held_out_r2": fit.held_out_r2,
                    "smape": fit.error,
                    "held_out_smape": fit.held_out_error,
                }
                for name, fit in report.fits.items()
            },
        }
        for report in reports
    ]


def show_fits(reports: Sequence[KernelReport]) -> None:
    """Print the fits of whole kernels; those of their halves are in the report."""
    whole = [report for report in reports if report.half == "both"]
    if not whole:
        typer.echo("too few cases measured to fit anything yet")
        return
    print_table(fits_table(whole))
    typer.echo("* the form of Toppings that is meant for this kernel\n")
    for report in whole:
        typer.echo(f"{kernel_name(report)}: {report.verdict()}")
