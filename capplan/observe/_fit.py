"""How well the workload of an observation repeats what was observed: requests are drawn and compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from capplan.observe._observation import Observation
from capplan.workload import draw_requests, load_workload

_MOST_DRAWN: Final = 5_000_000
"""Requests that are drawn; of longer logs, the beginning is compared."""
_LONGEST_TOKENS: Final = 2**20
_TOP: Final = 20


@dataclass(frozen=True)
class FitRow:
    """One comparison."""

    what: str
    observed: float
    simulated: float

    @property
    def error(self) -> float:
        """Difference in relation to what was observed; that of shares is the difference."""
        if self.what.endswith("share"):
            return self.simulated - self.observed
        return self.simulated / self.observed - 1.0 if self.observed else float(self.simulated != 0.0)


@dataclass(frozen=True)
class FitReport:
    """Requests of the workload against those of the log."""

    rows: tuple[FitRow, ...]
    hours: tuple[FitRow, ...]
    """Requests of each hour."""
    shares: tuple[FitRow, ...]
    """Requests per million of the most popular adapters."""
    minutes: tuple[tuple[float, ...], tuple[float, ...]]
    """Requests in each minute, observed and simulated."""

    def worst(self, rows: str) -> float:
        """Return the largest error, without its sign, of ``rows``, ``hours`` or ``shares``."""
        return max((abs(row.error) for row in getattr(self, rows)), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""

        def listed(rows: tuple[FitRow, ...]) -> list[dict[str, Any]]:
            return [
                {"what": r.what, "observed": r.observed, "simulated": r.simulated, "error": r.error}
                for r in rows
            ]

        return {name: listed(getattr(self, name)) for name in ("rows", "hours", "shares")}


def fit_report(observation: Observation, workload_file: Path, seed: int = 1) -> FitReport:
    """Draw the requests of a workload file and compare them with what was observed.

    Parameters
    ----------
    observation
        What was observed.
    workload_file
        The file that `Observation.write` made of it, at ``scale`` 1.
    seed
        Of the draw.
    """
    workload = load_workload(workload_file)
    mean_rps = observation.rate_rps / observation.scale
    duration_s = min(observation.duration_s, max(60.0, _MOST_DRAWN / max(mean_rps, 1e-9)))
    drawn = draw_requests(workload, duration_s, seed, _LONGEST_TOKENS)
    arrival_s = np.asarray(drawn.arrival_ns) / 1e9
    scale = observation.scale
    minutes = np.bincount((arrival_s // 60).astype(np.int64), minlength=1) / scale
    whole = len(observation.minutes) if duration_s == observation.duration_s else int(duration_s // 60)
    observed = observation.minutes[:whole].astype(float)
    minutes = np.pad(minutes, (0, max(0, whole - len(minutes))))[:whole]
    rows = [
        FitRow("requests per second", observed.sum() / duration_s, minutes.sum() / duration_s),
        FitRow("requests of the busiest minute", float(observed.max()), float(minutes.max())),
    ]
    rows += _lengths("prompt_tokens", np.asarray(drawn.prompt_tokens), observation.quantiles)
    rows += _lengths("output_tokens", np.asarray(drawn.output_tokens), observation.quantiles)
    if observation.prefix_hit_share is not None:
        prompts = np.asarray(drawn.prompt_tokens, dtype=float)
        simulated = np.minimum(prompts, observation.shared_prefix_tokens).sum() / prompts.sum()
        rows.append(FitRow("prefix hit share", observation.prefix_hit_share, float(simulated)))
    return FitReport(
        rows=tuple(rows),
        hours=tuple(_hours(observed, minutes)),
        shares=tuple(_shares(observation, drawn, workload)),
        minutes=(tuple(observed.tolist()), tuple(minutes.tolist())),
    )


def _lengths(name: str, tokens: Any, quantiles: Mapping[str, Mapping[str, float]]) -> list[FitRow]:
    found = []
    for label, value in quantiles.get(name, {}).items():
        own = float(tokens.mean()) if label == "mean" else float(np.percentile(tokens, float(label[1:])))
        found.append(FitRow(f"{name} {label}", value, own))
    return found


def _hours(observed: Any, simulated: Any) -> list[FitRow]:
    starts = range(0, len(observed), 60)
    return [
        FitRow(f"hour {at // 60}", float(observed[at : at + 60].sum()), float(simulated[at : at + 60].sum()))
        for at in starts
    ]


def _shares(observation: Observation, drawn: Any, workload: Any) -> list[FitRow]:
    """Return the requests per million of the most popular adapters."""
    counts = np.bincount(drawn.adapter, minlength=len(workload.adapters) + 1)  # the first is the base model
    names = [adapter.name for adapter in workload.adapters]
    own = dict(zip(names, counts[1:] / max(1, len(drawn.arrival_ns)), strict=True))
    total = max(1, observation.requests)
    return [
        FitRow(each.name, 1e6 * each.requests / total, 1e6 * float(own.get(each.name, 0.0)))
        for each in observation.adapters[:_TOP]
        if each.requests
    ]
