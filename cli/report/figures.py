"""Axes of charts: which range they show, where their ticks are, where a value lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from capplan.cli.report.axes import Axis, Scale, scale_of
from capplan.cli.report.page import Html

__all__ = [
    "Axis",
    "Curve",
    "bar_chart",
    "line_chart",
    "scatter_chart",
]


# Okabe and Ito's colours, told apart by people of all kinds of colour vision.
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")

_DASHES: Final = ("", "7 3", "2 3", "9 3 2 3")

_WIDTH: Final = 520.0

_HEIGHT: Final = 290.0

_TOP: Final = 8.0

_RIGHT: Final = 22.0

_BOTTOM: Final = 44.0

_CHARACTER: Final = 6.6  # width of one at the size of tick labels

_TOOLTIPS: Final = 200  # points of a curve up to which each gets one


@dataclass(frozen=True)
class Curve:
    """What one colour of a chart shows.

    Attributes
    ----------
    name : str
        Its entry in the legend; an empty one has none.
    x, y : sequence of float
        The points in order; a line is interrupted where a value is not finite.
    marked : bool
        Whether a line has a mark with a tooltip at each point.
    low, high : sequence of float, optional
        Ends of a whisker at each point.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    marked: bool = False
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class _Frame:
    """Where the axes are on the picture."""

    x: Scale
    y: Scale
    left: float

    def px(self, value: float) -> str:
        return _px(self.left + self.x.at(value) * (_WIDTH - _RIGHT - self.left))

    def py(self, value: float) -> str:
        return _px(_HEIGHT - _BOTTOM - self.y.at(value) * (_HEIGHT - _BOTTOM - _TOP))


def line_chart(
    title: str,
    curves: Sequence[Curve],
    x: Axis,
    y: Axis,
    *,
    rules: Mapping[str, float] | None = None,
    marks: Mapping[str, float] | None = None,
    beyond: tuple[str, float] | None = None,
    note: str = "",
) -> Html:
    """Return a chart of lines.

    Parameters
    ----------
    title, note : str
        What it shows, and what should be known to read it.
    curves : sequence of Curve
        The lines; beyond eight colours repeat with another dash.
    x, y : Axis
        The axes, with units in their labels; y starts at 0 unless it is logarithmic or told otherwise.
    rules : mapping of str to float, optional
        Horizontal lines with their names, such as bounds.
    marks : mapping of str to float, optional
        Vertical lines with their names, such as what was chosen.
    beyond : tuple of str and float, optional
        Name of what is out of reach, and where on the x axis it begins: shaded from there on.
    """
    rules = rules or {}
    frame = _frame(x, y, curves, extra_y=rules.values(), from_zero=True)
    area = Area(frame.left, _TOP, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM)
    drawn = [] if beyond is None else [shaded(area, frame.x, *beyond)]
    drawn += [marked(area, frame.x, name, at) for name, at in (marks or {}).items()]
    drawn += [_rule(frame, name, at) for name, at in rules.items()]
    for number, curve in enumerate(curves):
        drawn.append(_line(frame, curve, number))
        drawn.append(_whiskers(frame, curve, number))
        if curve.marked:
            drawn.append(_points(frame, curve, number, x, y))
    return _figure(title, note, _legend(curves, is_line=True), _svg(title, frame, x, y, drawn))


def scatter_chart(
    title: str, curves: Sequence[Curve], x: Axis, y: Axis, *, diagonal: bool = False, note: str = ""
) -> Html:
    """Return a chart of points; parameters as for :func:`line_chart`.

    Parameters
    ----------
    diagonal : bool
        Whether both axes have one range and the line of equal values is drawn, as for predicted and measured.
    """
    frame = _frame(x, y, curves, from_zero=False)
    drawn = []
    if diagonal:
        low, high = min(frame.x.low, frame.y.low), max(frame.x.high, frame.y.high)
        x, y = (Axis(a.label, a.log, low, high, a.ticks) for a in (x, y))
        frame = _frame(x, y, curves, from_zero=False)
        ends = f'x1="{frame.px(low)}" y1="{frame.py(low)}" x2="{frame.px(high)}" y2="{frame.py(high)}"'
        drawn.append(f'<line {ends} stroke="#5b6775" stroke-dasharray="4 3"/>')
    for number, curve in enumerate(curves):
        drawn.append(_whiskers(frame, curve, number))
        drawn.append(_points(frame, curve, number, x, y))
    return _figure(title, note, _legend(curves, is_line=False), _svg(title, frame, x, y, drawn))


def bar_chart(
    title: str, categories: Sequence[str], bars: Mapping[str, Sequence[float]], y: Axis, *, note: str = ""
) -> Html:
    """Return groups of bars: one group per category, one bar of it per entry of ``bars``."""
    values = [value for heights in bars.values() for value in heights]
    scale = scale_of(y, [*values, 0.0], from_zero=True)
    frame = _Frame(Scale(0.0, float(max(1, len(categories))), False, ()), scale, _left(scale))
    thickness = 0.8 / max(1, len(bars))
    drawn = []
    for number, (name, heights) in enumerate(bars.items()):
        for at, height in enumerate(heights):
            if not scale.shows(height):
                continue
            start = at + 0.1 + number * thickness
            top, bottom = sorted((float(frame.py(height)), float(frame.py(max(0.0, scale.low)))))
            width = float(frame.px(start + thickness)) - float(frame.px(start))
            size = f'width="{_px(width)}" height="{_px(bottom - top)}"'
            tip = escape(f"{categories[at]}{', ' + name if name else ''}: {height:.6g}")
            drawn.append(
                f'<rect x="{frame.px(start)}" y="{_px(top)}" {size}'
                f' fill="{_colour(number)}"><title>{tip}</title></rect>'
            )
    room = (_WIDTH - _RIGHT - frame.left) / max(1, len(categories)) / _CHARACTER
    every = max(1, round(max((len(c) for c in categories), default=1) / max(1.0, room) + 0.49))
    for at, category in enumerate(categories):
        if at % every == 0:
            drawn.append(_text(float(frame.px(at + 0.5)), _HEIGHT - _BOTTOM + 16, category))
    legend = _legend([Curve(name, (), ()) for name in bars], is_line=False)
    return _figure(title, note, legend, _svg(title, frame, Axis(""), y, drawn))


def _frame(
    x: Axis, y: Axis, curves: Sequence[Curve], extra_y: Iterable[float] = (), *, from_zero: bool
) -> _Frame:
    ends = [v for curve in curves for side in (curve.low, curve.high) if side is not None for v in side]
    across = scale_of(x, (v for curve in curves for v in curve.x), round_ends=not from_zero)
    up = scale_of(y, [*(v for curve in curves for v in curve.y), *ends, *extra_y], from_zero=from_zero)
    return _Frame(across, up, _left(up))


def _left(scale: Scale) -> float:
    return 34.0 + _CHARACTER * max((len(label) for _, label in scale.ticks), default=1)


def _runs(frame: _Frame, curve: Curve) -> Iterator[list[str]]:
    """Give the stretches of a curve that are not interrupted, as points of the picture."""
    run: list[str] = []
    for x, y in zip(curve.x, curve.y, strict=True):
        if frame.x.shows(x) and frame.y.shows(y):
            run.append(f"{frame.px(x)} {frame.py(y)}")
        elif run:
            yield run
            run = []
    if run:
        yield run


def _line(frame: _Frame, curve: Curve, number: int) -> str:
    # A stretch of one point is a dot: a line of no length with round ends.
    paths = "".join(f"M{'L'.join(run)}" if len(run) > 1 else f"M{run[0]}h0" for run in _runs(frame, curve))
    dash = _DASHES[number // len(COLOURS) % len(_DASHES)]
    style = f'stroke="{_colour(number)}" stroke-width="1.6" stroke-linecap="round" stroke-linejoin="round"'
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{paths}" fill="none" {style}{dashes}/>'


def _points(frame: _Frame, curve: Curve, number: int, x: Axis, y: Axis) -> str:
    shown = [(a, b) for a, b in zip(curve.x, curve.y, strict=True) if frame.x.shows(a) and frame.y.shows(b)]
    if len(shown) > _TOOLTIPS:
        dots = "".join(f"M{frame.px(a)} {frame.py(b)}h0" for a, b in shown)
        style = f'stroke="{_colour(number)}" stroke-width="3" stroke-linecap="round" stroke-opacity=".45"'
        return f'<path d="{dots}" fill="none" {style}/>'
    head = f"{curve.name}: " if curve.name else ""
    return "".join(
        f'<circle cx="{frame.px(a)}" cy="{frame.py(b)}" r="3.2" fill="{_colour(number)}">'
        f"<title>{escape(f'{head}{x.label} {a:.6g}; {y.label} {b:.6g}')}</title></circle>"
        for a, b in shown
    )


def _whiskers(frame: _Frame, curve: Curve, number: int) -> str:
    if curve.low is None or curve.high is None:
        return ""
    bars = "".join(
        f"M{frame.px(x)} {frame.py(low)}V{frame.py(high)}"
        for x, low, high in zip(curve.x, curve.low, curve.high, strict=True)
        if frame.x.shows(x) and frame.y.shows(low) and frame.y.shows(high)
    )
    return f'<path d="{bars}" stroke="{_colour(number)}" stroke-width="1.2"/>'


def _rule(frame: _Frame, name: str, at: float) -> str:
    if not frame.y.shows(at):
        return ""
    y = frame.py(at)
    ends = f'x1="{_px(frame.left)}" x2="{_px(_WIDTH - _RIGHT)}" y1="{y}" y2="{y}"'
    label = _text(_WIDTH - _RIGHT - 4, float(y) - 4, name, anchor="end", colour="#b3261e")
    return f'<line {ends} stroke="#b3261e" stroke-dasharray="5 4"/>{label}'


def _svg(title: str, frame: _Frame, x: Axis, y: Axis, drawn: Sequence[str]) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value, label in frame.y.ticks:
        at = frame.py(value)
        parts.append(f'<path d="M{_px(frame.left)} {at}H{_px(right)}" stroke="#e3e7eb"/>')
        parts.append(_text(frame.left - 6, float(at) + 4, label, anchor="end"))
    for value, label in frame.x.ticks:
        at = frame.px(value)
        parts.append(f'<path d="M{at} {_px(bottom)}v4" stroke="#5b6775"/>')
        parts.append(_text(float(at), bottom + 16, label))
    parts.append(
        f'<path d="M{_px(frame.left)} {_px(_TOP)}V{_px(bottom)}H{_px(right)}" fill="none" stroke="#5b6775"/>'
    )
    parts.extend(drawn)
    parts.append(_text((frame.left + right) / 2, _HEIGHT - 8, x.label))
    middle = (_TOP + bottom) / 2
    parts.append(f'<g transform="translate(13 {_px(middle)}) rotate(-90)">{_text(0, 0, y.label)}</g>')
    size = f'viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" font-size="12" font-family="inherit"'
    return f'<svg class="chart" role="img" aria-label="{escape(title)}" {size}>{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", colour: str = "#3b4754") -> str:
    halo = 'stroke="#fff" stroke-width="3" paint-order="stroke"'  # keeps it readable above lines
    place = f'x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" {halo}>{escape(text)}</text>'


def _legend(curves: Sequence[Curve], *, is_line: bool) -> str:
    entries = []
    for number, curve in enumerate(curves):
        if not curve.name:
            continue
        dash = _DASHES[number // len(COLOURS) % len(_DASHES)]
        line = f'<path d="M1 5H25" stroke="{_colour(number)}" stroke-width="2" stroke-dasharray="{dash}"/>'
        box = f'<rect x="8" width="10" height="10" fill="{_colour(number)}"/>'
        swatch = f'<svg viewBox="0 0 26 10" aria-hidden="true">{line if is_line else box}</svg>'
        entries.append(f"<span>{swatch}{escape(curve.name)}</span>")
    return f'<div class="legend">{"".join(entries)}</div>'


def _figure(title: str, note: str, legend: str, svg: str) -> Html:
    more = f' <span class="soft">{escape(note)}</span>' if note else ""
    return Html(f"<figure><figcaption>{escape(title)}{more}</figcaption>{legend}{svg}</figure>")


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _px(value: float) -> str:
    return f"{value:.1f}"


_CHOSEN: Final = "#1b6e3c"

_SOFT: Final = "#5b6775"

_ROOM: Final = 0.7  # share of the width beyond which a label stands on the left of its line


@dataclass(frozen=True)
class Area:
    """Where curves are drawn, in units of the picture."""

    left: float
    top: float
    right: float
    bottom: float

    def across(self, scale: Scale, value: float) -> float:
        """Return where a value lies, within the area."""
        at = self.left + scale.at(value) * (self.right - self.left)
        return min(self.right, max(self.left, at))


def marked(area: Area, scale: Scale, name: str, value: float) -> str:
    """Return a vertical line with its name at the foot; nothing where the value has no place."""
    if not scale.shows(value):
        return ""
    at = area.across(scale, value)
    line = f'<path d="M{at:.1f} {area.top:.1f}V{area.bottom:.1f}" stroke="{_CHOSEN}" stroke-dasharray="2 3"/>'
    is_far = scale.at(value) > _ROOM
    return line + _mark_label(at + (-4 if is_far else 4), area.bottom - 6, name, _CHOSEN, is_far=is_far)


def shaded(area: Area, scale: Scale, name: str, start: float) -> str:
    """Return the shade from a value to the end of the axis; nothing where the axis ends before it."""
    if not scale.shows(start) or scale.at(start) >= 1.0:
        return ""
    at = area.across(scale, start)
    size = f'width="{area.right - at:.1f}" height="{area.bottom - area.top:.1f}"'
    shade = (
        f'<rect class="beyond" x="{at:.1f}" y="{area.top:.1f}" {size} fill="#b3261e" fill-opacity=".1">'
        f"<title>{escape(name)}</title></rect>"
    )
    return shade + _mark_label(area.right - 4, area.top + 12, name, _SOFT, is_far=True)


def _mark_label(x: float, y: float, text: str, colour: str, *, is_far: bool) -> str:
    anchor = "end" if is_far else "start"
    halo = 'stroke="#fff" stroke-width="3" paint-order="stroke"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" {halo}>{escape(text)}</text>'
    )


_THICKNESS: Final = 13.0

_GAP: Final = 8.0

_ROW_CHARACTER: Final = 6.4

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
    left = 12.0 + _ROW_CHARACTER * max((len(name) for name in names), default=1)
    row = _THICKNESS * max(1, len(bars)) + _GAP
    bottom = _TOP + row * max(1, len(names))
    drawn = list(_grid(scale, left, bottom))
    for at, name in enumerate(names):
        top = _TOP + at * row
        drawn.append(_row_text(left - 6, top + row / 2 + 4, name, anchor="end"))
        for number, (entry, lengths) in enumerate(bars.items()):
            tip = f"{name}{', ' + entry if entry else ''}: {lengths[at]:.6g}"
            drawn.append(_bar(scale, left, top + _GAP / 2 + number * _THICKNESS, lengths[at], number, tip))
    drawn += [_bound(scale, left, bottom, name, at) for name, at in bounds.items()]
    drawn.append(_row_text((left + _WIDTH - _RIGHT) / 2, bottom + _BOTTOM - 8, x.label))
    size = f'viewBox="0 0 {_WIDTH:g} {bottom + _BOTTOM:g}" font-size="12" font-family="inherit"'
    svg = f'<svg class="chart" role="img" aria-label="{escape(title)}" {size}>{"".join(drawn)}</svg>'
    more = f' <span class="soft">{escape(note)}</span>' if note else ""
    return Html(f"<figure><figcaption>{escape(title)}{more}</figcaption>{_row_legend(bars)}{svg}</figure>")


def _row_px(scale: Scale, left: float, value: float) -> float:
    return left + scale.at(value) * (_WIDTH - _RIGHT - left)


def _grid(scale: Scale, left: float, bottom: float) -> list[str]:
    lines = []
    for value, label in scale.ticks:
        at = _row_px(scale, left, value)
        lines.append(f'<path d="M{at:.1f} {_TOP}V{bottom:.1f}" stroke="#e3e7eb"/>')
        lines.append(_row_text(at, bottom + 16, label))
    axis = f'<path d="M{left:.1f} {_TOP}V{bottom:.1f}H{_WIDTH - _RIGHT}" fill="none" stroke="#5b6775"/>'
    return [*lines, axis]


def _bar(scale: Scale, left: float, top: float, value: float, number: int, tip: str) -> str:
    if not scale.shows(value):
        return ""
    start, end = sorted((_row_px(scale, left, value), _row_px(scale, left, max(0.0, scale.low))))
    return (
        f'<rect x="{start:.1f}" y="{top:.1f}" width="{end - start:.1f}" height="{_THICKNESS - 2:g}" '
        f'fill="{COLOURS[number % len(COLOURS)]}"><title>{escape(tip)}</title></rect>'
    )


def _bound(scale: Scale, left: float, bottom: float, name: str, value: float) -> str:
    at = _row_px(scale, left, value)
    line = f'<path d="M{at:.1f} {_TOP}V{bottom:.1f}" stroke="{_BOUND}" stroke-dasharray="5 4"/>'
    return line + _row_text(at, bottom + 28, name, colour=_BOUND)


def _row_text(x: float, y: float, text: str, *, anchor: str = "middle", colour: str = _INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _row_legend(bars: Mapping[str, Sequence[float]]) -> str:
    entries = [
        f'<span><svg viewBox="0 0 26 10" aria-hidden="true"><rect x="8" width="10" height="10" '
        f'fill="{COLOURS[number % len(COLOURS)]}"/></svg>{escape(name)}</span>'
        for number, name in enumerate(bars)
        if name
    ]
    return f'<div class="legend">{"".join(entries)}</div>'
