"""Share of measured runs within the intervals that plans state, on runs that were left out of the fit.

``python -m benchmarks.interval_coverage REFERENCE_DIR [--fitted DIR] [--seeds N] [--every N] [--workers N]
[--markdown FILE]``

Profiles are fitted to the runs of one published group and judged on those of the other, both ways round, as
in `benchmarks.fidelity`. Every run is simulated on ``--seeds`` seeds with the fitted profile, and on the
first of them with the profiles drawn from the uncertainty of the fit. Starved and other runs are apart: the
throughput of a run that keeps up is the offered load. ``--every 3`` judges every third run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track

from benchmarks.common import command_line, emit, records_table
from benchmarks.fidelity import fitted_profile
from capplan import Profile, simulate
from capplan.datasets.published._runs import GROUPS, PUBLISHED, PublishedRun, published_runs
from capplan.models import drawn_profiles
from capplan.models._uncertainty import scatter
from capplan.planner._document import LEVEL, prediction_interval
from capplan.twin._sweep import in_parallel

METRICS: Final = ("throughput_tok_s", "itl_ms_mean")


def judge(profile: Profile, seeds: int, run: PublishedRun) -> list[dict[str, Any]]:
    """Return one row per metric: whether the measurement is inside the intervals."""
    results = [simulate(run.workload, profile, seed=seed, **run.settings) for seed in range(seeds)]
    drawn = [simulate(run.workload, each, seed=0, **run.settings) for each in drawn_profiles(profile)]
    rows = []
    for metric in METRICS:
        if metric == "itl_ms_mean" and not run.itl_is_reliable:
            continue
        values, others = ([getattr(r, metric) for r in each] for each in (results, drawn))
        measured = getattr(run, metric)
        both, seeds_only = (prediction_interval(values, each) for each in (others, ()))
        if both is None or seeds_only is None:
            continue
        rows.append(
            {
                "metric": metric,
                "starved": run.starved,
                "inside": both[0] <= measured <= both[1],
                "inside, seeds only": seeds_only[0] <= measured <= seeds_only[1],
                "above": measured > both[1],
                "below": measured < both[0],
                "half width": (both[1] - both[0]) / 2.0 / measured,
            }
        )
    return rows


def tables(given: Any) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Yield model, title and rows of each model and direction of the split."""
    for model in PUBLISHED:
        for fit, test in (GROUPS, GROUPS[::-1]):
            profile = fitted_profile(given, model, fit)
            runs = published_runs(given.reference, model, (test,))[:: given.every]
            found = in_parallel(partial(judge, profile, given.seeds), runs, workers=given.workers)
            label = f"{model.arch.name}, {test}"
            rows = [
                row for each in track(found, label, len(runs), console=Console(stderr=True)) for row in each
            ]
            title = f"{test}, fitted on {fit} (scatter {100 * scatter(profile):.1f} %)"
            yield model.arch.name, title, pd.DataFrame(rows)


def record(model: str, title: str, metric: str, starved: bool, rows: pd.DataFrame) -> dict[str, object]:
    """Return one line of the report."""
    share = {
        name: f"{100 * rows[name].mean():.1f} %"
        for name in ("inside", "inside, seeds only", "below", "above")
    }
    width = f"{100 * float(np.median(rows['half width'])):.2f} %"
    kind = "starved" if starved else "keeps up"
    facts = {"model": model, "runs": title, "metric": metric, "regime": kind, "n": len(rows)}
    return {**facts, **share, "median half width": width}


def report(given: Any) -> str:
    """Return the coverage of all splits as a Markdown table."""
    records = [
        record(model, title, str(metric), bool(starved), rows)
        for model, title, table in tables(given)
        for (metric, starved), rows in table.groupby(["metric", "starved"])
    ]
    return f"Measured values within {100 * LEVEL:.0f} % intervals\n\n{records_table(records)}\n"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("reference", type=Path, metavar="REFERENCE_DIR")
    parser.add_argument("--fitted", type=Path, metavar="DIR")
    parser.add_argument("--seeds", type=int, default=5, metavar="N")
    parser.add_argument("--every", type=int, default=1, metavar="N")
    parser.add_argument("--workers", type=int, metavar="N")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    given = parser.parse_args()
    emit(report(given), given.markdown)


if __name__ == "__main__":
    main()
