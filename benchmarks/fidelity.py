"""How well the twin predicts the published hour-long vLLM runs.

``python -m benchmarks.fidelity REFERENCE_DIR [--seeds N] [--shipped-seeds N] [--fitted DIR] [--workers N]
[--length-correlation R] [--markdown FILE]``

REFERENCE_DIR holds the published tables. The twin is told what a planner would know: adapters, ranks, rates,
mean and spread of lengths, engine settings.

Held out: profiles are fitted to the runs of one group and judged on those of the other, both ways round. What
is fitted to a group: step model, serving factor of loads, correlation of lengths, host model. Memory, idle
loads and profiled steps were measured apart from the runs and are shared. ``--fitted`` names a folder of
such profiles, DIR/GROUP/PROFILE.json, to use again; those that are missing are fitted and written there.

Not held out: the shipped profiles, fitted to the runs of both groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from sklearn.metrics import f1_score

from benchmarks.common import command_line, markdown
from benchmarks.shipped_profiles import published_profile
from capplan import Profile, load_profile, simulate
from capplan.datasets.published.runs import GROUPS, PUBLISHED, PublishedModel, PublishedRun, published_runs
from capplan.models.calibration.least_squares import SMAPE_FORMULA, smape
from capplan.spec import STARVED_BELOW, write_text_atomic
from capplan.twin.sweep import in_parallel

WORST = 10
_NEAR_THE_EDGE = 0.03
_ALIKE = 0.01  # ratios nearer to 1 than this explain nothing
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
REGIMES = ("un-queued", "waits for slots", "KV full", "client out of connections")
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
COLOURS = {"kept up": "#1b6ca8", "starved": "#d1495b"}
FITTED_HEADER = (
    "model",
    "profile",
    "step model, left-out runs",
    "length correlation",
    "serving factor",
    "request ms",
    "scrape: us per series",
    "us per series and adapter",
    "share",
)


@dataclass(frozen=True)
class Prediction:
    """Measured run and the mean of the twin's results over all seeds."""

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
        return self.served_fraction < STARVED_BELOW

    @property
    def error(self) -> float:
        return smape([self.throughput_tok_s], [self.run.throughput_tok_s])


def predict(profile: Profile, seeds: int, length_correlation: float | None, run: PublishedRun) -> Prediction:
    """Return the mean prediction over seeds 0, 1, ..."""
    workload = run.workload.replace(length_correlation=length_correlation)
    results = [simulate(workload, profile, seed=seed, **run.settings) for seed in range(seeds)]

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


def table(predictions: Sequence[Prediction]) -> list[tuple[str, ...]]:
    """Return rows of all, starved and other runs; errors in percent."""
    return [
        row("all", predictions),
        row("starved", [p for p in predictions if p.run.starved]),
        row("not starved", [p for p in predictions if not p.run.starved]),
    ]


def row(name: str, predictions: Sequence[Prediction]) -> tuple[str, ...]:
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
    return f"{value:.2f} %" if np.isfinite(value) else "-"


def regime(run: PublishedRun) -> str:
    """Return the measured bottleneck of a run."""
    if run.client_bound:
        return REGIMES[3]
    if run.kv_bound:
        return REGIMES[2]
    return REGIMES[1] if run.queued else REGIMES[0]


def by_regime(predictions: Sequence[Prediction]) -> list[tuple[str, ...]]:
    groups = [(name, [p for p in predictions if regime(p.run) == name]) for name in REGIMES]
    return [row(name, group) for name, group in groups if group]


def worst(predictions: Iterable[Prediction]) -> list[tuple[str, ...]]:
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
    """Return the source of a throughput error.

    A run that keeps up completes its offered load, so only the draw can be wrong. Any other run completes its
    batch in every step: its throughput is batch over step.
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


@dataclass(frozen=True)
class Options:
    reference: Path
    seeds: int = 1
    shipped_seeds: int = 1
    workers: int = 1
    fitted: Path | None = None
    length_correlation: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Profile and its predictions of runs."""

    model: PublishedModel
    title: str
    profile: Profile
    predictions: tuple[Prediction, ...]


def fitted_profile(model: PublishedModel, group: str, options: Options) -> Profile:
    """Return the profile fitted to the runs of a group, from a file if present."""
    if options.fitted is None:
        return published_profile(options.reference, model, (group,))
    path = options.fitted / group / f"{model.profile}.json"
    if not path.exists():
        profile = published_profile(options.reference, model, (group,))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, profile.model_dump_json(indent=2) + "\n")
    return load_profile(path)


def compare(
    model: PublishedModel,
    title: str,
    profile: Profile,
    runs: Sequence[PublishedRun],
    seeds: int,
    options: Options,
) -> Comparison:
    ask = partial(predict, profile, seeds, options.length_correlation)
    label = f"{model.arch.name}, {title}"
    answers = in_parallel(ask, runs, workers=options.workers)
    shown = track(answers, label, total=len(runs), console=Console(stderr=True))
    return Comparison(model, title, profile, tuple(shown))


def held_out(options: Options) -> list[Comparison]:
    return [
        compare(
            model,
            f"fitted on {fitted_on}, judged on {judged_on}",
            fitted_profile(model, fitted_on, options),
            published_runs(options.reference, model, (judged_on,)),
            options.seeds,
            options,
        )
        for model in PUBLISHED
        for fitted_on, judged_on in (GROUPS, GROUPS[::-1])
    ]


def shipped(options: Options) -> list[Comparison]:
    return [
        compare(
            model,
            "shipped",
            load_profile(model.profile),
            published_runs(options.reference, model),
            options.shipped_seeds,
            options,
        )
        for model in PUBLISHED
    ]


def constants(comparison: Comparison) -> tuple[str, ...]:
    profile = comparison.profile
    host = ("request_ms", "scrape_us_per_series", "scrape_us_per_series_adapter", "scrape_share")
    return (
        comparison.model.arch.name,
        comparison.title.split(",")[0],
        percent(profile.step_latency.fit.cross_validated_error or float("nan")),
        f"{profile.length_correlation:.3f}",
        f"{profile.loading.value('serving_factor'):.3f}",
        *(f"{profile.host.value(name):.3g}" for name in host),
    )


def figures(comparison: Comparison) -> list[str]:
    return [
        f"### {comparison.model.arch.name}, {comparison.title}",
        markdown(HEADER, table(comparison.predictions)),
        markdown(HEADER, by_regime(comparison.predictions)),
    ]


def report(options: Options) -> str:
    lengths = "correlated as the profile says"
    if options.length_correlation is not None:
        lengths = f"correlated by {options.length_correlation:g} (normal scores)"
    split, fitted_to_all = held_out(options), shipped(options)
    parts = [
        f"SMAPE is `{SMAPE_FORMULA}`; seeds per run: {options.seeds} held out, {options.shipped_seeds} with "
        f"the shipped profiles; prompt and output lengths {lengths}.",
        "## Held out",
    ]
    for comparison in split:
        parts += figures(comparison)
    for model in PUBLISHED:
        every = [p for c in split if c.model is model for p in c.predictions]
        parts += [
            f"### {model.arch.name}: the {WORST} runs whose throughput is predicted worst, held out",
            markdown(WORST_HEADER, worst(every)),
        ]
    parts.append("## Shipped profiles, not held out")
    for comparison in fitted_to_all:
        parts += figures(comparison)
    parts += ["## What was fitted", markdown(FITTED_HEADER, map(constants, (*split, *fitted_to_all)))]
    return "\n\n".join(parts) + "\n"


def draw(comparisons: Sequence[Comparison], picture: Path) -> None:
    """Plot predicted against measured throughput and inter-token latency."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 8), constrained_layout=True)
    for row, comparison in zip(axes, comparisons, strict=True):
        reliable = [p for p in comparison.predictions if p.run.itl_is_reliable]
        name = comparison.model.arch.name
        _panel(row[0], f"{name}: throughput, tok/s", "throughput_tok_s", comparison.predictions)
        _panel(row[1], f"{name}: mean inter-token latency, ms", "itl_ms_mean", reliable)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def _panel(axes: Any, title: str, metric: str, predictions: Sequence[Prediction]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    points = [(getattr(p.run, metric), getattr(p, metric), p.run.starved) for p in predictions]
    for starved, (label, colour) in enumerate(COLOURS.items()):
        chosen = [
            (measured, predicted) for measured, predicted, is_starved in points if is_starved == starved
        ]
        axes.scatter(*zip(*chosen, strict=True), s=9, alpha=0.6, color=colour, label=label, linewidths=0)
    ends = [min(p[0] for p in points), max(p[0] for p in points)]
    axes.plot(ends, ends, color="#333333", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted", title=title)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("reference", type=Path, metavar="REFERENCE_DIR")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--shipped-seeds", type=int, default=1, metavar="N")
    parser.add_argument("--workers", type=int, default=1, metavar="N")
    parser.add_argument("--fitted", type=Path, metavar="DIR")
    parser.add_argument("--length-correlation", type=float, metavar="R")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the shipped profiles instead")
    arguments = parser.parse_args()
    options = Options(
        reference=arguments.reference,
        seeds=arguments.seeds,
        shipped_seeds=arguments.shipped_seeds,
        workers=arguments.workers,
        fitted=arguments.fitted,
        length_correlation=arguments.length_correlation,
    )
    if arguments.picture:
        draw(shipped(options), arguments.picture)
        return
    text = report(options)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(f"# Fidelity\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
