"""How well the twin predicts the published hour-long vLLM runs.

``python -m benchmarks.fidelity REFERENCE_DIR [--seeds N] [--held-out]
[--length-correlation R] [--markdown FILE]``

REFERENCE_DIR holds runs.csv and, for ``--held-out``, the profiling tables.

The twin is told what a planner would know: adapters, ranks, rates, mean and spread of lengths, engine
settings. The shipped profiles were fitted to windows of these same runs. With ``--held-out`` a profile is
fitted to the runs of one group and judged on those of the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from sklearn.metrics import f1_score

from capplan import Profile, load_profile
from capplan.models.calibrate import SMAPE_FORMULA, smape
from capplan.spec import STARVED_BELOW
from capplan.twin.published_h100 import build_profile
from capplan.twin.published_models import PUBLISHED, PublishedModel
from capplan.twin.published_runs import GROUPS, PublishedRun, published_runs

FITTED_GROUP = "dt_real_results"
WORKERS = 2
WORST = 10
HEADER = (
    "runs",
    "n",
    "throughput",
    "offered load as answer",
    "mean ITL",
    "n of ITL",
    "starvation agreement",
    "starvation F1",
)


@dataclass(frozen=True)
class Prediction:
    """A measured run beside the mean of the twin's answers over all seeds."""

    run: PublishedRun
    throughput_tok_s: float
    itl_ms_mean: float
    served_fraction: float

    @property
    def starved(self) -> bool:
        return self.served_fraction < STARVED_BELOW

    @property
    def error(self) -> float:
        return smape([self.throughput_tok_s], [self.run.throughput_tok_s])


@dataclass(frozen=True)
class Options:
    """What is compared with what."""

    reference: Path
    seeds: int = 1
    held_out: bool = False
    length_correlation: float = 0.0


def predict(profile: Profile, options: Options, run: PublishedRun) -> Prediction:
    """Return what the twin says of a run."""
    correlation = options.length_correlation
    results = [run.simulate(profile, seed, length_correlation=correlation) for seed in range(options.seeds)]
    return Prediction(
        run=run,
        throughput_tok_s=float(np.mean([r.throughput_tok_s for r in results])),
        itl_ms_mean=float(np.mean([r.itl_ms_mean for r in results])),
        served_fraction=float(np.mean([r.served_fraction for r in results])),
    )


def predict_all(model: PublishedModel, options: Options) -> list[Prediction]:
    """Return the predictions for every run of a model, or for those of the groups that were not fitted."""
    reference, held_out = options.reference, options.held_out
    groups = tuple(group for group in GROUPS if group != FITTED_GROUP) if held_out else GROUPS
    profile = build_profile(reference, model, (FITTED_GROUP,)) if held_out else load_profile(model.profile)
    runs = published_runs(reference, model.key, groups)
    with ProcessPoolExecutor(WORKERS) as pool:
        answers = pool.map(partial(predict, profile, options), runs)
        return list(track(answers, model.key, total=len(runs), console=Console(stderr=True)))


def table(predictions: Sequence[Prediction]) -> list[tuple[str, ...]]:
    """Return one row for all runs, one for the starved and one for the others; errors in percent."""
    return [
        row("all", predictions),
        row("starved", [p for p in predictions if p.run.starved]),
        row("not starved", [p for p in predictions if not p.run.starved]),
    ]


def row(name: str, predictions: Sequence[Prediction]) -> tuple[str, ...]:
    measured = [p.run.throughput_tok_s for p in predictions]
    reliable = [p for p in predictions if p.run.itl_is_reliable]
    truth = [p.run.starved for p in predictions]
    said = [p.starved for p in predictions]
    itl = smape([p.itl_ms_mean for p in reliable], [p.run.itl_ms_mean for p in reliable])
    # F1 needs both kinds of runs.
    f1 = f"{f1_score(truth, said):.3f}" if 0 < sum(truth) < len(truth) else "-"
    return (
        name,
        str(len(predictions)),
        f"{smape([p.throughput_tok_s for p in predictions], measured):.2f} %",
        f"{smape([p.run.offered_tok_s for p in predictions], measured):.2f} %",
        f"{itl:.2f} %",
        str(len(reliable)),
        f"{100 * np.mean(np.equal(truth, said)):.1f} %",
        f1,
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
            "yes" if p.run.kv_bound else "no",
        )
        for p in ordered[:WORST]
    ]


WORST_HEADER = (
    "run",
    "adapters",
    "a_max",
    "s_max",
    "req/s",
    "measured tok/s",
    "twin tok/s",
    "SMAPE",
    "KV full",
)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(options: Options) -> str:
    """Return the whole report."""
    how = (
        f"Profiles fitted to the runs of `{FITTED_GROUP}` only and judged on the others."
        if options.held_out
        else "Shipped profiles, whose step model was fitted to windows of these same runs: not held out."
    )
    lengths = "independent"
    if options.length_correlation:
        lengths = f"correlated by {options.length_correlation:g} (normal scores)"
    parts = [
        f"{how} SMAPE is `{SMAPE_FORMULA}`; seeds per run: {options.seeds}; "
        f"prompt and output lengths {lengths}."
    ]
    for model in PUBLISHED:
        predictions = predict_all(model, options)
        parts += [
            f"## {model.arch.name}",
            markdown(HEADER, table(predictions)),
            f"The {WORST} runs whose throughput is predicted worst:",
            markdown(WORST_HEADER, worst(predictions)),
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity")
    parser.add_argument("reference", type=Path, metavar="REFERENCE_DIR")
    parser.add_argument("--seeds", type=int, default=1, metavar="N")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--length-correlation", type=float, default=0.0, metavar="R")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    text = report(
        Options(arguments.reference, arguments.seeds, arguments.held_out, arguments.length_correlation)
    )
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(f"# Fidelity\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
