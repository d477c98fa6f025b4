"""`capplan export`: from a plan to the files a deployer consumes."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from capplan.cli.console import counted
from capplan.cli.options import PlanFile, Unverified, command, read_plan
from capplan.cli.output import require_writable_folder, write_folder
from capplan.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ExportArgs:
    """Options of `capplan export`."""

    plan: PlanFile
    target: str = typer.Option(..., metavar="NAME", help="Deployment target: vllm.")
    output: str = typer.Option(
        ..., "--output", "-o", metavar="DIR", help="Directory to make: all of it or nothing."
    )
    port: int = typer.Option(8000, metavar="N", help="Port of the first server; each next one adds 1.")
    runtime_updates: bool = typer.Option(
        False, "--runtime-updates", help="Let clients load and unload adapters at run time."
    )
    unverified: Unverified = False
    force: bool = typer.Option(False, "--force", help="Replace the directory of an earlier export.")


@command
def export(args: ExportArgs) -> None:
    """Write a launch script per server, and routing.json with the shares of every adapter."""
    from capplan.deploy import EXPORTERS, TOP_NAMES

    if args.target not in EXPORTERS:
        raise InputError(f"must be one of {', '.join(EXPORTERS)}", args.target, "--target")
    require_writable_folder(args.output, TOP_NAMES, force=args.force)
    plan = read_plan(args.plan, unverified=args.unverified)
    files = EXPORTERS[args.target](plan, port=args.port, runtime_updates=args.runtime_updates)
    scripts = frozenset(name for name in files if name.endswith(".sh"))
    write_folder(args.output, files, scripts)
    typer.echo(f"{counted(len(scripts), 'launch script')} and routing.json written to {args.output}")
