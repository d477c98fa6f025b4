"""Operating points: highest token rate of a server with adapters of one rank (LoRAServe, section IV-A)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from capplan.errors import InputError
from capplan.planner.problem._estimate import TwinEstimator
from capplan.planner.problem._execution import NEVER, Deadline, parallel_map
from capplan.planner.problem._problem import (
    SIMULATED_S,
    AdapterShare,
    Assignment,
    Problem,
    infeasible,
    whole_adapters,
)
from capplan.planner.problem._settings import most_slots
from capplan.serving.rebalancing import AdapterDemand
from capplan.spec import Adapter, Arrivals, BaseTraffic, LengthPairs, RebalanceSettings, Renewal, Workload
from capplan.twin.cluster import Rebalancing
from capplan.workload import draw_requests

_FIRST_RPS: Final = 1.0
_MAX_RPS: Final = 2.0**20
_MIN_REQUESTS: Final = 32
"""Minimum number of simulated requests: with fewer, a bound may hold for want of requests."""
_BISECTIONS: Final = 7
"""Number of bisections, for a rate within 1 %."""
_LENGTH_SAMPLE: Final = 2**14
"""Number of requests that represent a mix of lengths."""


@dataclass(frozen=True)
class OperatingPoints:
    """Operating points of one problem, each measured once (LoRAServe, section IV-A).

    The measured server has as many adapters as a server of the cluster on average, all of one rank, with
    equal traffic and the workload's mix of lengths, and a slot for each if memory allows. The rate is
    constant. Arrivals and lengths use the same random numbers at every rate and rank.
    """

    problem: Problem
    """Problem with one pool."""
    seed: int = 0
    """Seed of the simulations."""
    deadline: Deadline = NEVER
    """Time at which simulations raise `OutOfTimeError`."""
    _measured: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, ranks: Iterable[int]) -> dict[int, float]:
        """Return the highest token rate (input and output) that a server sustains, by rank.

        Infeasible if a rank does not hold at the lowest rate.
        """
        ordered = sorted(set(ranks))
        new = [rank for rank in ordered if rank not in self._measured]
        self._measured.update(zip(new, parallel_map(self._measure, new), strict=True))
        return {rank: self._measured[rank] for rank in ordered}

    def _measure(self, rank: int) -> float:
        """Bracket by doubling or halving the rate, then bisect."""
        low, high = self._bracket(rank)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            low, high = (middle, high) if self._holds(rank, middle) else (low, middle)
        return low * self._tokens_per_request

    def _bracket(self, rank: int) -> tuple[float, float]:
        """Return a rate that holds and twice that, which does not; in requests per second."""
        rate_rps = _FIRST_RPS
        if self._holds(rank, rate_rps):
            while rate_rps < _MAX_RPS and self._holds(rank, 2.0 * rate_rps):
                rate_rps *= 2.0
            return rate_rps, 2.0 * rate_rps
        while rate_rps > _MIN_REQUESTS / SIMULATED_S:
            rate_rps /= 2.0
            if self._holds(rank, rate_rps):
                return rate_rps, 2.0 * rate_rps
        slo = self.problem.workload.slo
        bounds = slo.latency_bounds()
        raise infeasible(
            "slo" if bounds else "starvation",
            f"a {self.problem.profile.gpu.name} that serves nothing but rank {rank} at {rate_rps:g} req/s "
            f"breaks {'a latency bound or ' if bounds else ''}served_fraction {slo.served_fraction:g}: there "
            "is no operating point",
        )

    def _holds(self, rank: int, rate_rps: float) -> bool:
        """Tell whether a server sustains this rate of adapters of a rank; 0: of the base model."""
        count = math.ceil(len(self.problem.workload.adapters) / self.problem.gpus) if rank else 0
        adapters = tuple(
            Adapter(name=f"r{rank}-{i}", rank=rank, rate_rps=rate_rps / count) for i in range(count)
        )
        only = {"adapters": adapters, "base": None if rank else BaseTraffic(rate_rps=rate_rps)}
        alone = replace(self.problem, workload=self._mix.model_copy(update=only), shares=())
        shares = whole_adapters(alone)
        twin = TwinEstimator(alone, self.seed, deadline=self.deadline)
        return not twin(Assignment(shares, most_slots(alone, shares))).starved

    @property
    def _tokens_per_request(self) -> float:
        mix = self._mix
        if mix.length_pairs is not None:
            pairs = mix.length_pairs
            return float(pairs.prompt_tokens.mean(dtype=float) + pairs.output_tokens.mean(dtype=float))
        return mix.prompt_tokens.mean_tokens + mix.output_tokens.mean_tokens

    @cached_property
    def _mix(self) -> Workload:
        """Steady workload without headroom, with the lengths of all adapters mixed by their traffic."""
        workload = self.problem.workload
        arrivals = workload.arrivals
        if isinstance(arrivals, Renewal):
            arrivals = arrivals.model_copy(update={"modulation": None})
        elif not isinstance(arrivals, Arrivals):
            arrivals = Arrivals.POISSON
        alike = all(a.prompt_tokens is None and a.output_tokens is None for a in self.problem.traffic)
        pairs = workload.length_pairs if alike and workload.trace is None else self._sampled_lengths()
        steady = {"arrivals": arrivals, "length_pairs": pairs, "trace": None, "headroom": 0.0, "base": None}
        return workload.model_copy(update=steady)

    def _sampled_lengths(self) -> LengthPairs:
        """Return the lengths of a sample of requests, or of the whole trace."""
        workload, limit = self.problem.workload, self.problem.engine.max_model_len
        if workload.trace is not None:
            return LengthPairs.from_arrays(workload.trace.prompt_tokens, workload.trace.output_tokens)
        if workload.total_rate_rps == 0.0:
            busy = tuple(a.model_copy(update={"rate_rps": 1.0}) for a in workload.adapters)
            base = workload.base and workload.base.model_copy(update={"rate_rps": 1.0})
            workload = workload.model_copy(update={"adapters": busy, "base": base})
        drawn = draw_requests(
            workload, _LENGTH_SAMPLE / workload.total_rate_rps, self.seed, limit, max(1, limit - 1)
        )
        return LengthPairs.from_arrays(drawn.prompt_tokens, drawn.output_tokens)


def adapter_demand(problem: Problem, adapter: Adapter, size_bytes: int | None = None) -> AdapterDemand:
    """Return the demand for an adapter, or for the base model, at its declared rate.

    None: the size follows from the rank.
    """
    return AdapterDemand(
        adapter.name,
        adapter.rank,
        problem.offered_tok_s(AdapterShare.of(adapter)),
        problem.adapter_bytes(adapter) if size_bytes is None else size_bytes,
        adapter.max_replicas,
    )


def rebalancing_of(problem: Problem, settings: RebalanceSettings) -> Rebalancing:
    """Return the re-balancing of a problem's instances, with operating points that are measured once."""
    if len(problem.pools) > 1:
        raise InputError("needs equal GPUs, and there are several pools", len(problem.pools), "rebalance")
    ranks = {adapter.rank for adapter in problem.traffic}
    known = problem.known_points
    if not ranks <= known.keys():
        known.update(OperatingPoints(problem)(ranks))
    return Rebalancing(settings, dict(known))
