"""Figures of replayed request logs: requests and KV memory over time, measured and simulated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks.measured.case import ProfileFor
from benchmarks.measured.request_logs import RequestLog
from capplan import InputError
from capplan.spec import write_text_atomic

_PANELS: Final = MappingProxyType(
    {"running": "running requests", "waiting": "waiting requests", "kv_cache_pct": "KV cache in use, %"}
)


def write_course(log: RequestLog, methods: Mapping[str, ProfileFor], folder: Path) -> Path | None:
    """Write the course of a server as an HTML page, and return its path; None without any profile."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    courses = {"measured": log.course}
    for method, profile_for in methods.items():
        try:
            courses[method] = log.replayed_course(profile_for(log.deployment, None))
        except InputError:
            continue
    if len(courses) == 1:
        return None
    figure = make_subplots(rows=len(_PANELS), cols=1, shared_xaxes=True, subplot_titles=[*_PANELS.values()])
    for row, column in enumerate(_PANELS, start=1):
        for method, course in courses.items():
            line = go.Scatter(
                x=course["t"], y=course[column], name=method, legendgroup=method, showlegend=row == 1
            )
            figure.add_trace(line, row=row, col=1)
    figure.update_layout(title=f"{log.name}, vLLM {log.deployment.version}", height=900)
    figure.update_xaxes(title_text="seconds from the first arrival", row=len(_PANELS))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{log.name}.html"
    write_text_atomic(path, figure.to_html(include_plotlyjs="cdn"))
    return path
