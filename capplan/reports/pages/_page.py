"""Self-contained HTML pages: blocks of content, rendered with Jinja2."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import jinja2
from markupsafe import Markup

from capplan.models.calibration import SMAPE_FORMULA
from capplan.reports._console import Cell, Mark, Table, number, percent

if TYPE_CHECKING:
    from capplan.reports.pages._figures import Chart

_MOST_ROWS: Final = 60
"""Rows from which a table is folded."""

_PHONE_PX: Final = 366.0
_CHARACTER_PX: Final = 7.2
_CELL_PX: Final = 16.0

_TERMS: Final = {
    "A_max": "adapter slots in GPU memory (vLLM --max-loras); each takes memory that KV could use",
    "throughput": "input and output tokens of requests completed within the measured time, per second",
    "offered": "input and output tokens of requests that arrived within the measured time, per second",
    "served": "tokens of completed over tokens of submitted requests; requests in execution at the end are "
    "left out of both, waiting, failed and rejected ones are not",
    "starved": "less than 90 % served",
    "TTFT": "time from arrival to the first token",
    "E2E": "time from arrival to the last token",
    "TPOT": "(E2E - TTFT) / (output tokens - 1), per request",
    "TPT": "E2E / output tokens, per request",
    "ITL": "gap between two tokens as a client sees it, every gap counting alike",
    "SMAPE": f"{SMAPE_FORMULA}; p predicted, a measured",
    "lower bound": "no plan that keeps the bounds and the headroom uses fewer GPUs",
}
"""Definitions of the terms that several reports use."""


def terms(*names: str) -> dict[str, str]:
    """Return the definitions of shared terms."""
    return {name: _TERMS[name] for name in names}


@dataclass(frozen=True)
class Card:
    """One figure of the header, such as the number of GPUs, with a note below it."""

    label: str
    value: Cell
    note: str = ""


class Block(SimpleNamespace):
    """Part of a section; ``kind`` selects its markup in the template."""

    kind: str


@dataclass(frozen=True)
class Section:
    """Part of a page under a heading that the navigation links to."""

    heading: str
    parts: tuple[Block | Table, ...]
    intro: str = ""

    @property
    def anchor(self) -> str:
        """Heading in letters and digits, for links."""
        return "".join(c if c.isalnum() else "-" for c in self.heading.lower())


def page(
    title: str,
    *sections: Section,
    subtitle: str = "",
    cards: Sequence[Card] = (),
    terms: Mapping[str, str] | None = None,
) -> str:
    """Return a page as one HTML document that loads nothing.

    The subtitle has workload, profile and settings; `cards` are figures of the header, and `terms` are
    defined in the last section.
    """
    if terms:
        sections = (*sections, section("Definitions", definitions(terms)))
    has_charts = any(block.kind == "charts" for block in _flat(each.parts for each in sections))
    return _template().render(
        title=title,
        subtitle=subtitle,
        cards=cards,
        sections=sections,
        most_rows=_MOST_ROWS,
        plotly_js=_plotly_js() if has_charts else "",
    )


def _flat(groups: Iterable[Sequence[Block | Table]]) -> Iterable[Block | Table]:
    for blocks in groups:
        yield from blocks
        yield from _flat(
            block.parts for block in blocks if isinstance(block, Block) and block.kind == "folded"
        )


@cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("capplan.reports.pages", ".")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"json": _json, "is_wide": _is_wide}
    return environment.get_template("page.html.j2")


def _is_wide(table: Table) -> bool:
    """Return whether a table is wider than a phone with every text broken into its words."""
    width_px = 0.0
    for index, (name, *cells) in enumerate(zip(table.head, *table.rows, strict=True)):
        is_text = table.numbers_from is None or index < table.numbers_from
        texts = [part for cell in cells for part in (str(cell).split() if is_text else [str(cell)])]
        width_px += _CELL_PX + _CHARACTER_PX * max(map(len, [*name.split(), *texts]), default=0)
    return width_px > _PHONE_PX


def _json(chart: Chart) -> Markup:
    """Return the figure as JSON that cannot end its script element."""
    text: str = chart.figure.to_json()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704 (escaped above)


def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def section(heading: str, *parts: Block | Table, intro: str = "") -> Section:
    """Return a section with an introductory paragraph."""
    return Section(heading, parts, intro)


def paragraph(text: Cell) -> Block:
    """Return a paragraph."""
    return Block(kind="paragraph", text=text)


def heading(text: str) -> Block:
    """Return a heading within a section."""
    return Block(kind="heading", text=text)


def settings_table(settings: Mapping[str, object]) -> Table:
    """Return the table of the settings that are given."""
    rows = [(name, str(value)) for name, value in settings.items() if value is not None]
    return Table(("setting", "value"), rows, numbers_from=None)


def charts(*items: Chart) -> Block:
    """Return charts in a grid."""
    return Block(kind="charts", charts=items)


def definitions(meanings: Mapping[str, Cell]) -> Block:
    """Return a list of terms and their definitions."""
    return Block(kind="definitions", meanings=meanings)


def folded(summary: str, *parts: Block | Table, is_open: bool = False) -> Block:
    """Return blocks under a summary that shows and hides them."""
    return Block(kind="folded", summary=summary, parts=parts, is_open=is_open)


def svg(markup: str) -> Block:
    """Return a drawing; the markup is not escaped."""
    return Block(kind="svg", markup=markup)


def good(text: str) -> Mark:
    """Return text in the tone of success."""
    return Mark(text, "good")


def bad(text: str) -> Mark:
    """Return text in the tone of failure."""
    return Mark(text, "bad")


def against_bound(value: float | None, bound: float | None, text: str) -> Cell:
    """Return ``text``, marked by whether the value keeps its bound; unmarked without a bound."""
    if bound is None or value is None or math.isnan(value):
        return text
    return good(text) if value <= bound else bad(text)


def served_card(fraction: float, *, starved: bool) -> Card:
    """Return the card of the share of tokens served."""
    return Card("Tokens served", Mark(percent(fraction), "bad" if starved else "good"))


def latency_card(label: str, key: str, value: float | None, bounds: Mapping[str, float]) -> Card:
    """Return the card of a latency in the unit of its key, such as ``ttft_p99_s``, against its bound."""
    kind, _, unit = key.split("_")
    same = {name: bound for name, bound in bounds.items() if name.split("_")[0] == kind}
    shown = number(value, 2 if unit == "s" else 1)
    text = against_bound(value, bounds.get(key), f"{shown} {unit}")
    note = ", ".join(f"bound {name} {bound:g}" for name, bound in same.items())
    return Card(label, text, note or "no bound")
