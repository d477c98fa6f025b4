"""Candidate models of surrogates behind the scikit-learn estimator interface.

Every candidate reads whole feature vectors in the order of `FEATURES`. It predicts throughput in tokens per
second, or whether a GPU starves (0 or 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, clone
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.utils.validation import check_is_fitted, validate_data
from xgboost import XGBClassifier, XGBRegressor

from capplan.errors import InputError
from capplan.models.surrogates._features import FEATURES, expected_tok_s

Task: TypeAlias = Literal["throughput", "starvation"]
Space: TypeAlias = Mapping[str, BaseDistribution]

FAMILIES: Final = ("forest", "xgboost")
PAPER_FAMILIES: Final = ("knn", "svm")
"""Families of the adapter-caching paper without compiled predictions; a benchmark compares them."""

_LEAST_TOK_S: Final = 1e-3

STARVATION_SIGNS: Final[Mapping[str, int]] = MappingProxyType(
    {
        # Load. Spread and largest rate scale with it.
        "rate_sum_rps": 1,
        "rate_std_rps": 1,
        "rate_max_rps": 1,
        "offered_tok_s": 1,
        "load_over_capacity": 1,
        "batch_over_limit": 1,
        # Served shares of the fluid model.
        "expected_share": -1,
        "slots_share": -1,
        "full_queue_share": -1,
        # Contention for slots.
        "active_adapters": 1,
        "active_adapters_over_slots": 1,
        "slot_wait_s": 1,
        # Memory.
        "kv_tokens": -1,
        "kv_requests_over_seqs": -1,
        "batch_limit": -1,
    }
)
"""Monotone constraints of the probability of starvation: more load never lowers it, more KV never raises it.

They hold for two vectors that differ in these features only. Of two workloads it follows as far as the fluid
model moves its features that way: where slots bind, more load can leave the batch emptier.
"""

THROUGHPUT_SIGNS: Final[Mapping[str, int]] = MappingProxyType(
    {"kv_tokens": 1, "kv_requests_over_seqs": 1, "batch_limit": 1}
)
"""Monotone constraints of throughput over the expected throughput: memory only.

Far above capacity the ratio rises again, since the batch is always full there.
"""


_STARTS: Final[Mapping[tuple[str, str], Mapping[str, Any]]] = MappingProxyType(
    {
        ("forest", "throughput"): {
            "n_estimators": 32,
            "min_samples_leaf": 10,
            "max_depth": None,
            "max_features": 1.0,
        },
        ("forest", "starvation"): {
            "n_estimators": 32,
            "min_samples_leaf": 5,
            "max_depth": 10,
            "max_features": 1.0,
            "criterion": "gini",
        },
        ("xgboost", "throughput"): {
            "n_estimators": 150,
            "learning_rate": 0.038,
            "max_depth": 7,
            "min_child_weight": 1.05,
            "subsample": 0.94,
            "colsample_bytree": 0.74,
            "reg_lambda": 0.53,
            "max_bin": 256,
            "huber_slope": 0.043,
        },
        ("xgboost", "starvation"): {
            "n_estimators": 400,
            "learning_rate": 0.043,
            "max_depth": 4,
            "min_child_weight": 0.32,
            "subsample": 0.77,
            "colsample_bytree": 0.57,
            "reg_lambda": 0.044,
            "max_bin": 1024,
        },
    }
)
"""Found by earlier searches on both shipped profiles."""


def monotone_constraints(task: Task) -> tuple[int, ...]:
    """Return -1, 0 or 1 for every feature, as XGBoost's ``monotone_constraints``."""
    signs = STARVATION_SIGNS if task == "starvation" else THROUGHPUT_SIGNS
    return tuple(signs.get(name, 0) for name in FEATURES)


class RelativeRegressor(RegressorMixin, MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """Regressor of the logarithm of throughput over `expected_tok_s`; `regressor_` is the fitted clone.

    Relative errors have equal weight at all loads, and no extrapolation is needed where load is unbounded.
    """

    def __init__(self, regressor: Any) -> None:
        self.regressor = regressor

    def fit(self, X: ArrayLike, y: ArrayLike) -> RelativeRegressor:  # noqa: N803 (scikit-learn's name)
        """Fit on feature vectors, shape (rows, features), and tokens per second, shape (rows,)."""
        features, throughput = validate_data(self, X, y, dtype=np.float32, y_numeric=True)
        ratio = np.maximum(np.asarray(throughput, float), _LEAST_TOK_S) / _baseline_tok_s(features)
        self.regressor_ = clone(self.regressor).fit(features, np.log(ratio))
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803 (scikit-learn's name)
        """Return throughput in tokens per second, shape (rows,)."""
        check_is_fitted(self)
        features = validate_data(self, X, dtype=np.float32, reset=False)
        ratio: NDArray[np.float64] = np.exp(np.asarray(self.regressor_.predict(features), float))
        return _baseline_tok_s(features) * ratio


def _baseline_tok_s(features: NDArray[np.float32]) -> NDArray[np.float64]:
    if features.shape[1] != len(FEATURES):
        raise InputError(f"must have {len(FEATURES)} features", features.shape[1], "X")
    baseline: NDArray[np.float64] = np.maximum(expected_tok_s(features), _LEAST_TOK_S)
    return baseline


@dataclass(frozen=True)
class CandidateModel:
    """One family of models for one task."""

    name: str
    """One of `FAMILIES`."""
    task: Task
    template: Any
    """Unfitted estimator with its defaults."""
    distributions: Space
    """Search space of hyper-parameters for Optuna."""
    start: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters of the first trial; others are sampled."""

    def make(self, params: Mapping[str, Any], seed: int) -> Any:
        """Return the unfitted estimator with hyper-parameters named as in the distributions."""
        path = "regressor__" if isinstance(self.template, RelativeRegressor) else ""
        made = clone(self.template).set_params(**{path + name: value for name, value in params.items()})
        return made.set_params(**{f"{path}random_state": seed})


def candidate_model(family: str, task: Task) -> CandidateModel:
    """Return the candidate of a family.

    Raises
    ------
    InputError
        For an unknown family.
    """
    if family not in FAMILIES:
        raise InputError(f"must be one of {', '.join(FAMILIES)}", family, "family")
    classifies = task == "starvation"
    learner: Any
    if family == "forest":
        learner = RandomForestClassifier() if classifies else RandomForestRegressor()
    else:
        # With absolute error XGBoost replaces leaf values by medians, which breaks the constraints.
        learner = (XGBClassifier if classifies else XGBRegressor)(
            objective="binary:logistic" if classifies else "reg:pseudohubererror",
            tree_method="hist",
            n_jobs=1,
            monotone_constraints=monotone_constraints(task),
        )
    space = forest_space(task) if family == "forest" else boosting_space(task)
    template = learner if classifies else RelativeRegressor(learner)
    return CandidateModel(family, task, template, space, _STARTS[family, task])


def forest_space(task: Task) -> Space:
    """Return the random forest's search space; the forests stay small enough to ship."""
    space: dict[str, BaseDistribution] = {
        "n_estimators": IntDistribution(32, 128, step=32),
        "min_samples_leaf": IntDistribution(5, 32, log=True),
        "max_depth": CategoricalDistribution((None, 5, 10, 20)),
        "max_features": CategoricalDistribution((1.0, "sqrt", "log2")),
    }
    if task == "starvation":
        space["criterion"] = CategoricalDistribution(("gini", "entropy"))
    return space


def boosting_space(task: Task) -> Space:
    """Return XGBoost's search space; 500 trees of depth 7 predict in less than 20 microseconds."""
    space: dict[str, BaseDistribution] = {
        "n_estimators": IntDistribution(100, 500, step=50),
        "learning_rate": FloatDistribution(0.03, 0.3, log=True),
        "max_depth": IntDistribution(3, 7),
        "min_child_weight": FloatDistribution(0.1, 20.0, log=True),
        "subsample": FloatDistribution(0.5, 1.0),
        "colsample_bytree": FloatDistribution(0.4, 1.0),
        "reg_lambda": FloatDistribution(0.01, 10.0, log=True),
        "max_bin": CategoricalDistribution((256, 1024)),
    }
    if task == "throughput":
        # Where squared error turns into absolute error, in units of the logarithm: 0.01 is 1 %.
        space["huber_slope"] = FloatDistribution(0.01, 0.5, log=True)
    return space
