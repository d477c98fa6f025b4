"""The application: its commands and the options that all of them share."""

from __future__ import annotations

from typing import Annotated

import typer

from capplan.cli.bench import bench
from capplan.cli.calibrate import calibrate
from capplan.cli.compare import compare
from capplan.cli.dataset import dataset
from capplan.cli.explain import explain
from capplan.cli.export import export
from capplan.cli.plan import plan
from capplan.cli.profile import profile
from capplan.cli.profiles import profiles
from capplan.cli.report import report
from capplan.cli.reporting import ReportingGroup
from capplan.cli.schema import schema
from capplan.cli.serve import serve
from capplan.cli.simulate import simulate
from capplan.cli.surrogate import surrogate
from capplan.cli.train import train
from capplan.cli.validate import validate
from capplan.cli.workload import workload


def _show_version(wanted: bool) -> None:
    if wanted:
        import capplan

        typer.echo(f"capplan {capplan.__version__}")
        raise typer.Exit


def _shared_options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """From a workload file to a multi-LoRA serving plan that is verified before anyone deploys it.

    Exit status: 0 done, 1 a verification disagrees, 2 something given is wrong, 3 no plan is possible.
    """


app = typer.Typer(
    name="capplan",
    cls=ReportingGroup,
    callback=_shared_options,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (plan, compare, simulate, explain, report, export, profiles, calibrate, train, serve, bench):
    app.command()(command)
app.command()(validate)
app.command()(schema)
app.add_typer(dataset, name="dataset")
app.add_typer(profile, name="profile")
app.add_typer(surrogate, name="surrogate")
app.add_typer(workload, name="workload")


def main() -> None:
    """Run the command line; never returns."""
    app(prog_name="capplan")
