"""Reports: well-formed, self-contained, and what users wrote stays text."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.cli.report import page
from capplan.cli.report.axes import Axis, scale_of
from capplan.cli.report.figures import Curve, bar_chart, line_chart, scatter_chart

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
    """Checks that every element that is opened is closed, and collects what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
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
        self.text += data


def parsed(document: str) -> Balanced:
    parser = Balanced()
    parser.feed(document)
    parser.close()
    assert parser.open == []
    return parser


def svg_of(figure: str) -> ET.Element:
    return ET.fromstring(re.search(r'<svg class="chart".*</svg>', figure, re.DOTALL)[0])  # type: ignore[index]


def a_page() -> str:
    chart = line_chart(HOSTILE, [Curve(HOSTILE, [1], [2], marked=True)], Axis(HOSTILE), Axis("y, s"))
    bars = bar_chart("bars", [HOSTILE], {HOSTILE: [1.0]}, Axis("y"))
    return page.page(
        HOSTILE,
        page.section(HOSTILE, page.charts(chart, bars), HOSTILE, intro=HOSTILE),
        page.section(
            "Tables",
            page.table([HOSTILE, "n"], [[HOSTILE, page.bad(HOSTILE)]], caption=HOSTILE),
            page.folded(HOSTILE, page.definitions({HOSTILE: HOSTILE}), page.paragraph(HOSTILE)),
        ),
        subtitle=HOSTILE,
    )


def test_what_users_wrote_stays_text() -> None:
    page = a_page()
    assert "<script" not in page
    assert parsed(page).text.count(HOSTILE) >= 12


def test_a_page_loads_nothing() -> None:
    page = a_page()
    assert all(target.startswith("#") for target in parsed(page).loaded)
    assert "default-src 'none'" in page
    assert "url(" not in page
    assert "@import" not in page


def test_a_page_links_to_its_sections() -> None:
    page = a_page()
    anchors = re.findall(r'href="#([^"]*)"', page)
    assert len(anchors) == 2
    for anchor in anchors:
        assert page.count(f'id="{anchor}"') == 1


@given(curves, st.booleans(), st.booleans())
def test_any_numbers_make_a_well_formed_chart(given_curves: list[Curve], log: bool, diagonal: bool) -> None:
    x, y = Axis("x", log=log), Axis("y", log=log)
    for figure in (
        line_chart("t", given_curves, x, y, rules={"bound": 3.0}),
        scatter_chart("t", given_curves, x, y, diagonal=diagonal),
        bar_chart("t", ["a", "b"], {str(i): list(c.y[:2]) for i, c in enumerate(given_curves)}, y),
    ):
        parsed(figure)
        svg = svg_of(figure)
        assert "nan" not in ET.tostring(svg, encoding="unicode").lower().replace("inline", "")


def test_a_line_is_interrupted_where_a_value_is_missing() -> None:
    figure = line_chart("t", [Curve("c", [0, 1, 2, 3, 4], [1, 2, NAN, 3, 4])], Axis("x"), Axis("y"))
    (path,) = [e.get("d") for e in svg_of(figure).iter() if e.get("stroke-width") == "1.6"]
    assert path is not None
    assert path.count("M") == 2


def test_points_have_tooltips_with_both_values() -> None:
    figure = line_chart("t", [Curve("c", [8], [2.5], marked=True)], Axis("A_max"), Axis("TTFT, s"))
    (tip,) = [e.text for e in svg_of(figure).iter() if e.tag.endswith("title")]
    assert tip == "c: A_max 8; TTFT, s 2.5"


def test_both_axes_are_labelled() -> None:
    texts = [e.text for e in svg_of(line_chart("t", [], Axis("time, s"), Axis("tokens/s"))).iter() if e.text]
    assert {"time, s", "tokens/s"} <= set(texts)


@pytest.mark.parametrize(
    ("axis", "values", "labels"),
    [
        (Axis("x"), [0, 10], ["0", "2", "4", "6", "8", "10"]),
        (Axis("x"), [0, 0.31], ["0.0", "0.1", "0.2", "0.3", "0.4"]),
        (Axis("x"), [0, 31_000], ["0", "10,000", "20,000", "30,000", "40,000"]),
        (Axis("x", log=True), [1, 1000], ["1", "3", "10", "30", "100", "300", "1,000"]),
        (Axis("x", log=True, ticks=(8, 16, 32)), [8, 32], ["8", "16", "32"]),
        (Axis("x", ticks=(1, 2, 3, 400)), [1, 400], ["1", "400"]),
        (Axis("x", low=0, high=1), [0.4], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
    ],
)
def test_ticks_are_round_or_as_given_and_do_not_touch(
    axis: Axis, values: list[float], labels: list[str]
) -> None:
    assert [label for _, label in scale_of(axis, values, from_zero=True).ticks] == labels


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=20), st.booleans(), st.booleans())
def test_every_value_and_tick_lies_on_the_axis(values: list[float], log: bool, round_ends: bool) -> None:
    scale = scale_of(Axis("x", log=log), values, round_ends=round_ends)
    places = [scale.at(value) for value in (*values, *(tick for tick, _ in scale.ticks))]
    assert all(-1e-6 <= place <= 1 + 1e-6 for place in places)
    assert [tick for tick, _ in scale.ticks] == sorted({tick for tick, _ in scale.ticks})
