"""Timed batches, and the sampling of their medians.

Points are measured in rounds in a random order, so that disturbances meet all points alike.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from capplan.errors import InputError

PAPER_BATCHES: Final = (4, 8, 12, 16, 20, 24, 28, 32)
"""Toppings, section 5 and figure 11: batches of 4 to 32 ..."""
PAPER_RANKS: Final = (8, 16, 32, 64)
"""... of adapters of ranks 8 to 64."""
WIDE_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDE_RANKS: Final = (8, 16, 32, 64, 128)
PREFILL_BATCHES: Final = (1, 2, 4, 8)
PREFILL_TOKENS: Final = (16, 64, 256)
CROSSOVER_ADAPTERS: Final = (1, 4, 16)
CROSSOVER_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Tokens of each adapter, between decode and prefill."""
CROSSOVER_RANKS: Final = (8, 16, 64)
SHARED_BY: Final = 4
"""Requests per shared adapter."""
HALVES: Final = ("shrink", "expand")
MIN_PASSES: Final = 5
_SIGMAS_PER_MAD: Final = 1.4826
_SPREAD_OF_MEDIAN: Final = 1.2533  # standard error of a median over that of a mean, for normal samples


@dataclass(frozen=True)
class Case:
    """Batch of requests with adapters."""

    grid: str
    """First grid of the case; wider grids include its cases."""
    phase: str
    """``decode``, ``prefill``, or ``crossover``: a few tokens of each adapter."""
    mix: str
    """Mix of ranks, part of the configuration, whose draws (`seed`) share a fold."""
    seed: int
    ranks: tuple[int, ...]
    """Rank of each adapter; the requests of an adapter are adjacent."""
    requests_each: int = 1
    """Requests of each adapter."""
    tokens_each: int = 1
    """Tokens of each request."""

    @property
    def requests(self) -> int:
        """Requests of the batch."""
        return len(self.ranks) * self.requests_each

    @property
    def tokens(self) -> int:
        """Tokens of all requests."""
        return self.requests * self.tokens_each

    @property
    def configuration(self) -> str:
        """Key that cross-validation keeps in one fold."""
        return f"{self.phase}/{self.requests}x{self.tokens_each}/{self.mix}"

    @property
    def name(self) -> str:
        """Unique name."""
        return f"{self.configuration}/{self.seed}"


def _paper(seed: int) -> Iterator[Case]:
    for requests in PAPER_BATCHES:
        yield from _mixes("paper", "decode", requests, 1, PAPER_RANKS, 2, seed)


def _wide(seed: int) -> Iterator[Case]:
    known = {case.name for case in _paper(seed)}
    for requests in WIDE_BATCHES:
        mixes = _mixes("wide", "decode", requests, 1, WIDE_RANKS, 1, seed)
        yield from (case for case in mixes if case.name not in known)
        if requests > SHARED_BY:
            for rank in WIDE_RANKS[::2]:
                ranks = (rank,) * (requests // SHARED_BY)
                yield Case("wide", "decode", f"shared-{rank}", 0, ranks, requests_each=SHARED_BY)


def _prefill(seed: int) -> Iterator[Case]:
    for requests in PREFILL_BATCHES:
        for tokens in PREFILL_TOKENS:
            yield from _mixes("prefill", "prefill", requests, tokens, PAPER_RANKS, 1, seed)


def _crossover(seed: int) -> Iterator[Case]:
    del seed  # nothing is drawn
    sizes = itertools.product(CROSSOVER_ADAPTERS, CROSSOVER_TOKENS, CROSSOVER_RANKS)
    for adapters, tokens, rank in sizes:
        yield Case("crossover", "crossover", f"all-{rank}", 0, (rank,) * adapters, tokens_each=tokens)


def _tiny(seed: int) -> Iterator[Case]:
    for requests in (1, 2, 4, 6):
        yield from _mixes("tiny", "decode", requests, 1, (4, 8), 1, seed)
    yield from _mixes("tiny", "prefill", 2, 3, (4, 8), 1, seed)
    for tokens in (1, 4, 16):
        yield Case("tiny", "crossover", "all-4", 0, (4, 4), tokens_each=tokens)


def _mixes(
    grid: str, phase: str, requests: int, tokens: int, ranks: tuple[int, ...], draws: int, seed: int
) -> Iterator[Case]:
    """Yield batches of one rank, half and half, one large among small, and random ranks."""
    low, high = ranks[0], ranks[-1]
    mixes = [(f"all-{rank}", 0, (rank,) * requests) for rank in ranks]
    if requests > 1:
        half = (high,) * (requests // 2) + (low,) * (requests - requests // 2)
        mixes.append((f"half-{low}-{high}", 0, half))
        mixes.append((f"one-{high}-rest-{low}", 0, (high,) + (low,) * (requests - 1)))
        for draw in range(draws):
            rng = np.random.default_rng((seed, requests, len(ranks), draw))
            drawn = rng.choice(np.array(ranks), size=requests).tolist()
            mixes.append((f"drawn-{low}-{high}", draw, tuple(drawn)))
    for mix, draw, chosen in mixes:
        yield Case(grid, phase, mix, draw, chosen, tokens_each=tokens)


GRIDS: Final = MappingProxyType(
    {
        "paper": (_paper,),
        "wide": (_paper, _wide, _prefill),
        "prefill": (_prefill,),
        "crossover": (_crossover,),
        "tiny": (_tiny,),
    }
)


def cases(grid: str, seed: int = 0) -> tuple[Case, ...]:
    """Return the cases of a grid, one of `GRIDS`; ``wide`` includes ``paper``."""
    if grid not in GRIDS:
        raise InputError(f"must be one of {', '.join(GRIDS)}", grid, "grid")
    return tuple(case for part in GRIDS[grid] for case in part(seed))


class KernelTiming(NamedTuple):
    """Median of the calls of one pass."""

    median_us: float
    disturbed: bool
    """Whether every call was interrupted by another process on its core."""


@dataclass
class KernelPoint:
    """One kernel on one case at one width, with the medians of its passes."""

    kernel: str
    width: int
    case: Case
    times_us: dict[str, list[float]] = field(default_factory=lambda: {half: [] for half in HALVES})
    """By half, in microseconds."""
    disturbed: int = 0
    """Passes of which every call was interrupted."""

    @property
    def key(self) -> tuple[str, int, str]:
        """Identity across restarts."""
        return self.kernel, self.width, self.case.name

    @property
    def passes(self) -> int:
        """Passes so far."""
        return len(self.times_us[HALVES[0]])

    def add(self, *timings: KernelTiming) -> None:
        """Add a pass: shrink, expand."""
        for half, timing in zip(HALVES, timings, strict=True):
            self.times_us[half].append(timing.median_us)
        self.disturbed += any(timing.disturbed for timing in timings)

    def is_converged(self, limits: SamplingLimits) -> bool:
        """Return whether the medians have converged or the passes are used up."""
        if self.passes >= limits.max_passes:
            return True
        return self.passes >= MIN_PASSES and all(
            relative_error(times) <= limits.tolerance for times in self.times_us.values()
        )


@dataclass(frozen=True)
class SamplingLimits:
    """Limits on sampling."""

    budget_s: float = 600.0
    """Time for all points."""
    tolerance: float = 0.02
    """Relative standard error of a converged median."""
    max_passes: int = 60
    """Passes after which a point counts as converged."""
    calls: int = 4
    """Timed calls of each half per pass."""


def relative_error(times: Sequence[float]) -> float:
    """Return the relative standard error of the median, from the median absolute deviation."""
    values = np.asarray(times)
    middle = float(np.median(values))
    spread = _SIGMAS_PER_MAD * float(np.median(np.abs(values - middle)))
    return _SPREAD_OF_MEDIAN * spread / math.sqrt(values.size) / middle


def timing_row(
    case: Case, kernel: str, half: str, width: int, times_us: Sequence[float], disturbed: int
) -> dict[str, Any]:
    """Return the row of the kernel table for the medians of a case's passes."""
    rank_sum = sum(case.ranks)
    return {
        "kernel": kernel,
        "half": half,
        "width": width,
        "case": case.name,
        "configuration": case.configuration,
        "grid": case.grid,
        "phase": case.phase,
        "requests": case.requests,
        "tokens": case.tokens,
        "adapters": len(case.ranks),
        "max_rank": max(case.ranks),
        "rank_sum": rank_sum * case.requests_each,
        "adapter_rank_sum": rank_sum,
        "rank_tokens": rank_sum * case.requests_each * case.tokens_each,
        "median_us": float(np.median(times_us)),
        "relative_error": relative_error(times_us) if len(times_us) > 1 else float("nan"),
        "visits": len(times_us),
        "disturbed": disturbed,
        "visits_us": [float(each) for each in times_us],
    }


def rounds(
    points: Sequence[KernelPoint],
    limits: SamplingLimits,
    seed: int,
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[KernelPoint]:
    """Yield the next point until all have converged or the budget is spent."""
    rng = np.random.default_rng(seed)
    until = now_s() + limits.budget_s
    while open_points := [point for point in points if not point.is_converged(limits)]:
        for at in rng.permutation(len(open_points)):
            if now_s() >= until:
                return
            yield open_points[at]
