"""Candidate models of surrogates behind the scikit-learn estimator interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product, zip_longest
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, clone
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR
from sklearn.utils.validation import check_is_fitted, validate_data
from xgboost import XGBClassifier, XGBRegressor

from capplan.errors import InputError
from capplan.models.surrogates.features import FEATURES, expected_tok_s, feature_of

Task: TypeAlias = Literal["throughput", "starvation"]

Combination: TypeAlias = Mapping[str, Any]

Grid: TypeAlias = tuple[tuple[Combination, ...], ...]

"""Combinations by kind, such as the kernel: a subset takes as many of each kind."""

_MOST_TREES_PER_LEAF_ROW: Final = 26

"""Trees over the least rows of a leaf: a forest has about two fifths of its rows times this in leaves."""

_SVM_C: Final = (0.1, 1.0, 10.0, 100.0, 1_000.0, 10_000.0)

_SVM_EPSILON: Final = (0.1, 0.5, 1.0, 5.0)

_SVM_DEGREE: Final = (2, 3, 4, 5)

_SVM_GAMMA: Final = ("scale", "auto", 0.01, 0.1, 1, 10)

_SVM_COEF0: Final = (0.0, 0.1, 0.5, 1.0)

_SVM_KERNELS: Final[Mapping[str, Combination]] = MappingProxyType(
    {
        "linear": {},
        "poly": {"degree": _SVM_DEGREE, "gamma": _SVM_GAMMA, "coef0": _SVM_COEF0},
        "rbf": {"gamma": _SVM_GAMMA},
        "sigmoid": {"gamma": _SVM_GAMMA, "coef0": _SVM_COEF0},
    }
)


def knn_grid() -> Grid:
    """Return the two distances of the nearest neighbour; all else is fixed in the paper."""
    return (_combined({"p": (1, 2)}),)


def forest_grid(task: Task, *, signed_target: bool) -> Grid:
    """Return the random forest's space.

    Appendix B's combinations that grow the same trees stand once: ``friedman_mse`` is ``squared_error``, and
    ``log_loss`` is ``entropy``, in scikit-learn; a leaf of n samples asks for splits of at least 2 n.
    ``max_features=auto``, which scikit-learn no longer has, was 1.0 for regressors.

    Parameters
    ----------
    task
        ``throughput`` or ``starvation``.
    signed_target
        Whether the target can be negative, which the criterion ``poisson`` refuses.
    """
    criteria: tuple[str, ...]
    if task == "starvation":
        criteria = ("gini", "entropy")
    else:
        criteria = ("squared_error", "absolute_error") + (() if signed_target else ("poisson",))
    leaves = [
        {"min_samples_leaf": leaf, "min_samples_split": split}
        for leaf in (1, 2, 5, 10, 32, 128)
        for split in sorted({max(split, 2 * leaf) for split in (2, 5, 10, 20)})
    ]
    others = _combined(
        {
            "n_estimators": (32, 128, 256),
            "max_depth": (None, 5, 10, 20),
            "criterion": criteria,
            "max_features": (None if task == "starvation" else 1.0, "sqrt", "log2"),
        }
    )
    return (tuple({**other, **leaf} for other in others for leaf in leaves),)


def svm_grid(task: Task) -> Grid:
    """Return the support vector machine's space; what a kernel ignores is not varied with it."""
    shared: dict[str, Sequence[Any]] = {"C": _SVM_C}
    if task == "throughput":
        shared["epsilon"] = _SVM_EPSILON
    return tuple(_combined({"kernel": (kernel,), **shared, **own}) for kernel, own in _SVM_KERNELS.items())


def boosting_space(*, huber: bool) -> Mapping[str, BaseDistribution]:
    """Return XGBoost's space; at most 500 trees of depth 7, so that an answer stays under 20 microseconds.

    Parameters
    ----------
    huber
        Whether the loss is Huber's, of the logarithm of a ratio; its slope is then searched too.
    """
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
    if huber:
        # Where squared error turns into absolute error, in units of the logarithm: 0.01 is 1 %.
        space["huber_slope"] = FloatDistribution(0.01, 0.5, log=True)
    return space


def subset(grid: Grid, count: int, seed: int) -> list[Combination]:
    """Return `count` combinations of a grid, drawn at random, as many of each kind; all if it has fewer.

    Forests of absolute error, whose time grows with the square of the rows, and those of so many leaves that
    a surrogate would not be small are in the whole grid only.
    """
    rng = np.random.default_rng(seed)
    kinds = [[combination for combination in kind if _is_modest(combination)] for kind in grid]
    shuffled = [[kind[i] for i in rng.permutation(len(kind))] for kind in kinds]
    dealt = chain.from_iterable(zip_longest(*shuffled))
    return [combination for combination in dealt if combination is not None][:count]


def _is_modest(combination: Combination) -> bool:
    if "n_estimators" not in combination:
        return True
    leaves = combination["n_estimators"] / combination["min_samples_leaf"]
    return bool(combination["criterion"] != "absolute_error" and leaves <= _MOST_TREES_PER_LEAF_ROW)


def whole(grid: Grid) -> list[Combination]:
    """Return all combinations of a grid."""
    return list(chain.from_iterable(grid))


def _combined(values: Mapping[str, Iterable[Any]]) -> tuple[Combination, ...]:
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))


STARVATION_SIGNS: Final[Mapping[str, int]] = MappingProxyType(
    {
        # The load itself. Spread and largest rate scale with it; at a given sum they say little else.
        "rate_sum_rps": 1,
        "rate_std_rps": 1,
        "rate_max_rps": 1,
        "offered_tok_s": 1,
        # Against what the engine can carry: a batch that is full, a queue that grows.
        "load_over_capacity": 1,
        "batch_over_limit": 1,
        # What the estimate says is served of it: by the engine, by the slots, by slots with a full front end.
        "expected_share": -1,
        "slots_share": -1,
        "full_queue_share": -1,
        # Adapters compete for slots: how many ask at a time, and how long one waits.
        "active_adapters": 1,
        "active_adapters_over_slots": 1,
        "slot_wait_s": 1,
        # Memory: more requests at a time, fewer preemptions.
        "kv_tokens": -1,
        "kv_requests_over_seqs": -1,
        "batch_limit": -1,
    }
)

"""Signs of the probability of starvation."""

SERVED_SHARE_SIGNS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "load_over_capacity": -1,
        "batch_over_limit": -1,
        "expected_share": 1,
        "slots_share": 1,
        "full_queue_share": 1,
        "kv_tokens": 1,
        "kv_requests_over_seqs": 1,
        "batch_limit": 1,
    }
)

"""Signs of throughput over the *offered* load. Throughput itself may fall with load: queues cost time."""

EXPECTED_RATIO_SIGNS: Final[Mapping[str, int]] = MappingProxyType(
    {"kv_tokens": 1, "kv_requests_over_seqs": 1, "batch_limit": 1}
)

"""Signs of throughput over the *expected* throughput: of memory only.

It has no others: far above capacity the ratio rises again, since the batch is always full there. So here
more KV never hurts at the same expectation; what the expectation itself does is the estimate's affair.
"""


def signs(task: Task, columns: Sequence[str] = FEATURES, baseline: str = "expected") -> tuple[int, ...]:
    """Return -1, 0 or 1 for every column: the answer must not rise, is free, or must not fall with it.

    Parameters
    ----------
    task
        ``starvation``: the probability of it. ``throughput``: its ratio to the baseline.
    columns
        Names of features.
    baseline
        Of throughput: ``expected`` or ``offered``.
    """
    ratio = SERVED_SHARE_SIGNS if baseline == "offered" else EXPECTED_RATIO_SIGNS
    known = STARVATION_SIGNS if task == "starvation" else ratio
    return tuple(known.get(name, 0) for name in columns)


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


_SVM_ITERATIONS: Final = 50_000

"""Beyond which libsvm stops: with C = 10000 it would not end in hours, and no better answers come of it."""


@dataclass(frozen=True)
class FeatureOptions:
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
class CandidateModel:
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
    options: FeatureOptions
    template: Any
    path: str
    grid: Grid = ()
    distributions: Mapping[str, BaseDistribution] = field(default_factory=dict)

    def make(self, params: Mapping[str, Any], seed: int) -> Any:
        """Return the unfitted estimator with hyper-parameters, named as in the grid or the distributions."""
        made = clone(self.template).set_params(**{self.path + name: value for name, value in params.items()})
        seeds = {name: seed for name in made.get_params() if name.endswith("__random_state")}
        return made.set_params(**seeds)


def candidate_model(family: str, task: Task, options: FeatureOptions | None = None) -> CandidateModel:
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
    return FAMILIES[family](task, options or FeatureOptions())


def learner_of(estimator: Any) -> Any:
    """Return the fitted model inside a candidate's fitted estimator, such as the forest or the XGBoost model.

    It saw the columns of `Options.columns` and answers throughput as `RelativeRegressor` says.
    """
    inside = getattr(estimator, "regressor_", estimator)
    return inside.named_steps["model"]


def _knn(task: Task, options: FeatureOptions) -> CandidateModel:
    model = KNeighborsRegressor if task == "throughput" else KNeighborsClassifier
    learner = model(n_neighbors=1, leaf_size=8, weights="uniform", algorithm="kd_tree")
    return CandidateModel(
        "knn", task, options, _template(task, options, learner, scaled=True), _path(task), grid=knn_grid()
    )


def _forest(task: Task, options: FeatureOptions) -> CandidateModel:
    learner = RandomForestRegressor() if task == "throughput" else RandomForestClassifier()
    grid = forest_grid(task, signed_target=options.relative)
    return CandidateModel("forest", task, options, _template(task, options, learner), _path(task), grid=grid)


def _svm(task: Task, options: FeatureOptions) -> CandidateModel:
    learner = (SVR if task == "throughput" else SVC)(max_iter=_SVM_ITERATIONS)
    path = _path(task)
    if task == "throughput" and options.relative:
        # The paper's tubes of 0.1 to 5 are tokens per second; of a logarithm they are taken as per cent.
        learner = TransformedTargetRegressor(learner, func=_to_percent, inverse_func=_from_percent)
        path += "regressor__"
    template = _template(task, options, learner, scaled=True)
    return CandidateModel("svm", task, options, template, path, grid=svm_grid(task))


def _xgboost(task: Task, options: FeatureOptions) -> CandidateModel:
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
    return CandidateModel("xgboost", task, options, template, _path(task), distributions=space)


FAMILIES: Final[Mapping[str, Callable[[Task, FeatureOptions], CandidateModel]]] = MappingProxyType(
    {"knn": _knn, "forest": _forest, "svm": _svm, "xgboost": _xgboost}
)

"""The paper's three (section 6) and gradient boosting."""


def _template(task: Task, options: FeatureOptions, learner: Any, *, scaled: bool = False) -> Any:
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
