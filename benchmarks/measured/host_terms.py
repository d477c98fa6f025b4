"""Host terms of a profile, fitted on measured rows: milliseconds per step, running request, and request.

A step model composed of kernels has none of them. Each round of the fit simulates all rows, with the terms
and with each of the first two a little larger, and solves a linear problem: longer steps hold more requests,
so that no single simulation suffices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from benchmarks.measured.case import Deployment, LeftOut, MeasuredCase, ProfileFor
from capplan import Profile
from capplan.spec import Coefficient

_ROUNDS: Final = 4
_DIFFERENCES_MS: Final = (0.2, 0.004)
_FITTED: Final = ("itl_ms", "tpot_ms")
"""Metrics that the fit is on: the first that a row has."""


@dataclass(frozen=True)
class HostTerms:
    """Milliseconds of the host."""

    ms_per_step: float = 0.0
    ms_per_request: float = 0.0
    """Per request that runs in a step."""
    request_ms: float | None = None
    """Outside of steps, before the first token; None: as the profile has it."""

    def added_to(self, profile: Profile) -> Profile:
        """Return the profile with the terms added to its step model."""
        added = {"base_ms": self.ms_per_step, "ms_per_request": self.ms_per_request}
        model, host = profile.step_latency, profile.host
        values = {name: each.value for name, each in model.coefficients.items()}
        more = {name: Coefficient(value=values.get(name, 0.0) + added[name]) for name in added}
        step_latency = model.replace(coefficients=model.coefficients | more)
        if self.request_ms is not None:
            outside = {"request_ms": Coefficient(value=self.request_ms)}
            host = host.replace(coefficients=host.coefficients | outside)
        return profile.replace(step_latency=step_latency, host=host)


def fit_host_terms(
    cases: Sequence[MeasuredCase],
    bare_profile_for: ProfileFor,
    left_out: LeftOut | None = None,
    rounds: int = _ROUNDS,
) -> HostTerms:
    """Return the terms, none below 0, of least squared relative error of ITL over rows that are not left out.

    `request_ms` is the median over rows of measured TTFT without that of the simulation.

    Parameters
    ----------
    cases
        Measured rows of ITL or TPOT.
    bare_profile_for
        Profiles without host terms.
    left_out
        Rows to leave out of the fit.
    rounds
        Linear problems to solve.
    """
    kept = [case for case in cases if left_out is None or not left_out.covers(case.deployment)]
    bare = {case.deployment: bare_profile_for(case.deployment, left_out) for case in kept}

    def ratios(ms_per_step: float, ms_per_request: float) -> NDArray[np.float64]:
        terms = HostTerms(ms_per_step, ms_per_request)
        return np.array(
            [_itl_ratio(case, case.predict(terms.added_to(bare[case.deployment]))) for case in kept]
        )

    at = np.zeros(2)
    for _ in range(rounds):
        ratio = ratios(*at)
        columns = [(ratios(*(at + step)) - ratio) / step.sum() for step in np.diag(_DIFFERENCES_MS)]
        slopes = np.stack(columns, axis=1)
        at, _ = nnls(slopes, slopes @ at + 1.0 - ratio)
    found = HostTerms(*map(float, at))
    return replace(found, request_ms=_request_ms(kept, bare, found))


def _itl_ratio(case: MeasuredCase, predicted: Mapping[str, float]) -> float:
    metric = next(name for name in _FITTED if name in case.measured)
    return predicted[metric] / case.measured[metric]


def _request_ms(
    cases: Sequence[MeasuredCase], bare: Mapping[Deployment, Profile], terms: HostTerms
) -> float | None:
    inside = replace(terms, request_ms=0.0)
    rest_ms = [
        case.measured["ttft_ms"] - case.predict(inside.added_to(bare[case.deployment]))["ttft_ms"]
        for case in cases
        if "ttft_ms" in case.measured
    ]
    return max(0.0, float(np.median(rest_ms))) if rest_ms else None


class WithHostTerms:
    """Profiles with host terms that are fitted on measured rows when first asked for."""

    def __init__(self, bare_profile_for: ProfileFor, cases: Sequence[MeasuredCase]) -> None:
        self._bare_profile_for = bare_profile_for
        self._cases = cases
        self._terms: dict[LeftOut | None, HostTerms] = {}

    def terms(self, left_out: LeftOut | None = None) -> HostTerms:
        """Return the terms fitted without some rows."""
        if left_out not in self._terms:
            self._terms[left_out] = fit_host_terms(self._cases, self._bare_profile_for, left_out)
        return self._terms[left_out]

    def __call__(self, deployment: Deployment, left_out: LeftOut | None = None) -> Profile:
        bare = self._bare_profile_for(deployment, left_out)
        return self.terms(left_out).added_to(bare)
