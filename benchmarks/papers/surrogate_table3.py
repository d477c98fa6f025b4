"""Table 3 of the adapter-caching paper: nearest neighbours, random forest and SVM beside boosted trees.

``python -m benchmarks.papers.surrogate_table3 DIR ...`` prints it for datasets of `capplan dataset generate`.
The grids of appendix B are searched by successive halving, combinations that give the same model once;
``--budget`` draws that many of them, ``--paper-space`` takes all (hours). Scores are of scenarios of
held-out groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_halving_search_cv  # noqa: F401 (makes the next line work)
from sklearn.model_selection import HalvingGridSearchCV, cross_val_predict
from sklearn.neighbors import KNeighborsClassifier, KNeighborsRegressor
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR

from benchmarks.common import command_line, records_table
from capplan.models.calibration import smape
from capplan.models.training import TrainingOptions, read_tables
from capplan.models.training._candidates import RelativeRegressor, Task
from capplan.models.training._data import TrainingTable
from capplan.models.training._evaluation import (
    grouped_folds,
    macro_f1,
    predictions,
    starvation_scores,
    throughput_errors,
)
from capplan.models.training._train import TASKS, fit_tuned

Combination = Mapping[str, Any]
Grid = tuple[tuple[Combination, ...], ...]
"""Combinations by kind, such as the kernel: a subset takes as many of each kind."""

PAPER_MODELS = ("knn", "forest", "svm")
SVM_ITERATIONS = 50_000
"""Limit of libsvm, which would run for hours with C = 10000 without better predictions."""

MAX_TREES_PER_LEAF_ROW = 26
"""Trees over the least rows of a leaf: a forest has about two fifths of its rows times this in leaves."""
HALVING = 3
LEAST_ROWS = 200


def knn_grid() -> Grid:
    """Return the two distances of the nearest neighbour; the paper fixes all else."""
    return (combined({"p": (1, 2)}),)


def forest_grid(task: Task) -> Grid:
    """Return the random forest's grid.

    ``friedman_mse`` is ``squared_error`` and ``log_loss`` is ``entropy`` in scikit-learn; a leaf of n samples
    needs splits of at least 2 n; ``max_features=auto`` was 1.0 for regressors. ``poisson`` needs targets
    above 0.
    """
    leaves = [
        {"min_samples_leaf": leaf, "min_samples_split": split}
        for leaf in (1, 2, 5, 10, 32, 128)
        for split in sorted({max(split, 2 * leaf) for split in (2, 5, 10, 20)})
    ]
    others = combined(
        {
            "n_estimators": (32, 128, 256),
            "max_depth": (None, 5, 10, 20),
            "criterion": ("gini", "entropy") if task == "starvation" else ("squared_error", "absolute_error"),
            "max_features": (None if task == "starvation" else 1.0, "sqrt", "log2"),
        }
    )
    return (tuple({**other, **leaf} for other in others for leaf in leaves),)


def svm_grid(task: Task) -> Grid:
    """Return the support vector machine's grid, without parameters that a kernel ignores."""
    gamma: Sequence[Any] = ("scale", "auto", 0.01, 0.1, 1, 10)
    coef0 = (0.0, 0.1, 0.5, 1.0)
    kernels: dict[str, dict[str, Sequence[Any]]] = {
        "linear": {},
        "poly": {"degree": (2, 3, 4, 5), "gamma": gamma, "coef0": coef0},
        "rbf": {"gamma": gamma},
        "sigmoid": {"gamma": gamma, "coef0": coef0},
    }
    shared: dict[str, Sequence[Any]] = {"C": (0.1, 1.0, 10.0, 100.0, 1_000.0, 10_000.0)}
    if task == "throughput":
        shared["epsilon"] = (0.1, 0.5, 1.0, 5.0)
    return tuple(combined({"kernel": (kernel,), **shared, **own}) for kernel, own in kernels.items())


def combined(values: Mapping[str, Iterable[Any]]) -> tuple[Combination, ...]:
    return tuple(dict(zip(values, chosen, strict=True)) for chosen in product(*values.values()))


def whole(grid: Grid) -> list[Combination]:
    return list(chain.from_iterable(grid))


def subset(grid: Grid, count: int, seed: int) -> list[Combination]:
    """Return `count` combinations drawn at random, as many of each kind; all if the grid has fewer.

    Forests of absolute error, whose time grows with the square of the rows, and forests of very many leaves
    are in the whole grid only.
    """
    rng = np.random.default_rng(seed)
    kinds = [[combination for combination in kind if is_modest(combination)] for kind in grid]
    shuffled = [[kind[i] for i in rng.permutation(len(kind))] for kind in kinds]
    mixed = chain.from_iterable(zip_longest(*shuffled))
    return [combination for combination in mixed if combination is not None][:count]


def is_modest(combination: Combination) -> bool:
    if "n_estimators" not in combination:
        return True
    leaves = combination["n_estimators"] / combination["min_samples_leaf"]
    return bool(combination["criterion"] != "absolute_error" and leaves <= MAX_TREES_PER_LEAF_ROW)


def template(family: str, task: Task, seed: int) -> tuple[Any, str, Grid]:
    """Return the unfitted estimator, the path of its hyper-parameters and its grid."""
    throughput = task == "throughput"
    if family == "forest":
        if throughput:
            return (
                RelativeRegressor(RandomForestRegressor(random_state=seed)),
                "regressor__",
                forest_grid(task),
            )
        return RandomForestClassifier(random_state=seed), "", forest_grid(task)
    if family == "knn":
        model: Any = (KNeighborsRegressor if throughput else KNeighborsClassifier)(
            n_neighbors=1, leaf_size=8, weights="uniform", algorithm="kd_tree"
        )
        path, grid = "model__", knn_grid()
    else:
        model, path, grid = (SVR if throughput else SVC)(max_iter=SVM_ITERATIONS), "model__", svm_grid(task)
        if throughput:
            # The paper's tubes of 0.1 to 5 are tokens per second; of a logarithm they are per cent.
            to_percent, from_percent = (lambda ratio: 100.0 * ratio), (lambda percent: percent / 100.0)
            model = TransformedTargetRegressor(model, func=to_percent, inverse_func=from_percent)
            path = "model__regressor__"
    pipeline = Pipeline([("scale", StandardScaler()), ("model", model)])
    if throughput:
        return RelativeRegressor(pipeline), f"regressor__{path}", grid
    return pipeline, path, grid


def rounds_of(combinations: int, rows: int) -> int:
    """Return the rounds of halving: down to the last three, but on at least `LEAST_ROWS` rows."""
    rounds = 1
    while HALVING**rounds <= combinations and rows // HALVING**rounds >= LEAST_ROWS:
        rounds += 1
    return rounds


def loss(task: Task, fitted: Any, features: NDArray[np.float32], target: NDArray[Any]) -> float:
    """Return the paper's loss: SMAPE in per cent, or 1 - macro-F1."""
    predicted = predictions(fitted, features)
    return smape(predicted, target) if task == "throughput" else 1.0 - macro_f1(predicted, target)


def tuned(
    family: str, task: Task, table: TrainingTable, options: TrainingOptions, *, paper_space: bool
) -> tuple[Combination, NDArray[np.float64]]:
    """Return the best combination of a grid, and its predictions for held-out groups."""
    estimator, path, grid = template(family, task, options.seed)
    combinations = whole(grid) if paper_space else subset(grid, options.budget, options.seed)
    target = table.share_tok_s if task == "throughput" else table.starved.astype(int)
    classes = None if task == "throughput" else table.starved
    splits = grouped_folds(table.group, folds=options.folds, seed=options.seed, classes=classes)
    search = HalvingGridSearchCV(
        estimator,
        [{path + name: [value] for name, value in chosen.items()} for chosen in combinations],
        factor=HALVING,
        min_resources=len(table) // HALVING ** (rounds_of(len(combinations), len(table)) - 1),
        scoring=lambda fitted, features, known: -loss(task, fitted, features, known),
        cv=splits,
        refit=False,
        random_state=options.seed,
        n_jobs=options.n_jobs,
    )
    with joblib.parallel_config(backend="threading"), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="One or more of the test scores are non-finite")
        search.fit(table.features, target)
        best = search.best_params_
        made = clone(estimator).set_params(**best)
        method = "predict_proba" if hasattr(made, "predict_proba") else "predict"
        predicted = cross_val_predict(
            made, table.features, target, cv=splits, n_jobs=options.n_jobs, method=method
        )
    values = predicted[:, 1] if predicted.ndim == 2 else predicted
    return {name.removeprefix(path): value for name, value in best.items()}, np.asarray(values, float)


def rows(table: TrainingTable, options: TrainingOptions, *, paper_space: bool) -> list[dict[str, str]]:
    """Return the rows of the table."""
    found = []
    for family in PAPER_MODELS:
        params, scores = {}, {}
        for task in TASKS:
            params[task], predicted = tuned(family, task, table, options, paper_space=paper_space)
            score = throughput_errors if task == "throughput" else starvation_scores
            scores[task] = score(table, predicted)["all"]
        found.append(row(family, scores, params))
    boosted = {
        fitted.task: fitted
        for fitted in fit_tuned(table, options, lambda *_: None)
        if fitted.name == "xgboost"
    }
    best = {task: fitted.scores["all"] for task, fitted in boosted.items()}
    return [*found, row("xgboost", best, {task: fitted.params for task, fitted in boosted.items()})]


def row(family: str, scores: Mapping[str, float], params: Mapping[str, Combination]) -> dict[str, str]:
    chosen = [
        {name: f"{v:.3g}" if isinstance(v, float) else v for name, v in each.items()}
        for each in params.values()
    ]
    shown = "; ".join(", ".join(f"{name} {value}" for name, value in each.items()) for each in chosen)
    return {
        "model": family,
        "throughput SMAPE": f"{scores['throughput']:.2f} %",
        "starvation macro-F1": f"{scores['starvation']:.3f}",
        "hyper-parameters (throughput; starvation)": shown,
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="datasets")
    parser.add_argument("--budget", type=int, default=12, help="combinations of each grid")
    parser.add_argument("--paper-space", action="store_true", help="all combinations; hours")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    options = TrainingOptions(
        budget=given.budget, folds=given.folds, seed=given.seed, n_jobs=given.jobs, families=("xgboost",)
    )
    table = read_tables(given.folders)
    print(f"{len(table)} scenarios, {table.starved.mean():.1%} starved, {given.folds} grouped folds\n")
    print(records_table(rows(table, options, paper_space=given.paper_space)))


if __name__ == "__main__":
    main()
