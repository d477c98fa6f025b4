"""Sections of a plan's report that the twin adds: curves of A_max, what is in use, other numbers of GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from capplan.cli import html
from capplan.cli.bar_rows import bar_rows
from capplan.cli.charts import Axis, Curve, line_chart
from capplan.cli.explanation_tables import (
    CURVE_HEAD,
    OUTCOME_HEAD,
    point_cells,
    room_head,
    room_rows,
    times,
    what_if_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from capplan.planner.explaining import CurvePoint, Explanation, GroupExplanation, Room, SlotCurve
    from capplan.spec import Slo

_WIDE: Final = 50.0
"""Ratio of values from which a logarithmic axis shows more."""
_MOST_SHOWN: Final = 200.0
"""Where bars of what is in use end, in percent."""
_NAMED: Final = 12
"""Groups that a heading names."""


def explanation_sections(explanation: Explanation, slo: Slo) -> list[html.Section]:
    """Return the sections on slots, on what is in use, and on other numbers of GPUs."""
    groups = explanation.groups
    slots = [part for group in groups for part in _slots(group, slo.latency_bounds())]
    rooms = [part for group in groups for part in (html.heading(_names(group)), *_room(group.room))]
    alike = "Groups with adapters and settings alike are shown once."
    sections = [
        html.section(
            "Why A_max is what it is",
            *slots,
            intro="More slots let more adapters run at once, but each takes KV memory and time in every "
            f"step. The twin simulates one seed at {times(groups[0].curve.scale)}, which uses up the "
            f"headroom, as in the search. {alike}",
        ),
        html.section(
            "What is in use, and what is left",
            *rooms,
            intro="Means while steps run, at the planned load and a little beyond the largest that holds. A "
            f"bound is in use by as much as its metric has of it. {alike}",
        ),
    ]
    if explanation.what_if:
        rows = (_words_second(row) for row in what_if_rows(explanation))
        table = html.table(_words_second(("", *OUTCOME_HEAD)), rows, numbers_from=2)
        words = (
            "Planned anew by the solver capplan and verified on one seed. One fewer keeps the objective; one "
            "more is placed for the shortest mean time to the last token: otherwise it would stay idle. "
            "Latencies are those of the instance where they are longest."
        )
        sections.append(html.section("One GPU fewer or more", table, intro=words))
    return sections


def _names(group: GroupExplanation) -> str:
    more = f" and {len(group.ids) - _NAMED} more" if len(group.ids) > _NAMED else ""
    return ", ".join(group.ids[:_NAMED]) + more


def _slots(group: GroupExplanation, bounds: Mapping[str, float]) -> list[html.Html]:
    curve = group.curve
    rows = [
        (
            html.Html(f"<strong>{cells[0]} (chosen)</strong>") if point.a_max == curve.chosen else cells[0],
            *cells[1:],
        )
        for point, cells in ((point, point_cells(point)) for point in curve.points)
    ]
    return [
        html.heading(_names(group)),
        html.paragraph(group.why_a_max),
        html.charts(*_curve_charts(curve, bounds)),
        html.table(_words_second(CURVE_HEAD), map(_words_second, rows), numbers_from=2),
    ]


def _curve_charts(curve: SlotCurve, bounds: Mapping[str, float]) -> list[html.Html]:
    def chart(
        title: str, unit: str, value: Callable[[CurvePoint], float | None], rules: Mapping[str, float]
    ) -> html.Html:
        known = [(point.a_max, at) for point in curve.points if (at := value(point)) is not None]
        heights = [at for _, at in known]
        is_wide = bool(heights) and 0.0 < _WIDE * min(heights) < max(heights)
        return line_chart(
            title,
            [Curve("", [float(a_max) for a_max, _ in known], heights, marked=True)],
            _across(curve),
            Axis(f"{title}, {unit}", log=is_wide),
            rules=rules,
            marks={f"chosen: {curve.chosen}": float(curve.chosen)},
            beyond=_out_of_memory(curve),
        )

    def kept(name: str) -> dict[str, float]:
        return {name: bounds[name]} if name in bounds else {}

    offered = {"offered": curve.offered_tok_s}
    return [
        chart("Throughput", "tok/s", lambda point: point.throughput_tok_s, offered),
        chart("TTFT p99", "s", lambda point: point.ttft_p99_s, kept("ttft_p99_s")),
        chart("E2E mean", "s", lambda point: point.e2e_mean_s, kept("e2e_mean_s")),
        chart("Adapter loads", "per minute", lambda point: point.loads_per_min, {}),
    ]


def _across(curve: SlotCurve) -> Axis:
    """Return the axis of the slots, to the first number that does not fit."""
    slots = [float(point.a_max) for point in curve.points]
    return Axis(
        "A_max, slots", log=slots[-1] >= 8.0 * slots[0], low=slots[0], high=slots[-1], ticks=tuple(slots)
    )


def _out_of_memory(curve: SlotCurve) -> tuple[str, float] | None:
    if curve.most_slots is None:
        return None
    return f"no memory beyond {curve.most_slots}", float(max(1, curve.most_slots))


def _room(room: Room) -> list[html.Html]:
    shares = {"at the planned load": [_percent(use.now) for use in room.uses]}
    if room.fails_at is not None:
        shares[f"at {times(room.fails_at)}"] = [_percent(use.beyond) for use in room.uses]
    known = [share for each in shares.values() for share in each if share == share]
    high = min(_MOST_SHOWN, max([100.0, *known]))
    names = [use.name for use in room.uses]
    chart = bar_rows("In use, %", names, shares, Axis("", high=high), bounds={"": 100.0})
    rows = map(_words_second, room_rows(room))
    return [
        html.paragraph(f"{room.words[:1].upper()}{room.words[1:]}."),
        html.charts(chart, html.table(_words_second(room_head(room)), rows, numbers_from=2)),
    ]


def _words_second(row: Sequence[str]) -> tuple[str, ...]:
    """Return a row with its last cell, a sentence, before the numbers, so that these stay together."""
    return (row[0], row[-1], *row[1:-1])


def _percent(share: float | None) -> float:
    return float("nan") if share is None else 100.0 * share
