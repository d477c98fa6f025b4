"""Measured runs beside the twin's answers: errors, and what the worst ones come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.metrics import f1_score

from capplan import Profile
from capplan.models.calibration.least_squares import smape
from capplan.spec import STARVED_BELOW
from capplan.twin.published_runs import PublishedRun

WORST = 10
_NEAR_THE_EDGE = 0.03
_ALIKE = 0.01  # ratios nearer to 1 than this explain nothing


@dataclass(frozen=True)
class Prediction:
    """A measured run beside the mean of the twin's answers over all seeds."""

    run: PublishedRun
    throughput_tok_s: float
    offered_tok_s: float
    itl_ms_mean: float
    served_fraction: float
    ttft_s_p50: float
    ttft_s_mean_charged: float
    running_mean: float

    @property
    def starved(self) -> bool:
        """Whether the twin says so."""
        return self.served_fraction < STARVED_BELOW

    @property
    def error(self) -> float:
        """SMAPE of the throughput."""
        return smape([self.throughput_tok_s], [self.run.throughput_tok_s])


def predict(profile: Profile, seeds: int, length_correlation: float | None, run: PublishedRun) -> Prediction:
    """Return what the twin says of a run, the mean over seeds 0, 1, ..."""
    results = [run.simulate(profile, seed, length_correlation=length_correlation) for seed in range(seeds)]

    def mean(name: str) -> float:
        return float(np.mean([getattr(result, name) for result in results]))

    return Prediction(
        run=run,
        throughput_tok_s=mean("throughput_tok_s"),
        offered_tok_s=mean("offered_tok_s"),
        itl_ms_mean=mean("itl_ms_mean"),
        served_fraction=mean("served_fraction"),
        ttft_s_p50=mean("ttft_s_p50"),
        ttft_s_mean_charged=mean("ttft_s_mean_charged"),
        running_mean=mean("running_mean"),
    )


HEADER = (
    "runs",
    "n",
    "throughput",
    "offered load as answer",
    "mean ITL",
    "n",
    "TTFT, charged",
    "n",
    "median TTFT, un-queued",
    "n",
    "starvation agreement",
    "F1",
)


def table(predictions: Sequence[Prediction]) -> list[tuple[str, ...]]:
    """Return one row for all runs, one for the starved and one for the others; errors in percent."""
    return [
        row("all", predictions),
        row("starved", [p for p in predictions if p.run.starved]),
        row("not starved", [p for p in predictions if not p.run.starved]),
    ]


def row(name: str, predictions: Sequence[Prediction]) -> tuple[str, ...]:
    """Return one row under `HEADER`."""
    measured = [p.run.throughput_tok_s for p in predictions]
    reliable = [p for p in predictions if p.run.itl_is_reliable]
    charged = [
        p for p in predictions if np.isfinite(p.run.ttft_s_mean_charged) and (p.run.starved or p.run.queued)
    ]
    calm = [p for p in predictions if not p.run.queued]
    truth = [p.run.starved for p in predictions]
    said = [p.starved for p in predictions]
    # F1 needs both kinds of runs.
    f1 = f"{f1_score(truth, said):.3f}" if 0 < sum(truth) < len(truth) else "-"
    return (
        name,
        str(len(predictions)),
        percent(smape([p.throughput_tok_s for p in predictions], measured)),
        percent(smape([p.run.offered_tok_s for p in predictions], measured)),
        percent(smape([p.itl_ms_mean for p in reliable], [p.run.itl_ms_mean for p in reliable])),
        str(len(reliable)),
        percent(
            smape([p.ttft_s_mean_charged for p in charged], [p.run.ttft_s_mean_charged for p in charged])
        ),
        str(len(charged)),
        percent(float(np.median([abs(p.ttft_s_p50 / p.run.ttft_s_p50 - 1) for p in calm])) * 100)
        if calm
        else "-",
        str(len(calm)),
        f"{100 * np.mean(np.equal(truth, said)):.1f} %",
        f1,
    )


def percent(value: float) -> str:
    """Return a figure of the tables; a dash where there is none."""
    return f"{value:.2f} %" if np.isfinite(value) else "-"


REGIMES = ("un-queued", "waits for slots", "KV full", "client out of connections")


def regime(run: PublishedRun) -> str:
    """Return what bound a run, as measured."""
    if run.client_bound:
        return REGIMES[3]
    if run.kv_bound:
        return REGIMES[2]
    return REGIMES[1] if run.queued else REGIMES[0]


def by_regime(predictions: Sequence[Prediction]) -> list[tuple[str, ...]]:
    """Return one row for each regime that has runs, under `HEADER`."""
    groups = [(name, [p for p in predictions if regime(p.run) == name]) for name in REGIMES]
    return [row(name, group) for name, group in groups if group]


WORST_HEADER = (
    "run",
    "adapters",
    "a_max",
    "s_max",
    "req/s",
    "measured tok/s",
    "twin tok/s",
    "SMAPE",
    "regime",
    "reading",
)


def worst(predictions: Iterable[Prediction]) -> list[tuple[str, ...]]:
    """Return the runs whose throughput is predicted worst."""
    ordered = sorted(predictions, key=lambda p: p.error, reverse=True)
    return [
        (
            str(p.run.index),
            str(len(p.run.workload.adapters)),
            str(p.run.a_max),
            str(p.run.s_max),
            f"{p.run.workload.total_rate_rps:.1f}",
            f"{p.run.throughput_tok_s:.0f}",
            f"{p.throughput_tok_s:.0f}",
            f"{p.error:.1f} %",
            regime(p.run),
            reading(p),
        )
        for p in ordered[:WORST]
    ]


def reading(p: Prediction) -> str:
    """Return where the error of a throughput comes from.

    A run that keeps up completes what was sent, so only the draw can be wrong. Any other completes its batch
    in every step: its throughput is off by as much as batch over step.
    """
    served = p.run.throughput_tok_s / p.run.offered_tok_s
    parts = []
    if abs(served - STARVED_BELOW) < _NEAR_THE_EDGE or p.starved != p.run.starved:
        parts.append(f"at the edge: served {served:.2f} measured, {p.served_fraction:.2f} in the twin")
    if not p.starved and not p.run.starved:
        parts += _said("tokens sent, by luck of the draw,", p.offered_tok_s / p.run.offered_tok_s)
    elif p.run.mean_running > 0:
        parts += _said("batch", p.running_mean / p.run.mean_running)
    if p.run.itl_is_reliable:
        parts += _said("gaps between tokens", p.itl_ms_mean / p.run.itl_ms_mean)
    return "; ".join(parts) or "no single cause"


def _said(what: str, ratio: float) -> list[str]:
    return [] if abs(ratio - 1) < _ALIKE else [f"{what} {100 * (ratio - 1):+.0f} %"]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
