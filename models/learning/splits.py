"""Splits that keep near twins together: a scenario never stands on both sides of a split from its group."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import GroupKFold, StratifiedGroupKFold

from capplan.errors import InputError

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
