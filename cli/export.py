"""`capplan export`: from a plan to the files a deployer consumes."""

from __future__ import annotations

from typing import Annotated

import typer

from capplan.cli.console import counted
from capplan.cli.options import PlanFile
from capplan.cli.output import require_writable_folder, write_folder
from capplan.errors import InputError


def export(
    plan: PlanFile,
    target: Annotated[str, typer.Option("--target", metavar="NAME", help="Who will deploy it: vllm.")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="Directory to make: all of it or nothing.")
    ],
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="Port of the first server; each next one adds 1.")
    ] = 8000,
    runtime_updates: Annotated[
        bool, typer.Option("--runtime-updates", help="Let clients load and unload adapters at run time.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the directory of an earlier export.")
    ] = False,
) -> None:
    """Write a launch script per server, and routing.json: which share of an adapter's requests goes where."""
    from capplan.deploy import EXPORTERS, TOP_NAMES
    from capplan.spec import Plan

    if target not in EXPORTERS:
        raise InputError(f"must be one of {', '.join(EXPORTERS)}", target, "--target")
    require_writable_folder(output, TOP_NAMES, force=force)
    files = EXPORTERS[target](Plan.from_json(plan), port=port, runtime_updates=runtime_updates)
    scripts = frozenset(name for name in files if name.endswith(".sh"))
    write_folder(output, files, scripts)
    typer.echo(f"{counted(len(scripts), 'launch script')} and routing.json written to {output}")
