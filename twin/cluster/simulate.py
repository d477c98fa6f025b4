"""`simulate_cluster`: many GPUs under one clock, and a router in front of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from capplan.spec import Workload
from capplan.twin.cluster.readable import PythonRouter, run_with
from capplan.twin.cluster.result import ClusterResult, cluster_result
from capplan.twin.cluster.rules import NamedRouter, build_rule
from capplan.twin.cluster.run import run_cluster
from capplan.twin.cluster.scenario import ClusterScenario, Instance, build_cluster, without_adapters


def simulate_cluster(
    workload: Workload,
    instances: Sequence[Instance],
    *,
    router: NamedRouter | PythonRouter = "plan-shares",
    duration_s: float = 3600.0,
    seed: int = 0,
) -> ClusterResult:
    """Simulate instances that serve one workload together.

    Parameters
    ----------
    workload
        Adapters, rates and request lengths.
    instances
        The engines, which may differ in everything, and the adapters that each holds.
    router
        Who gets a request: a name of `capplan.serving.routing.ROUTERS`, the parameters of a router that has
        any (`Dlora`, `Toppings`), or a function of a request and the candidates (slow; for experiments).
    duration_s
        Horizon in seconds.
    seed
        Seed of arrivals, lengths and the router; same seed, same result. The requests are those that
        `capplan.simulate` draws with it.

    Returns
    -------
    ClusterResult
        Metrics over all requests, and those of every instance.

    Raises
    ------
    InfeasibleError
        With reason ``memory`` for an instance that its engine would refuse to start.
    InputError
        When a setting breaks its rule, or nobody holds an adapter.
    """
    started = time.perf_counter()
    scenario = build_cluster(workload, instances, duration_s, seed)
    return _result(scenario, instances, router, seed, started)


def simulate_without_adapters(
    workload: Workload,
    instances: Sequence[Instance],
    *,
    router: NamedRouter | PythonRouter = "least-loaded",
    duration_s: float = 3600.0,
    seed: int = 0,
) -> ClusterResult:
    """Simulate the same requests on the same instances without adapters and slots for them.

    The reference of Toppings' SLO (section 7.4): its ``tpt_ms_mean`` is the TPT of inference without LoRA.
    Parameters as for `simulate_cluster`; every instance may get every request.
    """
    started = time.perf_counter()
    scenario = without_adapters(build_cluster(workload, instances, duration_s, seed))
    return _result(scenario, instances, router, seed, started)


def _result(
    scenario: ClusterScenario,
    instances: Sequence[Instance],
    router: NamedRouter | PythonRouter,
    seed: int,
    started: float,
) -> ClusterResult:
    if callable(router):
        trace = run_with(scenario, router, seed)
    else:
        trace = run_cluster(scenario, build_rule(router, scenario), seed)
    profiles = [instance.profile for instance in instances]
    return cluster_result(scenario, trace, profiles, time.perf_counter() - started)
