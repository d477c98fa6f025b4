"""Bars that lie: one row per name, for names too long to stand below a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from capplan.cli.chart_axes import Axis, Scale, scale_of
from capplan.cli.charts import COLOURS
from capplan.cli.html import Html

_WIDTH: Final = 520.0
_RIGHT: Final = 22.0
_TOP: Final = 8.0
_BOTTOM: Final = 44.0
_THICKNESS: Final = 13.0
_GAP: Final = 8.0
_CHARACTER: Final = 6.4
_INK: Final = "#3b4754"
_BOUND: Final = "#b3261e"


def bar_rows(
    title: str,
    names: Sequence[str],
    bars: Mapping[str, Sequence[float]],
    x: Axis,
    *,
    bounds: Mapping[str, float] | None = None,
    note: str = "",
) -> Html:
    """Return a chart of rows: one per name, one bar of it per entry of `bars`.

    Parameters
    ----------
    title, note
        What it shows, and what should be known to read it.
    names
        Of the rows, from top to bottom.
    bars
        Lengths of the bars of each colour, by its entry in the legend; an empty one has none. There is no bar
        where a value is not finite.
    x
        The axis of the lengths, with its unit.
    bounds
        Vertical lines with their names.
    """
    bounds = bounds or {}
    values = [value for lengths in bars.values() for value in lengths]
    scale = scale_of(x, [*values, *bounds.values(), 0.0], from_zero=True)
    left = 12.0 + _CHARACTER * max((len(name) for name in names), default=1)
    row = _THICKNESS * max(1, len(bars)) + _GAP
    bottom = _TOP + row * max(1, len(names))
    drawn = list(_grid(scale, left, bottom))
    for at, name in enumerate(names):
        top = _TOP + at * row
        drawn.append(_text(left - 6, top + row / 2 + 4, name, anchor="end"))
        for number, (entry, lengths) in enumerate(bars.items()):
            tip = f"{name}{', ' + entry if entry else ''}: {lengths[at]:.6g}"
            drawn.append(_bar(scale, left, top + _GAP / 2 + number * _THICKNESS, lengths[at], number, tip))
    drawn += [_bound(scale, left, bottom, name, at) for name, at in bounds.items()]
    drawn.append(_text((left + _WIDTH - _RIGHT) / 2, bottom + _BOTTOM - 8, x.label))
    size = f'viewBox="0 0 {_WIDTH:g} {bottom + _BOTTOM:g}" font-size="12" font-family="inherit"'
    svg = f'<svg class="chart" role="img" aria-label="{escape(title)}" {size}>{"".join(drawn)}</svg>'
    more = f' <span class="soft">{escape(note)}</span>' if note else ""
    return Html(f"<figure><figcaption>{escape(title)}{more}</figcaption>{_legend(bars)}{svg}</figure>")


def _px(scale: Scale, left: float, value: float) -> float:
    return left + scale.at(value) * (_WIDTH - _RIGHT - left)


def _grid(scale: Scale, left: float, bottom: float) -> list[str]:
    lines = []
    for value, label in scale.ticks:
        at = _px(scale, left, value)
        lines.append(f'<path d="M{at:.1f} {_TOP}V{bottom:.1f}" stroke="#e3e7eb"/>')
        lines.append(_text(at, bottom + 16, label))
    axis = f'<path d="M{left:.1f} {_TOP}V{bottom:.1f}H{_WIDTH - _RIGHT}" fill="none" stroke="#5b6775"/>'
    return [*lines, axis]


def _bar(scale: Scale, left: float, top: float, value: float, number: int, tip: str) -> str:
    if not scale.shows(value):
        return ""
    start, end = sorted((_px(scale, left, value), _px(scale, left, max(0.0, scale.low))))
    return (
        f'<rect x="{start:.1f}" y="{top:.1f}" width="{end - start:.1f}" height="{_THICKNESS - 2:g}" '
        f'fill="{COLOURS[number % len(COLOURS)]}"><title>{escape(tip)}</title></rect>'
    )


def _bound(scale: Scale, left: float, bottom: float, name: str, value: float) -> str:
    at = _px(scale, left, value)
    line = f'<path d="M{at:.1f} {_TOP}V{bottom:.1f}" stroke="{_BOUND}" stroke-dasharray="5 4"/>'
    return line + _text(at, bottom + 28, name, colour=_BOUND)


def _text(x: float, y: float, text: str, *, anchor: str = "middle", colour: str = _INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _legend(bars: Mapping[str, Sequence[float]]) -> str:
    entries = [
        f'<span><svg viewBox="0 0 26 10" aria-hidden="true"><rect x="8" width="10" height="10" '
        f'fill="{COLOURS[number % len(COLOURS)]}"/></svg>{escape(name)}</span>'
        for number, name in enumerate(bars)
        if name
    ]
    return f'<div class="legend">{"".join(entries)}</div>'
