"""Marks across a chart: what was chosen, and what is out of reach."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Final

from capplan.cli.chart_axes import Scale

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
    return line + _label(at + (-4 if is_far else 4), area.bottom - 6, name, _CHOSEN, is_far=is_far)


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
    return shade + _label(area.right - 4, area.top + 12, name, _SOFT, is_far=True)


def _label(x: float, y: float, text: str, colour: str, *, is_far: bool) -> str:
    anchor = "end" if is_far else "start"
    halo = 'stroke="#fff" stroke-width="3" paint-order="stroke"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" {halo}>{escape(text)}</text>'
    )
