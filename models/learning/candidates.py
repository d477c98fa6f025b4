"""The learners a surrogate may be, behind scikit-learn's contract: fit, predict, and maybe predict_proba.

Every one sees the whole feature vector, in the order of `FEATURES`, and answers throughput in tokens per
second, or whether a GPU starves: 0 or 1. `predict_proba` gives the probability, which the support vector
machine has not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution
from sklearn.base import clone
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR
from xgboost import XGBClassifier, XGBRegressor

from capplan.errors import InputError
from capplan.models.learning.grids import Grid, Task, boosting_space, forest_grid, knn_grid, svm_grid
from capplan.models.learning.monotone import signs
from capplan.models.learning.relative import BASELINES, RelativeRegressor
from capplan.models.surrogates.features import FEATURES, PAPER_FEATURES

__all__ = [
    "FAMILIES",
    "PAPER_FEATURES",
    "Candidate",
    "Options",
    "RelativeRegressor",
    "candidate",
    "learner_of",
]

_SVM_ITERATIONS: Final = 50_000
"""Beyond which libsvm stops: with C = 10000 it would not end in hours, and no better answers come of it."""


@dataclass(frozen=True)
class Options:
    """How a candidate sees the problem.

    Attributes
    ----------
    columns
        Names of the features that it may use.
    relative
        Whether throughput is learnt relative to physics (`RelativeRegressor`) or as raw tokens per second.
    monotone
        Whether boosted trees obey `signs`.
    baseline
        What throughput is relative to, one of `BASELINES`. With ``offered`` more signs hold, so more is
        guaranteed of the answer; with ``expected`` less is left to learn, and errors are smaller.
    """

    columns: tuple[str, ...] = FEATURES
    relative: bool = True
    monotone: bool = True
    baseline: str = "expected"

    def __post_init__(self) -> None:
        unknown = sorted(set(self.columns) - set(FEATURES))
        if unknown or not self.columns:
            raise InputError("must be names of features", unknown or self.columns, "Options.columns")
        if self.baseline not in BASELINES:
            raise InputError(f"must be one of {', '.join(BASELINES)}", self.baseline, "Options.baseline")


@dataclass(frozen=True)
class Candidate:
    """One family of models for one task.

    Attributes
    ----------
    name
        Of the family, one of `FAMILIES`.
    task
        ``throughput`` or ``starvation``.
    options
        How it sees the problem.
    template
        The unfitted estimator with its defaults.
    path
        What stands before the name of a hyper-parameter in the estimator's own parameters.
    grid
        Combinations of hyper-parameters, to be searched by halving; empty if Optuna searches.
    distributions
        Of hyper-parameters, to be searched by Optuna; empty if there is a grid.
    """

    name: str
    task: Task
    options: Options
    template: Any
    path: str
    grid: Grid = ()
    distributions: Mapping[str, BaseDistribution] = field(default_factory=dict)

    def make(self, params: Mapping[str, Any], seed: int) -> Any:
        """Return the unfitted estimator with hyper-parameters, named as in the grid or the distributions."""
        made = clone(self.template).set_params(**{self.path + name: value for name, value in params.items()})
        seeds = {name: seed for name in made.get_params() if name.endswith("__random_state")}
        return made.set_params(**seeds)


def candidate(family: str, task: Task, options: Options | None = None) -> Candidate:
    """Return the candidate of a family.

    Parameters
    ----------
    family
        One of `FAMILIES`.
    task
        ``throughput`` or ``starvation``.
    options
        All features, relative to physics and monotone if not given.

    Raises
    ------
    InputError
        For an unknown family.
    """
    if family not in FAMILIES:
        raise InputError(f"must be one of {', '.join(FAMILIES)}", family, "family")
    return FAMILIES[family](task, options or Options())


def learner_of(estimator: Any) -> Any:
    """Return the fitted model inside a candidate's fitted estimator, such as the forest or the XGBoost model.

    It saw the columns of `Options.columns` and answers throughput as `RelativeRegressor` says.
    """
    inside = getattr(estimator, "regressor_", estimator)
    return inside.named_steps["model"]


def _knn(task: Task, options: Options) -> Candidate:
    model = KNeighborsRegressor if task == "throughput" else KNeighborsClassifier
    learner = model(n_neighbors=1, leaf_size=8, weights="uniform", algorithm="kd_tree")
    return Candidate(
        "knn", task, options, _template(task, options, learner, scaled=True), _path(task), grid=knn_grid()
    )


def _forest(task: Task, options: Options) -> Candidate:
    learner = RandomForestRegressor() if task == "throughput" else RandomForestClassifier()
    grid = forest_grid(task, signed_target=options.relative)
    return Candidate("forest", task, options, _template(task, options, learner), _path(task), grid=grid)


def _svm(task: Task, options: Options) -> Candidate:
    learner = (SVR if task == "throughput" else SVC)(max_iter=_SVM_ITERATIONS)
    path = _path(task)
    if task == "throughput" and options.relative:
        # The paper's tubes of 0.1 to 5 are tokens per second; of a logarithm they are taken as per cent.
        learner = TransformedTargetRegressor(learner, func=_to_percent, inverse_func=_from_percent)
        path += "regressor__"
    template = _template(task, options, learner, scaled=True)
    return Candidate("svm", task, options, template, path, grid=svm_grid(task))


def _xgboost(task: Task, options: Options) -> Candidate:
    shared: dict[str, Any] = {"tree_method": "hist", "n_jobs": 1}
    # Ratios have signs; raw tokens per second have none.
    if options.monotone and (task == "starvation" or options.relative):
        shared["monotone_constraints"] = signs(task, options.columns, options.baseline)
    # Huber's loss is for small ratios: where much is left to learn, its flat tails hardly move.
    huber = task == "throughput" and options.relative and options.baseline == "expected"
    if task == "starvation":
        learner = XGBClassifier(objective="binary:logistic", **shared)
    elif huber:
        # Not absolute error itself: XGBoost replaces its leaves by medians afterwards, past the constraints.
        learner = XGBRegressor(objective="reg:pseudohubererror", **shared)
    else:
        learner = XGBRegressor(objective="reg:squarederror", **shared)
    template, space = _template(task, options, learner), boosting_space(huber=huber)
    return Candidate("xgboost", task, options, template, _path(task), distributions=space)


FAMILIES: Final[Mapping[str, Callable[[Task, Options], Candidate]]] = MappingProxyType(
    {"knn": _knn, "forest": _forest, "svm": _svm, "xgboost": _xgboost}
)
"""The paper's three (section 6) and gradient boosting."""


def _template(task: Task, options: Options, learner: Any, *, scaled: bool = False) -> Any:
    """Return the unfitted estimator: columns, scaling, model; for throughput, relative to physics or not."""
    steps = [
        ("columns", _columns(options.columns)),
        ("scale", StandardScaler() if scaled else "passthrough"),
        ("model", learner),
    ]
    if task == "starvation":
        return Pipeline(steps)
    return RelativeRegressor(Pipeline(steps), relative=options.relative, baseline=options.baseline)


def _path(task: Task) -> str:
    return "model__" if task == "starvation" else "regressor__model__"


def _columns(names: Sequence[str]) -> Any:
    if tuple(names) == FEATURES:
        return "passthrough"
    return ColumnTransformer([("kept", "passthrough", [FEATURES.index(name) for name in names])])


def _to_percent(ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    return 100.0 * ratio


def _from_percent(percent: NDArray[np.float64]) -> NDArray[np.float64]:
    return percent / 100.0
