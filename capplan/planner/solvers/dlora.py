"""dLoRA's proactive placement, as the adapter-caching paper runs it (section 8.4.3).

Every adapter gets a place, and then replicas wherever they do not lower the burst tolerance: the least, over
adapters, of the free KV memory of the engines that hold it, per share of the traffic. A last round adds
replicas until there are (engines + adapters - 1) in all, without a look at memory. Replicas take equal shares
of their adapter's traffic; as many slots as adapters.

As published, the search would go on for ever when memory runs out before every adapter has a place. That is
noticed here, and is an error. The bounds of `max_replicas` are kept; the paper has none.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError
from capplan.models.memory import kv_tokens
from capplan.planner.problem import AdapterShare, Assignment, Problem, whole_adapters
from capplan.planner.solvers.base import RequiredEstimator, Solver, SolverContext
from capplan.planner.splitting import split_evenly
from capplan.serving.memory import kv_bytes_per_token, slot_bytes


class BurstTolerance:
    """Who holds what, and what bursts that tolerates; all per adapter and engine, in KV tokens."""

    def __init__(
        self, traffic: NDArray[np.float64], engines: int, free: float, slot: float, most: NDArray[np.int64]
    ) -> None:
        """Start with nothing placed.

        Parameters
        ----------
        traffic
            Of the traffic, shape (adapters,).
        engines
            How many there are.
        free, slot
            KV tokens of an empty engine, and those that one more adapter costs.
        most
            Most replicas of each adapter.
        """
        self.traffic = traffic
        self.slot = slot
        self.most = most
        self.free = np.full(engines, free)
        self.holds = np.zeros((traffic.size, engines), dtype=np.bool_)
        self.replicas = np.zeros(traffic.size, dtype=np.int64)
        self.counts = np.zeros(engines, dtype=np.int64)
        self.reach = np.zeros(traffic.size)
        """Free tokens of the engines that hold each adapter."""

    def place(self, adapter: int, engine: int) -> None:
        """Put an adapter on an engine."""
        self.reach[self.holds[:, engine]] -= self.slot
        self.free[engine] -= self.slot
        self.holds[adapter, engine] = True
        self.reach[adapter] += self.free[engine]
        self.replicas[adapter] += 1
        self.counts[engine] += 1

    def tolerance(self) -> float:
        """Return the burst tolerance; adapters without traffic have no bursts."""
        busy = self.traffic > 0.0
        return float(np.min(self.reach[busy] / self.traffic[busy], initial=np.inf))

    def tolerance_with(self, adapter: int, engine: int) -> float:
        """Return the burst tolerance if this adapter were placed on this engine."""
        reach = self.reach - self.slot * self.holds[:, engine]
        reach[adapter] += self.free[engine] - self.slot
        busy = self.traffic > 0.0
        return float(np.min(reach[busy] / self.traffic[busy], initial=np.inf))

    def candidates(self, adapter: int) -> list[int]:
        """Return the engines without an adapter and with room for it, those with fewest adapters first."""
        if self.replicas[adapter] >= self.most[adapter]:
            return []
        engines = np.flatnonzero(~self.holds[adapter] & (self.free >= self.slot))
        return [int(engine) for engine in engines[np.argsort(self.counts[engines], kind="stable")]]

    def most_behind(self) -> int:
        """Return the adapter whose share of all replicas lags its share of the traffic most.

        Those that a user's `max_replicas` holds back are left out.
        """
        ahead = self.replicas / self.replicas.sum() - self.traffic
        ahead[(self.replicas >= self.most) & (self.most < self.free.size)] = np.inf
        return int(np.argmin(ahead))


def _place(problem: Problem, context: SolverContext) -> tuple[Assignment, ...]:
    shares = whole_adapters(problem)
    burst = replicate(
        _empty_state(problem, shares), time.monotonic() + context.time_limit_s, context.time_limit_s
    )
    held: list[list[AdapterShare]] = [[] for _ in range(problem.gpus)]
    for adapter, share in enumerate(shares):
        engines = np.flatnonzero(burst.holds[adapter]).tolist()
        for each, engine in zip(split_evenly(share, len(engines)), engines, strict=True):
            held[engine].append(each)
    return tuple(Assignment(tuple(shares), problem.fixed_a_max or len(shares)) for shares in held if shares)


def replicate(burst: BurstTolerance, deadline_s: float, limit_s: float) -> BurstTolerance:
    """Place and replicate until nothing more helps, then add the replicas of the last round.

    Raises
    ------
    InfeasibleError
        When an adapter finds no place, or the time is over.
    """
    adapters, engines = burst.holds.shape
    best = 0.0
    while True:
        if time.monotonic() > deadline_s:
            raise InfeasibleError(
                f"time: dLoRA's search is not over after {limit_s:g} s with {adapters} adapters on {engines} "
                "instances",
                reason="time",
            )
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
                raise _memory_error(burst, unplaced.size)
            break
    _last_round(burst)
    return burst


def _last_round(burst: BurstTolerance) -> None:
    """Add replicas in turn, whatever the memory: the adapter with fewest, the next engine without it."""
    adapters, engines = burst.holds.shape
    engine = 0
    for _ in range(engines + adapters - 1 - int(burst.replicas.sum())):
        open_ones = np.flatnonzero(burst.replicas < burst.most)
        if open_ones.size == 0:
            break
        adapter = int(open_ones[np.argmin(burst.replicas[open_ones])])
        while burst.holds[adapter, engine]:
            engine = (engine + 1) % engines
        burst.place(adapter, engine)
        engine = (engine + 1) % engines


def _empty_state(problem: Problem, shares: tuple[AdapterShare, ...]) -> BurstTolerance:
    profile, engine = problem.profile, problem.engine
    s_max = problem.s_max(shares)
    free = kv_tokens(profile, 0, s_max, engine.gpu_memory_utilization, engine.max_num_seqs)
    slot = profile.memory.value("slot_factor") * slot_bytes(profile.model, profile.engine, s_max, profile.tp)
    slot += profile.memory.value("slot_overhead_bytes")
    rates = np.array([share.rate_rps for share in shares])
    total = rates.sum()
    traffic = rates / total if total > 0.0 else np.full(len(shares), 1.0 / len(shares))
    most = [min(problem.gpus, adapter.max_replicas or problem.gpus) for adapter in problem.workload.adapters]
    per_token = kv_bytes_per_token(profile.model, profile.tp)
    return BurstTolerance(
        traffic, problem.gpus, float(free), slot / per_token, np.array(most, dtype=np.int64)
    )


def _memory_error(burst: BurstTolerance, unplaced: int) -> InfeasibleError:
    adapters, engines = burst.holds.shape
    return InfeasibleError(
        f"memory: dLoRA keeps every adapter in a slot, and {unplaced} of {adapters} find no place on "
        f"{engines} instance(s): each takes as much memory as {burst.slot:,.0f} KV tokens",
        reason="memory",
    )


DLORA_PROACTIVE = Solver(
    name="dlora-proactive",
    summary="replicates adapters wherever that does not lower the bursts that memory tolerates",
    source="dLoRA's proactive placement, as in the adapter-caching paper, section 8.4.3",
    place=_place,
    required_estimator=RequiredEstimator.NONE,
    divides=True,
)
