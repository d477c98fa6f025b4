"""Intervals of predictions: spread over seeds, and over profiles drawn from the uncertainty of the fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Final

from scipy.special import ndtri, stdtrit

LEVEL: Final = 0.9
"""Probability that one further hour lies within the interval."""


def least_share_of_seeds(count: int) -> float:
    """Return the least share of seeds that hold, with probability `LEVEL`, after `count` that all held."""
    return float((1.0 - LEVEL) ** (1.0 / count))


def prediction_interval(values: Sequence[float], drawn: Sequence[float] = ()) -> tuple[float, float] | None:
    """Return the interval of a metric of one further run; None for one seed, which shows no spread.

    With mean m and standard deviation s of n seeds, and deviations d of drawn profiles from the first seed
    with the fitted profile::

        low  = m - sqrt((t s sqrt(1 + 1/n))^2 + (z r_below)^2)
        high = m + sqrt((t s sqrt(1 + 1/n))^2 + (z r_above)^2)

    t and z are the two-sided `LEVEL` quantiles of Student's distribution with n - 1 degrees and of the normal
    distribution. ``r_below = sqrt(2 mean(min(d, 0)^2))`` and ``r_above`` alike: half of the draws are slower
    profiles, so a metric that only falls has an interval to one side.

    Parameters
    ----------
    values
        Metric by seed, with the fitted profile.
    drawn
        Metric of each drawn profile on the first seed; empty: without uncertainty of the profile.
    """
    count = len(values)
    if count < 2:
        return None
    mean, upper = fmean(values), (1.0 + LEVEL) / 2.0
    seeds = float(stdtrit(count - 1, upper)) * stdev(values) * math.sqrt(1.0 + 1.0 / count)
    deviations = [each - values[0] for each in drawn]
    below, above = (
        float(ndtri(upper)) * math.sqrt(2.0 * fmean(max(0.0, sign * d) ** 2 for d in deviations or (0.0,)))
        for sign in (-1.0, 1.0)
    )
    return max(0.0, mean - math.hypot(seeds, below)), mean + math.hypot(seeds, above)
