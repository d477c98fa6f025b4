"""`capplan workload`: workload files of papers and public traces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from capplan.cli.options import AsJson, command
from capplan.cli.output import require_writable_files
from capplan.errors import InputError
from capplan.reports.console import Table, print_json, print_table

if TYPE_CHECKING:
    from capplan.workload.presets import Preset


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
    from capplan.workload import presets

    if args.list_all or args.name is None:
        if args.name is not None:
            raise InputError("does not go with the name of a preset", args.name, "--list")
        if not args.list_all:
            raise InputError("is required, or --list", location="NAME")
        _show(list(presets.presets().values()), as_json=args.as_json)
        return
    chosen = presets.preset(args.name)
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
    from capplan.spec.workload import is_profile_path

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
