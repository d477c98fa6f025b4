"""What a surrogate knows of its own error: intervals, a calibrated probability, and where it was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.models.surrogates.tree import Tree

Features: TypeAlias = NDArray[np.float32]
Floats: TypeAlias = NDArray[np.float64]

COVERAGE: Final = 0.9


@dataclass(frozen=True)
class Intervals:
    """Conformal intervals, one width per regime (Mondrian): the leaves of a tree of how hard scenarios are.

    Attributes
    ----------
    low, high
        Two trees of the same regimes, whose leaves hold the 5 % and 95 % quantiles of the logarithm of true
        over answered throughput, on scenarios that the answering model had not seen.
    """

    low: Tree
    high: Tree

    def around(self, features: Features, answers: Floats) -> tuple[Floats, Floats]:
        """Return the ends of the intervals around answers in tokens per second, shape (n,) each."""
        return (
            answers * np.exp(np.minimum(0.0, self.low.answers(features))),
            answers * np.exp(np.maximum(0.0, self.high.answers(features))),
        )


@dataclass(frozen=True)
class Calibration:
    """From a score to a probability: a logistic curve (Platt scaling)."""

    slope: float
    offset: float

    def probability(self, score: Floats) -> Floats:
        """Return the probability of starvation of scores, shape (n,)."""
        chance: Floats = 0.5 * (1.0 + np.tanh(0.5 * (self.slope * score + self.offset)))
        return chance


@dataclass(frozen=True)
class Domain:
    """Where the training data lies.

    Attributes
    ----------
    low, high
        Smallest and largest training value of every feature, shape (features,).
    centre, whitening
        Of features on a logarithmic scale: their mean, shape (features,), and what makes their covariance a
        unit matrix, shape (features, features).
    farthest
        The largest distance of a training scenario from the centre.
    """

    low: Features
    high: Features
    centre: Floats
    whitening: Floats
    farthest: float

    def novelty(self, features: Features) -> Floats:
        """Return the Mahalanobis distance over that of the farthest training scenario, shape (n,)."""
        away = (_scaled(features) - self.centre) @ self.whitening
        distance: Floats = np.sqrt((away**2).sum(axis=1)) / self.farthest
        return distance

    def contains(self, features: Features) -> NDArray[np.bool_]:
        """Return whether every feature is in range, and their combination no stranger than in training."""
        return self.place(features)[0]

    def place(self, features: Features) -> tuple[NDArray[np.bool_], Floats]:
        """Return what `contains` and `novelty` say, shape (n,) each."""
        inside = (features >= self.low) & (features <= self.high)
        novelty = self.novelty(features)
        known: NDArray[np.bool_] = inside.all(axis=1) & (novelty <= 1.0)
        return known, novelty


def domain_of(features: Features) -> Domain:
    """Return the domain of training data, shape (n, features)."""
    scaled = _scaled(features)
    centre = scaled.mean(axis=0)
    # Derived features nearly depend on each other; a floor keeps their small differences from weighing most.
    values, vectors = np.linalg.eigh(np.cov(scaled, rowvar=False))
    whitening = vectors / np.sqrt(values + _FLOOR * values.max())
    distance = np.sqrt((((scaled - centre) @ whitening) ** 2).sum(axis=1))
    return Domain(
        low=features.min(axis=0),
        high=features.max(axis=0),
        centre=centre,
        whitening=whitening,
        farthest=float(distance.max()) * _SLACK,
    )


_FLOOR: Final = 1e-3
_SLACK: Final = 1.02


def _scaled(features: Features) -> Floats:
    scaled: Floats = np.arcsinh(features.astype(float))
    return scaled
