"""Host terms of a step, fitted on measured ITL: milliseconds per step and per running request.

A bare step model has neither. The mean ITL of a simulated stage is linear in both terms as long as the steps
hold the same requests. Longer steps hold more of them, so that simulation and least squares alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.measured.case import LeftOut, ProfileFor
from benchmarks.measured.dense_stages import Stage
from benchmarks.measured.step_log import StepLog, log_steps
from capplan import Profile
from capplan.spec import Coefficient

_ROUNDS: Final = 4
_LOG_S: Final = 200.0


@dataclass(frozen=True)
class HostTerms:
    """Milliseconds of the host per step and per request that runs in it."""

    ms_per_step: float
    ms_per_request: float

    def added_to(self, profile: Profile) -> Profile:
        """Return the profile with the terms added to its step model."""
        model = profile.step_latency
        added = {"base_ms": self.ms_per_step, "ms_per_request": self.ms_per_request}
        coefficients = dict(model.coefficients)
        for name, value in added.items():
            before = coefficients[name].value if name in coefficients else 0.0
            coefficients[name] = Coefficient(value=before + value)
        return profile.replace(step_latency=model.replace(coefficients=coefficients))


def stage_steps(stage: Stage, profile: Profile, duration_s: float = _LOG_S) -> StepLog:
    """Return the steps of a stage under a profile."""
    return log_steps(stage.scenario(profile, duration_s))


def fit_host_terms(
    stages: Sequence[Stage],
    bare_profile_for: ProfileFor,
    left_out: LeftOut | None = None,
    rounds: int = _ROUNDS,
) -> HostTerms:
    """Return the terms of least squared relative error of ITL over the stages that are not left out.

    Parameters
    ----------
    bare_profile_for
        Profiles without host terms.
    left_out
        Stages to leave out of the fit.
    rounds
        Simulations of every stage; the first ones run with too few requests per step.
    """
    kept = [stage for stage in stages if left_out is None or not left_out.covers(stage.deployment)]
    bare = {stage.deployment: bare_profile_for(stage.deployment, left_out) for stage in kept}
    terms = HostTerms(0.0, 0.0)
    for _ in range(rounds):
        columns, rest = [], []
        for stage in kept:
            log = stage_steps(stage, terms.added_to(bare[stage.deployment]))
            requests = log.itl_ms(log.requests)
            measured_ms = gap_ms(stage)
            without = log.itl_ms() - terms.ms_per_step - terms.ms_per_request * requests
            columns.append([1.0 / measured_ms, requests / measured_ms])
            rest.append((measured_ms - without) / measured_ms)
        found, *_ = np.linalg.lstsq(np.array(columns), np.array(rest), rcond=None)
        terms = HostTerms(*map(float, found))
    return terms


def gap_ms(stage: Stage) -> float:
    """Return the measured mean gap between tokens: the source divides by all output tokens."""
    tokens = round(stage.output_tokens)
    return stage.measured["itl_ms"] * tokens / (tokens - 1)
