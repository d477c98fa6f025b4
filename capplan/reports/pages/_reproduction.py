"""The page of reproduced figures: the paper's numbers and curves beside ours."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from capplan.reports._console import Cell, Table, counted
from capplan.reports.pages import _page as page
from capplan.reports.pages._figures import Axis, Chart, Curve, is_wide, line_chart
from capplan.reports.tables._reproduction import HEAD, cells, judged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from capplan.reproduce import Plot, Recipe, Reproduction, Result

_TERMS: Final = {
    "ours": "mean over seeds of the digital twin",
    "band": "values that count as reproduced, fixed before the first run",
    **page.terms("TTFT", "E2E", "TPT"),
}


def reproduction_page(found: Sequence[tuple[Recipe, Reproduction]]) -> str:
    """Return one HTML page, readable offline, with every figure of some papers.

    Parameters
    ----------
    found
        Recipes and what was simulated of them.
    """
    sections = []
    for recipe, reproduction in found:
        sections.append(_setting(recipe, reproduction))
        sections += [_figure(recipe, result) for result in reproduction.results]
    return page.page(
        "Figures of the papers",
        *sections,
        subtitle=", ".join(f"{recipe.paper}: {judged(each)}" for recipe, each in found),
        cards=[_card(recipe, each) for recipe, each in found],
        terms=_TERMS,
    )


def _card(recipe: Recipe, reproduction: Reproduction) -> page.Card:
    inside, all_ = reproduction.judged
    return page.Card(recipe.paper, f"{inside} of {all_}", "rows inside")


def _setting(recipe: Recipe, reproduction: Reproduction) -> page.Section:
    parts: list[page.Block | Table] = [page.paragraph(each) for each in recipe.about.strip().split("\n\n")]
    if recipe.free:
        rows: list[tuple[Cell, ...]] = [
            (name, f"{each.value} {each.unit}".strip(), each.fixed_by) for name, each in recipe.free.items()
        ]
        parts.append(Table(("not printed by the paper", "value", "fixed by"), rows, numbers_from=None))
    if recipe.assumed:
        parts.append(
            page.folded(counted(len(recipe.assumed), "assumption"), page.definitions(dict(recipe.assumed)))
        )
    if recipe.changed:
        parts.append(
            page.folded(
                "Changed after rows had been seen", *(page.paragraph(each) for each in recipe.changed)
            )
        )
    return page.section(recipe.title, *parts, intro=f"{reproduction.command}, {reproduction.date}")


def _figure(recipe: Recipe, result: Result) -> page.Section:
    figure = recipe.figure(result.figure)
    rows = [cells(figure, row) for row in result.rows]
    parts: list[page.Block | Table] = [Table(HEAD, rows)]
    if result.curves and figure.plot is not None:
        parts.insert(0, page.charts(_chart(figure.title, figure.plot, result)))
    reasons = dict.fromkeys(row.reason.strip() for row in result.rows if row.reason)
    parts += [page.paragraph(reason) for reason in reasons]
    return page.section(f"{recipe.paper} {figure.id}: {figure.title}", *parts, intro=figure.note)


def _chart(title: str, plot: Plot, result: Result) -> Chart:
    curves = [
        Curve(each.name, each.x, [math.nan if y is None else y for y in each.y], marked=True)
        for each in result.curves
    ]
    for name, points in plot.paper.items():
        x, y = zip(*points, strict=True)
        curves.append(Curve(f"paper: {name}", x, y, marked=True))
    shown = [value for curve in curves for value in curve.y]
    across = [value for curve in curves for value in curve.x]
    x_axis, y_axis = (
        Axis(label, log=is_wide(values)) for label, values in ((plot.x, across), (plot.y, shown))
    )
    return line_chart(title, curves, x_axis, y_axis)
