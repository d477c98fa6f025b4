"""What learning knows of its own error: regimes, intervals, calibration, reliability, importance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeRegressor

from capplan.models.calibration.least_squares import smape
from capplan.models.learning.scores import macro_f1
from capplan.models.learning.table import TrainingTable
from capplan.models.surrogates.features import FEATURES, feature_of
from capplan.models.surrogates.forest import LEAF, Forest
from capplan.models.surrogates.tree import LOG_OVER_EXPECTED, Tree, tree_of
from capplan.models.surrogates.uncertainty import COVERAGE, Calibration, Intervals

Features: TypeAlias = NDArray[np.float32]
Floats: TypeAlias = NDArray[np.float64]

NEAR: Final = 0.2
"""Near the edge: a load within 20 % of the capacity that the fluid estimate gives."""

_REGIMES: Final = 16
_LEAST_ROWS: Final = 120
_WORST: Final = 3.0
_SMALL: Final = 1e-4
_BINS: Final = 10
_LARGEST_SCORE: Final = 12.0


def regimes(table: TrainingTable) -> dict[str, NDArray[np.bool_]]:
    """Return which rows belong to each regime that errors are told of."""
    near = np.abs(feature_of(table.features, "load_over_capacity") - 1.0) <= NEAR
    designs = {str(name): table.design == name for name in np.unique(table.design)}
    return {
        "all": np.ones(len(table), bool),
        **designs,
        "starved": table.starved,
        "not starved": ~table.starved,
        "near the edge": near,
        **{f"near the edge, {name}": near & rows for name, rows in designs.items()},
    }


def throughput_errors(table: TrainingTable, answers_tok_s: Floats) -> dict[str, float]:
    """Return SMAPE in per cent by regime, against the twin's raw answers."""
    return {
        name: smape(answers_tok_s[rows], table.throughput_tok_s[rows])
        for name, rows in regimes(table).items()
        if rows.any()
    }


def starvation_scores(table: TrainingTable, probability: Floats) -> dict[str, float]:
    """Return macro-F1 by regime; of those that hold both classes."""
    return {
        name: macro_f1(probability[rows], table.starved[rows])
        for name, rows in regimes(table).items()
        if np.unique(table.starved[rows]).size == 2
    }


def intervals_of(
    features: Features, answers_tok_s: Floats, true_tok_s: Floats, groups: NDArray[np.int64], seed: int
) -> Intervals:
    """Return conformal intervals from answers to scenarios that the model had not seen.

    On half of the groups a small tree finds regimes of equal difficulty; the other half, which had no say in
    them, gives the quantiles in each, with the correction for a finite sample (Mondrian conformal
    prediction).
    """
    error = np.clip(np.log(np.maximum(true_tok_s, 1e-3) / np.maximum(answers_tok_s, 1e-3)), -_WORST, _WORST)
    known = np.unique(groups)
    growing = np.isin(groups, np.random.default_rng(seed).permutation(known)[: known.size // 2])
    size = np.log(np.abs(error) + _SMALL)
    grown = DecisionTreeRegressor(
        max_leaf_nodes=_REGIMES, min_samples_leaf=min(_LEAST_ROWS, growing.sum() // 2), random_state=seed
    ).fit(features[growing], size[growing])
    regime = tree_of(grown, LOG_OVER_EXPECTED)
    leaves = regime.leaves(features)
    low, high = list(regime.value), list(regime.value)
    for leaf in np.flatnonzero(regime.is_leaf):
        low[leaf], high[leaf] = _ends(error[(leaves == leaf) & ~growing])
    return Intervals(low=_with_values(regime, low), high=_with_values(regime, high))


def calibration_of(score: Floats, starved: NDArray[np.bool_]) -> Calibration:
    """Return the logistic curve from scores, of scenarios that the model had not seen, to probabilities."""
    fitted = LogisticRegression(C=1e6).fit(_bounded(score)[:, None], starved)
    return Calibration(slope=float(fitted.coef_[0, 0]), offset=float(fitted.intercept_[0]))


def reliability(probability: Floats, starved: NDArray[np.bool_]) -> list[list[float]]:
    """Return mean probability, share that starved, and scenarios, by tenths of probability that occur."""
    tenth = np.minimum((probability * _BINS).astype(int), _BINS - 1)
    return [
        [float(probability[rows].mean()), float(starved[rows].mean()), int(rows.sum())]
        for rows in (tenth == number for number in range(_BINS))
        if rows.any()
    ]


def coverage(table: TrainingTable, low: Floats, high: Floats) -> dict[str, float]:
    """Return the share of the twin's answers inside the intervals, by regime."""
    inside = (table.throughput_tok_s >= low) & (table.throughput_tok_s <= high)
    return {name: float(inside[rows].mean()) for name, rows in regimes(table).items() if rows.any()}


def importance(forests: tuple[Forest, ...]) -> dict[str, float]:
    """Return the share of questions that trees ask of each feature, the first ones weighing most.

    A node counts 2^-depth: about the share of scenarios that are asked.
    """
    total = np.zeros(len(FEATURES))
    for forest in forests:
        weight = np.zeros(forest.feature.size)
        weight[forest.roots] = 1.0
        for node in np.flatnonzero(forest.feature != LEAF):
            total[forest.feature[node]] += weight[node]
            weight[forest.left[node]] = weight[forest.right[node]] = 0.5 * weight[node]
    order = np.argsort(-total)
    return {FEATURES[i]: float(total[i] / total.sum()) for i in order if total[i] > 0.0}


def _ends(error: Floats) -> tuple[float, float]:
    ordered = np.sort(error)
    tail = (1.0 - COVERAGE) / 2.0
    beyond = int(np.floor(tail * (ordered.size + 1)))
    if beyond < 1:  # too few to leave any out, or none
        return (float(ordered[0]), float(ordered[-1])) if ordered.size else (-_WORST, _WORST)
    return float(ordered[beyond - 1]), float(ordered[-beyond])


def _with_values(tree: Tree, values: list[float]) -> Tree:
    return replace(tree, value=tuple(float(value) for value in values))


def _bounded(score: Floats) -> Floats:
    return np.clip(score, -_LARGEST_SCORE, _LARGEST_SCORE)


def rounded(scores: Mapping[str, Any], digits: int = 4) -> dict[str, float]:
    """Return scores as a report holds them."""
    return {name: round(float(value), digits) for name, value in scores.items()}
