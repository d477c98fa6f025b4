"""Tuning of the paper's surrogates: nearest neighbours, random forest and support vectors (appendix B).

Grids are searched by successive halving with grouped folds, as the paper does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, product, zip_longest
from typing import Any, Final

import joblib
import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_halving_search_cv  # noqa: F401 (makes the next line work)
from sklearn.model_selection import HalvingGridSearchCV
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR

from capplan.models.calibration import smape
from capplan.models.training import (
    RelativeRegressor,
    Task,
    TrainingTable,
    grouped_folds,
    macro_f1,
    predictions,
)

Combination = Mapping[str, Any]
Grid = Sequence[Mapping[str, Sequence[Any]]]
"""Values by parameter, of each kind such as the kernel: a subset takes as many of each kind."""

SVM_ITERATIONS: Final = 50_000
"""Limit of libsvm, which would run for hours with C = 10000 without better predictions."""
MAX_TREES_PER_LEAF_ROW: Final = 26
"""Trees over the least rows of a leaf: a forest has about two fifths of its rows times this in leaves."""
HALVING: Final = 3
LEAST_ROWS: Final = 200


def subset(grid: Grid, count: int, seed: int) -> list[Combination]:
    """Return combinations drawn at random, as many of each kind, without forests of very many leaves."""
    random = np.random.default_rng(seed)
    kinds = [[each for each in _combined(kind) if _is_modest(each)] for kind in grid]
    shuffled = [[kind[at] for at in random.permutation(len(kind))] for kind in kinds]
    mixed = chain.from_iterable(zip_longest(*shuffled))
    return [each for each in mixed if each is not None][:count]


def _combined(kind: Mapping[str, Sequence[Any]]) -> Iterator[Combination]:
    return (dict(zip(kind, values, strict=True)) for values in product(*kind.values()))


def _is_modest(combination: Combination) -> bool:
    trees = combination.get("n_estimators", 0)
    return bool(trees <= MAX_TREES_PER_LEAF_ROW * combination.get("min_samples_leaf", 1))


def template(family: str, task: Task, seed: int) -> tuple[Any, str]:
    """Return an unfitted estimator of a family, and the path of its hyper-parameters."""
    throughput = task == "throughput"
    if family == "forest":
        model = (RandomForestRegressor if throughput else RandomForestClassifier)(random_state=seed)
        return (RelativeRegressor(model), "regressor__") if throughput else (model, "")
    path = "model__"
    if family == "knn":
        kind = KNeighborsRegressor if throughput else KNeighborsClassifier
        model = kind(n_neighbors=1, leaf_size=8, weights="uniform", algorithm="kd_tree")
    else:
        model = (SVR if throughput else SVC)(max_iter=SVM_ITERATIONS)
        if throughput:
            # The paper's tubes of 0.1 to 5 are tokens per second; of a logarithm they are per cent.
            model = TransformedTargetRegressor(model, func=_to_percent, inverse_func=_from_percent)
            path = "model__regressor__"
    pipeline = Pipeline([("scale", StandardScaler()), ("model", model)])
    return (RelativeRegressor(pipeline), f"regressor__{path}") if throughput else (pipeline, path)


def _to_percent(ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    return 100.0 * ratio


def _from_percent(percent: NDArray[np.float64]) -> NDArray[np.float64]:
    return percent / 100.0


def loss(task: Task) -> Callable[[Any, NDArray[np.float32], NDArray[Any]], float]:
    """Return the paper's loss as a score of scikit-learn: minus SMAPE in per cent, or macro-F1."""

    def score(fitted: Any, features: NDArray[np.float32], target: NDArray[Any]) -> float:
        predicted = predictions(fitted, features)
        return -smape(predicted, target) if task == "throughput" else macro_f1(predicted, target)

    return score


def rounds_of(combinations: int, rows: int) -> int:
    """Return the rounds of halving: down to the last three, but on at least `LEAST_ROWS` rows."""
    rounds = 1
    while HALVING**rounds <= combinations and rows // HALVING**rounds >= LEAST_ROWS:
        rounds += 1
    return rounds


def tuned(
    family: str,
    task: Task,
    table: TrainingTable,
    combinations: Sequence[Combination],
    *,
    folds: int,
    seed: int,
) -> Any:
    """Return the best of some combinations, fitted to the whole table."""
    estimator, path = template(family, task, seed)
    target = table.share_tok_s if task == "throughput" else table.starved.astype(int)
    classes = None if task == "throughput" else table.starved
    search = HalvingGridSearchCV(
        estimator,
        [{path + name: [value] for name, value in chosen.items()} for chosen in combinations],
        factor=HALVING,
        min_resources=len(table) // HALVING ** (rounds_of(len(combinations), len(table)) - 1),
        scoring=loss(task),
        cv=grouped_folds(table.group, folds=folds, seed=seed, classes=classes),
        refit=False,
        random_state=seed,
        n_jobs=1,
    )
    # Combinations that diverge have no score and are not chosen.
    with (
        joblib.parallel_config(backend="threading"),
        np.errstate(all="ignore"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="One or more of the t")
        search.fit(table.features, target)
        return clone(estimator).set_params(**search.best_params_).fit(table.features, target)
