"""A cluster of S-LoRA servers under a stream of requests, whoever decides where each of them goes.

A placement routes by shares, so where a request goes does not depend on how the servers do: it is drawn
beforehand, window by window, and every server then serves its own requests from the beginning to the end of
the trace. Nothing is reset where the placement changes. Routers that look at the servers run in the cluster
twin instead.

Adapters are in the memory of every host. LoRAServe fetches one from another server at its first request after
a change, in about the time of a copy from the own host (section IV-B); such a copy is what a first use costs
here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.planner.solvers.loraserve import Extrapolation, arrived_tok_s, extrapolate
from capplan.planner.solvers.loraserve_placement import AdapterDemand, PlacementVariants, place
from capplan.serving.memory import adapter_bytes
from capplan.spec import Profile, Workload
from capplan.twin.core import run
from capplan.twin.scenario import NS_PER_S, build_scenario, draw_for
from capplan.twin.trace import STATUS_REJECTED
from capplan.workload import Requests

MAX_MODEL_LEN: Final = 8192
MAX_BATCH_TOKENS: Final = 8192
"""S-LoRA takes a prompt in one batch or not at all."""
MAX_NUM_SEQS: Final = 256
UTILIZATION: Final = 0.9

Shares: TypeAlias = Sequence[Mapping[str, float]]
"""Of each server, the share of every adapter that it serves."""


@dataclass(frozen=True)
class Load:
    """A stream of requests, and who they are for."""

    workload: Workload
    profile: Profile
    requests: Requests
    duration_s: float
    seed: int

    @property
    def names(self) -> list[str]:
        """Adapters in the order of their numbers, which begin at 1."""
        return [adapter.name for adapter in self.workload.adapters]


def load_at(workload: Workload, profile: Profile, rps: float, duration_s: float, seed: int) -> Load:
    """Return the requests of a workload at a total rate."""
    faster = at_rate(workload, rps)
    requests = draw_for(faster, profile, duration_s, seed, MAX_MODEL_LEN)
    return Load(faster, profile, requests, duration_s, seed)


def at_rate(workload: Workload, rps: float) -> Workload:
    """Return a workload with all rates scaled to a total."""
    scale = rps / workload.total_rate_rps
    adapters = tuple(a.model_copy(update={"rate_rps": a.rate_rps * scale}) for a in workload.adapters)
    return workload.model_copy(update={"adapters": adapters})


def adapter_loads(workload: Workload, profile: Profile, tok_s: Sequence[float]) -> list[AdapterDemand]:
    """Return adapters with these demands."""
    return [
        AdapterDemand(a.name, a.rank, demand, adapter_bytes(profile.model, a.rank))
        for a, demand in zip(workload.adapters, tok_s, strict=True)
    ]


def declared_tok_s(load: Load) -> list[float]:
    """Return the demand that the mean rates stand for, at the mean length of the requests."""
    requests = load.requests
    tokens = float(requests.prompt_tokens.mean(dtype=float) + requests.output_tokens.mean(dtype=float))
    return [adapter.rate_rps * tokens for adapter in load.workload.adapters]


def stepped(
    load: Load,
    points: Mapping[int, float],
    servers: int,
    step_s: float,
    variants: PlacementVariants,
    method: Extrapolation = Extrapolation.HOLT,
) -> tuple[list[Shares], list[int]]:
    """Return LoRAServe's placement in every time step, and the bytes that each asks to be copied.

    Each rests on what arrived in the steps before; the first one on the declared rates.
    """
    history = arrived_tok_s(load.requests, len(load.workload.adapters), step_s, load.duration_s)
    declared = declared_tok_s(load)
    placements: list[Shares] = []
    moved = []
    stored = None
    for step in range(len(history)):
        demand = [extrapolate(history[:step, i].tolist(), declared[i], method) for i in range(len(declared))]
        adapters = adapter_loads(load.workload, load.profile, demand)
        placed = place(adapters, points, servers, stored=stored, variants=variants)
        stored = [frozenset(served) for served in placed.shares]
        placements.append(placed.shares)
        moved.append(placed.bytes_to_copy if step else 0)
    return placements, moved


def routed(load: Load, placements: Sequence[Shares]) -> NDArray[np.int64]:
    """Return the server of every request, drawn by the shares of the placement in force when it arrives.

    The placements hold for equal parts of the trace, one after the other.
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
    """Return the time to first token of every request, by `ttft_s`, where shares decide who serves it."""
    server = routed(load, placements)
    times = np.empty(server.size)
    for number in range(len(placements[0])):
        mine = np.flatnonzero(server == number)
        asked = load.requests
        own = Requests(
            asked.arrival_ns[mine], asked.adapter[mine], asked.prompt_tokens[mine], asked.output_tokens[mine]
        )
        times[mine] = _served_alone(load, own)
    return times


def _served_alone(load: Load, requests: Requests) -> NDArray[np.float64]:
    scenario = build_scenario(
        load.workload,
        load.profile,
        a_max=len(load.workload.adapters),
        s_max=max(adapter.rank for adapter in load.workload.adapters),
        duration_s=load.duration_s,
        seed=load.seed,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_BATCH_TOKENS,
        max_cpu_loras=None,
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=UTILIZATION,
        max_in_flight=None,
        requests=requests,
    )
    trace = run(scenario)
    return ttft_s(requests.arrival_ns, trace.first_ns, trace.status, scenario.horizon_ns)


def ttft_s(
    arrival_ns: NDArray[np.int64], first_ns: NDArray[np.int64], status: NDArray[np.int8], horizon_ns: int
) -> NDArray[np.float64]:
    """Return how long requests waited for their first token, or have waited so far; infinite if refused."""
    answered = (first_ns >= 0) & (first_ns <= horizon_ns)
    waited = (np.where(answered, first_ns, horizon_ns) - arrival_ns) / NS_PER_S
    return np.where(status == STATUS_REJECTED, np.inf, waited)


def p95_ttft_s(load: Load, times_s: NDArray[np.float64], bound_s: float) -> float:
    """Return the 95th percentile, without the requests of the last `bound_s` seconds, who may yet be late."""
    judged = load.requests.arrival_ns < (load.duration_s - bound_s) * NS_PER_S
    return float(np.percentile(times_s[judged], 95, method="higher")) if judged.any() else 0.0
