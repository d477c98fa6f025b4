"""Small random clusters: different engines, tight limits, and simultaneous events."""

from dataclasses import replace
from typing import Literal

import numpy as np
from hypothesis import strategies as st

from capplan.serving.routers import LeastWorkLeft, Performance, Toppings, WorkModel
from capplan.serving.state import VLLM
from capplan.twin import Scenario
from capplan.twin.cluster import NamedRouter, PythonRouter, served_router
from capplan.twin.cluster._scenario import ClusterScenario, place
from capplan.twin.instance._scenario import NS_PER_MS
from capplan.workload import Requests
from tests.oracle.routers import LeastAddedWork, RankAware, reference_router
from tests.serving.worlds import Choose, seeded
from tests.twin.pooled import make_pooled
from tests.twin.scenarios import make_scenario

NOBODY = Requests(np.zeros(0, np.int64), *(np.zeros(0, np.int32) for _ in range(3)))


def make_cluster(choose: Choose, most: int = 4, apart: bool = False, shared: bool = False) -> ClusterScenario:
    """Return a cluster; `apart`: adapters on one instance each; `shared`: some instances share a link."""
    make_engine = make_pooled if choose(0, 2) == 0 else make_scenario
    base = make_engine(choose)._replace(buckets=0)
    adapters = base.adapters
    ranks = np.array([0, *(choose(1, 4) * 8 for _ in range(adapters))], np.int64)
    engines, held = [], []
    if apart:
        count = choose(1, min(most, adapters))
        homes = [*range(count), *(choose(0, count - 1) for _ in range(adapters - count))]
        held = [np.flatnonzero(np.array(homes) == i) + 1 for i in range(count)]
    else:
        everything = np.arange(1, adapters + 1)
        held.append(everything)  # so that every adapter is somewhere
        for _ in range(choose(1, most) - 1):
            chosen = [number for number in everything if choose(0, 3)]
            held.append(np.array(chosen or [1]))
    for numbers in held:
        engine = base if not engines else make_engine(choose)
        engines.append(holding(engine, numbers, ranks)._replace(horizon_ns=base.horizon_ns))
    shares = [np.array([float(choose(0, 3)) for _ in numbers]) for numbers in held]
    return ClusterScenario(
        engines=tuple(engines),
        placement=place(held, shares, adapters),
        requests=base.requests,
        rank=ranks,
        horizon_ns=base.horizon_ns,
        link=np.cumsum([choose(0, 1) if shared else 1 for _ in engines]),
        shared_prefix_tokens=base.shared_prefix_tokens,
    )


def report_period_s(scenario: ClusterScenario, period_s: float) -> float:
    """Return the period, or one of 300 reports, in whole milliseconds; the reference makes them in Python."""
    least_ms = -(-scenario.horizon_ns // (300 * NS_PER_MS))
    return max(period_s, least_ms / 1000) if period_s else 0.0


def holding(engine: Scenario, numbers: np.ndarray, ranks: np.ndarray) -> Scenario:
    """Return the engine with these adapters, whose costs are taken from its own in turn."""
    taken = np.array([0, *(1 + np.arange(numbers.size) % engine.adapters)])
    costs = engine.costs
    costs = costs._replace(
        load_ns=costs.load_ns[taken],
        disk_ns=costs.disk_ns[taken],
        pages=costs.pages[taken],
        rank=ranks[np.array([0, *numbers])],
    )
    if engine.limits.policy != VLLM:  # adapters share the memory of KV: there are no slots
        limits = engine.limits._replace(max_loras=numbers.size, max_cpu_loras=numbers.size)
        engine = engine._replace(limits=limits)
    if engine.pool is not None:
        arrays = ("adapter_pages", "adapter_bytes", "adapter_tokens", "load_ns")
        own = {name: getattr(engine.pool, name)[taken] for name in arrays}
        engine = engine._replace(pool=replace(engine.pool, **own))
    return engine._replace(requests=NOBODY, costs=costs, buckets=0)


def make_performance(choose: Choose) -> Performance:
    """Return models of round numbers, so that many scores tie."""
    return Performance(*(choose(0, 4) / 2 for _ in range(5)))


def make_work_model(choose: Choose) -> WorkModel:
    """Return a model of round numbers, so that many scores tie."""
    coefficients = (choose(0, 4) / 2 for _ in range(7))
    return WorkModel(*coefficients, batch_tokens=choose(1, 64), padded=choose(0, 1) == 1)


def router_and_reference(
    name: str, instances: int, seed: int, turn_s: float = 0.0
) -> tuple[NamedRouter, PythonRouter]:
    """Return a router that moves no requests, with parameters of a seed, and its rule in plain Python."""
    models = [make_performance(seeded(seed + i)) for i in range(instances)]
    work_models = [make_work_model(seeded(seed + i)) for i in range(instances)]
    kernel: Literal["bgmv", "mbgmv"] = "bgmv" if seed % 2 == 0 else "mbgmv"
    slo_ms = 1.0 + seed % 50
    least_work = LeastWorkLeft(1.0 + seed % 3, 0.01, work_models, 1.0 + seed % 2, turn_s)
    router = served_router(name)
    if name.startswith("toppings"):
        router = Toppings(kernel, slo_ms, performance=models, rank_aware=name == "toppings")
    if name == "least-work-left":
        router = least_work
    rank_aware = RankAware(kernel if name == "toppings" else "blind", models, slo_ms)
    return router, reference_router(name, instances, rank_aware, LeastAddedWork(work_models, least_work))


@st.composite
def clusters(draw: st.DrawFn, shared: bool = False) -> ClusterScenario:
    """Return a strategy of clusters."""
    return make_cluster(lambda low, high: draw(st.integers(low, high)), shared=shared)


def seeded_cluster(seed: int, most: int = 4, apart: bool = False) -> ClusterScenario:
    """Return the cluster of a seed."""
    return make_cluster(seeded(seed), most, apart)
