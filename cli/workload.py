"""`capplan workload`: workload files of papers and public traces.

`capplan workload predictor`: a learned predictor of output lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from capplan.cli.options import AsJson, Quiet, Seed, WorkloadFile, command
from capplan.cli.output import require_writable_files
from capplan.errors import InputError
from capplan.reports import Table, percent, print_json, print_table

if TYPE_CHECKING:
    from capplan.workload import Preset


@dataclass(frozen=True, kw_only=True)
class PredictorArgs:
    """Options of `capplan workload predictor`."""

    workload: WorkloadFile
    output: str = typer.Option(..., "--output", "-o", metavar="FILE", help="Predictor to write (JSON).")
    duration_s: float = typer.Option(
        3600.0, "--duration", metavar="SECONDS", help="Requests of so much time: of the trace, or drawn."
    )
    held_out: float = typer.Option(
        0.2, metavar="SHARE", help="Share of the requests, the latest, for the test."
    )
    seed: Seed = 0
    as_json: AsJson = False
    quiet: Quiet = False


@command
def predictor(args: PredictorArgs) -> None:
    """Train a predictor of output lengths, and report its accuracy.

    It reads the prompt length, the adapter and the hour of day of a request. Use it with `scheduler:
    {predictor: {kind: learned, file: FILE}}`; adapters are found by their names.
    """
    from capplan.models.training import PredictorOptions, train_predictor
    from capplan.spec import DEFAULT_MAX_MODEL_LEN, require_duration, write_bytes_atomic
    from capplan.workload import draw_requests, load_workload

    require_duration(args.duration_s)
    require_writable_files(args.output)
    options = PredictorOptions(held_out=args.held_out, seed=args.seed)
    workload = load_workload(args.workload)
    requests = draw_requests(workload, args.duration_s, args.seed, DEFAULT_MAX_MODEL_LEN)
    trained = train_predictor(requests, [adapter.name for adapter in workload.adapters], options)
    write_bytes_atomic(args.output, trained.content)
    if args.as_json:
        print_json(
            {
                "file": args.output,
                "class_tokens": trained.class_tokens,
                "trained": trained.trained,
                "held_out": trained.held_out,
                "accuracy": trained.accuracy,
                "baseline": trained.baseline,
            }
        )
    elif not args.quiet:
        rows = [
            ("requests trained on", f"{trained.trained:,}"),
            ("requests held out", f"{trained.held_out:,}"),
            ("right class, held out", percent(trained.accuracy)),
            ("the most frequent class alone", percent(trained.baseline)),
            ("predicted tokens by class", ", ".join(map(str, trained.class_tokens))),
        ]
        print_table(Table(("predictor", "value"), rows))
        typer.echo(f"written to {args.output}")


@dataclass(frozen=True, kw_only=True)
class PresetArgs:
    """Options of `capplan workload preset`."""

    name: str | None = typer.Argument(None, metavar="[NAME]", help="Which preset to write.")
    list_all: bool = typer.Option(False, "--list", help="List the presets.")
    output: str | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="Where to write; printed unless given."
    )
    profile: str | None = typer.Option(
        None, metavar="NAME", help="Profile that the file names; default: ./profile.json."
    )
    gpus: int | None = typer.Option(None, metavar="N", min=1, help="GPUs a plan may use.")
    traces: str | None = typer.Option(None, metavar="DIR", help="Folder of the public traces.")
    as_json: AsJson = False


@command
def preset(args: PresetArgs) -> None:
    """List the presets, or write the workload file of one."""
    from capplan.spec import write_text_atomic
    from capplan.workload import preset as find_preset
    from capplan.workload import presets

    if args.list_all or args.name is None:
        if args.name is not None:
            raise InputError("does not go with the name of a preset", args.name, "--list")
        if not args.list_all:
            raise InputError("is required, or --list", location="NAME")
        _show(list(presets().values()), as_json=args.as_json)
        return
    chosen = find_preset(args.name)
    require_writable_files(args.output)
    text = chosen.yaml(*_hardware(chosen, args.profile), gpus=args.gpus, traces=args.traces)
    if args.output is not None:
        write_text_atomic(args.output, text)
    if args.as_json:
        print_json({**_summary(chosen), "assumed": chosen.assumed, "workload": text, "file": args.output})
    elif args.output is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{chosen.name} written to {args.output}")


def _hardware(chosen: Preset, name: str | None) -> tuple[str | None, str | None]:
    """Return the profile as the file is to name it, and a base model that it is for."""
    from capplan.datasets import load_profile
    from capplan.spec import is_profile_path

    if name is None:
        return None, None
    models = load_profile(name).model.hf_ids
    written = str(Path(name).resolve()) if is_profile_path(name) else name
    return written, None if chosen.base_model in models else models[0]


def _summary(preset: Preset) -> dict[str, object]:
    return {
        "name": preset.name,
        "source": preset.source,
        "summary": preset.summary,
        "needs": preset.file or None,
    }


def _show(listed: list[Preset], *, as_json: bool) -> None:
    if as_json:
        print_json([_summary(each) for each in listed])
        return
    rows = [(each.name, each.source, each.summary + (" (--traces)" if each.file else "")) for each in listed]
    print_table(Table(("preset", "source", "summary"), rows, numbers_from=None))
