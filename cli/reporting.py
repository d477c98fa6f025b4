"""How a command ends: one line and an exit status for what users cause, a traceback for what they do not."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

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
    """Turn errors into a line on stderr and an exit status; a defect of capplan itself passes unchanged.

    Parameters
    ----------
    debug : bool
        Whether the line is preceded by the traceback.

    Raises
    ------
    typer.Exit
        With the status of the error.
    """
    try:
        yield
        sys.stdout.flush()  # a reader that has gone away must show here, not while the interpreter ends
    except CapplanError as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    except BrokenPipeError:
        # What is still buffered has no reader; without this the interpreter would complain while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(_PIPE_CLOSED) from None
