"""Features by bin: the thresholds that a small tree may use, short numbers where that is possible."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.models.surrogates.forest import round_down


@dataclass(frozen=True)
class Cuts:
    """A table of features, each in bins of about equal numbers of rows.

    Attributes
    ----------
    codes
        Bin of each row and feature, shape (n, features).
    thresholds
        float32 of each feature and cut; a row's bin is at most `cut` where its feature is at most
        ``thresholds[feature, cut]``. Features with fewer cuts repeat their last: shape (features, cuts).
    """

    codes: NDArray[np.int16]
    thresholds: NDArray[np.float32]

    @property
    def bins(self) -> int:
        """Bins per feature, one more than cuts."""
        return int(self.thresholds.shape[1]) + 1

    def counts(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the number of `rows` by feature and bin, shape (features, bins)."""
        sums = np.zeros((self.codes.shape[1], self.bins), np.int64)
        _count(self.codes, rows, sums)
        return sums

    def histogram(self, rows: NDArray[np.intp], weight: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of `weight`, one per row of `rows`, by feature and bin, shape (features, bins)."""
        sums = np.zeros((self.codes.shape[1], self.bins))
        _add(self.codes, rows, weight, sums)
        return sums

    def joint_histogram(
        self,
        rows: NDArray[np.intp],
        targets: NDArray[np.intp],
        weight: NDArray[np.float64],
        target_bins: int,
    ) -> NDArray[np.float64]:
        """Return sums by feature, bin and bin of the target, shape (features, bins, target bins)."""
        sums = np.zeros((self.codes.shape[1], self.bins, target_bins))
        _add_jointly(self.codes, rows, targets, weight, sums)
        return sums


@jit
def _count(codes: NDArray[np.int16], rows: NDArray[np.intp], sums: NDArray[np.int64]) -> None:
    for row in rows:
        for feature in range(codes.shape[1]):
            sums[feature, codes[row, feature]] += 1


@jit
def _add(
    codes: NDArray[np.int16],
    rows: NDArray[np.intp],
    weight: NDArray[np.float64],
    sums: NDArray[np.float64],
) -> None:
    for i in range(rows.size):
        for feature in range(codes.shape[1]):
            sums[feature, codes[rows[i], feature]] += weight[i]


@jit
def _add_jointly(
    codes: NDArray[np.int16],
    rows: NDArray[np.intp],
    targets: NDArray[np.intp],
    weight: NDArray[np.float64],
    sums: NDArray[np.float64],
) -> None:
    for i in range(rows.size):
        for feature in range(codes.shape[1]):
            sums[feature, codes[rows[i], feature], targets[i]] += weight[i]


def cut(features: NDArray[np.float32], most: int = 160) -> Cuts:
    """Return a table of features in at most `most` + 1 bins each; features of shape (n, features)."""
    columns = [_thresholds(column, most) for column in features.T]
    width = max(1, *(column.size for column in columns))
    thresholds = np.array([_padded(column, width) for column in columns], np.float32)
    return Cuts(coded(features, thresholds), thresholds)


def coded(features: NDArray[np.float32], thresholds: NDArray[np.float32]) -> NDArray[np.int16]:
    """Return the bin of each row and feature, shape (n, features)."""
    columns = [
        np.searchsorted(own, column, side="left") for own, column in zip(thresholds, features.T, strict=True)
    ]
    return np.stack(columns, axis=1).astype(np.int16)


def short_between(low: float, high: float) -> float:
    """Return the number with the fewest digits, and a float32, that is at least `low` and below `high`."""
    middle = low + (high - low) / 2.0
    if middle != 0.0:
        magnitude = math.floor(math.log10(abs(middle)))
        for decimals in range(-magnitude, 9 - magnitude):
            short = float(np.float32(round(middle, decimals)))
            if low <= short < high:
                return short
    elif low <= 0.0 < high:
        return 0.0
    return float(round_down(np.array([middle]))[0])


def _thresholds(column: NDArray[np.float32], most: int) -> NDArray[np.float32]:
    values = np.unique(column)
    if values.size > most + 1:
        ranks = np.linspace(0, column.size - 1, most + 2).round().astype(int)[1:-1]
        ends = np.unique(np.searchsorted(values, np.sort(column)[ranks]))
        ends = ends[ends < values.size - 1]
    else:
        ends = np.arange(values.size - 1)
    return np.array([short_between(float(values[e]), float(values[e + 1])) for e in ends], np.float32)


def _padded(column: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    last = column[-1] if column.size else np.float32(np.finfo(np.float32).max)
    return np.concatenate([column, np.full(width - column.size, last, np.float32)])
