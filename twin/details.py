"""`simulate_detailed`: the same simulation, and all that is known of each request, adapter and moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capplan.spec import Workload
from capplan.twin import trace as t
from capplan.twin.attainment import Attainment, attainment
from capplan.twin.groups import GroupMetrics, group_metrics
from capplan.twin.isolated import isolated_s
from capplan.twin.reduction import reduce_trace
from capplan.twin.request_table import FINISHED, RequestTable, request_status, request_table
from capplan.twin.result import SimulationResult
from capplan.twin.scenario import Scenario
from capplan.twin.series import TimeSeries, bucket_count, time_series


@dataclass(frozen=True)
class DetailedResult:
    """A simulation with its details."""

    result: SimulationResult
    """What `simulate` returns."""
    requests: RequestTable
    overall: GroupMetrics
    by_rank: Mapping[int, GroupMetrics]
    """In ascending order of rank."""
    by_adapter: Mapping[str, GroupMetrics]
    """In the order of the workload."""
    slo: tuple[Attainment, ...]
    """One per latency bound of the workload's SLO, all together last; empty without bounds."""
    series: TimeSeries


def with_buckets(scenario: Scenario) -> Scenario:
    """Return the scenario with the instruction to record details."""
    return scenario._replace(buckets=bucket_count(scenario))


def detailed_result(
    workload: Workload,
    scenario: Scenario,
    trace: t.Trace,
    result: SimulationResult,
    overhead_s: float,
    client_itl_factor: float,
    runner: Callable[[Scenario], t.Trace],
) -> DetailedResult:
    """Return the details of a run that recorded them.

    Parameters
    ----------
    workload, scenario, trace, result
        What was simulated, the record of it, and its metrics.
    overhead_s
        Time of a request outside the engine.
    client_itl_factor
        How much longer the gaps between tokens are for a client than in the engine.
    runner
        The twin, which serves requests alone for the slowdown and without adapters for ``slo.tpt_over_base``.
    """
    ranks = np.array([0, *(adapter.rank for adapter in workload.adapters)], np.int32)
    finished = np.flatnonzero(request_status(trace, scenario.horizon_ns) == FINISHED)
    alone_s = isolated_s(scenario, ranks, finished, runner)
    table = request_table(workload, scenario, trace, overhead_s, alone_s)
    base_tpt_ms = None if workload.slo.tpt_over_base is None else _base_tpt_ms(scenario, overhead_s, runner)
    bounds, kept = attainment(workload.slo, result, table, overhead_s, client_itl_factor, base_tpt_ms)
    seen = trace.adapters.copy()
    seen[0] = 0  # the base model needs no load, so its admissions are neither hits nor misses

    def metrics(group_of_adapter: NDArray[np.int64], names: Sequence[str]) -> tuple[GroupMetrics, ...]:
        adapters = np.zeros((len(names), t.N_ADAPTER), np.int64)
        np.add.at(adapters, group_of_adapter, seen)
        group = group_of_adapter[table.adapter]
        return group_metrics(table, group, names, adapters, kept, result.duration_s, client_itl_factor)

    (overall,) = metrics(np.zeros(ranks.size, np.int64), ["all"])
    distinct, rank_number = np.unique(ranks, return_inverse=True)
    ranked = metrics(rank_number, [f"rank {rank}" for rank in distinct])
    adapters = metrics(np.arange(ranks.size), table.adapters)
    first = 0 if adapters[0].submitted else 1  # the base model, where requests ask for it
    return DetailedResult(
        result=result,
        requests=table,
        overall=overall,
        by_rank=dict(zip(distinct.tolist()[first:], ranked[first:], strict=True)),
        by_adapter=dict(zip(table.adapters[first:], adapters[first:], strict=True)),
        slo=bounds,
        series=time_series(scenario, trace, table),
    )


def _base_tpt_ms(scenario: Scenario, overhead_s: float, runner: Callable[[Scenario], t.Trace]) -> float:
    """Return the mean TPT of the same requests on the same GPU without adapters and slots for them."""
    requests = scenario.requests
    bare = scenario._replace(
        requests=requests._replace(adapter=np.zeros_like(requests.adapter)),
        costs=scenario.costs._replace(a_max=0, s_max=0),
        buckets=0,
    )
    limit = scenario.limits.max_model_len
    tpt_ms = reduce_trace(bare.requests, runner(bare), bare.horizon_ns, limit, overhead_s).tpt_ms
    return float(tpt_ms.mean()) if tpt_ms.size else float("nan")
