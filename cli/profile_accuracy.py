"""`capplan profile accuracy`: errors of a profile's kind on measured engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from capplan.cli.options import AsJson, command
from capplan.errors import InputError
from capplan.reports import Table, number, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capplan.models import MeasuredRows


@dataclass(frozen=True, kw_only=True)
class AccuracyArgs:
    """Options of `capplan profile accuracy`."""

    profile: str = typer.Argument(..., metavar="PROFILE", help="Shipped name, or path of a profile JSON.")
    as_json: AsJson = False


@command
def accuracy(args: AccuracyArgs) -> None:
    """Show errors on measured engines of a profile's kind, nearest rows first."""
    from capplan.datasets import load_profile
    from capplan.models import comparable_rows, measured_accuracy

    profile = load_profile(args.profile)
    rows = comparable_rows(profile)
    if not rows:
        rule = "must be composed or a roofline: `capplan profiles NAME` shows the errors of its own fit"
        raise InputError(rule, str(profile.provenance.kind), f"{args.profile}: provenance.kind")
    if args.as_json:
        print_json([each.model_dump(mode="json") for each in rows])
        return
    print_table(_table(rows))
    typer.echo("error: 100 * mean(|p / a - 1|); bias: 100 * mean(p / a - 1); nearest rows first")
    typer.echo(f"computed by `{measured_accuracy().command}`")


def _table(rows: Sequence[MeasuredRows]) -> Table:
    lines = [
        (
            each.model,
            each.gpu,
            each.dtype,
            each.version or "not stated",
            each.metric_in_words,
            each.basis,
            str(each.tp),
            str(each.rows),
            f"{number(each.error_percent, 1)} %",
            f"{each.bias_percent:+.1f} %",
        )
        for each in rows
    ]
    head = ("model", "GPU", "dtype", "vLLM", "metric", "basis", "tp", "rows", "error", "bias")
    return Table(head, lines, numbers_from=6)
