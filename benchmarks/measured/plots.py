"""Figure of replayed request logs: requests and KV memory over time, measured and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pandas as pd

from benchmarks.measured.case import ProfileFor
from benchmarks.measured.request_logs import RequestLog
from capplan import InputError

FILE: Final = "request-logs.png"
_PANELS: Final = MappingProxyType(
    {"running": "running requests", "waiting": "waiting requests", "kv_cache_pct": "KV memory in use, %"}
)


def draw_courses(logs: Sequence[RequestLog], methods: Mapping[str, ProfileFor], folder: Path) -> Path:
    """Plot the course of every server, one column each, and return the path of the picture."""
    import matplotlib.pyplot as plt

    size = (6 * len(logs), 2.6 * len(_PANELS))
    figure, axes = plt.subplots(
        len(_PANELS), len(logs), figsize=size, sharex="col", squeeze=False, constrained_layout=True
    )
    for column, log in zip(axes.T, logs, strict=True):
        courses = _courses(log, methods)
        for panel, (name, label) in zip(column, _PANELS.items(), strict=True):
            for method, course in courses.items():
                width = 2.5 if method == "measured" else 1.0
                panel.plot(course["t"], course[name], linewidth=width, label=method)
            panel.set_ylabel(label)
        column[0].set_title(f"{log.name}, vLLM {log.deployment.version}")
        column[0].legend(frameon=False)
        column[-1].set_xlabel("seconds from the first arrival")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / FILE, dpi=110)
    plt.close(figure)
    return folder / FILE


def _courses(log: RequestLog, methods: Mapping[str, ProfileFor]) -> dict[str, pd.DataFrame]:
    """Return the measured course and those of methods that have a profile."""
    courses = {"measured": log.course}
    for method, profile_for in methods.items():
        try:
            courses[method] = log.replayed_course(profile_for(log.deployment, None))
        except InputError:
            continue
    return courses
