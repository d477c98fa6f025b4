"""The application: its commands, the options that all of them share, and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from capplan.cli.bench import bench
from capplan.cli.calibrate import calibrate
from capplan.cli.compare import compare
from capplan.cli.dataset import dataset
from capplan.cli.documents import profiles, schema
from capplan.cli.explain import explain, report
from capplan.cli.export import export
from capplan.cli.plan import plan
from capplan.cli.profile_engine import engine
from capplan.cli.profile_kernels import kernels
from capplan.cli.profile_roofline import roofline
from capplan.cli.profile_server import server
from capplan.cli.serve import serve
from capplan.cli.simulate import simulate
from capplan.cli.surrogate import surrogate
from capplan.cli.train import train
from capplan.cli.validate import validate
from capplan.cli.workload import workload
from capplan.errors import CapplanError

_INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it
_PIPE_CLOSED: Final = 141  # 128 + SIGPIPE


class ReportingGroup(TyperGroup):
    """A group of commands whose errors end as an exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with reported(debug=ctx.params.get("debug", False)):
            return super().invoke(ctx)


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Map exceptions to one line on stderr and an exit status; internal errors pass unchanged."""
    try:
        yield
        sys.stdout.flush()  # raises BrokenPipeError here rather than at interpreter exit
    except CapplanError as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    except BrokenPipeError:
        # Redirect buffered output, which would otherwise raise at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_PIPE_CLOSED) from None


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


profile = typer.Typer(no_args_is_help=True, help="Measure what profiles are made of.")
for each in (engine, kernels, roofline, server):
    profile.command()(each)


@profile.callback()
def _profile_group() -> None:
    """Measure what profiles are made of."""


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
