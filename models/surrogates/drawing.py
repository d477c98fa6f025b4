"""A small tree as a drawing: self-contained SVG, root to the left, one row per rule.

Boxes carry their own light ground and lines are of a middle grey, so it reads on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from capplan.models.surrogates.features import FEATURES
from capplan.models.surrogates.forest import LEAF
from capplan.models.surrogates.tree import PROBABILITY, Tree
from capplan.models.surrogates.tree_rules import Rule, output_text, paths_of, short_figure

_COLUMN: Final = 236.0
_BOX: Final = 200.0
_ROW: Final = 32.0
_HEIGHT: Final = 24.0
_LEAF_BOX: Final = 232.0
_TITLE: Final = 34.0
_GAP: Final = 28.0
_MARGIN: Final = 10.0

_INK: Final = "#1c2530"
_NEUTRAL: Final = "#767676"  # the grey of equal contrast, 4.5 to 1, on white and on black
_ASKING: Final = "#eef2f6"
_WELL: Final = (205, 233, 214)
_MIDDLE: Final = (250, 240, 200)
_BADLY: Final = (246, 205, 198)


@dataclass(frozen=True)
class _Place:
    x: float
    y: float


def drawing(trees: Sequence[tuple[str, Tree]]) -> str:
    """Return one SVG document that shows titled trees, one below the other."""
    parts: list[str] = []
    width, top = 0.0, 0.0
    for title, tree in trees:
        parts += _drawn(title, tree, top)
        width = max(width, tree.depth * _COLUMN + _LEAF_BOX + 2 * _MARGIN)
        top += _TITLE + tree.rules * _ROW + _GAP
    label = escape(", ".join(title for title, _ in trees), quote=True)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {top:.0f}" '
            f'width="{width:.0f}" height="{top:.0f}" role="img" aria-label="{label}" '
            'font-family="system-ui, sans-serif" font-size="11.5">',
            *parts,
            "</svg>\n",
        ]
    )


def _drawn(title: str, tree: Tree, top: float) -> Iterator[str]:
    places = _places(tree, top + _TITLE)
    rules = paths_of(tree)
    yield _text(_MARGIN, top + 18, title, size=15, colour=_NEUTRAL, weight=600)
    for node, place in enumerate(places):
        if tree.feature[node] != LEAF:
            yield _branch(place, places[tree.left[node]], "yes")
            yield _branch(place, places[tree.right[node]], "no")
    for node, place in enumerate(places):
        if tree.feature[node] == LEAF:
            yield _leaf(place, rules[node])
        else:
            yield _question(tree, node, place)


def _places(tree: Tree, top: float) -> list[_Place]:
    """Return where each node goes: leaves on rows from top to bottom, a parent half way of its children."""
    places = [_Place(0.0, 0.0)] * len(tree.feature)
    rows = iter(range(tree.rules))

    def put(node: int, depth: int) -> float:
        if tree.feature[node] == LEAF:
            y = top + (next(rows) + 0.5) * _ROW
        else:
            y = (put(tree.left[node], depth + 1) + put(tree.right[node], depth + 1)) / 2
        places[node] = _Place(_MARGIN + depth * _COLUMN, y)
        return y

    put(0, 0)
    return places


def _question(tree: Tree, node: int, place: _Place) -> str:
    text = f"{FEATURES[tree.feature[node]]} ≤ {short_figure(tree.threshold[node])}"
    tip = f"{text}?  {tree.share[node]:.1%} of training scenarios come by here"
    return _box(place, _BOX, _ASKING, text, tip)


def _leaf(place: _Place, rule: Rule) -> str:
    text = f"{output_text(rule.answer, rule.value)} · {rule.share:.1%}"
    return _box(place, _LEAF_BOX, _tint(rule), text, f"{rule.text} ({rule.share:.1%} of training scenarios)")


def _box(place: _Place, width: float, fill: str, text: str, tip: str) -> str:
    # Names may grow longer than a box: then the letters draw closer, and the tooltip has them all.
    squeezed = f' textLength="{width - 12:.0f}" lengthAdjust="spacingAndGlyphs"'
    fits = len(text) * 6.1 <= width - 12
    return (
        f"<g><title>{escape(tip)}</title>"
        f'<rect x="{place.x:.1f}" y="{place.y - _HEIGHT / 2:.1f}" width="{width:.0f}" height="{_HEIGHT:.0f}" '
        f'rx="4" fill="{fill}" stroke="{_NEUTRAL}" stroke-width="0.8"/>'
        f'<text x="{place.x + 6:.1f}" y="{place.y + 4:.1f}" fill="{_INK}"{"" if fits else squeezed}>'
        f"{escape(text)}</text></g>"
    )


def _branch(parent: _Place, child: _Place, label: str) -> str:
    start, end = parent.x + _BOX, child.x
    middle = (start + end) / 2
    path = f"M{start:.1f} {parent.y:.1f}H{middle:.1f}V{child.y:.1f}H{end:.1f}"
    line = f'<path d="{path}" fill="none" stroke="{_NEUTRAL}" stroke-width="1.2"/>'
    return line + _text(middle - 4, child.y - 4, label, size=10, colour=_NEUTRAL, anchor="end")


def _text(
    x: float, y: float, text: str, *, size: int, colour: str, weight: int = 400, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _tint(rule: Rule) -> str:
    """Return the ground of a leaf: green where it says that all is well, red where requests starve.

    Only chances of starvation have an end that is bad; a throughput stays white.
    """
    if rule.answer != PROBABILITY:
        return "#ffffff"
    low, high, at = (
        (_WELL, _MIDDLE, 2 * rule.value) if rule.value < 0.5 else (_MIDDLE, _BADLY, 2 * rule.value - 1)
    )
    return "#" + "".join(f"{round(a + (b - a) * at):02x}" for a, b in zip(low, high, strict=True))
