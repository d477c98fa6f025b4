"""Reports as one HTML file that needs no network: the page, its sections, tables and notes.

Whatever is not :class:`Html` already is escaped, so names that users chose cannot become markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Final


class Html(str):
    """Text that is markup already; anything else is escaped where it enters a page."""

    __slots__ = ()


# No script, no style sheet, picture or font from elsewhere: a browser would refuse them.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE: Final = """
:root { --ink: #1c2530; --soft: #5b6775; --line: #d5dbe1; --band: #f4f6f8; --bad: #b3261e; --good: #1b6e3c; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1.25rem 4rem; max-width: 1240px; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.5rem 0 .25rem; }
p { margin: .4rem 0; max-width: 100ch; }
.soft, caption, figcaption .soft { color: var(--soft); }
nav { margin: .75rem 0; } nav a { margin-right: 1rem; } a { color: #0b57a4; }
.scroll { overflow-x: auto; margin: .5rem 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
caption { text-align: left; padding: .25rem 0; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { background: var(--band); font-weight: 600; }
.n { text-align: right; white-space: nowrap; }
tbody tr:hover { background: var(--band); }
.bad { color: var(--bad); font-weight: 600; } .good { color: var(--good); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(430px, 1fr)); gap: 1.25rem 1.5rem; }
figure { margin: 0; break-inside: avoid; } figcaption { font-weight: 600; font-size: .95rem; }
figcaption .soft { font-weight: 400; }
svg.chart { display: block; width: 100%; height: auto; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1rem; font-size: .85rem; min-height: 1.4rem; }
.legend svg { width: 26px; height: 10px; margin-right: .35rem; vertical-align: middle; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.25rem; max-width: 100ch; }
dt { font-weight: 600; } dd { margin: 0; }
details { margin: .5rem 0; } summary { cursor: pointer; font-weight: 600; }
@media (max-width: 520px) { .charts { grid-template-columns: 1fr; }
  dl { display: block; } dd { margin-bottom: .5rem; } }
@media print { body { max-width: none; padding: 0; } .scroll { overflow: visible; } }
"""


def page(title: str, *sections: str, subtitle: str = "") -> str:
    """Return a whole document.

    Parameters
    ----------
    title, subtitle : str
        What it is about, and the line below: workload, profile, settings.
    *sections : str
        What follows; links to those made by :func:`section` come first when there are several.
    """
    linked = [each for each in sections if isinstance(each, Section)]
    links = " ".join(f'<a href="#{each.anchor}">{escape(each.heading)}</a>' for each in linked)
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style></head><body>",
            f'<header><h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p></header>',
            f"<nav>{links}</nav>" if len(linked) > 1 else "",
            *(_markup(each) for each in sections),
            "</body></html>\n",
        )
    )


class Section(Html):
    """A section of a page, which the page links to."""

    __slots__ = ("anchor", "heading")

    heading: str
    anchor: str


def section(heading: str, *parts: str, intro: str = "") -> Section:
    """Return a section with its heading, a paragraph that introduces it, and its parts."""
    anchor = "".join(c if c.isalnum() else "-" for c in heading.lower())
    opening = paragraph(intro) if intro else ""
    body = "\n".join(_markup(part) for part in parts)
    made = Section(
        f'<section id="{escape(anchor)}"><h2>{escape(heading)}</h2>\n{opening}\n{body}\n</section>'
    )
    made.heading, made.anchor = heading, anchor
    return made


def paragraph(text: str) -> Html:
    """Return a paragraph."""
    return Html(f"<p>{_markup(text)}</p>")


def heading(text: str) -> Html:
    """Return a heading within a section."""
    return Html(f"<h3>{_markup(text)}</h3>")


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", numbers_from: int | None = 1
) -> Html:
    """Return a table of texts; columns from ``numbers_from`` on are aligned to the right."""

    def row(cells: Sequence[str], tag: str) -> str:
        parts = []
        for at, cell in enumerate(cells):
            side = ' class="n"' if numbers_from is not None and at >= numbers_from else ""
            parts.append(f"<{tag}{side}>{_markup(cell)}</{tag}>")
        return f"<tr>{''.join(parts)}</tr>"

    body = "\n".join(row(cells, "td") for cells in rows)
    above = f"<caption>{_markup(caption)}</caption>" if caption else ""
    inside = f"{above}<thead>{row(head, 'th')}</thead>\n<tbody>{body}</tbody>"
    return Html(f'<div class="scroll"><table>{inside}</table></div>')


def good(text: str) -> Html:
    """Return text marked as fine."""
    return Html(f'<span class="good">{_markup(text)}</span>')


def bad(text: str) -> Html:
    """Return text marked as a failure."""
    return Html(f'<span class="bad">{_markup(text)}</span>')


def charts(*figures: str) -> Html:
    """Return figures side by side, as many as the window is wide for."""
    return Html(f'<div class="charts">{"".join(_markup(each) for each in figures)}</div>')


def definitions(meanings: Mapping[str, str]) -> Html:
    """Return a list of terms and what they mean."""
    entries = (f"<dt>{_markup(term)}</dt><dd>{_markup(text)}</dd>" for term, text in meanings.items())
    return Html(f"<dl>{''.join(entries)}</dl>")


def folded(summary: str, *parts: str, is_open: bool = False) -> Html:
    """Return parts that a click on their summary shows."""
    state = " open" if is_open else ""
    body = "\n".join(_markup(part) for part in parts)
    return Html(f"<details{state}><summary>{_markup(summary)}</summary>\n{body}\n</details>")


def _markup(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)
