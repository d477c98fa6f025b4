"""dLoRA's proactive placement, as the adapter-caching paper runs it (section 8.4.3).

Every adapter is placed once, and then replicated while that does not lower the burst tolerance: the minimum
over adapters of the free KV memory of their engines, relative to their share of the traffic. A last round
adds replicas up to (engines + adapters - 1) in total, without regard to memory. Replicas take equal shares of
the traffic; every adapter has a slot.

As published, the search does not end if memory runs out before every adapter is placed. Here this is an
error. The limits of `max_replicas` are kept; the paper has none. The base model is replicated as an adapter
is, and takes the memory of one, which it leaves free.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from capplan.models import kv_budget
from capplan.planner.problem._problem import (
    AdapterShare,
    Assignment,
    Problem,
    distinct_adapters,
    infeasible,
    whole_adapters,
)
from capplan.planner.problem._splitting import split_evenly
from capplan.planner.solvers._base import Solver, SolverContext
from capplan.serving import kv_bytes_per_token, slot_bytes


def _place(problem: Problem, context: SolverContext) -> tuple[Assignment, ...]:
    shares = whole_adapters(problem)
    deadline_s = time.monotonic() + context.time_limit_s
    burst = replicate(_empty_state(problem, shares), deadline_s, context.time_limit_s)
    held: list[list[AdapterShare]] = [[] for _ in range(problem.gpus)]
    for adapter, share in enumerate(shares):
        engines = np.flatnonzero(burst.holds[adapter]).tolist()
        for each, engine in zip(split_evenly(share, len(engines)), engines, strict=True):
            held[engine].append(each)
    return tuple(
        Assignment(tuple(shares), problem.fixed_a_max or distinct_adapters(shares))
        for shares in held
        if shares
    )


def _empty_state(problem: Problem, shares: tuple[AdapterShare, ...]) -> BurstTolerance:
    profile, engine = problem.profile, problem.engine
    s_max = problem.s_max(shares)
    free = kv_budget(profile, engine.gpu_memory_utilization).tokens(engine, a_max=0)
    slot = profile.memory.value("slot_factor") * slot_bytes(profile.model, profile.engine, s_max, profile.tp)
    slot += profile.memory.value("slot_overhead_bytes")
    rates = np.array([share.rate_rps for share in shares])
    total = rates.sum()
    traffic = rates / total if total > 0.0 else np.full(len(shares), 1.0 / len(shares))
    most = [min(problem.gpus, adapter.max_replicas or problem.gpus) for adapter in problem.traffic]
    slot /= kv_bytes_per_token(profile.model, profile.tp)
    return BurstTolerance(traffic, problem.gpus, float(free), slot, np.array(most, dtype=np.int64))


class BurstTolerance:
    """Placement of adapters on engines, and the bursts that it tolerates.

    `traffic` is the share of the traffic of each adapter, `most` the maximum number of its replicas, both of
    shape (adapters,). `free` and `slot` are the KV tokens of an empty engine and of one adapter.
    """

    def __init__(
        self, traffic: NDArray[np.float64], engines: int, free: float, slot: float, most: NDArray[np.int64]
    ) -> None:
        self.traffic, self.slot, self.most = traffic, slot, most
        self.free = np.full(engines, free)
        self.holds = np.zeros((traffic.size, engines), dtype=np.bool_)  # whether an engine has an adapter
        self.replicas = np.zeros(traffic.size, dtype=np.int64)  # engines of each adapter
        self.counts = np.zeros(engines, dtype=np.int64)  # adapters of each engine
        self._reach = np.zeros(traffic.size)  # free tokens of the engines that have each adapter

    def place(self, adapter: int, engine: int) -> None:
        """Place an adapter on an engine."""
        self._reach[self.holds[:, engine]] -= self.slot
        self.free[engine] -= self.slot
        self.holds[adapter, engine] = True
        self._reach[adapter] += self.free[engine]
        self.replicas[adapter] += 1
        self.counts[engine] += 1

    def tolerance_with(self, adapter: int, engine: int) -> float:
        """Return the burst tolerance with another replica; adapters without traffic have no bursts."""
        reach = self._reach - self.slot * self.holds[:, engine]
        reach[adapter] += self.free[engine] - self.slot
        busy = self.traffic > 0.0
        return float(np.min(reach[busy] / self.traffic[busy], initial=np.inf))

    def candidates(self, adapter: int) -> list[int]:
        """Return the engines with room for another replica, those with the fewest adapters first."""
        if self.replicas[adapter] >= self.most[adapter]:
            return []
        engines = np.flatnonzero(~self.holds[adapter] & (self.free >= self.slot))
        ordered: list[int] = engines[np.argsort(self.counts[engines], kind="stable")].tolist()
        return ordered

    def most_behind(self) -> int:
        """Return the adapter whose share of all replicas is lowest relative to its share of the traffic.

        Adapters that `max_replicas` limits are left out.
        """
        ahead = self.replicas / self.replicas.sum() - self.traffic
        ahead[(self.replicas >= self.most) & (self.most < self.free.size)] = np.inf
        return int(np.argmin(ahead))


def replicate(burst: BurstTolerance, deadline_s: float, limit_s: float) -> BurstTolerance:
    """Place and replicate while the burst tolerance does not fall, then add the replicas of the last round.

    Infeasible if an adapter finds no place, or at the deadline.
    """
    adapters, engines = burst.holds.shape
    best = 0.0
    while True:
        if time.monotonic() > deadline_s:
            words = f"{limit_s:g} s with {adapters} adapters on {engines} instances"
            raise infeasible("time", f"dLoRA's search is not over after {words}")
        unplaced = np.flatnonzero(burst.replicas == 0)
        adapter = int(unplaced[0]) if unplaced.size else burst.most_behind()
        complete = unplaced.size == 0 or unplaced.tolist() == [adapter]
        for engine in burst.candidates(adapter):
            after = burst.tolerance_with(adapter, engine) if complete else 0.0
            if after >= best:
                burst.place(adapter, engine)
                best = after
                break
        else:
            if unplaced.size:
                raise infeasible(
                    "memory",
                    f"dLoRA keeps every adapter in a slot, and {unplaced.size} of {adapters} find no place "
                    f"on {engines} instance(s): each takes as much memory as {burst.slot:,.0f} KV tokens",
                )
            break
    _last_round(burst)
    return burst


def _last_round(burst: BurstTolerance) -> None:
    """Add replicas in turn: the adapter with the fewest, to the next engine without it."""
    adapters, engines = burst.holds.shape
    engine = 0
    for _ in range(engines + adapters - 1 - int(burst.replicas.sum())):
        allowed = np.flatnonzero(burst.replicas < burst.most)
        if allowed.size == 0:
            break
        adapter = int(allowed[np.argmin(burst.replicas[allowed])])
        while burst.holds[adapter, engine]:
            engine = (engine + 1) % engines
        burst.place(adapter, engine)
        engine = (engine + 1) % engines


DLORA_PROACTIVE = Solver(
    name="dlora-proactive",
    summary="replicates adapters wherever that does not lower the bursts that memory tolerates",
    source="dLoRA's proactive placement, as in the adapter-caching paper, section 8.4.3",
    place=_place,
    uses_all_gpus=True,
    divides=True,
)
