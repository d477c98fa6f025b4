"""Cases of LoRAServe's figures: a system under a load, its highest load, operating points, one server."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.reproduce._search import highest
from capplan.reproduce.loraserve._setting import LengthsOf, mixed, of_lengths, server, setting
from capplan.serving import adapter_bytes
from capplan.serving.rebalancing import AdapterDemand, place
from capplan.spec import Adapter, Lengths, RebalanceSettings, Renewal, Workload
from capplan.twin.cluster import ClusterResult, Instance, Rebalancing, simulate_cluster
from capplan.twin.instance import REJECTED

LORASERVE: Final = "loraserve"
OWN_RANK: Final = "loraserve-own-rank"
TOPPINGS: Final = "toppings-rank-blind"
RANK_AWARE: Final = "toppings"
CONTIGUOUS: Final = "slora-contiguous"
RANDOM: Final = "slora-random"
MOST_SERVERS: Final = 16
_STEP: Final = 1.25
Points: TypeAlias = tuple[tuple[int, float], ...]
"""Operating points by rank."""


@dataclass(frozen=True)
class Scene:
    """A mix of adapters on equal servers; `copies` of each adapter and of the traffic (weak scaling)."""

    mix: str
    arrivals: str = "poisson"
    servers: int = 4
    copies: int = 1
    model: str = "llama-7b"
    tp: int = 4
    engine: str = "authors"

    @property
    def horizon_s(self) -> float:
        """Length of the trace."""
        return setting().mixes[self.mix].horizon_s

    def load(self, rps: float, seed: int) -> Workload:
        """Return the requests at a rate."""
        return mixed(self.mix, self.arrivals, self.copies, rps, seed)


@dataclass(frozen=True)
class Point:
    """An adapter of a rank alone on a server of a scene."""

    scene: Scene
    rank: int


@dataclass(frozen=True)
class Run:
    """A system on a scene under a load; `draw` numbers random placements."""

    scene: Scene
    system: str
    points: Points
    rps: float
    seed: int
    draw: int = 0


@dataclass(frozen=True)
class Alone:
    """One server with an adapter of each rank, requests of fixed lengths."""

    ranks: tuple[int, ...]
    rps: float
    seed: int
    prompt_tokens: int = 512
    output_tokens: int = 128
    model: str = "llama-7b"
    tp: int = 4
    engine: str = "authors"
    arrivals: Literal["poisson", "deterministic"] = "poisson"


def operating_point(case: Point) -> float:
    """Return the highest token rate of a server within the bound (section IV-A)."""
    scene, given = case.scene, setting()
    lengths = given.lengths[given.mixes[scene.mix].lengths]

    def alone(rps: float) -> Workload:
        return of_lengths(lengths, [Adapter(name="a", rank=case.rank, rate_rps=rps)])

    def holds(rps: float) -> bool:
        load = alone(rps)
        result = _static(load, [_instance(scene, load)], "round-robin", 0, scene.horizon_s)
        return p95_s(result, scene.horizon_s) <= given.bound_s

    return highest(holds, 8.0, _STEP, given.precision) * _tokens(alone(1.0))


def highest_rps(run: Run) -> float:
    """Return the highest load within the bound, searched from that of the run."""
    given = setting()
    return highest(lambda rps: _holds(replace(run, rps=rps)), run.rps, _STEP, given.precision)


def fewest_servers(run: Run) -> int:
    """Return the fewest servers that keep the bound, searched from those of the run."""

    def holds(servers: int) -> bool:
        return _holds(replace(run, scene=replace(run.scene, servers=servers)))

    servers = run.scene.servers
    while servers > 1 and holds(servers - 1):
        servers -= 1
    while servers < MOST_SERVERS and not holds(servers):
        servers += 1
    return servers


def _holds(run: Run) -> bool:
    return p95_s(serve(run), run.scene.horizon_s) <= setting().bound_s


def served(run: Run) -> dict[str, Any]:
    """Return the latencies of a run, and what its servers used.

    ``p95_s`` and ``tbt_ms`` over all requests; ``server_p95_s`` by server; ``emptiest`` by time step: the
    fewest adapters that a server used, and their ranks.
    """
    result, horizon_s = serve(run), run.scene.horizon_s
    requests, servers = result.requests, range(run.scene.servers)
    rank = np.array([0, *(adapter.rank for adapter in run.scene.load(run.rps, run.seed).adapters)])
    window = requests.arrival_s // setting().window_s
    emptiest = []
    for step in np.unique(window):
        used = [np.unique(requests.adapter[(window == step) & (requests.instance == at)]) for at in servers]
        fewest = min(used, key=len)
        emptiest.append((len(fewest), len({*rank[fewest].tolist()})))
    return {
        "p95_s": p95_s(result, horizon_s),
        "tbt_ms": result.itl_ms_mean,
        "server_p95_s": [p95_s(result, horizon_s, requests.instance == at) for at in servers],
        "emptiest": emptiest,
    }


def alone(case: Alone) -> dict[str, float]:
    """Return the P95 TTFT of the first rank, and the mean TTFT and time between tokens of all requests."""
    adapters = [
        Adapter(name=f"r{rank}", rank=rank, rate_rps=case.rps / len(case.ranks)) for rank in case.ranks
    ]
    lengths = LengthsOf(prompt=Lengths(mean=case.prompt_tokens), output=Lengths(mean=case.output_tokens))
    load = of_lengths(lengths, adapters, Renewal(process=case.arrivals))
    scene, horizon_s = Scene("", model=case.model, tp=case.tp, engine=case.engine), setting().alone_s
    result = _static(load, [_instance(scene, load)], "round-robin", case.seed, horizon_s)
    return {
        "p95_s": p95_s(result, horizon_s, result.requests.adapter == 1),
        "ttft_ms": 1e3 * result.ttft_s_mean,
        "tbt_ms": result.itl_ms_mean,
    }


def p95_s(result: ClusterResult, horizon_s: float, of: NDArray[np.bool_] | None = None) -> float:
    """Return the P95 TTFT, without requests that arrive too late to exceed the bound.

    A request without an answer counts with its wait so far, a rejected one as infinite.
    """
    requests = result.requests
    waited_s = np.where(np.isnan(requests.ttft_s), horizon_s - requests.arrival_s, requests.ttft_s)
    waited_s[requests.status == REJECTED] = np.inf
    counted = requests.arrival_s < horizon_s - setting().bound_s
    if of is not None:
        counted &= of
    return float(np.percentile(waited_s[counted], 95, method="higher")) if counted.any() else 0.0


def serve(run: Run) -> ClusterResult:
    """Simulate a run."""
    scene, load = run.scene, run.scene.load(run.rps, run.seed)
    if run.system not in (LORASERVE, OWN_RANK):
        router = "plan-shares" if run.system in (CONTIGUOUS, RANDOM) else run.system
        instances = [_instance(scene, load, own) for own in held(run, load)]
        return _static(load, instances, router, run.seed, scene.horizon_s)
    model, tokens, points = server(scene.model, scene.tp, scene.engine).model, _tokens(load), dict(run.points)
    mix = setting().mixes[scene.mix]
    now = {
        rank: first / share
        for rank, first, share in zip(setting().ranks, mix.first or mix.shares, mix.shares, strict=True)
    }
    demands = [
        AdapterDemand(a.name, a.rank, a.rate_rps * now[a.rank] * tokens, adapter_bytes(model, a.rank))
        for a in load.adapters
    ]
    solve, solver = (_at_own_rank, "capplan") if run.system == OWN_RANK else (_algorithm_1, "loraserve")
    settings = RebalanceSettings(every_s=setting().window_s, forecast="linear", solver=solver)
    first = solve(demands, points, [()] * scene.servers)
    return simulate_cluster(
        load,
        [_instance(scene, load, own) for own in first],
        router="plan-shares",
        duration_s=scene.horizon_s,
        seed=run.seed,
        rebalance=Rebalancing(
            settings, points, replan=lambda now: solve(now.adapters, now.operating_points, now.stored)
        ),
    )


def _algorithm_1(
    demands: Sequence[AdapterDemand], points: Mapping[int, float], stored: Sequence[Collection[str]]
) -> Sequence[Mapping[str, float]]:
    return place(demands, points, len(stored), stored=stored).shares


def _at_own_rank(
    demands: Sequence[AdapterDemand], points: Mapping[int, float], stored: Sequence[Collection[str]]
) -> Sequence[Mapping[str, float]]:
    """Return the placement if an adapter's work did not depend on the largest rank beside it."""
    work = [replace(each, tok_s=each.tok_s / points[each.rank]) for each in demands]
    return _algorithm_1(work, dict.fromkeys(points, 1.0), stored)


def _static(
    load: Workload, instances: Sequence[Instance], router: Any, seed: int, horizon_s: float
) -> ClusterResult:
    return simulate_cluster(load, instances, router=router, duration_s=horizon_s, seed=seed)


def held(run: Run, load: Workload) -> list[Mapping[str, float] | None]:
    """Return the adapters of each server; None: all."""
    servers, names = run.scene.servers, [adapter.name for adapter in load.adapters]  # in order of rank
    if run.system not in (CONTIGUOUS, RANDOM):
        return [None] * servers
    if run.system == RANDOM:
        names = np.random.default_rng([run.seed, run.draw]).permutation(names).tolist()
    ends = [len(names) * number // servers for number in range(servers + 1)]
    return [dict.fromkeys(names[a:b], 1.0) for a, b in pairwise(ends)]


def _instance(scene: Scene, load: Workload, adapters: Mapping[str, float] | None = None) -> Instance:
    given = setting()
    return Instance(
        server(scene.model, scene.tp, scene.engine),
        a_max=len(load.adapters),
        s_max=max(adapter.rank for adapter in load.adapters),
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.engines[scene.engine].batch_tokens,
        max_model_len=given.max_model_len,
        adapters=adapters,
    )


def _tokens(load: Workload) -> float:
    return load.prompt_tokens.mean_tokens + load.output_tokens.mean_tokens
