"""Error of the twin on the published hour-long vLLM runs.

``python -m benchmarks.fidelity REFERENCE_DIR [--seeds N] [--shipped-seeds N] [--fitted DIR] [--workers N]
[--length-correlation R] [--markdown FILE]``

REFERENCE_DIR holds the published tables. The twin gets what a planner has: adapters, ranks, rates, mean and
spread of lengths, engine settings.

Held out: profiles are fitted to the runs of one group and evaluated on those of the other, both ways round.
Fitted to a group: step model, serving factor of loads, correlation of lengths, host model. Memory, idle loads
and profiled steps were measured apart from the runs and are shared. ``--fitted`` names a folder of such
profiles, DIR/GROUP/PROFILE.json, to reuse; missing ones are fitted and written there.

Not held out: the shipped profiles, fitted to the runs of both groups.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track
from sklearn.metrics import f1_score

from benchmarks.common import command_line, markdown, records_table
from benchmarks.shipped_profiles import published_profile
from capplan import Profile, load_profile, simulate
from capplan.datasets.published._runs import GROUPS, PUBLISHED, PublishedModel, PublishedRun, published_runs
from capplan.models.calibration import SMAPE_FORMULA, smape
from capplan.spec import STARVED_BELOW, write_text_atomic
from capplan.twin._sweep import in_parallel

WORST: Final = 10
_NEAR_THE_EDGE: Final = 0.03
_ALIKE: Final = 0.01  # ratios nearer to 1 than this explain nothing
METRICS: Final = ("throughput_tok_s", "itl_ms_mean", "ttft_s_p50", "ttft_s_mean_charged", "offered_tok_s")
HEADER: Final = (
    "runs", "n", "throughput", "offered load as answer", "mean ITL", "n", "TTFT, charged", "n",
    "median TTFT, un-queued", "n", "starvation agreement", "F1",
)  # fmt: skip
REGIMES: Final = ("un-queued", "waits for slots", "KV full", "client out of connections")
COLOURS: Final = {"kept up": "#1b6ca8", "starved": "#d1495b"}
HOST: Final = {
    "request ms": "request_ms",
    "scrape: us per series": "scrape_us_per_series",
    "us per series and adapter": "scrape_us_per_series_adapter",
    "share": "scrape_share",
}


def predict(
    profile: Profile, seeds: int, length_correlation: float | None, run: PublishedRun
) -> dict[str, Any]:
    """Return a measured run, with the mean of the twin's results over seeds 0, 1, ... as ``twin_*``."""
    workload = run.workload.replace(length_correlation=length_correlation)
    results = [simulate(workload, profile, seed=seed, **run.settings) for seed in range(seeds)]
    means = {
        f"twin_{name}": float(np.mean([getattr(result, name) for result in results]))
        for name in (*METRICS, "running_mean", "served_fraction")
    }
    return {
        **vars(run),
        **means,
        "twin_starved": means["twin_served_fraction"] < STARVED_BELOW,
        "queued": run.queued,
        "regime": regime(run),
    }


def regime(run: PublishedRun) -> str:
    """Return the measured bottleneck of a run."""
    if run.client_bound:
        return REGIMES[3]
    if run.kv_bound:
        return REGIMES[2]
    return REGIMES[1] if run.queued else REGIMES[0]


def errors(name: str, runs: pd.DataFrame) -> tuple[str, ...]:
    """Return the row of some runs."""

    def error(rows: pd.DataFrame, metric: str) -> str:
        return percent(smape(rows[f"twin_{metric}"], rows[metric]))

    reliable, calm = runs[runs.itl_is_reliable], runs[~runs.queued]
    charged = runs[np.isfinite(runs.ttft_s_mean_charged) & (runs.starved | runs.queued)]
    first_token = (calm.twin_ttft_s_p50 / calm.ttft_s_p50 - 1).abs().median() * 100
    # F1 needs both kinds of runs.
    f1 = f"{f1_score(runs.starved, runs.twin_starved):.3f}" if runs.starved.nunique() == 2 else "-"
    return (
        name,
        str(len(runs)),
        error(runs, "throughput_tok_s"),
        percent(smape(runs.offered_tok_s, runs.throughput_tok_s)),
        error(reliable, "itl_ms_mean"),
        str(len(reliable)),
        error(charged, "ttft_s_mean_charged"),
        str(len(charged)),
        percent(first_token),
        str(len(calm)),
        f"{100 * (runs.starved == runs.twin_starved).mean():.1f} %",
        f1,
    )


def percent(value: float) -> str:
    return f"{value:.2f} %" if np.isfinite(value) else "-"


def worst(runs: pd.DataFrame) -> str:
    error = [smape([p], [m]) for p, m in zip(runs.twin_throughput_tok_s, runs.throughput_tok_s, strict=True)]
    ordered = runs.assign(error=error).sort_values("error", ascending=False, kind="stable")[:WORST]
    return records_table(
        {
            "run": run.index,
            "adapters": len(run.workload.adapters),
            "a_max": run.a_max,
            "s_max": run.s_max,
            "req/s": f"{run.workload.total_rate_rps:.1f}",
            "measured tok/s": f"{run.throughput_tok_s:.0f}",
            "twin tok/s": f"{run.twin_throughput_tok_s:.0f}",
            "SMAPE": f"{run.error:.1f} %",
            "regime": run.regime,
            "reading": reading(run),
        }
        for run in (argparse.Namespace(**row) for row in ordered.to_dict("records"))
    )


def reading(run: Any) -> str:
    """Return the source of a throughput error.

    A run that keeps up completes its offered load, so only the draw can be wrong. Any other run completes its
    batch in every step: its throughput is batch over step.
    """
    served = run.throughput_tok_s / run.offered_tok_s
    parts = []
    if abs(served - STARVED_BELOW) < _NEAR_THE_EDGE or run.twin_starved != run.starved:
        parts.append(f"at the edge: served {served:.2f} measured, {run.twin_served_fraction:.2f} in the twin")
    if not run.twin_starved and not run.starved:
        parts += _difference("tokens sent, by luck of the draw,", run.twin_offered_tok_s / run.offered_tok_s)
    elif run.mean_running > 0:
        parts += _difference("batch", run.twin_running_mean / run.mean_running)
    if run.itl_is_reliable:
        parts += _difference("gaps between tokens", run.twin_itl_ms_mean / run.itl_ms_mean)
    return "; ".join(parts) or "no single cause"


def _difference(what: str, ratio: float) -> list[str]:
    return [] if abs(ratio - 1) < _ALIKE else [f"{what} {100 * (ratio - 1):+.0f} %"]


@dataclass(frozen=True)
class Comparison:
    """Profile and its predictions of runs."""

    model: PublishedModel
    title: str
    profile: Profile
    runs: pd.DataFrame

    def tables(self) -> list[str]:
        runs = self.runs
        kinds = {"all": runs, "starved": runs[runs.starved], "not starved": runs[~runs.starved]}
        regimes = {name: group for name in REGIMES if len(group := runs[runs.regime == name])}
        tables = [markdown(HEADER, (errors(*each) for each in kind.items())) for kind in (kinds, regimes)]
        return [f"### {self.model.arch.name}, {self.title}", *tables]

    def constants(self) -> dict[str, str]:
        profile = self.profile
        return {
            "model": self.model.arch.name,
            "profile": self.title.split(",")[0],
            "step model, left-out runs": percent(profile.step_latency.fit.cross_validated_error or np.nan),
            "length correlation": f"{profile.length_correlation:.3f}",
            "serving factor": f"{profile.loading.value('serving_factor'):.3f}",
            **{title: f"{profile.host.value(name):.3g}" for title, name in HOST.items()},
        }


def compare(
    given: argparse.Namespace,
    model: PublishedModel,
    title: str,
    profile: Profile,
    groups: tuple[str, ...],
    seeds: int,
) -> Comparison:
    runs = published_runs(given.reference, model, groups)
    found = in_parallel(
        partial(predict, profile, seeds, given.length_correlation), runs, workers=given.workers
    )
    label = f"{model.arch.name}, {title}"
    rows = list(track(found, label, total=len(runs), console=Console(stderr=True)))
    return Comparison(model, title, profile, pd.DataFrame(rows))


def fitted_profile(given: argparse.Namespace, model: PublishedModel, group: str) -> Profile:
    """Return the profile fitted to the runs of a group, from a file if present."""
    if given.fitted is None:
        return published_profile(given.reference, model, (group,))
    path = given.fitted / group / f"{model.profile}.json"
    if not path.exists():
        profile = published_profile(given.reference, model, (group,))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, profile.model_dump_json(indent=2) + "\n")
    return load_profile(path)


def held_out(given: argparse.Namespace) -> Iterator[Comparison]:
    for model in PUBLISHED:
        for fit, test in (GROUPS, GROUPS[::-1]):
            title = f"fitted on {fit}, judged on {test}"
            yield compare(given, model, title, fitted_profile(given, model, fit), (test,), given.seeds)


def shipped(given: argparse.Namespace) -> list[Comparison]:
    return [
        compare(given, model, "shipped", load_profile(model.profile), GROUPS, given.shipped_seeds)
        for model in PUBLISHED
    ]


def report(given: argparse.Namespace) -> str:
    lengths = "correlated as the profile says"
    if given.length_correlation is not None:
        lengths = f"correlated by {given.length_correlation:g} (normal scores)"
    split, fitted_to_all = list(held_out(given)), shipped(given)
    parts = [
        f"SMAPE is `{SMAPE_FORMULA}`; seeds per run: {given.seeds} held out, {given.shipped_seeds} with "
        f"the shipped profiles; prompt and output lengths {lengths}.",
        "## Held out",
    ]
    for comparison in split:
        parts += comparison.tables()
    for model in PUBLISHED:
        runs = pd.concat([comparison.runs for comparison in split if comparison.model is model])
        title = f"the {WORST} runs whose throughput is predicted worst, held out"
        parts += [f"### {model.arch.name}: {title}", worst(runs)]
    parts.append("## Shipped profiles, not held out")
    for comparison in fitted_to_all:
        parts += comparison.tables()
    constants = (comparison.constants() for comparison in (*split, *fitted_to_all))
    parts += ["## What was fitted", records_table(constants)]
    return "\n\n".join(parts) + "\n"


def draw(comparisons: Sequence[Comparison], picture: Path) -> None:
    """Plot predicted against measured throughput and inter-token latency."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 8), constrained_layout=True)
    for row, comparison in zip(axes, comparisons, strict=True):
        name, runs = comparison.model.arch.name, comparison.runs
        _panel(row[0], f"{name}: throughput, tok/s", "throughput_tok_s", runs)
        _panel(row[1], f"{name}: mean inter-token latency, ms", "itl_ms_mean", runs[runs.itl_is_reliable])
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def _panel(axes: Any, title: str, metric: str, runs: pd.DataFrame) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    for starved, (label, colour) in enumerate(COLOURS.items()):
        some = runs[runs.starved == starved]
        axes.scatter(
            some[metric], some[f"twin_{metric}"], s=9, alpha=0.6, color=colour, label=label, linewidths=0
        )
    ends = [runs[metric].min(), runs[metric].max()]
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
    given = parser.parse_args()
    if given.picture:
        draw(shipped(given), given.picture)
        return
    text = report(given)
    print(text)
    if given.markdown:
        given.markdown.write_text(f"# Fidelity\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
