"""Reports are well-formed and self-contained, and text of users is never markup."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.reports import Table
from capplan.reports.pages import _page as page
from capplan.reports.pages._figures import (
    Axis,
    Chart,
    Curve,
    bar_chart,
    bar_rows,
    histogram,
    line_chart,
    scatter_chart,
)

VOID = {"meta", "br"}
NAN = float("nan")
HOSTILE = '<script>alert("&")</script>'
numbers = st.floats(-1e12, 1e12) | st.just(NAN) | st.just(float("inf"))
curves = st.lists(
    st.lists(st.tuples(numbers, numbers), max_size=12).map(
        lambda points: Curve("c", [x for x, _ in points], [y for _, y in points], marked=True)
    ),
    max_size=10,
)


class Balanced(HTMLParser):
    """Checks that every element that is opened is closed, and collects texts, references and scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.scripts: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "data", "action")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "data", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text += data


def own(document: str) -> str:
    """Return a page without the copy of plotly.js."""
    return re.sub(r"<script>/\*\*.*?</script>", "<script></script>", document, flags=re.DOTALL)


def parsed(document: str) -> Balanced:
    parser = Balanced()
    parser.feed(own(document))
    parser.close()
    assert parser.open == []
    assert all(target.startswith("#") for target in parser.loaded)
    assert "default-src 'none'" in document
    assert "http" not in re.sub(r"http-equiv|http://www.w3.org/2000/svg", "", own(document))
    assert not re.search(r"url\(|@import|http-equiv=.refresh", own(document))
    return parser


def figures_of(document: str) -> list[dict[str, Any]]:
    """Return the figures of a page as Plotly gets them, each with its title."""
    found = re.findall(
        r'aria-label="([^"]*)"[^>]*></div>\s*<script type="application/json">(.*?)</script>', document
    )
    return [{"title": title, **json.loads(text)} for title, text in found]


def a_page() -> str:
    chart = line_chart(HOSTILE, [Curve(HOSTILE, [1], [2], marked=True)], Axis(HOSTILE), Axis("y, s"))
    bars = bar_chart("bars", [HOSTILE], {HOSTILE: [1.0]}, Axis("y"))
    return page.page(
        HOSTILE,
        page.section(HOSTILE, page.charts(chart, bars), page.paragraph(HOSTILE), intro=HOSTILE),
        page.section(
            "Tables",
            Table([HOSTILE, "n"], [[HOSTILE, page.bad(HOSTILE)]], caption=HOSTILE),
            page.folded(HOSTILE, page.definitions({HOSTILE: HOSTILE}), page.paragraph(HOSTILE)),
        ),
        subtitle=HOSTILE,
        cards=[page.Card(HOSTILE, page.good(HOSTILE), HOSTILE)],
    )


def test_text_of_users_is_escaped_in_markup_and_in_figures() -> None:
    document = a_page()
    assert HOSTILE not in document
    found = parsed(document)
    assert found.text.count(HOSTILE) >= 14
    assert len(found.scripts) == 4 - 1  # two figures and the script that draws them
    for figure in figures_of(document):
        assert "<" not in json.dumps(figure)


def test_one_copy_of_plotly_is_inlined_only_where_there_are_figures() -> None:
    assert a_page().count("* plotly.js v") == 1
    assert "plotly" not in page.page("t", page.section("s", page.paragraph("p"))).lower()


def test_a_page_links_to_its_sections() -> None:
    document = a_page()
    anchors = re.findall(r'href="#([^"]*)"', own(document))
    assert len(anchors) == 2
    for anchor in anchors:
        assert document.count(f'id="{anchor}"') == 1


def test_long_tables_are_folded() -> None:
    rows = [[str(number)] for number in range(100)]
    assert "<details>" in page.page("t", page.section("s", Table(["n"], rows)))
    assert "<details>" not in page.page("t", page.section("s", Table(["n"], rows[:50])))


@pytest.mark.long
@given(curves, st.booleans(), st.booleans())
def test_any_numbers_make_strict_json(given_curves: list[Curve], log: bool, diagonal: bool) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    x, y = Axis("x", log=log), Axis("y", log=log)
    bars = {str(i): [*curve.y[:2], 0.0, 0.0][:2] for i, curve in enumerate(given_curves)}
    for chart in (
        line_chart("t", given_curves, x, y, bounds={"bound": 3.0}),
        scatter_chart("t", given_curves, x, y, diagonal=diagonal),
        bar_chart("t", ["a", "b"], bars, y),
        bar_rows("t", ["a", "b"], bars, x),
        histogram("t", [value for curve in given_curves for value in curve.y], x, bins=5),
    ):
        json.loads(chart.figure.to_json(), parse_constant=refuse)


def drawn(chart: Chart) -> dict[str, Any]:
    return json.loads(chart.figure.to_json())  # type: ignore[no-any-return]


def test_a_line_is_interrupted_where_a_value_is_missing() -> None:
    curve = Curve("c", [0, 1, 2, 3, 4], [1, 2, NAN, 3, 4])
    (trace,) = drawn(line_chart("t", [curve], Axis("x"), Axis("y")))["data"]
    assert trace["y"] == [1, 2, None, 3, 4]
    assert trace["connectgaps"] is False


def test_bounds_and_marks_are_lines_with_an_entry_in_the_legend() -> None:
    curve = [Curve("", [1, 2, 4], [3, 2, 1])]
    axis = Axis("slots", log=True, low=1, high=8)
    chart = line_chart(
        "t", curve, axis, Axis("y"), bounds={"bound": 5.0}, marks={"chosen": 2.0}, beyond=("no memory", 6.0)
    )
    shapes = {shape["name"]: shape for shape in drawn(chart)["layout"]["shapes"]}
    assert set(shapes) == {"bound", "chosen", "no memory"}
    assert all(shape["showlegend"] for shape in shapes.values())
    assert (shapes["bound"]["y0"], shapes["bound"]["y1"], shapes["bound"]["xref"]) == (5.0, 5.0, "paper")
    assert (shapes["chosen"]["x0"], shapes["chosen"]["yref"]) == (2.0, "paper")
    assert shapes["no memory"]["x0"] == 6.0


@pytest.mark.parametrize(
    ("axis", "kept"),
    [(Axis("x", ticks=(1, 2, 3, 400)), [1, 400]), (Axis("x", log=True, ticks=(8, 16, 32)), [8, 16, 32])],
)
def test_given_ticks_do_not_touch(axis: Axis, kept: list[float]) -> None:
    layout = drawn(line_chart("t", [Curve("", [1, 2], [1, 2])], axis, Axis("y")))["layout"]
    assert layout["xaxis"]["tickvals"] == kept


def test_both_axes_are_labelled() -> None:
    layout = drawn(line_chart("t", [], Axis("time, s"), Axis("tokens/s")))["layout"]
    assert layout["xaxis"]["title"]["text"] == "time, s"
    assert layout["yaxis"]["title"]["text"] == "tokens/s"
