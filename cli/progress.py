"""What is shown while something runs, always on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from capplan.cli.console import console

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with the stage, the units of work done in it, and their total."""


@contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[OnProgress]:
    """Give a callback that draws a bar per stage with the time left, only on a terminal and unless quiet."""
    if quiet or not sys.stderr.isatty():
        yield _ignore
        return
    tasks: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(err=True), transient=True) as bars:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show


def _ignore(stage: str, done: int, total: int) -> None:
    """Show nothing."""


def announce_compilation(*, quiet: bool = False) -> None:
    """Say that the twin is about to be compiled, if it is: otherwise the wait would look like a hang."""
    from capplan.compile import cache_dir, is_compiled

    if not quiet and not is_compiled():
        typer.echo(
            f"compiling the digital twin (once per version, about half a minute; cached in {cache_dir()})",
            err=True,
        )
