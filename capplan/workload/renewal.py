"""Renewal processes: requests of many adapters at once, gaps drawn from one family of distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import gammaln

from capplan.errors import InputError

Floats: TypeAlias = NDArray[np.float64]
Owners: TypeAlias = NDArray[np.int64]
Draw: TypeAlias = Callable[[np.random.Generator, Owners], Floats]

MAX_REQUESTS: Final = 1e8  # more than fit in memory beside their results
_WEIBULL_SHAPES: Final = (0.05, 200.0)  # cv from 4e5 to 0.006


class GapDistribution(NamedTuple):
    """A distribution of gaps whose mean is 1, drawn once for every owner given."""

    cv: float
    """Standard deviation over mean."""
    gaps: Draw
    biased: Draw
    """The gap that covers a fixed instant; long ones cover more instants, so x weighs their density."""

    def first(self, rng: np.random.Generator, owners: Owners) -> Floats:
        """Return the wait for the first request of a process that began long before: a part of such a gap."""
        covering = self.biased(rng, owners)
        return covering * rng.random(len(owners))


@lru_cache(maxsize=64)
def gap_distribution(process: str, cv: float | None) -> GapDistribution:
    """Return the law of ``poisson``, ``deterministic``, ``gamma``, ``weibull`` or ``lognormal`` gaps."""
    match process:
        case "poisson":
            return _gamma(1.0)
        case "deterministic":
            return GapDistribution(
                0.0, lambda _, owners: np.ones(len(owners)), lambda _, owners: np.ones(len(owners))
            )
        case "gamma":
            return _gamma(_given(cv))
        case "weibull":
            return _weibull(_given(cv))
        case "lognormal":
            return _lognormal(_given(cv))
        case _:
            raise InputError("must be the name of a renewal process", process, "process")


def _given(cv: float | None) -> float:
    if cv is None:
        raise InputError("is required", location="cv")
    return cv


def _gamma(cv: float) -> GapDistribution:
    shape = 1 / cv**2
    return GapDistribution(
        cv,
        lambda rng, owners: rng.standard_gamma(shape, len(owners)) / shape,
        lambda rng, owners: rng.standard_gamma(shape + 1, len(owners)) / shape,
    )


def _weibull(cv: float) -> GapDistribution:
    """With E exponential, E^(1 / shape) is Weibull; weighted by its size, E becomes a gamma variable."""

    def excess(shape: float) -> float:
        return float(gammaln(1 + 2 / shape) - 2 * gammaln(1 + 1 / shape)) - math.log1p(cv**2)

    shape = float(brentq(excess, *_WEIBULL_SHAPES, xtol=1e-12))
    scale = math.exp(-float(gammaln(1 + 1 / shape)))
    return GapDistribution(
        cv,
        lambda rng, owners: scale * rng.standard_exponential(len(owners)) ** (1 / shape),
        lambda rng, owners: scale * rng.standard_gamma(1 + 1 / shape, len(owners)) ** (1 / shape),
    )


def _lognormal(cv: float) -> GapDistribution:
    sigma = math.sqrt(math.log1p(cv**2))
    return GapDistribution(
        cv,
        lambda rng, owners: np.exp(sigma * rng.standard_normal(len(owners)) - sigma**2 / 2),
        lambda rng, owners: np.exp(sigma * rng.standard_normal(len(owners)) + sigma**2 / 2),
    )


def renewals(
    rng: np.random.Generator, spans: Floats, cv: float, first: Draw, gaps: Draw
) -> tuple[Owners, Floats]:
    """Return the events of one process per span, each in [0, span), not sorted over the processes.

    Parameters
    ----------
    spans : ndarray of float64, shape (n,)
        How far each process runs, in mean gaps.
    cv : float
        About how much the gaps spread; decides only how many are drawn at a time.
    first, gaps : callable
        Draw the wait for the first event, and the gaps after it, of the processes given by number.

    Returns
    -------
    owner : ndarray of int64, shape (events,)
        Process of each event.
    time : ndarray of float64, shape (events,)
        In mean gaps.

    Raises
    ------
    InputError
        When over 1e8 events are to be expected.
    """
    expected = float(spans.sum())
    if expected > MAX_REQUESTS:
        raise InputError(
            f"rates x duration must not exceed {MAX_REQUESTS:g} requests", expected, "duration_s"
        )
    last = first(rng, np.arange(len(spans)))
    active = np.flatnonzero(last < spans)
    owners, times = [active], [last[active]]
    while len(active):
        left = spans[active] - last[active]
        counts = np.ceil(left + min(cv, 4.0) * np.sqrt(left) + 2).astype(np.int64)
        owner = np.repeat(active, counts)
        # No gap needs to be longer than its span; without the bound one alone could drown the sums of all.
        drawn = np.minimum(gaps(rng, owner), spans[owner] + 1)
        sums = np.cumsum(drawn)
        ends = np.cumsum(counts) - 1
        before = np.concatenate(([0.0], sums[ends[:-1]]))
        time = sums + np.repeat(last[active] - before, counts)
        inside = time < spans[owner]
        owners.append(owner[inside])
        times.append(time[inside])
        last[active] = time[ends]
        active = active[last[active] < spans[active]]
    return np.concatenate(owners), np.concatenate(times)
