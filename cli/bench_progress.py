"""What is shown while a server is loaded: time, requests, failures and throughput, on stderr."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from rich.progress import BarColumn, Progress, TextColumn

from capplan.cli.console import console

if TYPE_CHECKING:
    from capplan.profiling.load.run import Snapshot

_RATE_OVER: Final = 20  # looks that throughput is averaged over, about five seconds


@contextmanager
def live(*, quiet: bool = False) -> Iterator[Callable[[Snapshot], None] | None]:
    """Give a callback that draws a bar with live numbers; None where nobody would see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[told]}"))
    with Progress(*columns, console=console(err=True), transient=True) as bars:
        task = bars.add_task("loading", total=None, told="asking the server")
        seen: deque[Snapshot] = deque(maxlen=_RATE_OVER)

        def on_tick(now: Snapshot) -> None:
            seen.append(now)
            done_s = min(now.now_s, now.horizon_s)
            stage = "loading" if now.now_s < now.horizon_s else "draining"
            told = numbers(seen[0], now)
            bars.update(task, description=stage, total=now.horizon_s, completed=done_s, told=told)

        yield on_tick


def numbers(before: Snapshot, now: Snapshot) -> str:
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
