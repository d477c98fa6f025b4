"""The application: its commands, the options that all of them share, and exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

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


_GROUPS: Final = {"profile": "Measure what profiles are made of."}
"""Groups whose commands are in modules of their own, with their help."""

_COMMANDS: Final = {
    **{name: f"capplan.cli.{name}" for name in ("plan", "compare", "simulate", "explain")},
    "report": "capplan.cli.explain",
    "export": "capplan.cli.export",
    "profiles": "capplan.cli.documents",
    **{name: f"capplan.cli.{name}" for name in ("calibrate", "train", "serve", "bench", "validate")},
    "schema": "capplan.cli.documents",
    "dataset": "capplan.cli.dataset",
    **{
        f"profile {name}": f"capplan.cli.profile_{name}"
        for name in ("engine", "kernels", "roofline", "server")
    },
    "surrogate": "capplan.cli.surrogate",
    "workload": "capplan.cli.workload",
}
"""Modules of the commands and groups, in the order of the help page; each has an attribute of that name."""


def build_app(only: str | None = None) -> typer.Typer:
    """Return the application; ``only``, a command or group, is imported without the others."""
    made = typer.Typer(
        name="capplan",
        cls=ReportingGroup,
        callback=_shared_options,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    groups: dict[str, typer.Typer] = {}
    for path, module in _COMMANDS.items():
        name, _, command = path.partition(" ")
        if only not in (None, name):
            continue
        found = getattr(import_module(module), command or name)
        if command:
            if name not in groups:
                groups[name] = typer.Typer(no_args_is_help=True, help=_GROUPS[name])
                made.add_typer(groups[name], name=name)
            groups[name].command()(found)
        elif isinstance(found, typer.Typer):
            made.add_typer(found, name=name)
        else:
            made.command()(found)
    return made


def __getattr__(name: str) -> typer.Typer:
    """Build ``app``, the application with all commands, on first use."""
    if name == "app":
        globals()["app"] = app = build_app()
        return app
    raise AttributeError(name)


def main() -> None:
    """Run the command line; never returns. Only the module of the given command is imported."""
    first = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    is_known = first in {path.partition(" ")[0] for path in _COMMANDS}
    build_app(first if is_known else None)(prog_name="capplan")
