"""Grouped splits, scores by regime, conformal intervals and probability calibration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, log_loss
from sklearn.model_selection import GroupKFold, StratifiedGroupKFold
from sklearn.tree import DecisionTreeRegressor

from capplan.errors import InputError
from capplan.models.calibration.least_squares import smape
from capplan.models.surrogates.features import FEATURES, feature_of
from capplan.models.surrogates.outputs import LEAF, Forest
from capplan.models.surrogates.surrogate import COVERAGE, Intervals, SigmoidCalibration
from capplan.models.surrogates.tree import LOG_OVER_EXPECTED, Tree, tree_of
from capplan.models.training.candidates import Task
from capplan.models.training.data import TrainingTable

Rows = NDArray[np.int64]


class Split(NamedTuple):
    """Row numbers of the two sides."""

    train: Rows
    test: Rows


def grouped_folds(
    groups: NDArray[np.int64],
    *,
    folds: int = 5,
    seed: int = 0,
    classes: NDArray[np.bool_] | None = None,
) -> list[Split]:
    """Return splits for cross-validation; every row is tested once, every group on one side.

    Parameters
    ----------
    groups
        Group of every row, shape (rows,).
    folds
        Number of splits, at least 2.
    seed
        Which groups go together.
    classes
        Class of every row, shape (rows,). When given, groups are dealt so that every fold has about the same
        share of each class.

    Raises
    ------
    InputError
        For fewer groups than folds, or when a fold would lack a class.
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


def grouped_holdout(
    groups: NDArray[np.int64],
    *,
    share: float = 0.2,
    seed: int = 0,
    classes: NDArray[np.bool_] | None = None,
) -> Split:
    """Return one split that holds whole groups out, about `share` of the rows.

    Parameters
    ----------
    groups, seed, classes
        As for `grouped_folds`.
    share
        Of the rows to be tested, above 0 and at most 0.5; the nearest ``1 / folds`` is taken.

    Raises
    ------
    InputError
        As `grouped_folds` does, and for another share.
    """
    if not 0.0 < share <= 0.5:
        raise InputError("must be above 0 and at most 0.5", share, "share")
    return grouped_folds(groups, folds=round(1.0 / share), seed=seed, classes=classes)[0]


def answer_of(estimator: Any, features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return tokens per second or the probability of starvation, shape (rows,); 0 or 1 if it has none."""
    if hasattr(estimator, "predict_proba"):
        return np.asarray(estimator.predict_proba(features), float)[:, 1]
    return np.asarray(estimator.predict(features), float)


def loss(task: Task, estimator: Any, features: NDArray[np.float32], target: NDArray[Any]) -> float:
    """Return what halving minimises: SMAPE in per cent, or 1 - macro-F1, as the paper judges."""
    return answer_loss(task, answer_of(estimator, features), target, smooth=False)


def answer_loss(task: Task, answer: NDArray[np.float64], target: NDArray[Any], *, smooth: bool) -> float:
    """Return the loss of answers; `smooth`: the logarithmic loss of probabilities, not 1 - macro-F1."""
    if task == "throughput":
        return smape(answer, target)
    if smooth:
        return float(log_loss(target, answer, labels=[0, 1]))
    return 1.0 - macro_f1(answer, target)


def macro_f1(probability: NDArray[np.float64], starved: NDArray[Any]) -> float:
    """Return the mean of the F1 of both classes, starved and not."""
    return float(f1_score(np.asarray(starved, int), np.asarray(probability) >= 0.5, average="macro"))


def pooled_scores(
    task: Task, answer: NDArray[np.float64], target: NDArray[Any], *, is_probability: bool
) -> dict[str, float]:
    """Return all scores of answers by name."""
    if task == "throughput":
        return {"smape": smape(answer, target)}
    scores = {"macro_f1": macro_f1(answer, target)}
    if is_probability:
        scores["log_loss"] = answer_loss(task, answer, target, smooth=True)
    return scores


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


def fit_intervals(
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


def fit_calibration(score: Floats, starved: NDArray[np.bool_]) -> SigmoidCalibration:
    """Return the logistic curve from scores, of scenarios that the model had not seen, to probabilities."""
    fitted = LogisticRegression(C=1e6).fit(_bounded(score)[:, None], starved)
    return SigmoidCalibration(slope=float(fitted.coef_[0, 0]), offset=float(fitted.intercept_[0]))


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
