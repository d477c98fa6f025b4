"""Grouped splits, scores by regime, conformal intervals and probability calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, log_loss
from sklearn.model_selection import GroupKFold, StratifiedGroupKFold
from sklearn.tree import DecisionTreeRegressor

from capplan.errors import InputError
from capplan.models.calibration._least_squares import smape
from capplan.models.surrogates._features import FEATURES, feature_of
from capplan.models.surrogates._outputs import LEAF, Forest
from capplan.models.surrogates._surrogate import COVERAGE, Intervals, SigmoidCalibration
from capplan.models.surrogates._tree import LOG_OVER_EXPECTED, tree_of
from capplan.models.training._data import TrainingTable

Task: TypeAlias = Literal["throughput", "starvation"]
Features: TypeAlias = NDArray[np.float32]
Floats: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = NDArray[np.int64]

NEAR_CAPACITY: Final = 0.2
"""Near the edge: a load within 20 % of the capacity that the fluid model estimates."""

_MAX_REGIMES: Final = 16
_MIN_REGIME_ROWS: Final = 120
_MAX_LOG_ERROR: Final = 3.0
_MIN_LOG_ERROR: Final = 1e-4
_BINS: Final = 10
_MAX_SCORE: Final = 12.0


class Split(NamedTuple):
    """Row numbers of a training and a test set."""

    train: Rows
    test: Rows


def grouped_folds(
    groups: Rows, *, folds: int = 5, seed: int = 0, classes: NDArray[np.bool_] | None = None
) -> list[Split]:
    """Return splits for cross-validation: every row is tested once, and no group is on both sides.

    Parameters
    ----------
    groups, classes
        Group and class of every row, shape (rows,). With classes, folds have about the same share of each.
    folds, seed
        Number of splits, at least 2, and seed of the assignment.

    Raises
    ------
    InputError
        For fewer groups than folds, or a fold without one of the classes.
    """
    found = np.unique(groups).size
    if not 2 <= folds <= found:
        raise InputError(f"must be from 2 to the number of groups, {found}", folds, "folds")
    if classes is None:
        splitter = GroupKFold(folds, shuffle=True, random_state=seed)
        return [Split(*split) for split in splitter.split(groups, groups=groups)]
    counts = np.bincount(np.asarray(classes, int), minlength=2)
    if counts.min() < folds:
        rule = f"there must be at least {folds} scenarios of each class, starved and not"
        raise InputError(rule, int(counts.min()), "classes")
    splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
    splits = [Split(*split) for split in splitter.split(groups, classes, groups)]
    if any(np.unique(classes[rows]).size < 2 for split in splits for rows in split):
        raise InputError("scenarios of one class stand in too few groups to be split", folds, "folds")
    return splits


def predictions(estimator: Any, features: Features) -> Floats:
    """Return tokens per second, or the probability of starvation; shape (rows,)."""
    if hasattr(estimator, "predict_proba"):
        return np.asarray(estimator.predict_proba(features), float)[:, 1]
    return np.asarray(estimator.predict(features), float)


def tuning_loss(task: Task, predicted: Floats, target: NDArray[Any]) -> float:
    """Return SMAPE of throughput in per cent, or the logarithmic loss of the probability of starvation."""
    if task == "throughput":
        return smape(predicted, target)
    return float(log_loss(target, predicted, labels=[0, 1]))


def macro_f1(probability: Floats, starved: NDArray[Any]) -> float:
    """Return the mean F1 of both classes, starved and not."""
    return float(f1_score(np.asarray(starved, int), np.asarray(probability) >= 0.5, average="macro"))


def regimes(table: TrainingTable) -> dict[str, NDArray[np.bool_]]:
    """Return the rows of each regime by name: all, each design, starved or not, near the edge."""
    near = np.abs(feature_of(table.features, "load_over_capacity") - 1.0) <= NEAR_CAPACITY
    designs = {str(name): table.design == name for name in np.unique(table.design)}
    return {
        "all": np.ones(len(table), bool),
        **designs,
        "starved": table.starved,
        "not starved": ~table.starved,
        "near the edge": near,
        **{f"near the edge, {name}": near & rows for name, rows in designs.items()},
    }


def throughput_errors(table: TrainingTable, predicted_tok_s: Floats) -> dict[str, float]:
    """Return SMAPE in per cent by regime, against the twin's unadjusted throughput."""
    return {
        name: smape(predicted_tok_s[rows], table.throughput_tok_s[rows])
        for name, rows in regimes(table).items()
        if rows.any()
    }


def starvation_scores(table: TrainingTable, probability: Floats) -> dict[str, float]:
    """Return macro-F1 by regime, for regimes with both classes."""
    return {
        name: macro_f1(probability[rows], table.starved[rows])
        for name, rows in regimes(table).items()
        if np.unique(table.starved[rows]).size == 2
    }


def fit_intervals(
    features: Features, predicted_tok_s: Floats, true_tok_s: Floats, groups: Rows, seed: int
) -> Intervals:
    """Return Mondrian conformal intervals from out-of-fold predictions.

    A small tree fitted on half of the groups finds regimes of equal difficulty. The other half gives the
    quantiles in each regime, with the finite-sample correction.
    """
    ratio = np.maximum(true_tok_s, 1e-3) / np.maximum(predicted_tok_s, 1e-3)
    error = np.clip(np.log(ratio), -_MAX_LOG_ERROR, _MAX_LOG_ERROR)
    known = np.unique(groups)
    growing = np.isin(groups, np.random.default_rng(seed).permutation(known)[: known.size // 2])
    size = np.log(np.abs(error) + _MIN_LOG_ERROR)
    grown = DecisionTreeRegressor(
        max_leaf_nodes=_MAX_REGIMES,
        min_samples_leaf=min(_MIN_REGIME_ROWS, growing.sum() // 2),
        random_state=seed,
    ).fit(features[growing], size[growing])
    regime = tree_of(grown, LOG_OVER_EXPECTED)
    leaves = grown.apply(features)
    low, high = list(regime.value), list(regime.value)
    for leaf, feature in enumerate(regime.feature):
        if feature == LEAF:
            low[leaf], high[leaf] = _quantiles(error[(leaves == leaf) & ~growing])
    return Intervals(low=replace(regime, value=tuple(low)), high=replace(regime, value=tuple(high)))


def _quantiles(error: Floats) -> tuple[float, float]:
    ordered = np.sort(error)
    tail = (1.0 - COVERAGE) / 2.0
    beyond = int(np.floor(tail * (ordered.size + 1)))
    if beyond < 1:  # too few values to leave any out
        return (float(ordered[0]), float(ordered[-1])) if ordered.size else (-_MAX_LOG_ERROR, _MAX_LOG_ERROR)
    return float(ordered[beyond - 1]), float(ordered[-beyond])


def fit_calibration(score: Floats, starved: NDArray[np.bool_]) -> SigmoidCalibration:
    """Return the logistic curve from out-of-fold scores to probabilities."""
    bounded = np.clip(score, -_MAX_SCORE, _MAX_SCORE)
    fitted = LogisticRegression(C=1e6).fit(bounded[:, None], starved)
    return SigmoidCalibration(slope=float(fitted.coef_[0, 0]), offset=float(fitted.intercept_[0]))


def reliability(probability: Floats, starved: NDArray[np.bool_]) -> list[list[float]]:
    """Return mean probability, starved share and number of scenarios for each non-empty tenth."""
    tenth = np.minimum((probability * _BINS).astype(int), _BINS - 1)
    return [
        [float(probability[rows].mean()), float(starved[rows].mean()), int(rows.sum())]
        for rows in (tenth == number for number in range(_BINS))
        if rows.any()
    ]


def coverage(table: TrainingTable, low: Floats, high: Floats) -> dict[str, float]:
    """Return the share of the twin's throughputs inside the intervals, by regime."""
    inside = (table.throughput_tok_s >= low) & (table.throughput_tok_s <= high)
    return {name: float(inside[rows].mean()) for name, rows in regimes(table).items() if rows.any()}


def importance(forests: tuple[Forest, ...]) -> dict[str, float]:
    """Return the share of split nodes by feature, a node at depth d weighted by 2^-d."""
    total = np.zeros(len(FEATURES))
    for forest in forests:
        weight = np.zeros(forest.feature.size)
        weight[forest.roots] = 1.0
        for node in np.flatnonzero(forest.feature != LEAF):
            total[forest.feature[node]] += weight[node]
            weight[forest.left[node]] = weight[forest.right[node]] = 0.5 * weight[node]
    order = np.argsort(-total)
    return {FEATURES[i]: float(total[i] / total.sum()) for i in order if total[i] > 0.0}


def rounded(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return scores rounded for a report."""
    return {name: round(float(value), 4) for name, value in scores.items()}
