"""The systems of LoRAServe's evaluation, by name: who serves which request under a load."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.loraserve_runs import (
    MAX_BATCH_TOKENS,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    UTILIZATION,
    Load,
    Shares,
    at_rate,
    served_by_shares,
    stepped,
)
from capplan.planner.api import solve
from capplan.planner.estimate import TwinEstimator
from capplan.planner.problem import AdapterShare, Assignment, Problem, make_problem
from capplan.planner.solvers import find_solver
from capplan.planner.solvers.loraserve import OperatingPoints
from capplan.planner.solvers.loraserve_placement import PlacementVariants
from capplan.planner.solvers.random_placement import contiguous_by_rank, random_shares
from capplan.spec import Objective, Profile, Workload, write_text_atomic
from capplan.twin.cluster import Instance, simulate_cluster
from capplan.twin.request_table import REJECTED

STEPPED: Final = {
    "loraserve": PlacementVariants(),
    "loraserve-literal": PlacementVariants(literal_leftovers=True),
    "loraserve-frozen": PlacementVariants(),
}
"""LoRAServe, with leftovers to the letter, and with the first placement kept to the end."""
ROUTED: Final = {"toppings": "toppings", "least-loaded": "least-loaded"}
"""All adapters on all servers; the router looks at the servers at every request."""
PLACED: Final = ("capplan", "slora-random", "slora-contiguous")
SYSTEMS: Final = (*STEPPED, *PLACED, *ROUTED)

_TRICKLE_RPS: Final = 1.0
"""Per server; `capplan` looks for the placement that holds at the highest multiple of it."""
_TIME_LIMIT_S: Final = 120.0


@dataclass(frozen=True)
class Scene:
    """A trace's workload on stand-in servers, and a folder for what took long to find out."""

    trace: str
    workload: Workload
    profile: Profile
    step_s: float
    folder: Path

    def ttft_s(self, system: str, load: Load, servers: int) -> NDArray[np.float64]:
        """Return the time to first token of every request under a system."""
        if system in ROUTED:
            return _routed(load, ROUTED[system], servers)
        if system in STEPPED:
            placements, _ = stepped(load, self.points(servers), servers, self.step_s, STEPPED[system])
            return served_by_shares(load, placements[:1] if system == "loraserve-frozen" else placements)
        return served_by_shares(load, [self.placed(system, servers, load.seed)])

    def placed(self, system: str, servers: int, seed: int) -> Shares:
        """Return a placement that stays; that of `capplan` does not depend on the seed."""
        problem = self._problem(servers)
        if system == "slora-random":
            return _whole(random_shares(problem, np.random.default_rng(seed)), servers)
        if system == "slora-contiguous":
            return _whole(contiguous_by_rank(problem), servers)
        return self._kept(f"{self.trace}.{system}.{servers}", lambda: self._by_capplan(servers))

    def points(self, servers: int) -> Mapping[int, float]:
        """Return the operating points of all ranks."""
        ranks = [adapter.rank for adapter in self.workload.adapters]
        measured = self._kept(
            f"{self.trace}.points.{servers}",
            lambda: [{str(rank): p for rank, p in OperatingPoints(self._problem(servers))(ranks).items()}],
        )
        return {int(rank): point for rank, point in measured[0].items()}

    def _problem(self, servers: int, **wishes: object) -> Problem:
        engine = self.workload.engine.model_copy(update={"max_num_batched_tokens": MAX_BATCH_TOKENS})
        slower = at_rate(self.workload, _TRICKLE_RPS * servers)
        wished = slower.model_copy(update={"engine": engine, "headroom": 0.0, "gpus": None, **wishes})
        return make_problem(wished, servers, self.profile)

    def _by_capplan(self, servers: int) -> Shares:
        problem = self._problem(servers, objective=Objective.MAX_THROUGHPUT)
        exact = TwinEstimator(problem, 0)
        answer = solve(problem, find_solver("capplan"), exact, time_limit_s=_TIME_LIMIT_S)
        return shares_of(answer.assignments, servers)

    def _kept(self, name: str, find: Callable[[], Shares]) -> Shares:
        """Return what the folder holds under a name, or else find it and write it there."""
        path = self.folder / f"{name}.json"
        if path.exists():
            known: Shares = json.loads(path.read_text(encoding="utf-8"))
            return known
        found = [dict(shares) for shares in find()]
        write_text_atomic(path, json.dumps(found))
        return found


def shares_of(assignments: tuple[Assignment, ...], servers: int) -> Shares:
    """Return assignments as shares; servers beyond them serve nothing."""
    shares: list[dict[str, float]] = [{} for _ in range(servers)]
    for server, assignment in zip(shares, assignments, strict=False):
        for part in assignment.parts:
            server[part.name] = server.get(part.name, 0.0) + part.share
    return shares


def _whole(groups: list[list[AdapterShare]], servers: int) -> Shares:
    return shares_of(tuple(Assignment(tuple(parts), 1) for parts in groups), servers)


def _routed(load: Load, router: str, servers: int) -> NDArray[np.float64]:
    """Return times to first token where a router looks at equal servers that all hold every adapter."""
    server = Instance(
        load.profile,
        a_max=len(load.workload.adapters),
        s_max=max(adapter.rank for adapter in load.workload.adapters),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_BATCH_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=UTILIZATION,
    )
    result = simulate_cluster(
        load.workload, [server] * servers, router=router, duration_s=load.duration_s, seed=load.seed
    )
    asked = result.requests  # drawn with the seed, they are those of `load`
    waited_s = np.where(np.isnan(asked.ttft_s), load.duration_s - asked.arrival_s, asked.ttft_s)
    return np.where(asked.status == REJECTED, np.inf, waited_s)
