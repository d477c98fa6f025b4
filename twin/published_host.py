"""The host model of the shipped H100 profiles: what clients and scrapes add to the engine's steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import nnls

from capplan.spec import Coefficient, Fit, FittedModel, Profile
from capplan.twin import client
from capplan.twin.core import run as run_compiled
from capplan.twin.published_models import PublishedModel
from capplan.twin.published_runs import GROUPS, PublishedRun, published_runs
from capplan.twin.result import SimulationResult
from capplan.twin.scenario import Scenario
from capplan.twin.trace import Trace

SCRAPE_INTERVAL_S = 2.0
"""The published runs slept so long between two scrapes of ``/metrics``, to record their series."""

_RUN_S = 3600.0
_SIMULATED_S = 900.0
_SETTLED_S = 300.0
_DENSE_SAMPLES = 80  # of a published series; the rest are spread evenly over what is left
_FEWEST_GAPS = 50
_SHARES = np.linspace(0.0, 1.5, 61)


@dataclass(frozen=True)
class _Seen:
    """A measured run beside what the twin says of it, without a host model."""

    run: PublishedRun
    ttft_s_p50: float
    itl_ms_mean: float
    step_s: float
    adapters: float
    small: float
    series: float
    """Mean number of time series over the hour."""


def no_host() -> FittedModel:
    """Return the model of a host that adds nothing."""
    return _host({"request_ms": 0.0, "client_itl_factor": 1.0}, "nothing", 0, 0.0)


def fit_host(
    reference: Path, profile: Profile, model: PublishedModel, groups: tuple[str, ...] = GROUPS
) -> FittedModel:
    """Fit what happens outside the engine's steps, with the twin in the loop.

    ``request_ms``: the median gap between measured and simulated TTFT where nobody queues.
    ``scrape_us_*``: how long a scrape takes, from how far apart the samples of runs without a queue are.
    ``scrape_share``: for what part of it tokens are held back; the one that brings the mean ITL nearest.

    Parameters
    ----------
    reference, model
        Tables and model.
    profile
        With its other models fitted.
    groups
        Groups of runs to fit to.
    """
    bare = profile.replace(host=no_host())
    seen = [_see(run, bare) for run in published_runs(reference, model.key, groups) if run.itl_is_reliable]
    calm = [each for each in seen if not each.run.queued and not each.run.starved]
    ours = np.array([each.ttft_s_p50 for each in calm])
    measured = np.array([each.run.ttft_s_p50 for each in calm])
    request_ms = max(0.0, float(np.median(measured - ours)) * 1e3)
    error = float(np.median(np.abs((ours + request_ms / 1e3) / measured - 1)) * 100)
    per_series = _fit_scrapes(reference, calm)
    share = _fit_share(seen, per_series)
    values = {
        "request_ms": round(request_ms, 3),
        "client_itl_factor": 1.0,
        client.INTERVAL_S: SCRAPE_INTERVAL_S,
        client.SERIES_US: round(per_series[0] * 1e6, 4),
        client.SERIES_ADAPTER_US: round(per_series[1] * 1e6, 5),
        client.SHARE: share,
    }
    source = f"runs.csv and timeseries.parquet: runs of {', '.join(groups)}, twin in the loop"
    return _host(values, source, len(seen), error)


def _host(values: dict[str, float], source: str, samples: int, error: float) -> FittedModel:
    return FittedModel(
        form="per-request",
        coefficients={name: Coefficient(value=value) for name, value in values.items()},
        fit=Fit(
            source=source,
            samples=samples,
            error_formula="100 * median(|p - a| / a) of the median TTFT where nobody queues",
            error=error,
        ),
    )


def _see(run: PublishedRun, profile: Profile) -> _Seen:
    kept: list[tuple[Scenario, Trace]] = []

    def keep(scenario: Scenario) -> Trace:
        kept.append((scenario, run_compiled(scenario)))
        return kept[0][1]

    result: SimulationResult = run.simulate(profile, duration_s=_SIMULATED_S, runner=keep)
    scenario, trace = kept[0]
    step_s, adapters = client.mean_step_s(trace), client.mean_adapters(trace)
    return _Seen(
        run=run,
        ttft_s_p50=result.ttft_s_p50,
        itl_ms_mean=result.itl_ms_mean,
        step_s=step_s,
        adapters=adapters,
        small=client.small_share(trace),
        series=client.mean_series(scenario, step_s, adapters, _RUN_S),
    )


def _fit_scrapes(reference: Path, calm: list[_Seen]) -> NDArray[np.float64]:
    """Return seconds per time series of a scrape, and per time series and adapter in the batch."""
    took = scrape_s(reference)
    rows = [(each, took[each.run.index]) for each in calm if each.run.index in took]
    design = np.array([(each.series, each.series * each.adapters) for each, _ in rows])
    coefficients: NDArray[np.float64] = nnls(design, np.array([seconds for _, seconds in rows]))[0]
    return coefficients


def scrape_s(reference: Path) -> dict[int, float]:
    """Return how long a scrape took on average in each run, in seconds.

    The samples are as far apart as the pause and the scrape take together. Of each series the first 80
    samples are published and 320 of the others, evenly spread.
    """
    points = pd.read_csv(reference / "runs.csv").set_index("run_idx").series_points
    took = {}
    table = pd.read_parquet(reference / "timeseries.parquet")
    for index in table.run_idx.unique().tolist():
        series = table[table.run_idx == index]
        n = len(series)
        number = np.arange(n, dtype=float)
        if n > _DENSE_SAMPLES:
            number[_DENSE_SAMPLES:] = np.linspace(_DENSE_SAMPLES, points[index] - 1, n - _DENSE_SAMPLES)
        at_s = series.t_s.to_numpy(float)
        used = (series.num_running.to_numpy() > 0) & (at_s > _SETTLED_S) & (at_s < _RUN_S)
        at_s, number = at_s[used], number[used]
        if at_s.size > _FEWEST_GAPS:
            gap_s = (at_s[-1] - at_s[0]) / (number[-1] - number[0])
            took[index] = max(0.0, float(gap_s) - SCRAPE_INTERVAL_S)
    return took


def _fit_share(seen: list[_Seen], per_series: NDArray[np.float64]) -> float:
    measured = np.array([each.run.itl_ms_mean for each in seen])

    def miss(share: float) -> float:
        ours = np.array([each.itl_ms_mean * _stretch(each, per_series, share) for each in seen])
        return float(np.mean(np.abs(np.log(ours / measured))))

    return round(float(_SHARES[np.argmin([miss(share) for share in _SHARES])]), 3)


def _stretch(seen: _Seen, per_series: NDArray[np.float64], share: float) -> float:
    taken_s = seen.series * (per_series[0] + per_series[1] * seen.adapters)
    return client.stretch(SCRAPE_INTERVAL_S, share * taken_s, seen.step_s, seen.small)
