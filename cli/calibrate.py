"""`capplan calibrate`: from tables of measurements to a profile, with a report of its errors."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from capplan.cli import options
from capplan.cli.output import require_writable_files, write_json
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InputError
from capplan.reports import Table, print_json, print_table, tables

if TYPE_CHECKING:
    from capplan.models.calibration import StepCalibration
    from capplan.spec import Profile
    from capplan.twin.calibration import CalibrationResult, RunCalibration


@dataclass(frozen=True, kw_only=True)
class CalibrateArgs:
    """Options of `capplan calibrate`."""

    output: str = typer.Option(..., "--output", "-o", metavar="FILE", help="Profile JSON to write.")
    folder: str | None = typer.Argument(
        None, metavar="[DIR]", help="Folder of `capplan profile engine` or `profile server`."
    )
    steps: str | None = typer.Option(None, metavar="FILE", help="Table of measured steps (CSV or Parquet).")
    runs: str | None = typer.Option(
        None, metavar="FILE", help="Table of measured runs; fitted by simulating them."
    )
    memory: str | None = typer.Option(None, metavar="FILE", help="Table of KV tokens by adapter slots.")
    loading: str | None = typer.Option(None, metavar="FILE", help="Table of adapter loads.")
    kernels: str | None = typer.Option(
        None, metavar="FILE", help="Table of `capplan profile kernels`, for the crossover of LoRA kernels."
    )
    base: str | None = typer.Option(
        None, metavar="NAME", help="Profile to start from: a shipped one or a profile JSON."
    )
    model_config: str | None = typer.Option(
        None, metavar="FILE", help="Without --base: config.json of the model."
    )
    base_model: str | None = typer.Option(None, metavar="ID", help="Without --base: its Hugging Face id.")
    gpu: str | None = typer.Option(None, metavar="NAME", help="Without --base: name of the GPU.")
    gpu_memory_gib: float | None = typer.Option(None, metavar="N", help="Without --base: memory of one GPU.")
    tp: int = typer.Option(1, metavar="N", min=1, help="Without --base: GPUs per copy.")
    engine_version: options.EngineVersion = None
    rules: options.EngineRules = None
    kernel: str | None = typer.Option(None, metavar="NAME", help="bgmv, mbgmv or vllm; default: the base's.")
    form: str | None = typer.Option(None, metavar="NAME", help="Step model; default: best on left-out runs.")
    free: str | None = typer.Option(None, metavar="NAME[,NAME...]", help="Coefficients fitted to the runs.")
    folds: int = typer.Option(5, metavar="N", min=2, help="Parts of the cross-validation.")
    seed: int = typer.Option(0, metavar="N", min=0, help="Same seed, same profile.")
    workers: int | None = typer.Option(None, metavar="N", min=1, help="Threads; default: one per core.")
    name: str | None = typer.Option(None, metavar="NAME", help="Of the profile; default: BASE-calibrated.")
    source: str | None = typer.Option(None, metavar="TEXT", help="Source of the measurements.")
    html: options.HtmlFile = None
    as_json: options.AsJson = False
    quiet: options.Quiet = False


@options.command
def calibrate(args: CalibrateArgs) -> None:
    """Fit a profile to measured steps or whole runs, and report its error on left-out data.

    Several step models are compared: that of capplan with and without each of its parts, and those of the
    papers. A folder stands for its tables and their base; options name others instead.
    """
    from capplan.spec import Kernel, write_text_atomic
    from capplan.twin.calibration import CalibrationOptions, CalibrationTables

    recorded = options.command_line("capplan calibrate", args)
    args = _with_tables_of_folder(args)
    base = _base(args)
    require_writable_files(args.output, args.html)
    if args.html is not None and Path(args.html).resolve() == Path(args.output).resolve():
        raise InputError("must be another file than --output", args.html, "--html")
    measured = options.fill(CalibrationTables, args)
    wanted = options.fill(
        CalibrationOptions,
        args,
        kernel=None if args.kernel is None else options.member(Kernel, args.kernel, "--kernel"),
        free=None if args.free is None else options.names(args.free, "--free"),
        workers=args.workers or os.cpu_count() or 1,
        command=recorded,
    )
    if args.runs is not None:
        announce_compilation(quiet=args.quiet)
    from capplan.twin.calibration import calibrate as fit

    with progress_bars(quiet=args.quiet) as on_progress:
        made = fit(base, measured, wanted, on_progress)
    if args.html is not None:
        from capplan.reports.pages import calibration_page

        write_text_atomic(args.html, calibration_page(made))
    write_json(args.output, made.profile.model_dump(mode="json"))
    if args.as_json:
        print_json(document(made))
    elif not args.quiet:
        show(made)
        typer.echo(f"written to {args.output}" + (f", page to {args.html}" if args.html else ""))


def _with_tables_of_folder(args: CalibrateArgs) -> CalibrateArgs:
    if args.folder is None:
        return args
    from capplan.profiling import tables_of

    found = tables_of(args.folder)
    names = ("base", "steps", "runs", "memory", "loading")
    return replace(args, **{name: getattr(args, name) or getattr(found, name) for name in names})


def _base(args: CalibrateArgs) -> Profile:
    """Return the profile to start from: a named one, or one of assumptions about a model on a GPU."""
    hardware_flags = {
        "--model-config": args.model_config,
        "--base-model": args.base_model,
        "--gpu": args.gpu,
        "--gpu-memory-gib": args.gpu_memory_gib,
    }
    if args.base is not None:
        from capplan.datasets import load_profile

        engine_flags = {"--engine-version": args.engine_version, "--rules": args.rules}
        for flag, value in (hardware_flags | engine_flags).items():
            if value is not None:
                raise InputError("does not go with --base, which sets it", value, flag)
        return load_profile(args.base)
    for flag, value in hardware_flags.items():
        if value is None:
            raise InputError("is required without --base", location=flag)
    from capplan.datasets import read_arch
    from capplan.models.calibration import Hardware, assumed_profile
    from capplan.serving import rules_of_engine

    rules, version = rules_of_engine(args.engine_version, args.rules, otherwise="vllm-0.8")
    hardware = Hardware(
        gpu=str(args.gpu),
        gpu_memory_bytes=options.gib_in_bytes(args.gpu_memory_gib or 0.0, "--gpu-memory-gib"),
        tp=args.tp,
        engine=rules.engine,
        engine_version=version,
        rules=rules.name,
        lora_extra_vocab=rules.lora_extra_vocab,
    )
    return assumed_profile(read_arch(str(args.model_config), str(args.base_model)), hardware)


def document(made: CalibrationResult) -> dict[str, Any]:
    """Return the result as JSON data."""
    return {
        "profile": made.profile.name,
        "base": made.base.name,
        "changed": {
            part: model.model_dump(mode="json", include={"form", "coefficients", "fit"})
            for part, model in tables.changed_models(made).items()
        },
        "adapter_loads": made.loads,
        "steps": None if made.steps is None else _steps(made.steps),
        "runs": None if made.runs is None else _runs(made.runs),
    }


def _steps(steps: StepCalibration) -> dict[str, Any]:
    return {
        "rows": steps.table.rows,
        "runs": len(steps.table.run_names),
        "chosen": steps.fit.candidate.label,
        "forced": steps.forced,
        "forms": [asdict(score) for score in steps.scores],
        "by_regime": [asdict(each) for each in steps.by_regime()],
        "by_a_max": [asdict(each) for each in steps.by_a_max()],
    }


def _runs(runs: RunCalibration) -> dict[str, Any]:
    return {
        "runs": len(runs.runs),
        "coefficients": {
            free.name: {"start": free.start, "value": float(value), "std_error": float(error)}
            for free, value, error in zip(runs.free, runs.fitted, runs.std_errors, strict=True)
        },
        "error_before": runs.errors(runs.before),
        "error_after": runs.errors(runs.after),
        "error_held_out": runs.errors(runs.held_out),
        "held_out_by_regime": {
            regime: runs.errors(runs.held_out, regime) for regime in sorted(set(runs.regimes))
        },
    }


def show(made: CalibrationResult) -> None:
    """Print the tables."""
    if made.steps is not None:
        print_table(tables.forms_table(made.steps))
        chosen = made.steps.fit.candidate.label
        typer.echo(
            f"{'asked for' if made.steps.forced else 'chosen'}: {chosen}, {tables.reason(made.steps)}\n"
        )
        print_table(_residuals_table(made.steps))
        typer.echo(f"adapter loads within the steps: {tables.load_source(made)}\n")
    if made.runs is not None:
        print_table(tables.runs_table(made.runs))
    rows = [
        (f"{part}.{name}", *cells)
        for part, model in tables.changed_models(made).items()
        for name, *cells in tables.coefficients_table(model, getattr(made.base, part)).rows
    ]
    print_table(Table(tables.COEFFICIENT_HEAD, rows))


def _residuals_table(steps: StepCalibration) -> Table:
    regimes = tables.residuals_table(steps.by_regime(), "on left-out runs")
    slots = [(f"a_max {name}", *cells) for name, *cells in tables.residuals_table(steps.by_a_max(), "").rows]
    return replace(regimes, rows=[*regimes.rows, *slots])
