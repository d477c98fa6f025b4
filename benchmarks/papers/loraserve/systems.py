"""Systems of LoRAServe's evaluation: their placements, and the TTFT of every request under a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import read_or_make
from benchmarks.papers.loraserve.load import (
    BOUND_S,
    MAX_MODEL_LEN,
    Load,
    at_rate,
    declared_tok_s,
    p95_ttft_s,
    ttft_s,
)
from capplan import Assignment, EngineArgs, Problem, Profile, Workload
from capplan.errors import InfeasibleError
from capplan.planner.problem import AdapterShare
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._operating_points import OperatingPoints
from capplan.planner.problem._setup import make_problem
from capplan.planner.solvers import find_solver
from capplan.planner.solvers._random_placement import contiguous_by_rank, shuffled_runs
from capplan.planner.solvers._solve import solve
from capplan.serving import adapter_bytes
from capplan.serving.rebalancing import AdapterDemand, arrived_tok_s, extrapolate, place
from capplan.serving.routers import LeastWorkLeft
from capplan.spec import Objective, RebalanceSettings
from capplan.twin import build_scenario
from capplan.twin.cluster import ClusterResult, Instance, NamedRouter, Rebalancing, simulate_cluster
from capplan.twin.instance import NS_PER_S, REJECTED, run
from capplan.workload import Requests

MAX_BATCH_TOKENS: Final = 8192
"""S-LoRA computes a prompt in one batch or rejects it."""
LIMITS: Final[Mapping[str, Any]] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": MAX_BATCH_TOKENS,
    "max_model_len": MAX_MODEL_LEN,
    "gpu_memory_utilization": 0.9,
}
STEP_S: Final = 60.0
"""LoRAServe's time step in the authors' measured runs."""
Shares: TypeAlias = Sequence[Mapping[str, float]]
"""Per server, the served share of every adapter."""
LORASERVE: Final = "loraserve"
STEPPED: Final = {LORASERVE: False, "loraserve-literal": True, "loraserve-frozen": False}
"""Systems by literal placement of leftovers; the frozen one keeps the first placement."""
BLIND: Final = "toppings-rank-blind"
ROUTED: Final = ("toppings", BLIND, "least-work-left", "least-loaded")
"""All adapters on all servers, routed by server state; names of routers."""
OURS: Final = "ours"
"""The placement of `capplan`, stored on all servers, and `least-work-left` that prefers it."""
OFF_PLAN: Final = 1.25
"""Factor of `least-work-left` on servers outside the placement."""
RANK_RAISE: Final = 1.5
"""Its further factor if the request has the largest rank there."""
TURN_S: Final = 2.0
"""Time between its turns of requests with ranks above those of most others at their server."""
_CHOICES: Final = (
    *((1.25, 1.0, 0.0), (1.5, 1.0, 0.0), (2.0, 1.0, 0.0), (1.25, 1.5, 0.0), (1.25, 2.0, 0.0)),
    *((1.25, 4.0, 0.0), (1.25, 1.0, 2.0), (1.25, 1.5, 2.0), (1.25, 2.0, 1.0), (1.25, 2.0, 2.0)),
    (1.25, 2.0, 4.0),
)
FACTORS: Final = {
    f"{OURS}-{off_plan:g}-{raised:g}-{turn_s:g}": (off_plan, raised, turn_s)
    for off_plan, raised, turn_s in _CHOICES
}
"""Ours with other factors and turns."""
RANDOM: Final = "slora-random"
CONTIGUOUS: Final = "slora-contiguous"
PLACED: Final = ("capplan", RANDOM, CONTIGUOUS)
RUNTIME: Final[Mapping[str, Mapping[str, str]]] = {
    "loraserve-runtime": {},
    "loraserve-runtime-gamma-poisson": {"forecast": "gamma-poisson"},
    "capplan-runtime": {"forecast": "gamma-poisson", "solver": "capplan"},
}
"""Settings of systems that re-balance at run time."""
SYSTEMS: Final = (*STEPPED, *RUNTIME, OURS, *FACTORS, *PLACED, *ROUTED)
DRAWS: Final = 4
"""Random placements per seed, 20 over five seeds."""
_OF_CAPACITY: Final = (0.6, 0.3, 0.02)
"""Loads relative to what the operating points sustain, tried in turn; `capplan` places the first it can
within its time, and maximizes its multiple."""
_SEARCHED_S: Final = 900.0
"""Simulated time of an instance in that search."""
SEARCH_S: Final = 60.0
"""Time limit of a placement by `capplan`."""


@dataclass(frozen=True)
class Scene:
    """Workload on equal servers, with a folder that caches operating points and placements."""

    name: str
    workload: Workload
    profile: Profile
    servers: int
    folder: Path
    step_s: float = STEP_S
    search_s: float = SEARCH_S

    def p95_s(self, system: str, load: Load, draw: int = 0) -> float:
        """Return the P95 TTFT of a system; `draw` numbers random placements."""
        return p95_ttft_s(load, self.ttft_s(system, load, draw), BOUND_S)

    def ttft_s(self, system: str, load: Load, draw: int = 0) -> NDArray[np.float64]:
        """Return the TTFT of every request under a system."""
        if system in ROUTED:
            return routed_by_state(load, system, [None] * self.servers)
        if system == OURS or system in FACTORS:
            off_plan, raised, turn_s = FACTORS.get(system, (OFF_PLAN, RANK_RAISE, TURN_S))
            router = LeastWorkLeft(off_plan, rank_raise=raised, turn_s=turn_s)
            return routed_by_state(load, router, self.placed("capplan"))
        if system in RUNTIME:
            settings = RebalanceSettings.model_validate({"every_s": self.step_s, **RUNTIME[system]})
            return rebalanced(load, self.points(), self.servers, settings)
        if system in STEPPED:
            placements, _ = self.stepped(load, STEPPED[system])
            return served_by_shares(load, placements[:1] if system == "loraserve-frozen" else placements)
        return served_by_shares(load, [self.placed(system, load.seed, draw)])

    def stepped(self, load: Load, literal_leftovers: bool = False) -> tuple[list[Shares], list[int]]:
        """Return LoRAServe's placements and bytes to copy, as `stepped`."""
        return stepped(load, self.points(), self.servers, self.step_s, literal_leftovers)

    def placed(self, system: str, seed: int = 0, draw: int = 0) -> Shares:
        """Return a static placement; that of `capplan` and the contiguous one have no seed."""
        problem = self.problem()
        if system == RANDOM:
            return _whole(shuffled_runs(problem, np.random.default_rng([seed, draw])), self.servers)
        if system == CONTIGUOUS:
            return _whole(contiguous_by_rank(problem), self.servers)
        popularity = self.name.removeprefix("poisson-").removeprefix("uniform-")  # arrivals do not matter
        return read_or_make(self.folder / f"{popularity}.{system}.{self.servers}.json", self._by_capplan)

    def points(self) -> Mapping[int, float]:
        """Return LoRAServe's operating points."""
        ranks = [adapter.rank for adapter in self.workload.adapters]
        path = self.folder / f"{self.name}.operating-points.{self.servers}.json"
        measured = read_or_make(path, lambda: dict(OperatingPoints(self.problem())(ranks)))
        return {int(rank): point for rank, point in measured.items()}

    def sustained_rps(self) -> float:
        """Return the rate at which the servers work at their operating points, if ranks were never mixed."""
        points, tokens = self.points(), self._tokens_per_request()
        busy = sum(adapter.rate_rps * tokens / points[adapter.rank] for adapter in self.workload.adapters)
        return self.servers * self.workload.total_rate_rps / busy

    def placed_rps(self) -> float:
        """Return the rate at which LoRAServe's placement by the mean rates fills its fullest server."""
        tokens = self._tokens_per_request()
        demands = [AdapterDemand(a.name, a.rank, a.rate_rps * tokens) for a in self.workload.adapters]
        return self.workload.total_rate_rps / max(place(demands, self.points(), self.servers).utilization)

    def _tokens_per_request(self) -> float:
        pairs = self.workload.length_pairs
        if pairs is None:
            raise ValueError(f"{self.name} has no recorded lengths")
        return float(pairs.prompt_tokens.mean(dtype=float) + pairs.output_tokens.mean(dtype=float))

    def problem(self, rps: float = 1.0, **fields: object) -> Problem:
        """Return the placement problem at a load, with one instance per server."""
        engine = self.workload.engine.model_copy(update={"max_num_batched_tokens": MAX_BATCH_TOKENS})
        slower = at_rate(self.workload, rps)
        base_model = self.profile.model.hf_ids[0]
        slo = slower.slo.replace(stable=False)  # the paper's bounds alone
        changes = {"base_model": base_model, "engine": engine, "headroom": 0.0, "gpus": None, "slo": slo}
        changes |= fields
        return make_problem(slower.model_copy(update=changes), self.servers * self.profile.tp, self.profile)

    def _by_capplan(self) -> Shares:
        *first, last = _OF_CAPACITY
        for share in first:
            with suppress(InfeasibleError):
                return self._search(share)
        return self._search(last)

    def _search(self, of_capacity: float) -> Shares:
        problem = self.problem(of_capacity * self.sustained_rps(), objective=Objective.MAX_THROUGHPUT)
        exact = TwinEstimator(problem, 0, _SEARCHED_S)
        answer = solve(problem, find_solver("capplan"), exact, time_limit_s=self.search_s)
        return shares_of(answer.assignments, self.servers)


def stepped(
    load: Load,
    points: Mapping[int, float],
    servers: int,
    step_s: float,
    literal_leftovers: bool,
) -> tuple[list[Shares], list[int]]:
    """Return LoRAServe's placement and bytes to copy in every time step.

    A placement depends on the arrivals of the steps before; the first one on the declared rates.
    """
    requests, adapters = load.requests, len(load.workload.adapters)
    tokens = requests.prompt_tokens.astype(np.int64) + requests.output_tokens
    history = arrived_tok_s(requests.arrival_ns, requests.adapter, tokens, adapters, step_s, load.duration_s)
    declared = declared_tok_s(load)
    placements: list[Shares] = []
    moved = []
    stored = None
    for step in range(len(history)):
        demand = [extrapolate(history[:step, i].tolist(), declared[i]) for i in range(len(declared))]
        placed = place(
            _demands(load, demand), points, servers, stored=stored, literal_leftovers=literal_leftovers
        )
        stored = [frozenset(served) for served in placed.shares]
        placements.append(placed.shares)
        moved.append(placed.bytes_to_copy if step else 0)
    return placements, moved


def rebalanced(
    load: Load, points: Mapping[int, float], servers: int, settings: RebalanceSettings
) -> NDArray[np.float64]:
    """Return the TTFT with re-balancing at run time, from LoRAServe's placement by the declared rates.

    Requests are drawn by the shares in force. Servers fetch an adapter with its first request, over links of
    12.5 GB/s.
    """
    first = place(_demands(load, declared_tok_s(load)), points, servers).shares
    slots = _slots(load.workload)
    instances = [Instance(load.profile, *slots, adapters=dict(own), **LIMITS) for own in first]
    rebalance = Rebalancing(settings, points)
    return _waits_s(
        load,
        simulate_cluster(
            load.workload, instances, duration_s=load.duration_s, seed=load.seed, rebalance=rebalance
        ),
    )


def _demands(load: Load, tok_s: Sequence[float]) -> list[AdapterDemand]:
    return [
        AdapterDemand(a.name, a.rank, demand, adapter_bytes(load.profile.model, a.rank))
        for a, demand in zip(load.workload.adapters, tok_s, strict=True)
    ]


def routed(load: Load, placements: Sequence[Shares]) -> NDArray[np.int64]:
    """Return the server of every request, drawn by the shares in force at its arrival.

    The placements hold for equal parts of the trace in turn.
    """
    requests = load.requests
    step = (requests.arrival_ns * (len(placements) / (load.duration_s * NS_PER_S))).astype(np.int64)
    step = np.minimum(step, len(placements) - 1)
    drawn = np.random.default_rng([load.seed, 1]).random(requests.arrival_ns.size)
    server = np.empty(requests.arrival_ns.size, np.int64)
    for number, shares in enumerate(placements):
        edges = np.cumsum([[served.get(name, 0.0) for name in load.names] for served in shares], axis=0)
        now = np.flatnonzero(step == number)
        of_request = edges[:, requests.adapter[now] - 1]  # shape (servers, requests)
        server[now] = (drawn[now] * of_request[-1] >= of_request).sum(axis=0)
    return server


def served_by_shares(load: Load, placements: Sequence[Shares]) -> NDArray[np.float64]:
    """Return the TTFT of every request under placements."""
    server = routed(load, placements)
    ttft = np.empty(server.size)
    slots, rank = _slots(load.workload)
    args = EngineArgs(max_loras=slots, max_lora_rank=rank, **LIMITS)
    for number in range(len(placements[0])):
        mine = np.flatnonzero(server == number)
        own = Requests(*(column[mine] for column in load.requests[:4]))
        scenario = build_scenario(
            load.workload, load.profile, args, duration_s=load.duration_s, seed=load.seed, requests=own
        )
        trace = run(scenario)
        ttft[mine] = ttft_s(own.arrival_ns, trace.first_ns, trace.status, scenario.horizon_ns)
    return ttft


def routed_by_state(
    load: Load, router: NamedRouter, shares: Sequence[Mapping[str, float] | None]
) -> NDArray[np.float64]:
    """Return the TTFT under a router, with all adapters on equal servers; shares may be 0."""
    slots = _slots(load.workload)
    instances = [
        Instance(
            load.profile,
            *slots,
            adapters=None if own is None else {name: own.get(name, 0.0) for name in load.names},
            **LIMITS,
        )
        for own in shares
    ]
    return _waits_s(
        load,
        simulate_cluster(load.workload, instances, router=router, duration_s=load.duration_s, seed=load.seed),
    )


def _waits_s(load: Load, result: ClusterResult) -> NDArray[np.float64]:
    """Return the TTFT of every request, or its wait so far; infinite if rejected."""
    served = result.requests  # drawn with the seed, as in `load`
    waited_s = np.where(np.isnan(served.ttft_s), load.duration_s - served.arrival_s, served.ttft_s)
    return np.where(served.status == REJECTED, np.inf, waited_s)


def shares_of(assignments: tuple[Assignment, ...], servers: int) -> Shares:
    """Return assignments as shares; further servers serve nothing."""
    shares: list[dict[str, float]] = [{} for _ in range(servers)]
    for server, assignment in zip(shares, assignments, strict=False):
        for share in assignment.shares:
            server[share.name] = server.get(share.name, 0.0) + share.fraction
    return shares


def _whole(groups: list[list[AdapterShare]], servers: int) -> Shares:
    return shares_of(tuple(Assignment(tuple(shares), 1) for shares in groups), servers)


def _slots(workload: Workload) -> tuple[int, int]:
    """Return a slot per adapter, of the largest rank."""
    return len(workload.adapters), max(adapter.rank for adapter in workload.adapters)
