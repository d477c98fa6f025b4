"""Host terms of a profile, fitted on measured rows: milliseconds per step, running request, and request.

A step model composed of operators has none of them. Longer steps hold more requests, so that every evaluation
of the fit simulates all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.measured.case import MeasuredCase, ProfileFor
from capplan import Profile
from capplan.spec import Coefficient

Floats = NDArray[np.float64]

_PRIOR: Final = (0.5, 0.01)
"""Standard deviations of base_ms and ms_per_request between versions."""

_ROW_ERROR: Final = 0.03
"""Relative error of a row, by which the prior is weighed."""

_START: Final = (0.5, 0.015)
_FITTED: Final = ("itl_ms", "tpot_ms")
"""Metrics that the fit is on: the first that a row has."""


@dataclass(frozen=True)
class Rows:
    """Measured rows with their profiles without host terms."""

    cases: tuple[MeasuredCase, ...]
    profiles: tuple[Profile, ...]

    @staticmethod
    def of(cases: Sequence[MeasuredCase], bare_profile_for: ProfileFor) -> Rows:
        """Return rows with the profiles of their deployments."""
        return Rows(tuple(cases), tuple(bare_profile_for(case.deployment, None) for case in cases))

    def without(self, out: Sequence[int]) -> Rows:
        """Return the rows but for those of these positions."""
        return self.only([i for i in range(len(self.cases)) if i not in out])

    def only(self, keep: Sequence[int]) -> Rows:
        """Return the rows of these positions."""
        return Rows(tuple(self.cases[i] for i in keep), tuple(self.profiles[i] for i in keep))

    def errors(self, terms: Floats, metric: str | None = None) -> Floats:
        """Return predicted over measured, less 1, under base_ms, ms_per_request and request_ms.

        Without a metric it is the one that fits are on.
        """
        found = []
        for case, profile in zip(self.cases, self.profiles, strict=True):
            name = metric or next(each for each in _FITTED if each in case.measured)
            found.append(case.predict(with_terms(profile, terms))[name] / case.measured[name] - 1.0)
        return np.array(found)


def with_terms(profile: Profile, terms: Floats) -> Profile:
    """Return the profile with base_ms, ms_per_request and request_ms set."""
    base_ms, ms_per_request, request_ms = (Coefficient(value=float(each)) for each in terms)
    step, host = profile.step_latency, profile.host
    return profile.replace(
        step_latency=step.replace(
            coefficients=step.coefficients | {"base_ms": base_ms, "ms_per_request": ms_per_request}
        ),
        host=host.replace(coefficients=host.coefficients | {"request_ms": request_ms}),
    )


def fitted(rows: Rows, prior: Floats | None = None) -> tuple[Floats, Floats]:
    """Return the terms of least squared relative error, and the standard errors of the first two.

    The first two are fitted on ITL or TPOT, towards those of a prior if there is one. `request_ms` is the
    median over rows of measured TTFT without that of the simulation.
    """
    pull = np.zeros(2) if prior is None else 1.0 / np.array(_PRIOR)
    towards = np.zeros(2) if prior is None else prior[:2]

    def residuals(two: Floats) -> Floats:
        errors = rows.errors(np.append(two, 0.0)) / _ROW_ERROR
        return np.concatenate([errors, pull * (two - towards)])

    found = least_squares(
        residuals,
        np.array(_START),
        bounds=(0.0, np.inf),
        diff_step=np.array([0.1, 0.1]),
        x_scale=_PRIOR,
        max_nfev=6,
    )
    jacobian = np.asarray(found.jac)
    spread = max(1.0, 2.0 * found.cost / max(1, found.fun.size - 2))
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * spread
    terms = np.append(found.x, 0.0)
    ttft_ms = np.array([case.measured["ttft_ms"] for case in rows.cases])
    terms[2] = max(0.0, float(np.median(-rows.errors(terms, "ttft_ms") * ttft_ms)))
    return terms, np.sqrt(np.diag(covariance))
