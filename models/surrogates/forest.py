"""Tree ensembles as flat arrays: answered by compiled code, stored without anything that can run on load."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

LEAF = -1


class Forest(NamedTuple):
    """Trees one after the other; the answer is the mean of their leaves."""

    roots: NDArray[np.int32]
    """First node of each tree, shape (trees,)."""
    feature: NDArray[np.int16]
    """Feature that a node asks for, shape (nodes,); LEAF in leaves."""
    threshold: NDArray[np.float32]
    """Go left where the feature is at most this."""
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: NDArray[np.float32]
    """Answer of a leaf: a mean, or the probability of the second class."""


@jit
def forest_answer(forest: Forest, x: NDArray[np.float32]) -> float:
    """Return the forest's answer to one feature vector, shape (features,)."""
    total = 0.0
    for root in forest.roots:
        node = root
        while forest.feature[node] >= 0:
            if x[forest.feature[node]] <= forest.threshold[node]:
                node = forest.left[node]
            else:
                node = forest.right[node]
        total += forest.value[node]
    return total / forest.roots.size


def forest_answers(forest: Forest, features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the forest's answers to many feature vectors, shape (n, features); the result has shape (n,)."""
    answers = np.empty(len(features))
    _answer_all(forest, np.ascontiguousarray(features, np.float32), answers)
    return answers


@jit
def _answer_all(forest: Forest, features: NDArray[np.float32], answers: NDArray[np.float64]) -> None:
    for row in range(answers.size):
        answers[row] = forest_answer(forest, features[row])


def flatten_forest(model: RandomForestRegressor | RandomForestClassifier) -> Forest:
    """Return a fitted scikit-learn forest as flat arrays; a classifier answers the second class's share.

    scikit-learn compares float32 features with float64 thresholds. Rounding a threshold down to float32 keeps
    every comparison as it was.
    """
    roots, parts, offset = [], [], 0
    for estimator in model.estimators_:
        tree = estimator.tree_
        leaf = tree.children_left == LEAF
        # A regressor's leaf holds its mean, a classifier's the shares of its classes.
        value = tree.value[:, 0, -1]
        parts.append(
            (
                np.where(leaf, LEAF, tree.feature),
                round_down(tree.threshold),
                np.where(leaf, LEAF, tree.children_left + offset),
                np.where(leaf, LEAF, tree.children_right + offset),
                value,
            )
        )
        roots.append(offset)
        offset += tree.node_count
    feature, threshold, left, right, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Forest(
        roots=np.array(roots, np.int32),
        feature=feature.astype(np.int16),
        threshold=threshold,
        left=left.astype(np.int32),
        right=right.astype(np.int32),
        value=value.astype(np.float32),
    )


def round_down(threshold: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the largest float32 that is at most each threshold."""
    nearest = threshold.astype(np.float32)
    return np.where(nearest > threshold, np.nextafter(nearest, np.float32(-np.inf)), nearest)
