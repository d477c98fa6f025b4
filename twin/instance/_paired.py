"""Order of configurations by paired simulations, with standard errors.

Under one seed all configurations serve the same requests, so the difference of two of them scatters less than
their values. A difference within `DECIDED_AT` standard errors, or of fewer than `PAIRED_SEEDS` seeds, decides
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeVar

import numpy as np

from capplan.errors import InputError

Name = TypeVar("Name", bound=Hashable)

DECIDED_AT: Final = 2.0
"""Standard errors beyond which a difference is decided."""

PAIRED_SEEDS: Final = 5
"""Seeds from which a comparison decides, and its default."""


@dataclass(frozen=True)
class MeanWithError:
    """Mean over seeds, or over pairs of one seed each."""

    mean: float
    std_error: float
    """Standard error of the mean; NaN of a single value."""
    count: int

    @property
    def decided(self) -> bool:
        """Whether the mean differs from 0 by more than `DECIDED_AT` standard errors; never of few values."""
        return self.count >= PAIRED_SEEDS and abs(self.mean) > DECIDED_AT * self.std_error

    @property
    def sign(self) -> int:
        """Sign of the mean; 0 if undecided."""
        return int(math.copysign(1.0, self.mean)) if self.decided else 0


def mean_with_error(values: Sequence[float]) -> MeanWithError:
    """Return the mean of values of different seeds, shape (seeds,)."""
    if not values:
        raise InputError("at least one value is required", location="values")
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return MeanWithError(float(np.mean(values)), error, len(values))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> MeanWithError:
    """Return first minus second, where values at one position have the same seed; shape (seeds,) each.

    Raises
    ------
    InputError
        For different numbers of seeds.
    """
    if len(first) != len(second):
        raise InputError(f"must have {len(first)} seeds, as the other", len(second), "second")
    return mean_with_error([one - other for one, other in zip(first, second, strict=True)])


@dataclass(frozen=True)
class PairedOrder:
    """Configurations by their mean of one metric, best first."""

    names: tuple[Hashable, ...]
    decided: tuple[bool, ...]
    """Whether each differs from the next, shape (names - 1,)."""

    def __str__(self) -> str:
        """Return the names with ``>`` for better and ``~`` for undecided between them."""
        signs = [" > " if decided else " ~ " for decided in self.decided]
        return "".join(f"{name}{sign}" for name, sign in zip(self.names, [*signs, ""], strict=True))


def paired_order(values: Mapping[Name, Sequence[float]], *, largest_first: bool) -> PairedOrder:
    """Return the order of configurations.

    Parameters
    ----------
    values
        One metric of each configuration, a value per seed, seeds in the same order.
    largest_first
        Whether larger is better.
    """
    sign = -1.0 if largest_first else 1.0
    names = sorted(values, key=lambda name: sign * float(np.mean(values[name])))
    decided = (paired_difference(values[one], values[other]).decided for one, other in pairwise(names))
    return PairedOrder(tuple(names), tuple(decided))


def contradictions(
    measured: Mapping[Name, Sequence[float]], predicted: Mapping[Name, Sequence[float]]
) -> tuple[tuple[Name, Name], ...]:
    """Return the pairs whose measured difference is decided and whose prediction has not the same sign.

    An undecided prediction contradicts a decided measurement. Undecided measurements contradict nothing.
    """
    names = list(measured)
    found = []
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            truth = paired_difference(measured[one], measured[other])
            if truth.decided and paired_difference(predicted[one], predicted[other]).sign != truth.sign:
                found.append((one, other))
    return tuple(found)
