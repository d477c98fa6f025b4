"""Gaps between tokens, counted in logarithmic bins: percentiles over any number of them in little memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_SMALLEST_S: Final = 1e-5
_PER_OCTAVE: Final = 128
_BINS: Final = 32 * _PER_OCTAVE  # up to eleven hours


class GapHistogram:
    """Counts of gaps, exact to a third of a percent."""

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(_BINS, np.int64)

    def add(self, gaps_s: NDArray[np.float64]) -> None:
        """Count gaps, in seconds."""
        places = np.log2(np.maximum(gaps_s, _SMALLEST_S) / _SMALLEST_S) * _PER_OCTAVE
        bins = np.minimum(places.astype(np.int64), _BINS - 1)
        self.counts += np.bincount(bins, minlength=_BINS)

    def percentiles_s(self, percentiles: Sequence[float]) -> list[float]:
        """Return percentiles in seconds; NaN without any gap."""
        up_to = np.cumsum(self.counts)
        if up_to[-1] == 0:
            return [math.nan] * len(percentiles)
        bins = np.searchsorted(up_to, np.array(percentiles) / 100.0 * up_to[-1])
        middles = _SMALLEST_S * 2.0 ** ((bins + 0.5) / _PER_OCTAVE)
        found: list[float] = np.where(bins == 0, 0.0, middles).tolist()  # what arrived together
        return found
