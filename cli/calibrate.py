"""`capplan calibrate`: from tables of measurements to a profile, with a report of how good it is."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from capplan.cli.console import DASH, number, print_json, print_table, table
from capplan.cli.options import AsJson, command
from capplan.cli.output import require_writable_file
from capplan.cli.progress import announce_compilation, progress_bars
from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.models.calibration.step_model import StepCalibration, StepModelScore
    from capplan.spec import FittedModel, Profile
    from capplan.twin.calibration import CalibrationResult
    from capplan.twin.calibration_fit import RunCalibration

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class CalibrateArgs:
    """Options of `capplan calibrate`."""

    output: str = typer.Option(..., "--output", "-o", metavar="FILE", help="Profile JSON to write.")
    folder: str | None = typer.Argument(
        None, metavar="[DIR]", help="Folder of `capplan profile engine` or `profile server`."
    )
    steps: str | None = typer.Option(None, metavar="FILE", help="Table of measured steps (CSV or Parquet).")
    runs: str | None = typer.Option(
        None, metavar="FILE", help="Table of measured runs; fitted with the twin in the loop."
    )
    memory: str | None = typer.Option(None, metavar="FILE", help="Table of KV tokens by adapter slots.")
    loading: str | None = typer.Option(None, metavar="FILE", help="Table of adapter loads.")
    base: str | None = typer.Option(
        None, metavar="NAME", help="Profile to start from: a shipped one or a profile JSON."
    )
    model_config: str | None = typer.Option(
        None, metavar="FILE", help="Without --base: config.json of the model."
    )
    base_model: str | None = typer.Option(None, metavar="ID", help="Without --base: its Hugging Face id.")
    gpu: str | None = typer.Option(None, metavar="NAME", help="Without --base.")
    gpu_memory_gib: float | None = typer.Option(None, metavar="N", help="Without --base: memory of one GPU.")
    tp: int = typer.Option(1, metavar="N", min=1, help="Without --base: GPUs per copy.")
    engine_version: str = typer.Option("0.8.5", metavar="VERSION", help="Without --base: of vLLM.")
    rules: str = typer.Option("vllm-0.8", metavar="NAME", help="Without --base: serving rules.")
    kernel: str | None = typer.Option(None, metavar="NAME", help="bgmv, mbgmv or vllm; default: the base's.")
    form: str | None = typer.Option(None, metavar="NAME", help="Step model; default: best on left-out runs.")
    free: str | None = typer.Option(
        None, metavar="NAME[,NAME...]", help="Coefficients that runs are fitted by."
    )
    folds: int = typer.Option(5, metavar="N", min=2, help="Parts of the cross-validation.")
    seed: int = typer.Option(0, metavar="N", min=0, help="Same seed, same profile.")
    workers: int | None = typer.Option(None, metavar="N", min=1, help="Threads; default: one per core.")
    name: str | None = typer.Option(None, metavar="NAME", help="Of the profile; default: BASE-calibrated.")
    source: str | None = typer.Option(None, metavar="TEXT", help="Where the measurements are from.")
    report: str | None = typer.Option(None, metavar="FILE", help="Write a report as one HTML file.")
    as_json: AsJson = False
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print nothing but errors.")


@command
def calibrate(args: CalibrateArgs) -> None:
    """Fit a profile to measured steps or whole runs, and report its error on left-out data.

    Several step models are compared, ours with and without each of its parts and those of the papers. A
    folder stands for the tables in it and what they begin with; options name others instead.
    """
    from capplan.spec import write_text_atomic
    from capplan.twin.calibration import CalibrationOptions, CalibrationTables

    args = _with_tables_of_folder(args)
    given = {"--model-config": args.model_config, "--base-model": args.base_model, "--gpu": args.gpu}
    start = _base(args.base, given, args.gpu_memory_gib, args.tp, args.engine_version, args.rules)
    for path in filter(None, (args.output, args.report)):
        require_writable_file(path)
    if args.report is not None and Path(args.report).resolve() == Path(args.output).resolve():
        raise InputError("must be another file than --output", args.report, "--report")
    tables = CalibrationTables(steps=args.steps, runs=args.runs, memory=args.memory, loading=args.loading)
    options = CalibrationOptions(
        name=args.name,
        source=args.source,
        kernel=_kernel(args.kernel),
        form=args.form,
        free=None if args.free is None else tuple(each.strip() for each in args.free.split(",")),
        folds=args.folds,
        seed=args.seed,
        workers=args.workers or os.cpu_count() or 1,
        command=_command(tables, args.base),
    )
    if args.runs is not None:
        announce_compilation(quiet=args.quiet)
    from capplan.twin.calibration import calibrate as fit

    with progress_bars(quiet=args.quiet) as on_progress:
        made = fit(start, tables, options, on_progress)
    if args.report is not None:
        from capplan.cli.report.calibration import calibration_page

        write_text_atomic(args.report, calibration_page(made))
    write_text_atomic(args.output, _json(made.profile))
    if args.as_json:
        print_json(document(made))
    elif not args.quiet:
        show(made)
        typer.echo(f"written to {args.output}" + (f", report to {args.report}" if args.report else ""))


def _with_tables_of_folder(args: CalibrateArgs) -> CalibrateArgs:
    if args.folder is None:
        return args
    from capplan.profiling.tables import tables_of

    found = tables_of(args.folder)
    return replace(
        args,
        base=args.base or found.base,
        steps=args.steps or found.steps,
        runs=args.runs or found.runs,
        memory=args.memory or found.memory,
        loading=args.loading or found.loading,
    )


def _json(profile: Profile) -> str:
    import json

    return json.dumps(profile.model_dump(mode="json"), indent=2) + "\n"


def _kernel(name: str | None) -> Any:
    from capplan.spec import Kernel

    if name is None:
        return None
    try:
        return Kernel(name)
    except ValueError:
        raise InputError(f"must be one of {', '.join(Kernel)}", name, "--kernel") from None


def _base(
    base: str | None,
    given: dict[str, str | None],
    gpu_memory_gib: float | None,
    tp: int,
    engine_version: str,
    rules: str,
) -> Profile:
    """Return the profile to start from: a named one, or one of assumptions about a model on a GPU."""
    if base is not None:
        from capplan.datasets import load_profile

        for flag, value in (*given.items(), ("--gpu-memory-gib", gpu_memory_gib)):
            if value is not None:
                raise InputError("does not go with --base, which says it", value, flag)
        return load_profile(base)
    for flag, value in (*given.items(), ("--gpu-memory-gib", gpu_memory_gib)):
        if value is None:
            raise InputError("is required without --base", location=flag)
    from capplan.datasets.catalog import read_arch
    from capplan.models.calibration.components import Hardware, assumed_profile
    from capplan.serving import serving_rules

    if gpu_memory_gib is None or not 0.0 < gpu_memory_gib < float("inf"):
        raise InputError("must be a finite number above 0", gpu_memory_gib, "--gpu-memory-gib")
    hardware = Hardware(
        gpu=str(given["--gpu"]),
        gpu_memory_bytes=round(gpu_memory_gib * _GIB),
        tp=tp,
        engine_version=engine_version,
        rules=serving_rules(rules).name,
    )
    return assumed_profile(read_arch(str(given["--model-config"]), str(given["--base-model"])), hardware)


def _command(tables: Any, base: str | None) -> str:
    """Return the command for the profile's record; files by their names, without their folders."""
    given = {"--steps": tables.steps, "--runs": tables.runs, "--memory": tables.memory}
    given |= {"--loading": tables.loading}
    parts = [f"{flag} {Path(path).name}" for flag, path in given.items() if path is not None]
    start = [] if base is None else [f"--base {Path(base).name if base.endswith('.json') else base}"]
    return " ".join(("capplan calibrate", *start, *parts))


PARTS = ("step_latency", "memory", "loading", "host")


def document(made: CalibrationResult) -> dict[str, Any]:
    """Return everything that was found, as JSON data."""
    return {
        "profile": made.profile.name,
        "base": made.base.name,
        "changed": {part: _part(getattr(made.profile, part)) for part in changed_parts(made)},
        "adapter_loads": made.loads,
        "steps": None if made.steps is None else _steps(made.steps),
        "runs": None if made.runs is None else _runs(made.runs),
    }


def changed_parts(made: CalibrationResult) -> tuple[str, ...]:
    """Return the parts of the profile that are not those of the base."""
    return tuple(part for part in PARTS if getattr(made.profile, part) != getattr(made.base, part))


def _part(model: FittedModel) -> dict[str, Any]:
    return model.model_dump(mode="json", include={"form", "coefficients", "fit"})


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
        print_table(_forms_table(made.steps))
        chosen = made.steps.fit.candidate.label
        typer.echo(f"{'asked for' if made.steps.forced else 'chosen'}: {chosen}, {reason(made.steps)}\n")
        print_table(_residuals_table(made.steps))
        typer.echo(f"adapter loads within the steps: {load_source(made)}\n")
    if made.runs is not None:
        print_table(_runs_table(made.runs))
    rows = table("coefficient", "value", "standard error", "before", numbers_from=1)
    for part in changed_parts(made):
        before = getattr(made.base, part).coefficients
        for name, coefficient in getattr(made.profile, part).coefficients.items():
            error = DASH if coefficient.std_error is None else f"{coefficient.std_error:.2g}"
            was = f"{before[name].value:.6g}" if name in before else DASH
            rows.add_row(f"{part}.{name}", f"{coefficient.value:.6g}", error, was)
    print_table(rows)


def load_source(made: CalibrationResult) -> str:
    """Return where the adapter loads are from, in words."""
    if made.loads == "unknown":
        return (
            "not known, so their time is in the other coefficients and counts twice in a simulation; "
            "give a column load_ms, or --runs for the twin to count them"
        )
    return f"from {made.loads}"


def reason(steps: StepCalibration) -> str:
    """Return why the form was taken, in half a sentence."""
    best = steps.scores[0]
    if steps.forced:
        return f"SMAPE {percentage(steps.score.held_out_error)} on left-out runs"
    if best.label == steps.score.label:
        return f"the least SMAPE on left-out runs, {percentage(best.held_out_error)}"
    mine = percentage(steps.score.held_out_error)
    return f"SMAPE {mine} on left-out runs, where {best.label} has {percentage(best.held_out_error)}"


def percentage(value: float) -> str:
    """Return an error that is in percent already."""
    return DASH if value != value else f"{value:.2f} %"


def form_cells(score: StepModelScore) -> tuple[str, ...]:
    """Return the row of a form in the tables of forms."""
    if score.missing:
        return score.label, DASH, DASH, DASH, DASH, f"needs {', '.join(score.missing)}"
    return (
        score.label,
        str(score.coefficients),
        percentage(score.error),
        percentage(score.held_out_error),
        number(score.held_out_r2, 4),
        "",
    )


FORM_HEAD = ("form", "free coefficients", "SMAPE of the fit", "on left-out runs", "R² there", "")


def _forms_table(steps: StepCalibration) -> Any:
    rows = table(*FORM_HEAD, numbers_from=1)
    for score in steps.scores:
        rows.add_row(*form_cells(score))
    return rows


RESIDUAL_HEAD = ("rows", "bias", "SMAPE", "95 % within")


def _residuals_table(steps: StepCalibration) -> Any:
    rows = table("on left-out runs", *RESIDUAL_HEAD, numbers_from=1)
    for each in steps.by_regime():
        rows.add_row(*residual_cells(each))
    for each in steps.by_a_max():
        rows.add_row(f"a_max {each.name}", *residual_cells(each)[1:])
    return rows


def residual_cells(each: Any) -> tuple[str, ...]:
    """Return the row of a part of the step table."""
    bias = f"{each.bias:+.2f} %"
    return each.name, f"{each.rows:,}", bias, percentage(each.error), percentage(each.p95)


RUN_HEAD = ("SMAPE", "before", "after", "on left-out runs")


def run_cells(runs: RunCalibration) -> list[tuple[str, ...]]:
    """Return the rows of the table of run errors."""
    after, held_out = runs.errors(runs.after), runs.errors(runs.held_out)
    nothing = float("nan")
    return [
        (
            target,
            percentage(error),
            percentage(after.get(target, nothing)),
            percentage(held_out.get(target, nothing)),
        )
        for target, error in runs.errors(runs.before).items()
    ]


def _runs_table(runs: RunCalibration) -> Any:
    rows = table(*RUN_HEAD, numbers_from=1)
    for cells in run_cells(runs):
        rows.add_row(*cells)
    return rows
