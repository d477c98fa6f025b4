"""LoRAServe's placement (section IV-A, Algorithm 1) as a solver; `capplan.planner.loraserve` has the steps.

It uses every server it is given and spreads the demand evenly over them: operating points of all ranks, from
the twin, turn tokens per second into servers' worth of demand. Demand is what the workload declares, since a
plan has no history. Slots are as many as the adapters on a server, or as fit in memory. With a plan in force,
servers are labelled so that the fewest bytes of adapters have to be copied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError, InputError
from capplan.planner.estimate import TwinEstimator
from capplan.planner.parallel import parallel_map
from capplan.planner.problem import AdapterShare, Assignment, Problem
from capplan.planner.slots import most_slots
from capplan.planner.solvers.base import RequiredEstimator, Requirement, Solver, SolverContext
from capplan.planner.solvers.loraserve_placement import (
    AdapterDemand,
    LoraservePlacement,
    PlacementVariants,
    place,
)
from capplan.serving.memory import adapter_bytes
from capplan.spec import Adapter, Arrivals, LengthPairs, Plan, Renewal, Workload
from capplan.workload import Requests, draw_requests


def solve_loraserve(
    problem: Problem,
    operating_points: Mapping[int, float],
    *,
    stored: Sequence[Collection[str]] | None = None,
    variants: PlacementVariants | None = None,
) -> tuple[Assignment, ...]:
    """Place all adapters on all instances.

    Parameters
    ----------
    problem
        Of one pool.
    operating_points
        Tokens per second that an instance sustains, by rank.
    stored
        Names of the adapters that each instance stores now; None: nothing anywhere.
    variants
        Readings of the algorithm.

    Raises
    ------
    InfeasibleError
        When the instances cannot sustain the demand; the message says how many could, with the headroom.
    InputError
        For a rank without an operating point.
    """
    placement = place(
        adapter_loads(problem), operating_points, problem.gpus, stored=stored, variants=variants
    )
    if placement.target > 1.0:
        raise _too_few_servers(problem, placement)
    return assignments(problem, placement)


def adapter_loads(problem: Problem) -> tuple[AdapterDemand, ...]:
    """Return the adapters of a problem with the demand that the workload declares."""
    return tuple(
        AdapterDemand(
            adapter.name,
            adapter.rank,
            problem.offered_tok_s(AdapterShare(adapter.name, adapter.rank, adapter.rate_rps)),
            adapter_bytes(problem.profile.model, adapter.rank),
            adapter.max_replicas,
        )
        for adapter in problem.workload.adapters
    )


def assignments(problem: Problem, placement: LoraservePlacement) -> tuple[Assignment, ...]:
    """Return a placement as assignments, servers without adapters left out."""
    taken: Counter[str] = Counter()
    answer = []
    for fractions in placement.shares:
        shares = []
        for adapter in problem.workload.adapters:
            if adapter.name in fractions:
                fraction, number = fractions[adapter.name], taken[adapter.name]
                shares.append(
                    AdapterShare(adapter.name, adapter.rank, adapter.rate_rps * fraction, fraction, number)
                )
                taken[adapter.name] += 1
        if shares:
            answer.append(Assignment(tuple(shares), most_slots(problem, shares)))
    return tuple(answer)


def _too_few_servers(problem: Problem, placement: LoraservePlacement) -> InfeasibleError:
    demand = placement.target * problem.gpus
    enough = math.ceil(demand / (1.0 - problem.workload.headroom))
    return InfeasibleError(
        f"gpus: the demand is what {demand:.2f} instances sustain at their operating points, and there are "
        f"{problem.gpus}; with headroom {problem.workload.headroom:g} it takes {enough}",
        reason="gpus",
    )


def _stored(previous: Plan | None, servers: int) -> list[frozenset[str]]:
    """Return the adapters of each instance of the plan in force; beyond its instances nothing."""
    groups = () if previous is None else previous.groups
    held = [
        frozenset(adapter.name for adapter in group.adapters)
        for group in groups
        for _ in range(group.replicas)
    ]
    return (held + [frozenset[str]()] * servers)[:servers]


def _place(problem: Problem, context: SolverContext) -> tuple[Assignment, ...]:
    points = OperatingPoints(problem, context.seed)
    ranks = [adapter.rank for adapter in problem.workload.adapters]
    return solve_loraserve(problem, points(ranks), stored=_stored(context.previous, problem.gpus))


LORASERVE = Solver(
    name="loraserve",
    summary="servers for each rank by their operating points, adapters packed on them in shares",
    source="LoRAServe, section IV-A, Algorithm 1",
    place=_place,
    required_estimator=RequiredEstimator.TWIN,
    divides=True,
    estimator="twin",
    supports=frozenset({Requirement.MAX_REPLICAS, Requirement.PREVIOUS_PLAN}),
)

HOLT_LEVEL: Final = 0.5
"""Weight of the newest step in the level, for Holt's trend and for the moving average."""

HOLT_TREND: Final = 0.3
"""Weight of the newest change in Holt's trend."""

RECENT_STEPS: Final = 12
"""Steps whose largest demand bounds the forecast, and that a line is fitted to."""

_MAX_GROWTH: Final = 2.0
_MIN_STEPS: Final = 3
_NS_PER_S: Final = 1e9


class Extrapolation(StrEnum):
    """How the next step's demand follows from those before."""

    HOLT = "holt"
    """Level and linear trend, both smoothed."""
    LAST = "last"
    EWMA = "ewma"
    """Exponentially weighted moving average."""
    LINEAR = "linear"
    """Least-squares line through the recent steps."""


def extrapolate(
    history: Sequence[float], declared: float, method: Extrapolation = Extrapolation.HOLT
) -> float:
    """Return the demand of the step that follows, at least 0 and at most twice the largest recent one.

    Parameters
    ----------
    history
        Tokens per second of the steps so far, oldest first; the one that just ended is the last.
    declared
        What is said of the adapter beforehand, in tokens per second: the answer without a history.
    method
        Fewer than three steps are too few for any: the last one then stands for the next.
    """
    values = np.asarray(history, dtype=np.float64)
    if values.size == 0:
        return declared
    if values.size < _MIN_STEPS or method is Extrapolation.LAST:
        return float(values[-1])
    largest = _MAX_GROWTH * float(values[-RECENT_STEPS:].max())
    return min(max(0.0, _FORECAST[method](values)), largest)


def _holt(values: NDArray[np.float64]) -> float:
    level, trend = float(values[0]), float(values[1] - values[0])
    for value in values[1:].tolist():
        before = level
        level = HOLT_LEVEL * value + (1.0 - HOLT_LEVEL) * (level + trend)
        trend = HOLT_TREND * (level - before) + (1.0 - HOLT_TREND) * trend
    return level + trend


def _ewma(values: NDArray[np.float64]) -> float:
    level = float(values[0])
    for value in values[1:].tolist():
        level += HOLT_LEVEL * (value - level)
    return level


def _linear(values: NDArray[np.float64]) -> float:
    recent = values[-RECENT_STEPS:]
    slope, intercept = np.polyfit(np.arange(recent.size), recent, 1)
    return float(intercept + slope * recent.size)


_FORECAST: Final = {Extrapolation.HOLT: _holt, Extrapolation.EWMA: _ewma, Extrapolation.LINEAR: _linear}


def arrived_tok_s(requests: Requests, adapters: int, step_s: float, duration_s: float) -> NDArray[np.float64]:
    """Return the input and output tokens per second of the requests that arrive in each whole time step.

    Parameters
    ----------
    requests
        Sorted by arrival; adapters are numbered from 1.
    adapters
        How many there are.
    step_s, duration_s
        Length of a step and of the whole; what is left beyond the last whole step is not counted.

    Returns
    -------
    ndarray, shape (steps, adapters)

    Raises
    ------
    InputError
        Unless ``0 < step_s <= duration_s``.
    """
    if not 0.0 < step_s <= duration_s:
        raise InputError(f"must be above 0 and at most the duration, {duration_s:g}", step_s, "step_s")
    steps = int(duration_s // step_s)
    step = (requests.arrival_ns / (step_s * _NS_PER_S)).astype(np.int64)
    counted = (step < steps) & (requests.adapter > 0)
    cell = step[counted] * adapters + requests.adapter[counted] - 1
    tokens = requests.prompt_tokens[counted].astype(np.float64) + requests.output_tokens[counted]
    sums = np.bincount(cell, tokens, minlength=steps * adapters)
    per_second: NDArray[np.float64] = sums.reshape(steps, adapters) / step_s
    return per_second


_FIRST_RPS: Final = 1.0
_MAX_RPS: Final = 2.0**20
_MIN_REQUESTS: Final = 32
"""In the time simulated; with fewer, a bound may seem to hold because nobody is there to break it."""

_BISECTIONS: Final = 7
"""The rate is then known to 1 % of itself."""

_LENGTH_SAMPLE: Final = 2**14
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
        self._measured.update(zip(new, parallel_map(self._measure, new), strict=True))
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
            while rate_rps < _MAX_RPS and self._holds(rank, 2.0 * rate_rps):
                rate_rps *= 2.0
            return rate_rps, 2.0 * rate_rps
        while rate_rps > _MIN_REQUESTS / TwinEstimator.duration_s:
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
        alone = replace(self.problem, workload=self._mix.model_copy(update={"adapters": adapters}), shares=())
        shares = tuple(AdapterShare(a.name, a.rank, a.rate_rps) for a in adapters)
        twin = TwinEstimator(alone, self.seed)
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
            workload, _LENGTH_SAMPLE / workload.total_rate_rps, self.seed, limit, max(1, limit - 1)
        )
        return LengthPairs.from_arrays(drawn.prompt_tokens, drawn.output_tokens)
