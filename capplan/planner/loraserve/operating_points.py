"""What one server sustains within the objectives when it serves adapters of one rank only, by the twin."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from capplan.errors import InfeasibleError
from capplan.planner.estimators import TwinEstimator
from capplan.planner.loraserve.memory import most_slots
from capplan.planner.parallel import in_parallel
from capplan.planner.problem import Assignment, Part, Problem
from capplan.spec import Adapter, Arrivals, LengthPairs, Renewal, Workload
from capplan.workload import draw_requests

_FIRST_RPS: Final = 1.0
_LARGEST_RPS: Final = 2.0**20
_FEWEST_REQUESTS: Final = 32
"""In the time simulated; with fewer, a bound may seem to hold because nobody is there to break it."""
_BISECTIONS: Final = 7
"""The rate is then known to 1 % of itself."""
_SAMPLE: Final = 2**14
"""Requests that stand for a mix of lengths."""


@dataclass(frozen=True)
class OperatingPoints:
    """Measures operating points of one problem, each once (LoRAServe, section IV-A: servers are profiled).

    The server of a measurement gets as many adapters as a server of the cluster has on average (the paper:
    "an adapter of a specific rank"), all of that rank, with equal traffic and the workload's mix of lengths,
    and as many slots as adapters, or as fit in memory. Its rate does not move in time. Arrivals and lengths
    come from one seed at every rate and rank: common random numbers.

    Attributes
    ----------
    problem
        Of one pool.
    seed
        Of the simulations, each of 900 s.
    adapters
        How many adapters the server has; None: the mean over servers, rounded up.
    """

    problem: Problem
    seed: int = 0
    adapters: int | None = None
    _measured: dict[int, float] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, ranks: Iterable[int]) -> dict[int, float]:
        """Return the highest token rate (input and output) that a server sustains, for every rank.

        Raises
        ------
        InfeasibleError
            For a rank of which not even a trickle holds.
        """
        wanted = sorted(set(ranks))
        new = [rank for rank in wanted if rank not in self._measured]
        self._measured.update(zip(new, in_parallel(self._measure, new), strict=True))
        return {rank: self._measured[rank] for rank in wanted}

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
            while rate_rps < _LARGEST_RPS and self._holds(rank, 2.0 * rate_rps):
                rate_rps *= 2.0
            return rate_rps, 2.0 * rate_rps
        while rate_rps > _FEWEST_REQUESTS / TwinEstimator.duration_s:
            rate_rps /= 2.0
            if self._holds(rank, rate_rps):
                return rate_rps, 2.0 * rate_rps
        bounds = self.problem.workload.slo.latency_bounds()
        raise InfeasibleError(
            f"{'slo' if bounds else 'starvation'}: a {self.problem.profile.gpu.name} that serves nothing but "
            f"rank {rank} at {rate_rps:g} req/s breaks "
            f"{'a latency bound or ' if bounds else ''}served_fraction "
            f"{self.problem.workload.slo.served_fraction:g}: there is no operating point",
            reason="slo" if bounds else "starvation",
        )

    def _holds(self, rank: int, rate_rps: float) -> bool:
        count = self.adapters or math.ceil(len(self.problem.workload.adapters) / self.problem.gpus)
        adapters = tuple(
            Adapter(name=f"r{rank}-{i}", rank=rank, rate_rps=rate_rps / count) for i in range(count)
        )
        alone = replace(self.problem, workload=self._mix.model_copy(update={"adapters": adapters}), parts=())
        parts = tuple(Part(a.name, a.rank, a.rate_rps) for a in adapters)
        twin = TwinEstimator(alone, self.seed)
        return not twin(Assignment(parts, most_slots(alone, parts))).starved

    @property
    def _tokens_per_request(self) -> float:
        mix = self._mix
        if mix.length_pairs is not None:
            pairs = mix.length_pairs
            return float(pairs.prompt_tokens.mean(dtype=float) + pairs.output_tokens.mean(dtype=float))
        return mix.prompt_tokens.mean_tokens + mix.output_tokens.mean_tokens

    @cached_property
    def _mix(self) -> Workload:
        """The workload, steady and without headroom, the lengths of its adapters mixed by their traffic."""
        workload = self.problem.workload
        arrivals = workload.arrivals
        if isinstance(arrivals, Renewal):
            arrivals = arrivals.model_copy(update={"modulation": None})
        elif not isinstance(arrivals, Arrivals):
            arrivals = Arrivals.POISSON
        alike = all(a.prompt_tokens is None and a.output_tokens is None for a in workload.adapters)
        pairs = workload.length_pairs if alike and workload.trace is None else self._sampled_lengths()
        steady = {"arrivals": arrivals, "length_pairs": pairs, "trace": None, "headroom": 0.0}
        return workload.model_copy(update=steady)

    def _sampled_lengths(self) -> LengthPairs:
        """Return the lengths of some requests of the workload; of a trace, all of them."""
        workload, limit = self.problem.workload, self.problem.engine.max_model_len
        if workload.trace is not None:
            return LengthPairs.from_arrays(workload.trace.prompt_tokens, workload.trace.output_tokens)
        if workload.total_rate_rps == 0.0:
            asking = tuple(a.model_copy(update={"rate_rps": 1.0}) for a in workload.adapters)
            workload = workload.model_copy(update={"adapters": asking})
        drawn = draw_requests(
            workload, _SAMPLE / workload.total_rate_rps, self.seed, limit, max(1, limit - 1)
        )
        return LengthPairs.from_arrays(drawn.prompt_tokens, drawn.output_tokens)
