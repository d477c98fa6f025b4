"""What small trees learn, and what counts as an error: throughput by SMAPE, starvation by its classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import f1_score

from capplan.models.calibration.least_squares import smape
from capplan.models.learning.cuts import cut
from capplan.models.learning.grow import Task
from capplan.models.surrogates.features import expected_tok_s
from capplan.models.surrogates.tree import LOG_OVER_EXPECTED, LOG_TOK_S, PROBABILITY

Floats: TypeAlias = NDArray[np.float64]

_LEAST_TOK_S: Final = 1e-3
_LEAST_LEAF: Final = 10  # rows
_QUANTILES: Final = 40  # values that a throughput leaf may answer while a tree grows
_CHANCES: Final = 20  # bins of a teacher's probability
_HARD: Final = 0.5  # weight of a wrong class beside the squared error of the probability (Brier)


@dataclass(frozen=True)
class Lesson:
    """Scenarios and their answers.

    Attributes
    ----------
    answer
        What the target is, one of `tree.ANSWERS`.
    features
        In the order of `FEATURES`, shape (n, features).
    target
        What leaves should answer, shape (n,).
    weight
        Of each scenario, shape (n,).
    scale_tok_s
        Throughput of a target of 0, shape (n,); 1 for probabilities.
    """

    answer: str
    features: NDArray[np.float32]
    target: Floats
    weight: Floats
    scale_tok_s: Floats

    def of(self, rows: NDArray[np.int64]) -> Lesson:
        """Return the part of some rows."""
        return Lesson(
            self.answer, self.features[rows], self.target[rows], self.weight[rows], self.scale_tok_s[rows]
        )

    def taught(self, features: NDArray[np.float32], target: Floats, weight: Floats) -> Lesson:
        """Return the same lesson with a teacher's scenarios and answers; only trees grow on it."""
        return replace(self, features=features, target=target, weight=weight)

    def error(self, answers: Floats) -> float:
        """Return how wrong answers are, in percent: SMAPE of throughput, or 1 - macro-F1 of starvation."""
        if self.answer != PROBABILITY:
            return smape(self.scale_tok_s * np.exp(answers), self.scale_tok_s * np.exp(self.target))
        return 100.0 * (1.0 - float(f1_score(self.target >= 0.5, answers >= 0.5, average="macro")))

    def best_leaf(self, rows: NDArray[np.intp]) -> float:
        """Return what a leaf of these rows should answer.

        Throughput: the target of least SMAPE, which is one of the rows' own, because the error of each row is
        concave to either side of its target. Starvation: the share of starved, drawn towards a half as if one
        more of each kind had been seen (Laplace).
        """
        target = self.target[rows]
        if self.answer == PROBABILITY:
            return float((target.sum() + 1.0) / (rows.size + 2.0))
        tried = np.unique(np.quantile(target, np.linspace(0.2, 0.8, 61), method="nearest"))
        return float(tried[np.argmin(_smape_loss(tried, target) @ self.weight[rows])])

    def task(self) -> Task:
        """Return the lesson in bins."""
        cuts = cut(self.features)
        if self.answer == PROBABILITY:
            chances = np.linspace(0.0, 1.0, _CHANCES + 1)
            values = (np.arange(_CHANCES) + 0.5) / _CHANCES
            squared = (values[:, None] - chances) ** 2
            wrong = np.where(values[:, None] >= 0.5, 1.0 - chances, chances)
            bins = np.rint(self.target * _CHANCES).astype(np.intp)
            return Task(cuts, bins, self.weight, values, (1.0 - _HARD) * squared + _HARD * wrong, _LEAST_LEAF)
        values = np.unique(np.quantile(self.target, np.linspace(0.0, 1.0, _QUANTILES)))
        bins = np.searchsorted((values[1:] + values[:-1]) / 2.0, self.target)
        return Task(cuts, bins, self.weight, values, _smape_loss(values, values), _LEAST_LEAF)


def throughput_lesson(features: NDArray[np.float32], throughput_tok_s: Floats, *, relative: bool) -> Lesson:
    """Return the lesson of throughput: its logarithm over what the features expect, or its logarithm."""
    scale = expected_tok_s(features) if relative else np.ones(len(features))
    target = np.log(np.maximum(throughput_tok_s, _LEAST_TOK_S) / np.maximum(scale, _LEAST_TOK_S))
    answer = LOG_OVER_EXPECTED if relative else LOG_TOK_S
    return Lesson(answer, features, target, np.ones(len(features)), scale)


def starvation_lesson(features: NDArray[np.float32], starved: NDArray[np.bool_]) -> Lesson:
    """Return the lesson of starvation."""
    ones = np.ones(len(features))
    return Lesson(PROBABILITY, features, starved.astype(float), ones, ones)


def _smape_loss(answers: Floats, targets: Floats) -> Floats:
    """Return |p - a| / (p + a) of logarithms, shape (answers, targets)."""
    loss: Floats = np.abs(np.tanh((answers[:, None] - targets) / 2.0))
    return loss
