"""From a tree as it grew, on bins, to a `Tree` on features, its leaves set on the twin's own answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from capplan.models.learning.cuts import Cuts
from capplan.models.learning.grow import Node, Split
from capplan.models.learning.lessons import Lesson
from capplan.models.surrogates.forest import LEAF
from capplan.models.surrogates.tree import Tree


@dataclass
class _Columns:
    feature: list[int] = field(default_factory=list)
    threshold: list[float] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    share: list[float] = field(default_factory=list)

    def add(self, share: float) -> int:
        """Add a node, a leaf for now."""
        for column, value in zip(vars(self).values(), (LEAF, 0.0, LEAF, LEAF, 0.0, share), strict=True):
            column.append(value)
        return len(self.feature) - 1


def planted(root: Node, cuts: Cuts, lesson: Lesson) -> Tree:
    """Return the tree over the scenarios of `lesson`; a side that none of them takes is left out.

    Parameters
    ----------
    root
        The tree as it grew.
    cuts
        What its questions refer to.
    lesson
        The twin's answers; the tree may have grown on a teacher's.
    """
    columns = _Columns()

    def plant(node: Node, rows: NDArray[np.intp]) -> int:
        if isinstance(node, Split):
            threshold = cuts.thresholds[node.feature, node.cut]
            goes_left = lesson.features[rows, node.feature] <= threshold
            if goes_left.all() or not goes_left.any():
                return plant(node.left if goes_left.all() else node.right, rows)
        number = columns.add(rows.size / len(lesson.features))
        if isinstance(node, Split):
            columns.feature[number], columns.threshold[number] = node.feature, float(threshold)
            columns.left[number] = plant(node.left, rows[goes_left])
            columns.right[number] = plant(node.right, rows[~goes_left])
        else:
            columns.value[number] = lesson.best_leaf(rows)
        return number

    plant(root, np.arange(len(lesson.features)))
    return Tree(lesson.answer, **{name: tuple(column) for name, column in vars(columns).items()})
