"""Boosted trees: conversion of XGBoost models to flat arrays, and physics-informed estimators.

Physics-informed estimators learn the served fraction and the step time instead of tokens per second.
Throughput follows from both (`outputs.throughput_of`). A GPU starves if its served fraction is below 0.9:
the distance from there tells more than the class of one run, which a scenario at the edge gets by chance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from xgboost import XGBRegressor

from capplan.errors import InputError
from capplan.models.surrogates.features import feature_of
from capplan.models.surrogates.outputs import (
    LEAF,
    LEAST_SHARE,
    LOG_ODDS,
    SERVED_AND_STEP,
    EnsembleOutput,
    Forest,
    expected_share,
    joined,
)
from capplan.models.training.candidates import monotone_constraints
from capplan.spec import STARVED_BELOW

if TYPE_CHECKING:
    from xgboost import Booster, XGBModel

_IDENTITY: Final = ("reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror", "reg:quantileerror")
_LOGISTIC: Final = ("binary:logistic", "reg:logistic")

LEAST_SERVED: Final = 0.5
"""Lower bound of the served fraction in the starvation target, which ignores how severe starvation is."""

SERVED_SCATTER: Final = 0.01
"""Width of the starvation target in the logarithm of the served fraction. Runs of one scenario with different
seeds scatter by 0.006 (median) to 0.014 (mean) near the edge."""

_LEAST_STEP_MS: Final = 1e-3


def flatten_boosted(model: XGBModel | Booster) -> Forest:
    """Return a fitted XGBoost model as a `Forest` whose mean leaf is the model's margin.

    The margin is the prediction of a regressor, or the log odds of the second class of a classifier.

    A forest averages its leaves, boosting sums them and adds a base score. Every leaf is stored as
    ``trees * leaf + base``, whose mean is that sum. XGBoost goes left where ``x < threshold``, a forest where
    ``x <= threshold``; both compare float32, so the threshold becomes the next smaller float32. Missing
    values do not occur in features.

    Parameters
    ----------
    model
        A fitted single-output model of plain trees (booster ``gbtree``). Trees after the best iteration of
        early stopping are dropped, as XGBoost's scikit-learn interface does.

    Raises
    ------
    InputError
        For several outputs, categorical splits or an unknown objective.
    """
    booster = model if not hasattr(model, "get_booster") else model.get_booster()
    if booster.attr("best_iteration") is not None:
        booster = booster[: booster.best_iteration + 1]
    learner = json.loads(booster.save_raw("json"))["learner"]
    gradient = learner["gradient_booster"]
    sizes = learner["learner_model_param"]
    if gradient["name"] != "gbtree":
        raise InputError("must be gbtree", gradient["name"], "booster")
    if int(sizes.get("num_class", 0)) > 1 or int(sizes.get("num_target", 1)) > 1:
        raise InputError("must have a single output", location="booster")
    trees = gradient["model"]["trees"]
    if not trees:
        raise InputError("must have at least one tree", location="booster")
    base = _base_margin(learner["objective"]["name"], sizes["base_score"])
    forest = joined([_flat_tree(tree) for tree in trees])
    leaves = len(trees) * forest.value.astype(float) + base
    return forest._replace(value=np.where(forest.feature == LEAF, leaves, 0.0).astype(np.float32))


def _base_margin(objective: str, written: str) -> float:
    """Return the base score on the scale of margins; the model stores it on the scale of predictions."""
    # A list of one since XGBoost 3.1, a number before.
    score = float(written.strip("[]"))
    if objective in _IDENTITY:
        return score
    if objective in _LOGISTIC:
        return math.log(score / (1.0 - score))
    raise InputError(f"must be one of {', '.join(_IDENTITY + _LOGISTIC)}", objective, "objective")


def _flat_tree(tree: Mapping[str, Any]) -> Forest:
    """Return one tree with its nodes in depth-first order, so that children come after their parent."""
    if any(tree["split_type"]):
        raise InputError("must not have categorical splits", location="booster")
    left, right = np.asarray(tree["left_children"]), np.asarray(tree["right_children"])
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        if left[node] >= 0:
            waiting += [int(right[node]), int(left[node])]
    place = np.zeros(left.size, np.int64)
    place[order] = np.arange(len(order))
    left, right = left[order], right[order]
    inner = left >= 0
    # Of an inner node this is the threshold, of a leaf its value; the JSON holds float32 exactly.
    condition = np.asarray(tree["split_conditions"])[order].astype(np.float32)
    below = np.nextafter(condition, np.float32(-np.inf))
    return Forest(
        roots=np.zeros(1, np.int32),
        feature=np.where(inner, np.asarray(tree["split_indices"])[order], LEAF).astype(np.int16),
        threshold=np.where(inner, below, np.float32(0.0)).astype(np.float32),
        left=place[left].astype(np.int32),
        right=place[right].astype(np.int32),
        value=condition,
    )


@dataclass(eq=False, repr=False)
class _Boosted(BaseEstimator):  # type: ignore[misc]
    """Shared hyper-parameters; defaults chosen on both designs of both shipped profiles.

    Parameters
    ----------
    n_estimators, learning_rate, max_depth, min_child_weight, subsample, colsample_bytree, max_bin
        As XGBoost's.
    random_state
        Seed.
    n_jobs
        Threads; predictions do not depend on it.
    """

    n_estimators: int = 400
    learning_rate: float = 0.06
    max_depth: int = 6
    min_child_weight: float = 4.0
    subsample: float = 0.7
    colsample_bytree: float = 0.5
    max_bin: int = 256
    random_state: int = 0
    n_jobs: int = 1

    def _boost(self, features: NDArray[np.float32], target: NDArray[np.float64], **more: Any) -> XGBRegressor:
        model = XGBRegressor(tree_method="hist", **self.get_params(), **more)
        return model.fit(features, target)


class ServedAndStep(RegressorMixin, _Boosted):  # type: ignore[misc]
    """Throughput from the served fraction and the step time, each relative to the fluid model's.

    Absolute error of logarithms is minimized: medians are robust to outlying scenarios.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803 (scikit-learn's name)
        """Fit on feature vectors, shape (n, features), and on served fraction and step time in ms, (n, 2)."""
        features, targets = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)
        served, step_ms = np.asarray(targets, float).T
        share = np.log(np.maximum(served, LEAST_SHARE) / expected_share(features))
        estimate_ms = feature_of(features, "step_ms")
        # Scenarios without a step keep the fluid model's step time.
        steps = np.where(step_ms > 0.0, np.log(np.maximum(step_ms, _LEAST_STEP_MS) / estimate_ms), 0.0)
        self.served_ = self._boost(features, share, objective="reg:absoluteerror")
        self.step_ = self._boost(features, steps, objective="reg:absoluteerror")
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803 (scikit-learn's name)
        """Return throughput in tokens per second, shape (n,)."""
        check_is_fitted(self)
        return self.output().predict(validate_data(self, X, dtype=np.float32, reset=False))

    def output(self) -> EnsembleOutput:
        """Return the trees as a surrogate stores them."""
        return EnsembleOutput(SERVED_AND_STEP, (flatten_boosted(self.served_), flatten_boosted(self.step_)))


@dataclass(eq=False, repr=False)
class ServedEdge(ClassifierMixin, _Boosted):  # type: ignore[misc]
    """Probability of starvation in another run with the same features, under monotone constraints.

    The target of a scenario is a logistic function of its served fraction, of width `SERVED_SCATTER`.
    Defaults chosen by cross-validation on 38,604 scenarios of Llama-3.1-8B.
    """

    n_estimators: int = 150
    learning_rate: float = 0.15
    max_depth: int = 7
    colsample_bytree: float = 1.0
    max_bin: int = 1024

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803 (scikit-learn's name)
        """Fit on feature vectors, shape (n, features), and served fractions, shape (n,)."""
        features, served = validate_data(self, X, y, dtype=np.float32, y_numeric=True)
        self.classes_ = np.array([0, 1])
        self.edge_ = self._boost(
            features,
            starvation_target(np.asarray(served, float)),
            objective="reg:logistic",
            monotone_constraints=monotone_constraints("starvation"),
        )
        return self

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """Return the log odds of starvation, shape (n,)."""
        check_is_fitted(self)
        return self.output().predict(validate_data(self, X, dtype=np.float32, reset=False))

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:  # noqa: N803
        """Return 1 where starvation is more likely than not, shape (n,)."""
        return (self.decision_function(X) > 0.0).astype(np.int64)

    def output(self) -> EnsembleOutput:
        """Return the trees as a surrogate stores them."""
        return EnsembleOutput(LOG_ODDS, (flatten_boosted(self.edge_),))


def starvation_target(served_fraction: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the target of `ServedEdge`: 0.5 at the edge of starvation, 1 far below, 0 far above it."""
    distance = np.log(STARVED_BELOW / np.maximum(served_fraction, LEAST_SERVED))
    target: NDArray[np.float64] = 0.5 * (1.0 + np.tanh(0.5 * distance / SERVED_SCATTER))
    return target
