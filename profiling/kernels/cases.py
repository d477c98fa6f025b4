"""What is timed: batches of requests with adapters, on the papers' grid and on a wider one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

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
SHARED_BY: Final = 4
"""Requests per adapter where adapters are shared."""
GRIDS: Final = ("paper", "wide", "prefill", "tiny")
LEAST_VISITS: Final = 5
_SIGMAS_PER_MAD: Final = 1.4826
_SPREAD_OF_MEDIAN: Final = 1.2533  # standard error of a median over that of a mean, for normal samples


@dataclass(frozen=True)
class Case:
    """One batch.

    Attributes
    ----------
    grid
        The first grid that it belongs to: what is fitted on the wider grid are the cases of both.
    phase
        ``decode`` or ``prefill``.
    mix
        How ranks are mixed; with phase, requests and tokens it names the configuration, whose draws (`seed`)
        are never on both sides of a split.
    ranks
        Rank of each adapter; the requests of an adapter stand together.
    requests_each, tokens_each
        Requests of each adapter, and tokens of each request.
    """

    grid: str
    phase: str
    mix: str
    seed: int
    ranks: tuple[int, ...]
    requests_each: int = 1
    tokens_each: int = 1

    @property
    def requests(self) -> int:
        """Size of the batch."""
        return len(self.ranks) * self.requests_each

    @property
    def tokens(self) -> int:
        """Tokens of all requests."""
        return self.requests * self.tokens_each

    @property
    def configuration(self) -> str:
        """What a split into folds keeps together."""
        return f"{self.phase}/{self.requests}x{self.tokens_each}/{self.mix}"

    @property
    def name(self) -> str:
        """A name of its own."""
        return f"{self.configuration}/{self.seed}"


def cases(grid: str, seed: int = 0) -> tuple[Case, ...]:
    """Return the cases of a grid, those of the grids within it first."""
    if grid == "paper":
        return tuple(_paper(seed))
    if grid == "prefill":
        return tuple(_prefill(seed))
    if grid == "wide":
        return (*_paper(seed), *_wide(seed), *_prefill(seed))
    if grid == "tiny":
        return tuple(_tiny(seed))
    raise InputError(f"must be one of {', '.join(GRIDS)}", grid, "grid")


def _paper(seed: int) -> Iterator[Case]:
    for requests in PAPER_BATCHES:
        for mix, draw, ranks in _mixes(requests, PAPER_RANKS, 2, seed):
            yield Case("paper", "decode", mix, draw, ranks)


def _wide(seed: int) -> Iterator[Case]:
    known = {case.name for case in _paper(seed)}
    for requests in WIDE_BATCHES:
        for mix, draw, ranks in _mixes(requests, WIDE_RANKS, 1, seed):
            case = Case("wide", "decode", mix, draw, ranks)
            if case.name not in known:
                yield case
        if requests > SHARED_BY:
            for rank in WIDE_RANKS[::2]:
                ranks = (rank,) * (requests // SHARED_BY)
                yield Case("wide", "decode", f"shared-{rank}", 0, ranks, requests_each=SHARED_BY)


def _prefill(seed: int) -> Iterator[Case]:
    for requests in PREFILL_BATCHES:
        for tokens in PREFILL_TOKENS:
            for mix, draw, ranks in _mixes(requests, PAPER_RANKS, 1, seed):
                yield Case("prefill", "prefill", mix, draw, ranks, tokens_each=tokens)


def _tiny(seed: int) -> Iterator[Case]:
    for requests in (1, 2, 4, 6):
        for mix, draw, ranks in _mixes(requests, (4, 8), 1, seed):
            yield Case("tiny", "decode", mix, draw, ranks)
    for mix, draw, ranks in _mixes(2, (4, 8), 1, seed):
        yield Case("tiny", "prefill", mix, draw, ranks, tokens_each=3)


def _mixes(
    requests: int, ranks: tuple[int, ...], draws: int, seed: int
) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Give batches of one rank, half and half, one large among small ones, and drawn at random."""
    low, high = ranks[0], ranks[-1]
    for rank in ranks:
        yield f"all-{rank}", 0, (rank,) * requests
    if requests < 2:
        return
    yield f"half-{low}-{high}", 0, (high,) * (requests // 2) + (low,) * (requests - requests // 2)
    yield f"one-{high}-rest-{low}", 0, (high,) + (low,) * (requests - 1)
    for draw in range(draws):
        rng = np.random.default_rng((seed, requests, len(ranks), draw))
        drawn = rng.choice(np.array(ranks), size=requests)
        yield f"drawn-{low}-{high}", draw, tuple(int(rank) for rank in drawn)


class KernelTiming(NamedTuple):
    """What the calls of one visit took."""

    median_us: float
    disturbed: bool
    """Whether every call was interrupted by something else that ran on its core."""


@dataclass
class KernelPoint:
    """One kernel on one case at one width, and the median times of its visits so far in microseconds."""

    kernel: str
    width: int
    case: Case
    shrink_us: list[float] = field(default_factory=list)
    expand_us: list[float] = field(default_factory=list)
    disturbed: int = 0
    """Visits of which every call was interrupted."""

    @property
    def key(self) -> tuple[str, int, str]:
        """What makes it the same spot after a restart."""
        return self.kernel, self.width, self.case.name

    @property
    def visits(self) -> int:
        """Visits so far."""
        return len(self.shrink_us)

    def add(self, shrink: KernelTiming, expand: KernelTiming) -> None:
        """Enter a visit."""
        self.shrink_us.append(shrink.median_us)
        self.expand_us.append(expand.median_us)
        self.disturbed += shrink.disturbed or expand.disturbed

    def is_settled(self, limits: SamplingLimits) -> bool:
        """Tell whether it need not be visited again."""
        if self.visits >= limits.most_visits:
            return True
        return self.visits >= LEAST_VISITS and all(
            relative_error(times) <= limits.tolerance for times in (self.shrink_us, self.expand_us)
        )


@dataclass(frozen=True)
class SamplingLimits:
    """When to stop.

    Attributes
    ----------
    budget_s
        Seconds for all spots.
    tolerance
        Relative standard error of a spot's median with which it is settled.
    most_visits
        Visits after which a spot is settled whatever its error.
    calls
        Timed calls of each half per visit.
    """

    budget_s: float = 600.0
    tolerance: float = 0.02
    most_visits: int = 60
    calls: int = 4


def relative_error(times: Sequence[float]) -> float:
    """Return the standard error of the median over the median, by the median absolute deviation."""
    values = np.asarray(times)
    middle = float(np.median(values))
    spread = _SIGMAS_PER_MAD * float(np.median(np.abs(values - middle)))
    return _SPREAD_OF_MEDIAN * spread / math.sqrt(values.size) / middle


def rounds(
    spots: Sequence[KernelPoint],
    limits: SamplingLimits,
    seed: int,
    now_s: Callable[[], float] = time.monotonic,
) -> Iterator[KernelPoint]:
    """Give the spot to visit next, until all are settled or the budget is spent."""
    rng = np.random.default_rng(seed)
    until = now_s() + limits.budget_s
    while open_spots := [spot for spot in spots if not spot.is_settled(limits)]:
        for at in rng.permutation(len(open_spots)):
            if now_s() >= until:
                return
            yield open_spots[at]
