"""`capplan workload`: workload files to start from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from capplan.cli.console import print_json, print_table, table
from capplan.cli.options import AsJson, ProfileName
from capplan.cli.output import require_writable_file
from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.workload.presets import Preset

workload = typer.Typer(no_args_is_help=True, help="Write workload files of papers and public traces.")


@workload.callback()
def _group() -> None:
    """Write workload files of papers and public traces."""


@workload.command()
def preset(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Which preset to write.")] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the presets.")] = False,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Where to write; printed unless given."),
    ] = None,
    profile: ProfileName = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", min=1, help="GPUs a plan may use.")
    ] = None,
    traces: Annotated[
        str | None, typer.Option("--traces", metavar="DIR", help="Folder of the public traces.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the presets, or write the workload file of one."""
    from capplan.spec import write_text_atomic
    from capplan.workload import presets

    if list_all or name is None:
        if name is not None:
            raise InputError("does not go with the name of a preset", name, "--list")
        if not list_all:
            raise InputError("is required, or --list", location="NAME")
        _show(list(presets.presets().values()), as_json=as_json)
        return
    chosen = presets.preset(name)
    if output is not None:
        require_writable_file(output)
    text = chosen.yaml(*_hardware(chosen, profile), gpus=gpus, traces=traces)
    if output is not None:
        write_text_atomic(output, text)
    if as_json:
        print_json({**_summary(chosen), "assumed": chosen.assumed, "workload": text, "file": output})
    elif output is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"{chosen.name} written to {output}")


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
    rows = table("preset", "source", "what it is")
    for each in listed:
        rows.add_row(each.name, each.source, each.summary + (" (--traces)" if each.file else ""))
    print_table(rows)
