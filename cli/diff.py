"""`capplan diff`: what changes from one plan to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from capplan.cli.options import AsJson, Quiet, command
from capplan.reports import DASH, Table, counted, number, print_json, print_table

if TYPE_CHECKING:
    from capplan.planner import PlanDiff

_SHOWN = 8
"""Adapters that are named in a line."""


@dataclass(frozen=True, kw_only=True)
class DiffArgs:
    """Options of `capplan diff`."""

    old: str = typer.Argument(..., metavar="OLD", help="Plan file (JSON).")
    new: str = typer.Argument(..., metavar="NEW", help="Plan file (JSON).")
    as_json: AsJson = False
    quiet: Quiet = False


@command
def diff(args: DiffArgs) -> None:
    """Compare two plans: GPUs, groups, settings, and adapters with the bytes to copy.

    Groups are matched by the adapters that they hold. Exit status: 0 if both deploy the same, 1 otherwise.
    """
    from capplan.planner import diff_plans
    from capplan.spec import Plan

    found = diff_plans(Plan.from_json(args.old), Plan.from_json(args.new))
    if args.as_json:
        print_json(found.as_dict())
    elif not args.quiet:
        _show(found)
    if not found.is_empty:
        raise typer.Exit(1)


def _show(found: PlanDiff) -> None:
    if found.is_empty:
        typer.echo("both plans deploy the same")
        return
    facts = [(name, _text(before), _text(after)) for name, (before, after) in found.plan.items()]
    facts += [
        (f"GPUs, {gpu}", str(before), str(after))
        for gpu, (before, after) in found.gpus.items()
        if before != after and len(found.gpus) > 1
    ]
    if facts:
        print_table(Table(["plan", "old", "new"], facts))
    rows = [
        (change.new or DASH, change.old or DASH, name, _text(before), _text(after))
        for change in found.groups
        for name, (before, after) in (change.settings or {"": ("", "")}).items()
    ]
    if rows:
        print_table(Table(["group", "was", "setting", "old", "new"], rows, numbers_from=3))
    predicted = [(name, _metric(before), _metric(after)) for name, (before, after) in found.predicted.items()]
    print_table(Table(["predicted", "old", "new"], predicted))
    for words, names in (
        ("added", found.added),
        ("removed", found.removed),
        ("with another rank, rate or path", found.changed),
        ("moved", found.moved),
    ):
        if names:
            typer.echo(f"{counted(len(names), 'adapter')} {words}: {_some(names)}")
    size = "" if found.copied_bytes is None else f", {number(found.copied_bytes / 2**20)} MiB"
    typer.echo(f"to copy: {counted(found.copied_adapters, 'adapter')}{size}")


def _text(value: Any) -> str:
    return DASH if value is None else str(value)


def _metric(value: float | None) -> str:
    return DASH if value is None else f"{value:,.4g}" if value < 1000 else number(value)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
