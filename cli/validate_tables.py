"""What `capplan validate` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import typer

from capplan.cli.console import DASH, number, print_table, table

if TYPE_CHECKING:
    from capplan.profiling.validation.compare import Comparison, GroupValidation
    from capplan.profiling.validation.validate import Validation

HEAD: Final = (
    "metric",
    "measured",
    "predicted",
    "SMAPE, %",
    "tolerance, %",
    "constant step",
    "SMAPE, %",
    "offered load",
    "SMAPE, %",
)
_FINE: Final = ("ttft_s", "e2e_s", "served")


def rows_of(group: GroupValidation) -> list[tuple[str, ...]]:
    """Return a row per metric."""
    return [_row(each) for each in group.comparisons] + [_verdicts(group)]


def _row(each: Comparison) -> tuple[str, ...]:
    decimals = 3 if each.name.startswith(_FINE) else 2
    shown = [number(value, decimals) for value in (each.measured, each.predicted)]
    limit = DASH if each.tolerance is None else number(each.tolerance, 1)
    return (
        each.name,
        *shown,
        number(each.error, 2),
        limit,
        number(each.constant_step, decimals),
        number(each.constant_step_error, 2),
        number(each.offered_load, decimals),
        number(each.offered_load_error, 2),
    )


def _verdicts(group: GroupValidation) -> tuple[str, ...]:
    starved, predicted, plain = (
        "yes" if told else "no"
        for told in (group.starved, group.predicted_starved, group.constant_step_starved)
    )
    return ("starved", starved, predicted, "", "equal", plain, "", "no", "")


def heading(group: GroupValidation) -> str:
    """Return what a group's table is of."""
    scale = "" if group.rate_scale == 1.0 else f", rates times {group.rate_scale:g}"
    return f"group {group.group}: {group.requests:,} requests in {group.duration_s:g} s{scale}"


def verdict(group: GroupValidation) -> str:
    """Return whether a group agrees, and what is wrong with the measurement."""
    told = "agrees" if group.agrees else "disagrees"
    return "; ".join((told, *group.faults))


def show(found: Validation) -> None:
    """Print a table per group."""
    for group in found.groups:
        typer.echo(heading(group))
        rows = table(*HEAD, numbers_from=1)
        for row in rows_of(group):
            rows.add_row(*row)
        print_table(rows)
        typer.echo(verdict(group))
