"""What the twin adds to the explanation of a plan, as tables and lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capplan.cli.console import DASH, number, percent, table

if TYPE_CHECKING:
    from rich.table import Table

    from capplan.planner.explaining import CurvePoint, Explanation, Outcome, Room, SlotCurve

CURVE_HEAD = (
    *("A_max", "KV tokens", "tok/s", "served", "TTFT p99, s", "E2E mean, s", "ITL mean, ms", "loads/min"),
    "verdict",
)
OUTCOME_HEAD = ("GPUs", "USD/h", "TTFT p99, s", "TPOT mean, ms", "tok/s", "holds up to", "what follows")


def curve_table(curve: SlotCurve) -> Table:
    """Return one row per number of slots, the chosen one marked."""
    rows = table(f"A_max at {times(curve.scale)}", *CURVE_HEAD[1:], numbers_from=1)
    rows.columns[-1].justify = "left"
    for point in curve.points:
        name, *cells = point_cells(point)
        rows.add_row(f"{name} ◀ chosen" if point.a_max == curve.chosen else name, *cells)
    return rows


def point_cells(point: CurvePoint) -> tuple[str, ...]:
    """Return a number of slots in words, one per column of `CURVE_HEAD`."""
    return (
        str(point.a_max),
        number(point.kv_tokens),
        number(point.throughput_tok_s),
        percent(point.served_fraction),
        number(point.ttft_p99_s, 2),
        number(point.e2e_mean_s, 2),
        number(point.itl_mean_ms, 1),
        number(point.loads_per_min, 1),
        point_verdict(point),
    )


def point_verdict(point: CurvePoint) -> str:
    """Return whether a number of slots holds, and what breaks."""
    if not point.fits:
        return "does not fit in memory"
    return "; ".join(point.broken) or "holds"


def room_table(room: Room) -> Table:
    """Return one row per resource and bound, at the planned load and where the instance fails."""
    rows = table(*room_head(room), numbers_from=1)
    rows.columns[-1].justify = "left"
    for row in room_rows(room):
        rows.add_row(*row)
    return rows


def room_head(room: Room) -> tuple[str, ...]:
    """Return the head of that table; without a load at which the instance fails there is no such column."""
    beyond = () if room.fails_at is None else (f"at {times(room.fails_at)}",)
    return ("in use", "at the planned load", *beyond, "")


def room_rows(room: Room) -> list[tuple[str, ...]]:
    """Return the rows of that table in words."""
    return [
        (
            use.name,
            percent(use.now),
            *(() if room.fails_at is None else (percent(use.beyond),)),
            use.detail,
        )
        for use in room.uses
    ]


def what_if_table(explanation: Explanation) -> Table:
    """Return one row for the plan, and one for each other number of GPUs."""
    rows = table("", *OUTCOME_HEAD, numbers_from=1)
    rows.columns[-1].justify = "left"
    for row in what_if_rows(explanation):
        rows.add_row(*row)
    return rows


def what_if_rows(explanation: Explanation) -> list[tuple[str, ...]]:
    """Return the rows of that table in words."""
    plan = explanation.outcome
    rows: list[tuple[int, str, Outcome | None, str]] = [(plan.gpus, "this plan", plan, DASH)]
    rows += [(each.gpus, each.change, each.outcome, each.words) for each in explanation.what_if]
    return [
        (name, *outcome_cells(gpus, outcome), words)
        for gpus, name, outcome, words in sorted(rows, key=lambda row: row[0])
    ]


def outcome_cells(gpus: int, outcome: Outcome | None) -> tuple[str, ...]:
    """Return the outcome of a plan in words; dashes where there is none."""
    if outcome is None:
        return (number(gpus), *[DASH] * 5)
    return (
        number(gpus),
        number(outcome.usd_per_hour, 2),
        number(outcome.ttft_p99_s, 2),
        number(outcome.tpot_mean_ms, 1),
        number(outcome.throughput_tok_s),
        _held(outcome),
    )


def _held(outcome: Outcome) -> str:
    if outcome.holds_until is None:
        return DASH
    return times(outcome.holds_until) if outcome.fails else f"{times(outcome.holds_until)} or more"


def times(scale: float) -> str:
    """Return a multiple of the planned load."""
    return f"{scale:.2f} × load"
