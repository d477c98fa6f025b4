"""Tables for people, JSON for machines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias

import rich.table
import typer
from rich import box
from rich.console import Console

from capplan.errors import printable

_WIDTH_OF_A_FILE: Final = 200  # columns, when the output is not a terminal
DASH: Final = "–"
GIB: Final = 2**30


class _Console(Console):
    """A console that leaves a closed pipe to :func:`capplan.cli.app.reported`."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, err: bool = False) -> Console:
    """Return a console on stdout or stderr that shows users' texts as they are."""
    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else _WIDTH_OF_A_FILE
    return _Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


@dataclass(frozen=True)
class Mark:
    """Text with a tone on pages: ``good``, ``bad`` or ``strong``."""

    text: str
    tone: str

    def __str__(self) -> str:
        return self.text


Cell: TypeAlias = str | Mark


@dataclass(frozen=True)
class Table:
    """Rows of text, for the terminal and for pages; columns from ``numbers_from`` on are aligned right."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numbers_from: int | None = 1
    caption: str = ""
    text_last: bool = False
    """Whether the last column holds words beside numbers."""
    kind: ClassVar[str] = "table"

    def text_second(self) -> Table:
        """Return the table with its last column, of words, as the second, which keeps numbers together."""
        head, *rows = ((row[0], row[-1], *row[1:-1]) for row in (self.head, *self.rows))
        return Table([str(name) for name in head], rows, 2, self.caption)


def print_table(table: Table) -> None:
    """Print a table on stdout."""
    shown = rich.table.Table(box=box.SIMPLE_HEAD, pad_edge=False)
    first = len(table.head) if table.numbers_from is None else table.numbers_from
    for index, column in enumerate(table.head):
        is_number = index >= first and not (table.text_last and index == len(table.head) - 1)
        shown.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*(printable(str(cell)) for cell in row))
    console().print(shown)


def print_json(document: Any) -> None:
    """Print a document as JSON on stdout; numbers that are not finite become null."""
    shows_all = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"
    typer.echo(json.dumps(finite(document), indent=2, ensure_ascii=not shows_all, allow_nan=False))


def finite(value: Any) -> Any:
    """Return a document with null in place of every NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def smape(value: float) -> str:
    """Return an error that is in percent already."""
    return DASH if math.isnan(value) else f"{value:.2f} %"


def number(value: float | None, decimals: int = 0) -> str:
    """Return a number with separated thousands, or a dash when there is none."""
    return DASH if value is None or not math.isfinite(value) else f"{value:,.{decimals}f}"


def percent(fraction: float | None) -> str:
    """Return a fraction as a percentage."""
    return DASH if fraction is None or math.isnan(fraction) else f"{100 * fraction:.1f} %"


def counted(count: int, noun: str) -> str:
    """Return ``1 GPU`` or ``2 GPUs``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
