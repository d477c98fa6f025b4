"""`simulate_cluster`: several GPUs under one clock behind a router."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.serving.pooled import PoolSetup
from capplan.spec import Profile, Workload
from capplan.twin.cluster._python_loop import PythonRouter, run_with
from capplan.twin.cluster._rebalancing import FleetMoves, Rebalancing
from capplan.twin.cluster._routers import NamedRouter, build_rule
from capplan.twin.cluster._run import ClusterTrace, run_cluster
from capplan.twin.cluster._scenario import (
    ClusterScenario,
    Instance,
    build_cluster,
    build_movable_cluster,
    take_requests,
    without_adapters,
)
from capplan.twin.instance import _trace as t
from capplan.twin.instance._details import FINISHED, Attainment, request_status
from capplan.twin.instance._metrics import SimulationResult, client_itl_factor, summarize
from capplan.twin.instance._scenario import NS_PER_S, Scenario
from capplan.twin.instance._simulate import tpt_attainment
from capplan.workload import Requests

_MOST_ROUNDS: Final = 100_000
"""Re-balancings of one simulation."""


def simulate_cluster(
    workload: Workload,
    instances: Sequence[Instance],
    *,
    router: NamedRouter | PythonRouter = "plan-shares",
    duration_s: float = 3600.0,
    seed: int = 0,
    gpus_per_link: int = 1,
    interrupt: Callable[[], None] | None = None,
    state_period_s: float = 0.0,
    rebalance: Rebalancing | None = None,
) -> ClusterResult:
    """Simulate several instances that serve one workload.

    Parameters
    ----------
    workload
        Adapters, rates and request lengths.
    instances
        The engines, and the adapters that each holds.
    router
        Name of a router in `capplan.serving.routers.ROUTERS`, parameters of one (`Dlora`, `Gateway`,
        `LeastWorkLeft`, `Toppings`), or a function of a request and the candidates (slow; for experiments).
    duration_s
        Horizon in seconds.
    seed
        Seed of arrivals, lengths and the router; same seed, same result. The requests are those that
        `capplan.simulate` draws with it.
    gpus_per_link
        GPUs that share a link to host memory, in the order of the instances. Copies of adapters over one link
        follow each other, those to the GPUs of one instance too.
    interrupt
        Called every simulated minute or sooner, unless the router is a function; an exception that it raises
        ends the simulation.
    state_period_s
        Time between reports of an instance to the router; the reports of all are spread over it, as those
        of the running router are. Meanwhile the router knows the last report and the requests that it has
        sent since; before the first one it knows that the instance is idle. 0: it reads the present states.
        Migrations are decided by the present state.
    rebalance
        Periodic re-balancing of the adapters, which instances fetch from each other; None: they stay. Every
        instance needs slots for the largest rank. A router with a new routing table reads all instances.

    Returns
    -------
    ClusterResult
        Metrics over all requests, and those of every instance.

    Raises
    ------
    InfeasibleError
        With reason ``memory`` for an instance whose engine would not start.
    InputError
        For an invalid setting, or an adapter without a holder.
    """
    started = time.perf_counter()
    if rebalance is not None and duration_s / rebalance.settings.every_s > _MOST_ROUNDS:
        rule = f"must be at least the simulated time over {_MOST_ROUNDS:,}, {duration_s / _MOST_ROUNDS:g} s"
        raise InputError(rule, rebalance.settings.every_s, "rebalance: every_s")
    build = build_cluster if rebalance is None else build_movable_cluster
    scenario = build(workload, instances, duration_s, seed, gpus_per_link=gpus_per_link)
    trace = _trace(scenario, router, seed, interrupt, state_period_s, rebalance)
    return _result(scenario, trace, instances, started, workload.slo.tpt_over_base, interrupt)


def simulate_without_adapters(
    workload: Workload,
    instances: Sequence[Instance],
    *,
    router: NamedRouter | PythonRouter = "least-loaded",
    duration_s: float = 3600.0,
    seed: int = 0,
) -> ClusterResult:
    """Simulate the same requests and instances without adapters and slots.

    Its ``tpt_ms_mean`` is the TPT of inference without LoRA, the reference of Toppings' SLO (section 7.4).
    Parameters as for `simulate_cluster`; any instance may get any request.
    """
    started = time.perf_counter()
    scenario = without_adapters(build_cluster(workload, instances, duration_s, seed))
    return _result(scenario, _trace(scenario, router, seed), instances, started)


def _trace(
    scenario: ClusterScenario,
    router: NamedRouter | PythonRouter,
    seed: int,
    interrupt: Callable[[], None] | None = None,
    state_period_s: float = 0.0,
    rebalance: Rebalancing | None = None,
) -> ClusterTrace:
    if callable(router):
        return run_with(scenario, router, seed, state_period_s, rebalance)
    rule = build_rule(router, scenario)
    return run_cluster(
        scenario, rule, seed, interrupt=interrupt, state_period_s=state_period_s, rebalancing=rebalance
    )


@dataclass(frozen=True, eq=False)
class RoutedRequests:
    """Requests in the order of their arrival, as columns; what had not happened by the end is NaN."""

    arrival_s: NDArray[np.float64]
    adapter: NDArray[np.int32]
    """1 + position in ``workload.adapters``; 0: the base model."""
    instance: NDArray[np.int32]
    """Where each was in the end."""
    status: NDArray[np.int8]
    """Position in `STATUSES`: finished, running, waiting, rejected, or lost in a
    crash after the first token."""
    queue_s: NDArray[np.float64]
    """From arrival to the first admission to a batch, without the wait for the load of its adapter to the
    GPU; transfers between instances are part of it."""
    ttft_s: NDArray[np.float64]
    e2e_s: NDArray[np.float64]
    """TTFT and E2E contain the time outside the engine, and that on the way from one instance to another."""
    tpt_ms: NDArray[np.float64]
    """E2E / output tokens."""


@dataclass(frozen=True, kw_only=True)
class ClusterResult(SimulationResult):
    """A simulated cluster: the metrics of `SimulationResult`, over all of its requests.

    Counts and tokens are sums over instances, ``running_max`` and ``waiting_max`` the largest of any, and
    means over busy time are those of one instance. ITL percentiles are exact where all profiles have one
    factor between engine and client.
    """

    instances: tuple[SimulationResult, ...]
    """What each instance did, as if it had been simulated alone with the requests that it got."""
    requests_per_instance: tuple[int, ...]
    migrations: int
    """Requests that were moved from one instance to another."""
    requests: RoutedRequests = field(compare=False)
    tpt_over_base: tuple[Attainment, ...] = ()
    """Attainment of ``slo.tpt_over_base`` on every instance; empty without the bound."""
    moves: FleetMoves | None = None
    """Re-balancings and transfers; None without re-balancing."""

    @property
    def lost(self) -> int:
        """Requests that a crash ended after their first token; they count as submitted, not as rejected."""
        return 0 if self.moves is None else self.moves.lost

    def attainment(self, bound_tpt_ms: float) -> float:
        """Return the share of all requests with a TPT of at most so many milliseconds.

        Requests that have not finished do not keep it; NaN without requests.
        """
        tpt_ms = self.requests.tpt_ms
        return float(np.mean(tpt_ms <= bound_tpt_ms)) if tpt_ms.size else float("nan")


class _Part(NamedTuple):
    """What one instance did."""

    rows: NDArray[np.int64]
    """Its requests."""
    scenario: Scenario
    trace: t.TwinTrace
    overhead_s: float
    itl_factor: float

    def summary(self) -> SimulationResult:
        return summarize(self.scenario, self.trace, 1e3 * self.overhead_s, self.itl_factor)


def _result(
    scenario: ClusterScenario,
    trace: ClusterTrace,
    instances: Sequence[Instance],
    started: float,
    tpt_over_base: float | None = None,
    interrupt: Callable[[], None] | None = None,
) -> ClusterResult:
    """Reduce the record of a cluster, simulated since `started`, to its metrics.

    `tpt_over_base` is the bound on TPT relative to the mean without adapters, whose simulation calls
    `interrupt`.
    """
    wall_s = time.perf_counter() - started
    parts = [_part(scenario, trace, i, instance.profile) for i, instance in enumerate(instances)]
    served = _as_served(scenario, parts)
    overall = _overall(scenario, trace, parts, served)
    values: dict[str, Any] = {f.name: getattr(overall, f.name) for f in fields(SimulationResult)}
    values["wall_s"] = wall_s
    routed = _routed(scenario, trace, served, parts[0].overhead_s)
    attained: tuple[Attainment, ...] = ()
    if tpt_over_base is not None:
        attained = tuple(
            tpt_attainment(p.scenario, p.trace, routed.status[p.rows], p.overhead_s, tpt_over_base, interrupt)
            for p in parts
        )
    return ClusterResult(
        **values,
        instances=tuple(part.summary() for part in parts),
        requests_per_instance=tuple(part.rows.size for part in parts),
        migrations=trace.migrations,
        requests=routed,
        tpt_over_base=attained,
        moves=trace.moves,
    )


def _part(scenario: ClusterScenario, trace: ClusterTrace, instance: int, profile: Profile) -> _Part:
    """Return the share of one instance in requests and record."""
    rows = np.flatnonzero(trace.instance == instance)
    engine, own = scenario.engines[instance], trace.traces[instance]
    columns = take_requests(scenario.requests, rows)
    local = scenario.local_numbers(instance)
    engine = engine._replace(
        requests=columns._replace(adapter=local[columns.adapter]), horizon_ns=scenario.horizon_ns
    )
    per_request = {name: getattr(own, name) for name in _PER_REQUEST}
    own = own._replace(**{name: column[rows] for name, column in per_request.items() if column.size})
    host = profile.host
    factor = client_itl_factor(host, engine, own)
    return _Part(rows, engine, own, host.value("request_ms") / 1e3, factor)


_PER_REQUEST = (
    *("first_ns", "finish_ns", "stalled_ns", "interruptions", "interrupted_ns", "status"),
    *("admitted_ns", "skipped_ns", "held_up_ns"),
)


def _overall(
    scenario: ClusterScenario, trace: ClusterTrace, parts: Sequence[_Part], served: Requests
) -> SimulationResult:
    """Return the metrics over all requests, as of one engine."""
    traces = [part.trace for part in parts]
    decoding = np.array([_decoding_ns(part) for part in parts])
    factors = np.array([part.itl_factor for part in parts])
    factor = float(factors @ decoding / decoding.sum()) if decoding.sum() else float(factors[0])
    together = trace.traces[0]._replace(
        gaps=np.sum([own.gaps for own in traces], axis=0),
        counts=_merged([own.counts for own in traces]),
        sums=_merged([own.sums for own in traces]),
        pool=_merged([own.pool for own in traces]),
    )
    first = scenario.engines[0]
    longest = max(engine.limits.max_model_len for engine in scenario.engines)
    everything = first._replace(
        requests=served,
        horizon_ns=scenario.horizon_ns,
        limits=first.limits._replace(max_model_len=longest),
        pool=_whole_pool(scenario),
    )
    result = summarize(everything, together, 1e3 * parts[0].overhead_s, factor)
    busy = float(together.sums.busy_ns) / scenario.horizon_ns / scenario.instances
    kv_tokens = sum(engine.num_blocks * engine.limits.block_size for engine in scenario.engines)
    pool = result.pool
    if pool is not None:
        links = [part.trace.pool.link_ns for part in parts]
        pool = replace(pool, link_utilization=min(1.0, float(np.mean(links)) / scenario.horizon_ns))
    return replace(result, busy_fraction=min(1.0, busy), kv_tokens=kv_tokens, pool=pool)


def _whole_pool(scenario: ClusterScenario) -> PoolSetup | None:
    """Return the sizes of all adapters; None if no instance has scheduler and cache."""
    sizes = np.ones((2, scenario.rank.size), np.int64)
    found = None
    for instance, engine in enumerate(scenario.engines):
        if engine.pool is not None:
            found = engine.pool
            local = scenario.local_numbers(instance)
            here = (local > 0) | (np.arange(local.size) == 0)
            sizes[:, here] = engine.pool.adapter_bytes[local[here]], engine.pool.adapter_tokens[local[here]]
    return None if found is None else replace(found, adapter_bytes=sizes[0], adapter_tokens=sizes[1])


def _merged(records: Sequence[np.record]) -> np.record:
    """Return the sum of every field, or the maximum of a field that is one."""
    merged = records[0].copy()
    for name in merged.dtype.names or ():
        combine = max if name.startswith("max_") else sum
        merged[name] = combine(record[name] for record in records)
    return merged


def _decoding_ns(part: _Part) -> float:
    """Return the time between first and last token over the finished requests of an instance."""
    done = part.trace.finish_ns != t.NEVER
    return float((part.trace.finish_ns[done] - part.trace.first_ns[done]).sum())


def _as_served(scenario: ClusterScenario, parts: Sequence[_Part]) -> Requests:
    """Return the requests with outputs cut by their instances, and arrivals corrected for overheads.

    An overhead of the instance above that of the first one moves the arrival earlier.
    """
    requests = scenario.requests
    arrival_ns, output = requests.arrival_ns.copy(), requests.output_tokens.copy()
    for part in parts:
        room = part.scenario.limits.max_model_len - requests.prompt_tokens[part.rows]
        output[part.rows] = np.minimum(output[part.rows], np.maximum(room, 1))
        arrival_ns[part.rows] -= round((part.overhead_s - parts[0].overhead_s) * NS_PER_S)
    return requests._replace(arrival_ns=arrival_ns, output_tokens=output)


def _routed(
    scenario: ClusterScenario, trace: ClusterTrace, served: Requests, overhead_s: float
) -> RoutedRequests:
    shared = trace.traces[0]
    status = request_status(shared, scenario.horizon_ns)
    horizon_ns = scenario.horizon_ns

    def since_arrival_s(clock_ns: NDArray[np.int64]) -> NDArray[np.float64]:
        happened = (clock_ns != t.NEVER) & (clock_ns <= horizon_ns)
        return np.where(happened, (clock_ns - served.arrival_ns) / NS_PER_S + overhead_s, np.nan)

    e2e_s = np.where(status == FINISHED, since_arrival_s(shared.finish_ns), np.nan)
    return RoutedRequests(
        arrival_s=scenario.requests.arrival_ns / NS_PER_S,
        adapter=scenario.requests.adapter,
        instance=trace.instance,
        status=status,
        queue_s=_queue_s(scenario, shared),
        ttft_s=since_arrival_s(shared.first_ns),
        e2e_s=e2e_s,
        tpt_ms=1e3 * e2e_s / served.output_tokens,
    )


def _queue_s(scenario: ClusterScenario, shared: t.TwinTrace) -> NDArray[np.float64]:
    """Return the time of each request in queues; NaN if it was not admitted."""
    admitted_ns = shared.admitted_ns
    happened = (admitted_ns != t.NEVER) & (admitted_ns <= scenario.horizon_ns)
    waited_ns = admitted_ns - scenario.requests.arrival_ns - shared.skipped_ns
    return np.where(happened, waited_ns / NS_PER_S, np.nan)
