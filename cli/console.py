"""Tables for people, JSON for machines."""

from __future__ import annotations

import json
import math
import sys
from typing import Any, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table

_WIDTH_OF_A_FILE: Final = 200  # columns, when the output is not a terminal
DASH: Final = "–"


class _Console(Console):
    """A console that leaves a closed pipe to :func:`capplan.cli.app.reported`."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, err: bool = False) -> Console:
    """Return a console on stdout or stderr that shows users' texts as they are."""
    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else _WIDTH_OF_A_FILE
    return _Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def table(*columns: str, numbers_from: int | None = None) -> Table:
    """Return an empty table; columns from ``numbers_from`` on are aligned to the right."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        is_number = numbers_from is not None and index >= numbers_from
        result.add_column(column, justify="right" if is_number else "left", overflow="fold")
    return result


def print_table(rows: Table) -> None:
    """Print a table on stdout."""
    console().print(rows)


def print_json(document: Any) -> None:
    """Print a document as JSON on stdout; numbers that are not finite become null."""
    typer.echo(json.dumps(finite(document), indent=2, ensure_ascii=False, allow_nan=False))


def finite(value: Any) -> Any:
    """Return a document with null in place of every NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float | None, decimals: int = 0) -> str:
    """Return a number with separated thousands, or a dash when there is none."""
    return DASH if value is None or not math.isfinite(value) else f"{value:,.{decimals}f}"


def percent(fraction: float | None) -> str:
    """Return a fraction as a percentage."""
    return DASH if fraction is None else f"{100 * fraction:.1f} %"


def counted(count: int, noun: str) -> str:
    """Return ``1 GPU`` or ``2 GPUs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
