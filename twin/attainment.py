"""Service-level objectives request by request: which share keeps each latency bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capplan.spec import Slo
from capplan.twin.request_table import FINISHED, REJECTED, RequestTable
from capplan.twin.result import SimulationResult, bound_value

KEPT, OPEN, BROKEN = 1, 0, -1


@dataclass(frozen=True)
class Attainment:
    """How many requests keep a bound.

    A request that was rejected broke every bound; one that is on its way broke a bound on TTFT, E2E or TPT
    once it has taken longer, and is open before. Bounds on TPOT and ITL leave requests of one token out.
    """

    bound: str
    """Key of the SLO, ``"tpt_over_base"``, or ``"all"`` for every latency bound together."""
    limit: float
    """In the unit of the key; NaN for all together."""
    value: float
    """The statistic that the key is about, such as the 99th percentile; NaN where it is about shares."""
    kept: int
    broken: int
    open: int

    @property
    def share(self) -> float:
        """Share of requests that kept the bound, of those that kept or broke it; NaN without any."""
        decided = self.kept + self.broken
        return self.kept / decided if decided else float("nan")


def attainment(
    slo: Slo,
    result: SimulationResult,
    table: RequestTable,
    overhead_s: float,
    client_itl_factor: float,
    base_tpt_ms: float | None,
) -> tuple[tuple[Attainment, ...], NDArray[np.int8]]:
    """Return how each latency bound is kept, all together last, and KEPT, OPEN or BROKEN per request.

    Parameters
    ----------
    slo
        The bounds; none: nothing is kept or broken.
    result, table
        What happened.
    overhead_s
        Time of a request outside the engine.
    client_itl_factor
        How much longer gaps between tokens are for a client than in the engine; a request's ITL is its mean
        gap.
    base_tpt_ms
        Mean TPT of the same requests without adapters, which ``tpt_over_base`` refers to.
    """
    limits: dict[str, float] = slo.latency_bounds()
    if slo.tpt_over_base is not None and base_tpt_ms is not None:
        limits["tpt_over_base"] = slo.tpt_over_base * base_tpt_ms
    measured = _measured(table, result.duration_s + overhead_s, client_itl_factor)
    rejected = table.status == REJECTED
    together = np.full(len(table), KEPT if limits else OPEN, np.int8)
    found = []
    for bound, limit in limits.items():
        kind = bound.split("_")[0]
        value, at_least = measured[kind]
        verdict = np.full(len(table), OPEN, np.int8)
        verdict[value <= limit] = KEPT
        verdict[(value > limit) | (at_least > limit) | rejected] = BROKEN
        counted = (table.output_tokens > 1) | rejected if kind in ("tpot", "itl") else slice(None)
        together[counted] = np.minimum(together[counted], verdict[counted])
        statistic = float("nan") if bound == "tpt_over_base" else bound_value(result, bound)
        found.append(_counted(bound, limit, statistic, verdict[counted]))
    if len(limits) > 1:
        found.append(_counted("all", float("nan"), float("nan"), together))
    return tuple(found), together


def _measured(
    table: RequestTable, end_s: float, client_itl_factor: float
) -> Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Return each metric of each request, NaN where it is not known, and what it will be at least."""
    so_far_s = np.where(table.status == FINISHED, np.nan, end_s - table.arrival_s)
    nothing = np.full(len(table), np.nan)
    return {
        "ttft": (table.ttft_s, np.where(np.isnan(table.ttft_s), so_far_s, np.nan)),
        "e2e": (table.e2e_s, so_far_s),
        "tpt": (table.tpt_ms, 1e3 * so_far_s / table.output_tokens),
        "tpot": (table.tpot_ms, nothing),
        "itl": (client_itl_factor * table.tpot_ms, nothing),
    }


def _counted(bound: str, limit: float, value: float, verdict: NDArray[np.int8]) -> Attainment:
    kept, broken = int((verdict == KEPT).sum()), int((verdict == BROKEN).sum())
    return Attainment(bound, limit, value, kept, broken, verdict.size - kept - broken)
