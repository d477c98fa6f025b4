"""Progress on stderr while a command runs."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from capplan.reports import console

if TYPE_CHECKING:
    from capplan.profiling.load import LoadProgress

_COMPILATION_LINES_S = 5.0
_LEAST_SHARE = 0.1  # before it, the time left cannot be estimated

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with the stage, the units of work done in it, and their total."""


class _Rate(ProgressColumn):
    """Units of work per second, over the last half minute."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        """Return nothing until there is a rate."""
        return Text("" if task.speed is None else f"{task.speed:.1f} {self.unit}/s")


@contextmanager
def progress_bars(*, quiet: bool = False, rate_of: str | None = None) -> Iterator[OnProgress]:
    """Give a callback that draws a bar per stage with the time left, only on a terminal and unless quiet.

    With ``rate_of``, the name of the units of work, the bar also shows units per second.
    """
    if quiet or not sys.stderr.isatty():
        yield _ignore
        return
    tasks: dict[str, TaskID] = {}
    rate = () if rate_of is None else (_Rate(rate_of),)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *rate)
    with Progress(*columns, TimeRemainingColumn(), console=console(err=True), transient=True) as bars:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield show


def _ignore(stage: str, done: int, total: int) -> None:
    """Show nothing."""


def announce_compilation(*, quiet: bool = False) -> None:
    """Print a line if the twin must be compiled, and then the time left."""
    from capplan._jit import is_compiled, on_compiled

    if quiet or is_compiled():
        on_compiled(None)
        return
    _announce("the digital twin")
    started_s = shown_s = time.monotonic()

    def show(share: float) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if _LEAST_SHARE <= share < 1.0 and now_s - shown_s >= _COMPILATION_LINES_S:
            shown_s = now_s
            left_s = (now_s - started_s) * (1.0 - share) / share
            typer.echo(f"compiling the digital twin: {share:.0%}, about {left_s:.0f} s left", err=True)

    on_compiled(show)


def announce_engine_compilation() -> None:
    """Print a line if an engine must compile its scheduler."""
    from capplan._jit import ENGINE_ENTRY, is_compiled

    if not is_compiled(ENGINE_ENTRY):
        _announce("the scheduler")


def _announce(compiled: str) -> None:
    from capplan._jit import cache_dir

    typer.echo(f"compiling {compiled} (once per version; cached in {cache_dir()})", err=True)


_RATE_UPDATES: Final = 20  # updates that throughput is averaged over, about five seconds


@contextmanager
def load_progress(*, quiet: bool) -> Iterator[Callable[[LoadProgress], None] | None]:
    """Give a callback that draws a bar with live metrics; None without a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console(err=True), transient=True) as bars:
        task = bars.add_task("loading", total=None, text="waiting for the server")
        seen: deque[LoadProgress] = deque(maxlen=_RATE_UPDATES)

        def on_tick(now: LoadProgress) -> None:
            seen.append(now)
            done_s = min(now.now_s, now.horizon_s)
            stage = "loading" if now.now_s < now.horizon_s else "draining"
            text = numbers(seen[0], now)
            bars.update(task, description=stage, total=now.horizon_s, completed=done_s, text=text)

        yield on_tick


def numbers(before: LoadProgress, now: LoadProgress) -> str:
    """Return the line beside the bar; throughput is that of completed requests since `before`."""
    passed_s = now.now_s - before.now_s
    rate = (now.tokens - before.tokens) / passed_s if passed_s > 0.0 else 0.0
    parts = [
        f"{min(now.now_s, now.horizon_s):.0f}/{now.horizon_s:.0f} s",
        f"{now.sent:,} sent",
        f"{now.in_flight:,} in flight",
        f"{now.completed:,} done",
        f"{rate:,.0f} tok/s",
    ]
    if now.failed:
        parts.append(f"{now.failed:,} failed")
    if now.rejected:
        parts.append(f"{now.rejected:,} rejected")
    return " · ".join(parts)
