"""What clients add to the engine's steps, without simulating the steps again.

Time outside the steps changes no decision of the engine, so its coefficients only shift what is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from capplan.twin.calibration_free import FreeCoefficient
from capplan.twin.calibration_runs import TARGETS
from capplan.twin.result import SimulationResult

REQUEST_MS: Final = "request_ms"
ITL_FACTOR: Final = "client_itl_factor"


def is_outside(free: FreeCoefficient) -> bool:
    """Tell whether a coefficient is about time outside the steps."""
    return free.part == "host" and free.name in (REQUEST_MS, ITL_FACTOR)


def answer(
    result: SimulationResult, before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[float, ...]:
    """Return every target as it would be with other coefficients outside the steps.

    Parameters
    ----------
    result
        Simulated with the coefficients `before`.
    before, after
        Values of free coefficients by name; those that are missing have not changed.
    """
    later_s = (after.get(REQUEST_MS, 0.0) - before.get(REQUEST_MS, 0.0)) / 1e3
    stretch = after.get(ITL_FACTOR, 1.0) / before.get(ITL_FACTOR, 1.0)
    shifts = {
        "ttft_s_p50": later_s,
        "ttft_s_mean": later_s,
        "ttft_s_mean_charged": later_s * result.completed / max(1, result.submitted),
        "e2e_s_mean": later_s,
    }
    factors = {"itl_ms_mean": stretch}
    return tuple(
        float(getattr(result, target)) * factors.get(target, 1.0) + shifts.get(target, 0.0)
        for target in TARGETS
    )
