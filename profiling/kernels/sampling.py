"""How often each spot is visited: until its median stands still, or the time is up.

Spots are visited in rounds, in a new random order each time, so that what else happens on the machine meets
all of them alike, and a spot's samples are spread over the whole time of measuring.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from capplan.profiling.kernels.cases import Case
from capplan.profiling.kernels.clocks import Visit

LEAST_VISITS: Final = 5
_SIGMAS_PER_MAD: Final = 1.4826
_SPREAD_OF_MEDIAN: Final = 1.2533  # standard error of a median over that of a mean, for normal samples


@dataclass
class Spot:
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

    def add(self, shrink: Visit, expand: Visit) -> None:
        """Enter a visit."""
        self.shrink_us.append(shrink.median_us)
        self.expand_us.append(expand.median_us)
        self.disturbed += shrink.disturbed or expand.disturbed

    def is_settled(self, limits: Limits) -> bool:
        """Tell whether it need not be visited again."""
        if self.visits >= limits.most_visits:
            return True
        return self.visits >= LEAST_VISITS and all(
            relative_error(times) <= limits.tolerance for times in (self.shrink_us, self.expand_us)
        )


@dataclass(frozen=True)
class Limits:
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
    spots: Sequence[Spot], limits: Limits, seed: int, now_s: Callable[[], float] = time.monotonic
) -> Iterator[Spot]:
    """Give the spot to visit next, until all are settled or the budget is spent."""
    rng = np.random.default_rng(seed)
    until = now_s() + limits.budget_s
    while open_spots := [spot for spot in spots if not spot.is_settled(limits)]:
        for at in rng.permutation(len(open_spots)):
            if now_s() >= until:
                return
            yield open_spots[at]
