"""Uncertainty of a profile: profiles with drawn coefficients, and one with pessimistic step times.

The coefficients of the step model and of adapter loading are drawn. Memory is not: engines print their KV
tokens, and the memory models of measured profiles are within about 1 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from capplan.errors import InputError
from capplan.spec import Coefficient, FittedModel, Profile, ProvenanceKind

DRAWS: Final = 8
"""Drawn profiles per verification, in antithetic pairs."""

DEFAULT_SCATTER: Final[Mapping[ProvenanceKind, float]] = MappingProxyType(
    {
        ProvenanceKind.MEASURED: 0.05,
        ProvenanceKind.PUBLISHED: 0.05,
        ProvenanceKind.COMPOSED: 0.10,
        ProvenanceKind.CARRIED: 0.15,
        ProvenanceKind.ROOFLINE: 0.15,
    }
)
"""Relative standard deviation of step and load times without a stored uncertainty, by kind of provenance.

Measured: twice the error of mean inter-token latencies on runs left out of a fit. Rooflines and carried
profiles: the largest mean difference between rooflines and the shipped profiles. Composed profiles: between
the two. The sources of these figures are in the documentation of profiles.
"""

_SEED: Final = 20_260_801
"""Draws are the same numbers for every profile and plan (common random numbers)."""


def scatter(profile: Profile) -> float:
    """Return the relative standard deviation of step times between runs."""
    known = profile.step_latency.uncertainty
    return DEFAULT_SCATTER[profile.provenance.kind] if known is None else known.scatter


def drawn_profiles(profile: Profile, count: int = DRAWS) -> tuple[Profile, ...]:
    """Return profiles with coefficients drawn from the uncertainty of the fit.

    Coefficients are normal with the covariance of the fit, bounded at 0 if the fitted ones are not negative.
    All coefficients and tables of the step model are multiplied by ``exp(scatter * z)`` with z at equally
    likely quantiles of a normal distribution, scaled to variance 1. Draws 2i and 2i + 1 have opposite signs.

    Parameters
    ----------
    profile
        The profile.
    count
        Number of draws, even.

    Raises
    ------
    InputError
        If `count` is odd or below 2.
    """
    if count < 2 or count % 2:
        raise InputError("must be an even number >= 2", count, "draws")
    pairs = count // 2
    quantiles = ndtri((np.arange(pairs) + pairs + 0.5) / count)  # the upper half
    quantiles /= np.sqrt(np.mean(quantiles**2))
    rng = np.random.default_rng(_SEED)
    common = rng.permutation(quantiles)
    steps, loads = profile.step_latency, profile.loading
    drawn = []
    for pair in range(pairs):
        of_steps, of_loads = (rng.standard_normal(len(each.coefficients)) for each in (steps, loads))
        for sign in (1.0, -1.0):
            factor = float(np.exp(scatter(profile) * sign * common[pair]))
            moved = _scaled(_moved(steps, sign * of_steps), factor)
            drawn.append(profile.replace(step_latency=moved, loading=_moved(loads, sign * of_loads)))
    return tuple(drawn)


def _moved(model: FittedModel, normal: NDArray[np.float64]) -> FittedModel:
    """Return the model with coefficients away from their values by normal numbers, one per coefficient."""
    known = model.uncertainty
    if known is None or not known.names:
        return model
    variances, axes = np.linalg.eigh(np.array(known.covariance))
    shifts = axes @ (np.sqrt(np.maximum(variances, 0.0)) * normal[: len(known.names)])
    moved = {}
    for name, shift in zip(known.names, shifts.tolist(), strict=True):
        value = model.value(name)
        moved[name] = Coefficient(value=max(0.0, value + shift) if value >= 0.0 else value + shift)
    return model.replace(coefficients=model.coefficients | moved)


def _scaled(model: FittedModel, factor: float) -> FittedModel:
    """Return the step model with every time multiplied."""
    if factor == 1.0:
        return model
    changed = {
        name: Coefficient(value=each.value * factor)
        for name, each in model.coefficients.items()
        if name not in _NO_TIMES
    }
    tables = {name: table.scaled(factor) for name, table in model.tables.items()}
    return model.replace(coefficients=model.coefficients | changed, tables=tables)


_NO_TIMES: Final = ("k6", "k7", "k7_base", "cache_kv_ktokens")
"""Coefficients of step models that are no times, and no times per quantity."""


def with_step_times(profile: Profile, factor: float) -> Profile:
    """Return the profile with all step times multiplied, as on a machine that is slower by the factor."""
    return profile.replace(step_latency=_scaled(profile.step_latency, factor))


def pessimistic_profile(profile: Profile, quantile: float) -> Profile:
    """Return the profile with step times at a quantile of their uncertainty.

    All step times are multiplied by ``exp(scatter * z)``, where z is the quantile of the normal distribution.
    The scatter is that of runs left out of the fit, so it contains the errors of the coefficients.

    Raises
    ------
    InputError
        Unless the quantile is in [0.5, 1).
    """
    if not 0.5 <= quantile < 1.0:
        raise InputError("must be at least 0.5 and below 1", quantile, "robust")
    return with_step_times(profile, float(np.exp(scatter(profile) * ndtri(quantile))))
