"""Pages of results by their kind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.planner import SolverComparison
    from capplan.planner.explain import Explanation
    from capplan.spec import Plan, Profile, Workload
    from capplan.twin import DetailedResult


def report(
    result: Plan | SolverComparison | Mapping[int, DetailedResult],
    path: str | os.PathLike[str],
    *,
    explanation: Explanation | None = None,
    workload: Workload | None = None,
    profile: Profile | str | None = None,
) -> None:
    """Write a result as one HTML page with tables and charts that works offline.

    Parameters
    ----------
    result
        A plan, a comparison of solvers, or detailed simulations of one GPU by their number of adapter slots:
        ``{16: simulate_detailed(workload, profile, a_max=16)}``.
    path
        File to write, completely or not at all.
    explanation
        With a plan: the result of :func:`capplan.explain`, for the choice of slots, utilization and headroom.
    workload
        Required with simulations; with a comparison, its latency bounds are drawn.
    profile
        Required with simulations unless the workload names one.

    Raises
    ------
    InputError
        When the file cannot be written, or the workload or profile of simulations is missing.
    """
    from capplan.datasets import load_profile
    from capplan.planner import SolverComparison
    from capplan.spec import Plan, write_text_atomic

    if isinstance(result, Plan):
        from capplan.reports.pages._plan import plan_page

        page = plan_page(f"of {result.base_model}", result, explanation)
    elif isinstance(result, SolverComparison):
        from capplan.reports.pages._comparison import comparison_page

        bounds = None if workload is None else workload.slo.latency_bounds()
        page = comparison_page(result, "a workload", bounds)
    else:
        from capplan.reports.pages._simulation import NamedResults, simulation_page

        if workload is None:
            raise InputError("is required with simulations", location="workload")
        used = workload.profile if profile is None else profile
        if used is None:
            raise InputError("is required with simulations", location="profile")
        used = load_profile(used) if isinstance(used, str) else used
        outcomes = {slots: detail.result for slots, detail in result.items()}
        results = NamedResults(outcomes, result, workload.scheduling)
        page = simulation_page(workload.base_model, workload, used, {}, results)
    write_text_atomic(path, page)
