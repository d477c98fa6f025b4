"""Queues of a plan, as text and as a table."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from capplan.cli.console import DASH, number, percent, table

if TYPE_CHECKING:
    from rich.table import Table

    from capplan.spec import Queues

_SIZES = {
    "degree2": "lengths x adapter",
    "degree1": "lengths + adapter",
    "output_only": "output",
}
_CHARGES = {
    "per_request": "prompt, output and adapter",
    "none": "prompt and output",
}


def quotas(queues: Queues | None) -> str:
    """Return the quota of each queue, smallest requests first; a dash without queues."""
    if queues is None:
        return DASH
    return "\n".join(number(each.quota_tokens) for each in queues.classes)


def queues_table(queues: Queues) -> Table:
    """Return one row per queue."""
    wrs = queues.wrs
    sizes = f"queue by size of request\n({_SIZES[wrs.form]})"
    rows = table(sizes, f"quota, tokens\n({_CHARGES[queues.adapter_charge]})", "share", numbers_from=1)
    for row in queue_rows(queues):
        rows.add_row(*row)
    return rows


def queue_rows(queues: Queues) -> list[tuple[str, str, str]]:
    """Return the rows of that table in words: sizes, quota, share of all quotas."""
    total = sum(each.quota_tokens for each in queues.classes)
    uppers = [each.upper_wrs for each in queues.classes]
    return [
        (_range(low, high), number(each.quota_tokens), percent(each.quota_tokens / total))
        for (low, high), each in zip(pairwise([None, *uppers]), queues.classes, strict=True)
    ]


def _range(low: float | None, high: float | None) -> str:
    if high is None:
        return "all" if low is None else f"{low:.3g} and more"
    return f"below {high:.3g}" if low is None else f"{low:.3g} to {high:.3g}"
