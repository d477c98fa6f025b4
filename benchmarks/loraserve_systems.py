"""Systems of LoRAServe's evaluation: TTFT of every request under a load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import H100_LLAMA, read_or_make
from capplan import Assignment, EngineArgs, Problem, Profile, Workload
from capplan.models.step_latency import GRAPH_TOKENS
from capplan.planner.api import solve
from capplan.planner.estimate import TwinEstimator
from capplan.planner.problem import AdapterShare, make_problem
from capplan.planner.solvers import find_solver
from capplan.planner.solvers.loraserve import OperatingPoints
from capplan.planner.solvers.random_placement import contiguous_by_rank, random_shares
from capplan.profiling.load.requests import scaled
from capplan.serving import adapter_bytes
from capplan.serving.rebalancing import AdapterDemand, arrived_tok_s, extrapolate, place
from capplan.spec import (
    Coefficient,
    FittedModel,
    Kernel,
    Objective,
    Provenance,
    ProvenanceKind,
)
from capplan.twin import build_scenario
from capplan.twin.cluster import Instance, simulate_cluster
from capplan.twin.core import run
from capplan.twin.per_request import REJECTED
from capplan.twin.scenario import NS_PER_S, draw_for
from capplan.twin.trace import STATUS_REJECTED
from capplan.workload import Requests

NAME: Final = "stand-in/llama-3.1-8b/s-lora-bgmv"
PREFILL_RATIO: Final = 2.7
"""Prefill time of 2,000 tokens at rank 128 over that at rank 8, alone on a server (section III-A1)."""
PROMPT_TOKENS: Final = 2000
RANKS: Final = (8, 128)
BYTES_PER_S: Final = 2.0e12
"""Memory bandwidth of an H100 with 64 GB of HBM2, rounded."""
KEPT: Final = ("base_ms", "ms_per_ktoken", "ms_per_kv_ktoken", "ms_per_ktoken_beyond_graphs")
MAX_MODEL_LEN: Final = 8192
MAX_BATCH_TOKENS: Final = 8192
"""S-LoRA computes a prompt in one batch or rejects it."""
LIMITS: Final[Mapping[str, Any]] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": MAX_BATCH_TOKENS,
    "max_model_len": MAX_MODEL_LEN,
    "gpu_memory_utilization": 0.9,
}
Shares: TypeAlias = Sequence[Mapping[str, float]]
"""Per server, the served share of every adapter."""
STEPPED: Final = {
    "loraserve": False,
    "loraserve-literal": True,
    "loraserve-frozen": False,
}
"""Systems by literal placement of leftovers; the frozen one keeps the first placement."""
ROUTED: Final = ("least-work-left", "toppings", "toppings-rank-blind", "least-loaded")
"""All adapters on all servers, routed by server state; names of routers."""
LOOKING: Final = "capplan-least-work-left"
"""The placement of `capplan`, stored on all servers, with a router that looks at them."""
PLACED: Final = ("capplan", "slora-random", "slora-contiguous")
SYSTEMS: Final = (*STEPPED, LOOKING, *PLACED, *ROUTED)
DRAWS: Final = 4
"""Random placements per seed, 20 over five seeds."""
_TRICKLE_RPS: Final = 1.0
"""Rate per server, of which `capplan` maximizes the sustained multiple."""
_TIME_LIMIT_S: Final = 120.0


def standin(shipped: Profile, prefill_ratio: float = PREFILL_RATIO) -> Profile:
    """Return the stand-in, with a shipped profile's costs of the base model."""
    step = shipped.step_latency
    free = [name for name in step.coefficients if name not in KEPT]
    decode_ms = decode_ms_per_krank(shipped)
    return shipped.replace(
        name=NAME,
        engine=shipped.engine.replace(name="s-lora", version="c1ddf48", rules="slora", kernel=Kernel.BGMV),
        step_latency=with_rank_costs(step, free, prefill_ratio, decode_ms),
        provenance=Provenance(
            kind=ProvenanceKind.ROOFLINE,
            source=f"{H100_LLAMA} without its costs of slots and adapters; ranks: LoRAServe, section III-A1",
            command="python -m benchmarks.loraserve_setting",
            notes=f"Prefill of {PROMPT_TOKENS} tokens at rank 128 takes {prefill_ratio:g} x that at rank 8. "
            f"Decode reads the padded q, k, v and o weights of each request at {BYTES_PER_S:g} bytes/s.",
        ),
    )


def with_rank_costs(
    step: FittedModel, free: Iterable[str], prefill_ratio: float, decode_ms_per_krank: float
) -> FittedModel:
    """Return a step model with costs by rank, and without some others.

    Parameters
    ----------
    step
        Step model of vLLM's kernels, whose costs do not depend on ranks.
    free
        Coefficients to set to 0.
    prefill_ratio
        Prefill time of 2,000 tokens at rank 128 over that at rank 8.
    decode_ms_per_krank
        Milliseconds per 1,000 request-ranks.
    """
    low, high = (PROMPT_TOKENS * rank / 1000.0 for rank in RANKS)
    prefill_ms = base_prefill_ms(step) * (prefill_ratio - 1.0) / (high - prefill_ratio * low)
    values = {**dict.fromkeys(free, 0.0), "ms_per_decode_krank": decode_ms_per_krank}
    values["ms_per_prefill_krank"] = prefill_ms
    changed = {name: Coefficient(value=value) for name, value in values.items()}
    return step.replace(coefficients={**step.coefficients, **changed})


def base_prefill_ms(step: FittedModel) -> float:
    return (
        step.value("base_ms")
        + step.value("ms_per_ktoken") * PROMPT_TOKENS / 1000.0
        + step.value("ms_per_ktoken_beyond_graphs") * (PROMPT_TOKENS - GRAPH_TOKENS) / 1000.0
    )


def decode_ms_per_krank(profile: Profile) -> float:
    """Return the cost of 1000 request-ranks of decode: the time to read as many rows of A and B."""
    arch = profile.model
    query, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    elements = 2 * (arch.hidden_size + query) + 2 * (arch.hidden_size + kv)
    return 1000.0 * arch.layers * elements * arch.dtype_bytes / BYTES_PER_S * 1000.0


@dataclass(frozen=True)
class Load:
    """Requests of a workload."""

    workload: Workload
    profile: Profile
    requests: Requests
    duration_s: float
    seed: int

    @property
    def names(self) -> list[str]:
        """Adapters by number, from 1."""
        return [adapter.name for adapter in self.workload.adapters]


def load_at(workload: Workload, profile: Profile, rps: float, duration_s: float, seed: int) -> Load:
    faster = at_rate(workload, rps)
    requests = draw_for(faster, profile, duration_s, seed, MAX_MODEL_LEN)
    return Load(faster, profile, requests, duration_s, seed)


def at_rate(workload: Workload, rps: float) -> Workload:
    return scaled(workload, rps / workload.total_rate_rps)


def declared_tok_s(load: Load) -> list[float]:
    """Return the demand of the mean rates at the mean request length."""
    requests = load.requests
    tokens = float(requests.prompt_tokens.mean(dtype=float) + requests.output_tokens.mean(dtype=float))
    return [adapter.rate_rps * tokens for adapter in load.workload.adapters]


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
    requests = load.requests
    tokens = requests.prompt_tokens.astype(np.int64) + requests.output_tokens
    history = arrived_tok_s(
        requests.arrival_ns, requests.adapter, tokens, len(load.workload.adapters), step_s, load.duration_s
    )
    declared = declared_tok_s(load)
    placements: list[Shares] = []
    moved = []
    stored = None
    for step in range(len(history)):
        demand = [extrapolate(history[:step, i].tolist(), declared[i]) for i in range(len(declared))]
        adapters = [
            AdapterDemand(a.name, a.rank, tok_s, adapter_bytes(load.profile.model, a.rank))
            for a, tok_s in zip(load.workload.adapters, demand, strict=True)
        ]
        placed = place(adapters, points, servers, stored=stored, literal_leftovers=literal_leftovers)
        stored = [frozenset(served) for served in placed.shares]
        placements.append(placed.shares)
        moved.append(placed.bytes_to_copy if step else 0)
    return placements, moved


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


def ttft_s(
    arrival_ns: NDArray[np.int64], first_ns: NDArray[np.int64], status: NDArray[np.int8], horizon_ns: int
) -> NDArray[np.float64]:
    """Return the TTFT, or the wait so far; infinite if rejected."""
    answered = (first_ns >= 0) & (first_ns <= horizon_ns)
    waited = (np.where(answered, first_ns, horizon_ns) - arrival_ns) / NS_PER_S
    return np.where(status == STATUS_REJECTED, np.inf, waited)


def p95_ttft_s(load: Load, times_s: NDArray[np.float64], bound_s: float) -> float:
    """Return the 95th percentile, excluding requests of the last `bound_s` seconds."""
    counted = load.requests.arrival_ns < (load.duration_s - bound_s) * NS_PER_S
    return float(np.percentile(times_s[counted], 95, method="higher")) if counted.any() else 0.0


@dataclass(frozen=True)
class Scene:
    """Workload of a trace on stand-in servers, with a cache folder."""

    trace: str
    workload: Workload
    profile: Profile
    step_s: float
    folder: Path

    def ttft_s(self, system: str, load: Load, servers: int, draw: int = 0) -> NDArray[np.float64]:
        if system in ROUTED:
            return _routed(load, system, [None] * servers)
        if system == LOOKING:
            return _routed(load, "least-work-left", self.placed("capplan", servers, load.seed))
        if system in STEPPED:
            placements, _ = stepped(load, self.points(servers), servers, self.step_s, STEPPED[system])
            return served_by_shares(load, placements[:1] if system == "loraserve-frozen" else placements)
        return served_by_shares(load, [self.placed(system, servers, load.seed, draw)])

    def placed(self, system: str, servers: int, seed: int, draw: int = 0) -> Shares:
        """Return a static placement; that of `capplan` does not depend on the seed."""
        problem = self._problem(servers)
        if system == "slora-random":
            return _whole(random_shares(problem, np.random.default_rng([seed, draw])), servers)
        if system == "slora-contiguous":
            return _whole(contiguous_by_rank(problem), servers)
        path = self.folder / f"{self.trace}.{system}.{servers}.json"
        return read_or_make(path, lambda: self._by_capplan(servers))

    def points(self, servers: int) -> Mapping[int, float]:
        ranks = [adapter.rank for adapter in self.workload.adapters]
        path = self.folder / f"{self.trace}.operating-points.{servers}.json"
        measured = read_or_make(path, lambda: dict(OperatingPoints(self._problem(servers))(ranks)))
        return {int(rank): point for rank, point in measured.items()}

    def _problem(self, servers: int, **fields: object) -> Problem:
        engine = self.workload.engine.model_copy(update={"max_num_batched_tokens": MAX_BATCH_TOKENS})
        slower = at_rate(self.workload, _TRICKLE_RPS * servers)
        changes = {"engine": engine, "headroom": 0.0, "gpus": None, **fields}
        return make_problem(slower.model_copy(update=changes), servers, self.profile)

    def _by_capplan(self, servers: int) -> Shares:
        problem = self._problem(servers, objective=Objective.MAX_THROUGHPUT)
        exact = TwinEstimator(problem, 0)
        answer = solve(problem, find_solver("capplan"), exact, time_limit_s=_TIME_LIMIT_S)
        return shares_of(answer.assignments, servers)


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


def _routed(load: Load, router: str, shares: Sequence[Mapping[str, float] | None]) -> NDArray[np.float64]:
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
    result = simulate_cluster(
        load.workload, instances, router=router, duration_s=load.duration_s, seed=load.seed
    )
    served = result.requests  # drawn with the seed, as in `load`
    waited_s = np.where(np.isnan(served.ttft_s), load.duration_s - served.arrival_s, served.ttft_s)
    return np.where(served.status == REJECTED, np.inf, waited_s)
