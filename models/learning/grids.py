"""The search spaces of the adapter-caching paper (appendix B), each model once, and boosting's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product, zip_longest
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

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
