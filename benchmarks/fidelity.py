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

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.fidelity_figures import (
    HEADER,
    WORST,
    WORST_HEADER,
    Prediction,
    by_regime,
    markdown,
    percent,
    predict,
    table,
    worst,
)
from capplan import Profile, load_profile
from capplan.models.calibration.least_squares import SMAPE_FORMULA
from capplan.spec import write_text_atomic
from capplan.twin.published_h100 import build_profile
from capplan.twin.published_models import PUBLISHED, PublishedModel
from capplan.twin.published_runs import GROUPS, PublishedRun, published_runs
from capplan.twin.sweep import in_parallel


@dataclass(frozen=True)
class Options:
    """What is compared with what."""

    reference: Path
    seeds: int = 1
    shipped_seeds: int = 1
    workers: int = 1
    fitted: Path | None = None
    length_correlation: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A profile judged on runs."""

    model: PublishedModel
    title: str
    profile: Profile
    predictions: tuple[Prediction, ...]


def fitted_profile(model: PublishedModel, group: str, options: Options) -> Profile:
    """Return the profile fitted to the runs of a group; from a file where there is one."""
    if options.fitted is None:
        return build_profile(options.reference, model, (group,))
    path = options.fitted / group / f"{model.profile}.json"
    if not path.exists():
        profile = build_profile(options.reference, model, (group,))
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
    """Predict every run."""
    ask = partial(predict, profile, seeds, options.length_correlation)
    label = f"{model.arch.name}, {title}"
    answers = in_parallel(ask, runs, workers=options.workers)
    shown = track(answers, label, total=len(runs), console=Console(stderr=True))
    return Comparison(model, title, profile, tuple(shown))


def held_out(options: Options) -> list[Comparison]:
    """Return both models, fitted on each group and judged on the other."""
    return [
        compare(
            model,
            f"fitted on {fitted_on}, judged on {judged_on}",
            fitted_profile(model, fitted_on, options),
            published_runs(options.reference, model.key, (judged_on,)),
            options.seeds,
            options,
        )
        for model in PUBLISHED
        for fitted_on, judged_on in (GROUPS, GROUPS[::-1])
    ]


def shipped(options: Options) -> list[Comparison]:
    """Return both models with the shipped profiles, on all runs."""
    return [
        compare(
            model,
            "shipped",
            load_profile(model.profile),
            published_runs(options.reference, model.key),
            options.shipped_seeds,
            options,
        )
        for model in PUBLISHED
    ]


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


def constants(comparison: Comparison) -> tuple[str, ...]:
    """Return what was fitted besides the coefficients of the step model, under `FITTED_HEADER`."""
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
    """Return title and tables of a comparison."""
    return [
        f"### {comparison.model.arch.name}, {comparison.title}",
        markdown(HEADER, table(comparison.predictions)),
        markdown(HEADER, by_regime(comparison.predictions)),
    ]


def report(options: Options) -> str:
    """Return the whole report."""
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


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity")
    parser.add_argument("reference", type=Path, metavar="REFERENCE_DIR")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument("--shipped-seeds", type=int, default=1, metavar="N")
    parser.add_argument("--workers", type=int, default=1, metavar="N")
    parser.add_argument("--fitted", type=Path, metavar="DIR")
    parser.add_argument("--length-correlation", type=float, metavar="R")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    text = report(
        Options(
            reference=arguments.reference,
            seeds=arguments.seeds,
            shipped_seeds=arguments.shipped_seeds,
            workers=arguments.workers,
            fitted=arguments.fitted,
            length_correlation=arguments.length_correlation,
        )
    )
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(f"# Fidelity\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
