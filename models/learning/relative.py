"""A regressor of throughput that learns what physics leaves open: the ratio to a formula of the features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, clone
from sklearn.utils.validation import check_is_fitted, validate_data

from capplan.errors import InputError
from capplan.models.surrogates.features import FEATURES, expected_tok_s, feature_of

_LEAST_TOK_S = 1e-3


def _offered_tok_s(features: NDArray[np.float32]) -> NDArray[np.float64]:
    return feature_of(features, "offered_tok_s")


BASELINES: Final[Mapping[str, Callable[[NDArray[np.float32]], NDArray[np.float64]]]] = MappingProxyType(
    {"expected": expected_tok_s, "offered": _offered_tok_s}
)
"""Tokens per second that throughput may be relative to: what the estimate expects, or what is offered."""


class RelativeRegressor(RegressorMixin, MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """Learn the logarithm of throughput over a baseline, and answer tokens per second.

    Relative errors weigh alike at all loads, and no learner has to extrapolate where load has no bound.

    Parameters
    ----------
    regressor
        Any regressor; a clone of it is fitted.
    relative
        Whether to learn ``log(throughput / baseline)``; if not, raw tokens per second, as the paper does.
    baseline
        One of `BASELINES`.

    Attributes
    ----------
    regressor_
        The fitted clone, which answers the logarithm of the ratio.
    """

    def __init__(self, regressor: Any, relative: bool = True, baseline: str = "expected") -> None:
        self.regressor = regressor
        self.relative = relative
        self.baseline = baseline

    def fit(self, X: ArrayLike, y: ArrayLike) -> RelativeRegressor:  # noqa: N803 (scikit-learn's name)
        """Fit on feature vectors, shape (rows, features), and tokens per second, shape (rows,)."""
        features, throughput = validate_data(self, X, y, dtype=np.float32, y_numeric=True)
        target = np.asarray(throughput, float)
        if self.relative:
            target = np.log(np.maximum(target, _LEAST_TOK_S) / self._baseline_tok_s(features))
        self.regressor_ = clone(self.regressor).fit(features, target)
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803 (scikit-learn's name)
        """Return throughput in tokens per second, shape (rows,)."""
        check_is_fitted(self)
        features = validate_data(self, X, dtype=np.float32, reset=False)
        answer = np.asarray(self.regressor_.predict(features), float)
        if self.relative:
            answer = self._baseline_tok_s(features) * np.exp(answer)
        return answer

    def _baseline_tok_s(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        if self.baseline not in BASELINES:
            raise InputError(f"must be one of {', '.join(BASELINES)}", self.baseline, "baseline")
        if features.shape[1] != len(FEATURES):
            raise InputError(f"must have {len(FEATURES)} features", features.shape[1], "X")
        return np.maximum(BASELINES[self.baseline](features), _LEAST_TOK_S)
