"""Plotly figures of plans, simulations and other results.

Pages and the ``plot`` methods of results share them. Bounds are entries of the legend, so that their labels
collide with nothing and can be toggled as the curves can.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

if TYPE_CHECKING:
    from capplan.spec import Group, Plan, Plotted
    from capplan.twin import DetailedResult, SimulationResult

# Palette of Okabe and Ito, without black, which is invisible in dark mode.
COLOURS: Final = ("#1f88cc", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
_DASHES: Final = ("solid", "dash", "dot", "dashdot")
_BOUND: Final = "#e5383b"
_CHOSEN: Final = "#2a9d5c"
_HEIGHT_PX: Final = 320
_WIDE: Final = 50.0
"""Ratio of values from which an axis is logarithmic."""
_MOST_GROUPS: Final = 40
_OVERLAID: Final = 8
"""Runs in one chart over time."""
COARSER: Final = 5
"""Buckets averaged into one point of a rate."""
STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True)
class Axis:
    """Label with unit, scale and, optionally, range and ticks of an axis."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: tuple[float, ...] = ()


@dataclass(frozen=True)
class Curve:
    """Points of one colour, with gaps at values that are not finite; no legend if the name is empty."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    marked: bool = False


@dataclass(frozen=True)
class Chart:
    """A figure with its title and a note."""

    title: str
    figure: go.Figure
    note: str = ""

    @property
    def height_px(self) -> int:
        """Height of the figure, in pixels."""
        return int(self.figure.layout.height)


def is_wide(values: Sequence[float]) -> bool:
    """Return whether values are positive and span so many magnitudes that a logarithmic axis shows more."""
    known = [value for value in values if math.isfinite(value)]
    return bool(known) and 0.0 < _WIDE * min(known) < max(known)


def line_chart(
    title: str,
    curves: Sequence[Curve],
    x: Axis,
    y: Axis,
    *,
    bounds: Mapping[str, float] | None = None,
    marks: Mapping[str, float] | None = None,
    beyond: tuple[str, float] | None = None,
) -> Chart:
    """Return a chart of lines; a linear y axis starts at 0.

    `bounds` are horizontal lines by name, such as latency bounds, and `marks` vertical ones, such as the
    chosen value; `beyond` is name and start of the infeasible part of the x axis, which is shaded.
    """
    figure = _figure(x, y, from_zero=True)
    for number, curve in enumerate(curves):
        mode = "lines+markers" if curve.marked or len(curve.x) == 1 else "lines"
        line = {"color": _colour(number), "width": 1.8, "dash": _DASHES[number // len(COLOURS) % 4]}
        figure.add_scatter(**_points(curve, number), mode=mode, line=line, cliponaxis=False)
    if y.log:
        figure.update_yaxes(dtick=1, minor={"ticks": "inside", "ticklen": 3})
    end = max([-math.inf, *(value for curve in curves for value in curve.x)] if x.high is None else [x.high])
    if beyond is not None and beyond[1] < end:
        area = {"x0": beyond[1], "x1": end, "y0": 0, "y1": 1, "yref": "paper", "layer": "below"}
        fill = {"fillcolor": _BOUND, "opacity": 0.12, "line": {"width": 0}}
        figure.add_shape(type="rect", name=_text(beyond[0]), showlegend=True, **area, **fill)
    for name, value in (bounds or {}).items():
        _rule(figure, name, value, "y", _BOUND)
    for name, value in (marks or {}).items():
        _rule(figure, name, value, "x", _CHOSEN)
    return Chart(title, figure)


def scatter_chart(
    title: str, curves: Sequence[Curve], x: Axis, y: Axis, *, diagonal: bool = False, note: str = ""
) -> Chart:
    """Return a chart of points; ``diagonal`` draws the line of equal values."""
    figure = _figure(x, y)
    for number, curve in enumerate(curves):
        figure.add_scatter(**_points(curve, number), mode="markers", marker_size=6)
    values = [value for curve in curves for each in (curve.x, curve.y) for value in each]
    known = [value for value in values if math.isfinite(value) and (value > 0 or not x.log)]
    if diagonal and known:
        ends = [min(known), max(known)]
        figure.add_scatter(
            x=ends, y=ends, mode="lines", line={"color": "#7f7f7f", "dash": "dash"}, name="equal"
        )
    return Chart(title, figure, note)


def bar_chart(
    title: str, categories: Sequence[str], bars: Mapping[str, Sequence[float]], y: Axis, *, note: str = ""
) -> Chart:
    """Return groups of vertical bars: one group per category, one bar of it per entry of ``bars``."""
    figure = _figure(Axis(""), y)
    for number, (name, heights) in enumerate(bars.items()):
        figure.add_bar(x=_texts(categories), y=heights, **_bar(name, number))
    figure.update_xaxes(type="category", nticks=12)
    return Chart(title, figure, note)


def bar_rows(
    title: str,
    names: Sequence[str],
    bars: Mapping[str, Sequence[float]],
    x: Axis,
    *,
    bounds: Mapping[str, float] | None = None,
    note: str = "",
    stacked: bool = False,
) -> Chart:
    """Return horizontal bars, grouped or stacked, with one row per name from top to bottom."""
    figure = _figure(x, Axis(""))
    for number, (name, lengths) in enumerate(bars.items()):
        figure.add_bar(y=_texts(names), x=lengths, orientation="h", **_bar(name, number))
    for name, value in (bounds or {}).items():
        _rule(figure, name, value, "x", _BOUND)
    figure.update_yaxes(type="category", autorange="reversed", dtick=1)
    height_px = max(200, 140 + len(names) * (12 + 14 * (1 if stacked else len(bars))))
    figure.update_layout(height=height_px, bargap=0.3, barmode="stack" if stacked else "group")
    return Chart(title, figure, note)


def histogram(title: str, values: Sequence[float], x: Axis, *, bins: int, note: str = "") -> Chart:
    """Return a histogram of values."""
    figure = _figure(x, Axis("rows"))
    figure.add_histogram(x=list(values), nbinsx=bins, marker={"color": COLOURS[0]}, showlegend=False)
    return Chart(title, figure, note)


def figure_of(result: Plotted) -> go.Figure:
    """Return the figure of a plan or of a simulation."""
    from capplan.spec import Plan
    from capplan.twin import DetailedResult, SimulationResult

    if isinstance(result, Plan):
        return plan_figure(result)
    if isinstance(result, SimulationResult):
        return simulation_figure(result)
    if isinstance(result, DetailedResult):
        return course_figure(result)
    raise TypeError(f"{type(result).__name__} has no figure")


def plan_figure(plan: Plan) -> go.Figure:
    """Return the predictions of a plan's groups: load, throughput and latencies against their bounds."""
    return _side_by_side(plan_charts(plan))


def plan_charts(plan: Plan) -> list[Chart]:
    """Return a bar per group: load over capacity, throughput, and latencies against their bounds."""
    groups = plan.groups[:_MOST_GROUPS]
    names = [group.id for group in groups]
    note = f"the first {_MOST_GROUPS} groups" if len(plan.groups) > len(groups) else ""
    loads = [100.0 * or_nan(group.predicted.load_over_capacity) for group in groups]
    rates = [group.predicted.throughput_tok_s for group in groups]
    latencies = (
        ("TTFT", "ttft", "s", "Time to first token"),
        ("TPOT", "tpot", "ms", "Time per output token"),
    )
    charts = [
        bar_rows("Load over capacity", names, {"": loads}, Axis("%"), bounds={"full": 100.0}, note=note),
        bar_rows("Throughput", names, {"": rates}, Axis("tok/s"), note=note),
    ]
    for kind, metric, unit, title in latencies:
        limits = plan.slo.latency_bounds()
        bounded = [key.split("_")[1] for key in limits if key.startswith(f"{metric}_")]
        statistics = list(dict.fromkeys((*bounded, "p99")))
        bars = {
            statistic if len(statistics) > 1 else "": [
                _latency(group, f"{metric}_{unit}", statistic) for group in groups
            ]
            for statistic in statistics
        }
        label = f"{kind} {', '.join(statistics)}, {unit}"
        charts.append(
            bar_rows(title, names, bars, Axis(label, low=0.0), bounds=bounds_of(limits, metric), note=note)
        )
    return charts


def _latency(group: Group, metric: str, statistic: str) -> float:
    value: float | None = getattr(getattr(group.predicted, metric), statistic)
    return or_nan(value)


def bounds_of(bounds: Mapping[str, float], metric: str) -> dict[str, float]:
    """Return the bounds of a metric such as ``ttft`` by their names in a legend."""
    return {f"bound: {key} {value:g}": value for key, value in bounds.items() if key.split("_")[0] == metric}


def simulation_figure(result: SimulationResult) -> go.Figure:
    """Return the latencies of a simulation: mean and percentiles of TTFT, TPOT, ITL and E2E."""
    kinds = (
        ("TTFT", "ttft_s", "s"),
        ("TPOT", "tpot_ms", "ms"),
        ("ITL", "itl_ms", "ms"),
        ("E2E", "e2e_s", "s"),
    )
    charts = [
        bar_chart(
            name,
            STATISTICS,
            {"": [getattr(result, f"{field}_{s}") for s in STATISTICS]},
            Axis(f"{name}, {unit}"),
        )
        for name, field, unit in kinds
    ]
    return _side_by_side(charts)


def course_figure(detail: DetailedResult) -> go.Figure:
    """Return the course of a simulation: requests, KV memory, adapters, loads, tokens and steps over time."""
    return _side_by_side(course_charts({0: detail}))


def course_charts(details: Mapping[int, DetailedResult]) -> list[Chart]:
    """Return the course of simulations over time, by number of adapter slots."""
    slots = sorted(details)
    shown = slots
    if len(slots) > _OVERLAID:
        shown = [slots[round(at * (len(slots) - 1) / (_OVERLAID - 1))] for at in range(_OVERLAID)]
    time = Axis("time, s", low=0.0, high=details[shown[0]].result.duration_s)

    def chart(title: str, label: str, attribute: str, *, high: float | None = None, every: int = 1) -> Chart:
        is_shared = attribute == "arrivals_rps" or len(shown) == 1  # one curve stands for all runs
        curves = []
        for count in shown[:1] if is_shared else shown:
            series = details[count].series
            time_s, values = (_coarser(v, every) for v in (series.time_s, getattr(series, attribute)))
            curves.append(Curve("" if is_shared else f"A_max {count}", time_s, values))
        return line_chart(title, curves, time, Axis(label, high=high))

    return [
        chart("Running requests", "requests", "running"),
        chart("Waiting requests", "requests", "waiting"),
        chart("KV memory in use", "share of KV tokens", "kv_share", high=1.0),
        chart("Resident adapters", "adapters", "resident_adapters"),
        chart("Adapters of running requests", "adapters", "active_adapters"),
        chart("Adapter loads", "loads/s", "loads_per_s", every=COARSER),
        chart("Time waiting for loads", "share of time", "load_share", every=COARSER),
        chart("Completed tokens", "tokens/s", "completed_tok_s", every=COARSER),
        chart("Step duration", "ms", "step_ms", every=COARSER),
        chart("Arrivals", "requests/s", "arrivals_rps", every=COARSER),
    ]


def _coarser(values: Any, every: int) -> list[float]:
    """Return the means of ``every`` consecutive values each, NaN left out."""
    import numpy as np

    starts = np.arange(0, values.size, every)
    known = ~np.isnan(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    counts = np.add.reduceat(known.astype(np.float64), starts)
    means: list[float] = np.where(counts > 0, sums / np.maximum(counts, 1.0), np.nan).tolist()
    return means


def _side_by_side(charts: Sequence[Chart]) -> go.Figure:
    rows = -(-len(charts) // 2)
    figure = make_subplots(rows, 2, subplot_titles=[_text(chart.title) for chart in charts])
    for number, chart in enumerate(charts):
        at = {"row": number // 2 + 1, "col": number % 2 + 1}
        for trace in chart.figure.data:
            figure.add_trace(trace.update(showlegend=False), **at)
        for shape in chart.figure.layout.shapes:
            is_vertical = shape.yref == "paper"
            line = {"line": shape.line, "annotation_text": shape.name}
            figure.add_vline(x=shape.x0, **at, **line) if is_vertical else figure.add_hline(
                y=shape.y0, **at, **line
            )
        figure.update_xaxes(chart.figure.layout.xaxis, **at)
        figure.update_yaxes(chart.figure.layout.yaxis, **at)
    height_px = max(chart.height_px for chart in charts)
    return figure.update_layout(height=rows * height_px, template="plotly_white", barmode="group")


def _figure(x: Axis, y: Axis, *, from_zero: bool = False) -> go.Figure:
    if from_zero and not y.log and y.low is None:
        y = Axis(y.label, low=0.0, high=y.high, ticks=y.ticks)
    figure = go.Figure()
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}}
    figure.update_layout(
        template="none",
        height=_HEIGHT_PX,
        margin={"l": 10, "r": 16, "t": 34, "b": 10},
        legend=legend,
        showlegend=True,
        font={"size": 12, "family": "system-ui, sans-serif"},
        barmode="group",
        hovermode="closest",
        xaxis=_axis(x),
        yaxis=_axis(y),
    )
    return figure


def _axis(axis: Axis) -> dict[str, Any]:
    made: dict[str, Any] = {"title": {"text": _text(axis.label)}, "automargin": True, "showline": True}
    made |= {"zeroline": False, "exponentformat": "none", "separatethousands": True}
    if axis.log:
        made["type"] = "log"
    if axis.ticks:
        made |= {"tickvals": _spaced(axis), "ticktext": [f"{tick:,g}" for tick in _spaced(axis)]}
    if axis.low is not None or axis.high is not None:
        ends = (axis.low, axis.high)
        made["range"] = [math.log10(e) if axis.log and e is not None else e for e in ends]
    if axis.low == 0.0 and axis.high is None:
        made |= {"rangemode": "tozero", "range": None}
    return {key: value for key, value in made.items() if value is not None}


def _spaced(axis: Axis) -> list[float]:
    """Return the ticks without those that would touch the one before."""
    place = math.log if axis.log else float
    ticks = sorted(axis.ticks)
    width = (place(ticks[-1]) - place(ticks[0])) or 1.0
    kept: list[float] = []
    for tick in ticks:
        if not kept or (place(tick) - place(kept[-1])) / width >= 0.07:
            kept.append(tick)
    return kept


def _points(curve: Curve, number: int) -> dict[str, Any]:
    place = {"x": list(curve.x), "y": list(curve.y), "marker": {"color": _colour(number)}}
    return place | {"name": _text(curve.name), "showlegend": bool(curve.name), "connectgaps": False}


def _bar(name: str, number: int) -> dict[str, Any]:
    return {"name": _text(name), "showlegend": bool(name), "marker": {"color": _colour(number)}}


def _rule(figure: go.Figure, name: str, value: float, axis: str, colour: str) -> None:
    """Add a line across the figure at a value of an axis, with an entry in the legend."""
    other = "x" if axis == "y" else "y"
    ends = {f"{axis}0": value, f"{axis}1": value, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper"}
    line = {"color": colour, "dash": "dash", "width": 1.6}
    figure.add_shape(type="line", name=_text(name), showlegend=True, line=line, **ends)


def _text(text: str) -> str:
    """Return text for Plotly, which interprets some HTML in labels."""
    return escape(text, quote=False)


def _texts(texts: Sequence[str]) -> list[str]:
    return [_text(text) for text in texts]


def or_nan(value: float | None) -> float:
    """Return a value, or NaN for None, which charts leave out."""
    return math.nan if value is None else value


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
