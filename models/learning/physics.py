"""Boosted trees that learn what physics leaves open: served fraction and step time, not tokens per second.

Throughput follows from both (`heads.throughput_of`); a GPU starves where the served fraction is below 0.9.
"""

from __future__ import annotations

from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted, validate_data
from xgboost import XGBRegressor

from capplan.models.learning.boosted import flatten_boosted
from capplan.models.learning.monotone import signs
from capplan.models.surrogates.features import feature_of
from capplan.models.surrogates.heads import (
    LEAST_SHARE,
    LOG_SERVED,
    SERVED_AND_STEP,
    Head,
    expected_share,
)

LEAST_AT_THE_EDGE: Final = 0.5
"""Below, a starved GPU is a starved GPU: the model of starvation spends no leaf on telling how much."""

_LEAST_STEP_MS: Final = 1e-3


class _Boosted(BaseEstimator):  # type: ignore[misc]
    """Hyper-parameters that both share; the defaults did well on both designs of both shipped profiles.

    Parameters
    ----------
    n_estimators, learning_rate, max_depth, min_child_weight, subsample, colsample_bytree
        As XGBoost's.
    random_state
        Seed.
    n_jobs
        Threads; the answers do not depend on it.
    """

    def __init__(
        self,
        n_estimators: int = 400,
        learning_rate: float = 0.06,
        max_depth: int = 6,
        min_child_weight: float = 4.0,
        subsample: float = 0.7,
        colsample_bytree: float = 0.5,
        random_state: int = 0,
        n_jobs: int = 1,
    ) -> None:
        self.n_estimators = n_estimators
        self.learning_rate = learning_rate
        self.max_depth = max_depth
        self.min_child_weight = min_child_weight
        self.subsample = subsample
        self.colsample_bytree = colsample_bytree
        self.random_state = random_state
        self.n_jobs = n_jobs

    def _boost(self, features: NDArray[np.float32], target: NDArray[np.float64], **more: Any) -> XGBRegressor:
        model = XGBRegressor(tree_method="hist", max_bin=256, **self.get_params(), **more)
        return model.fit(features, target)


class ServedAndStep(RegressorMixin, _Boosted):  # type: ignore[misc]
    """Throughput from the served fraction and the step time, each relative to the fluid estimate's.

    The absolute error is minimised, of logarithms: medians stay where few scenarios go astray.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803 (scikit-learn's name)
        """Fit on feature vectors, shape (n, features), and on served fraction and step time in ms, (n, 2)."""
        features, targets = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)
        served, step_ms = np.asarray(targets, float).T
        share = np.log(np.maximum(served, LEAST_SHARE) / expected_share(features))
        estimate_ms = feature_of(features, "step_ms")
        # Without a step there is nothing to learn of its time: it stays the estimate's.
        steps = np.where(step_ms > 0.0, np.log(np.maximum(step_ms, _LEAST_STEP_MS) / estimate_ms), 0.0)
        self.served_ = self._boost(features, share, objective="reg:absoluteerror")
        self.step_ = self._boost(features, steps, objective="reg:absoluteerror")
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803 (scikit-learn's name)
        """Return throughput in tokens per second, shape (n,)."""
        check_is_fitted(self)
        return self.head().answers(validate_data(self, X, dtype=np.float32, reset=False))

    def head(self) -> Head:
        """Return what a surrogate keeps of the fitted model."""
        return Head(SERVED_AND_STEP, (flatten_boosted(self.served_), flatten_boosted(self.step_)))


class ServedEdge(ClassifierMixin, _Boosted):  # type: ignore[misc]
    """Starvation from the served fraction, learned where it matters: between a half and all.

    Obeys the signs of physics: what loads the GPU more never raises the served fraction, what gives it more
    KV never lowers it (`monotone.signs`).
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803 (scikit-learn's name)
        """Fit on feature vectors, shape (n, features), and served fractions, shape (n,)."""
        features, served = validate_data(self, X, y, dtype=np.float32, y_numeric=True)
        target = np.log(np.maximum(np.asarray(served, float), LEAST_AT_THE_EDGE))
        self.classes_ = np.array([0, 1])
        falling = tuple(-sign for sign in signs("starvation"))
        self.served_ = self._boost(
            features, target, objective="reg:squarederror", monotone_constraints=falling
        )
        return self

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """Return the logarithm of 0.9 over the served fraction: above 0 the GPU starves; shape (n,)."""
        check_is_fitted(self)
        return self.head().answers(validate_data(self, X, dtype=np.float32, reset=False))

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:  # noqa: N803
        """Return 1 where the served fraction is below `STARVED_BELOW`, shape (n,)."""
        return (self.decision_function(X) > 0.0).astype(np.int64)

    def head(self) -> Head:
        """Return what a surrogate keeps of the fitted model."""
        return Head(LOG_SERVED, (flatten_boosted(self.served_),))
