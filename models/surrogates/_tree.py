"""Small decision trees: flat tuples, validated on creation, with a JSON form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from capplan.errors import NO_VALUE, InputError
from capplan.models.surrogates._features import FEATURES
from capplan.models.surrogates._outputs import LEAF, Forest, forest_values, round_down
from capplan.spec import format_key, validate_document

if TYPE_CHECKING:
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

MAX_RULES: Final = 256
MAX_DEPTH: Final = 32
"""Python refuses code that is indented by a hundred levels."""

LOG_OVER_EXPECTED: Final = "log_over_expected"
PROBABILITY: Final = "probability"
ANSWERS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {LOG_OVER_EXPECTED: (-700.0, 700.0), PROBABILITY: (0.0, 1.0)}
)
"""Quantities that leaves predict, with their bounds: the natural logarithm of throughput over
`features.expected_tok_s` (with a finite exponential), or the probability of starvation."""


class _Document(BaseModel, frozen=True, strict=True, extra="forbid", allow_inf_nan=False):
    pass


class _Split(_Document):
    feature: str
    at_most: float
    left: int
    right: int


class _Leaf(_Document):
    value: float
    share: float


class _TreeDocument(_Document):
    answer: str
    nodes: list[_Split | _Leaf] = Field(min_length=1, max_length=2 * MAX_RULES - 1)


@dataclass(frozen=True)
class Tree:
    """A decision tree over `FEATURES`; node 0 is the root, and children come after their parent.

    Raises
    ------
    InputError
        In one line, when the nodes are no tree, too many, or hold numbers out of bounds.
    """

    answer: str
    """Meaning of the values, one of `ANSWERS`."""
    feature: tuple[int, ...]
    """Index into `FEATURES` of the feature that a node compares; LEAF (-1) in leaves."""
    threshold: tuple[float, ...]
    """Go left where the feature is at most this; a float32. 0 in leaves."""
    left: tuple[int, ...]
    """Left child; LEAF in leaves."""
    right: tuple[int, ...]
    value: tuple[float, ...]
    """Prediction of a leaf; 0 in other nodes."""
    share: tuple[float, ...]
    """Share of the training scenarios that reach a node."""

    def __post_init__(self) -> None:
        _require(self.answer in ANSWERS, f"answer must be one of {', '.join(ANSWERS)}", self.answer)
        nodes = len(self.feature)
        columns = (self.threshold, self.left, self.right, self.value, self.share)
        _require(all(len(column) == nodes for column in columns), "columns must have one value per node")
        _require(1 <= nodes < 2 * MAX_RULES, f"must have 1 to {MAX_RULES} rules")
        for node in range(nodes):
            self._require_valid(node)
        # A shared node could make endless code.
        children = sorted(child for child in (*self.left, *self.right) if child != LEAF)
        _require(children == list(range(1, nodes)), "every node but the first must have one parent")
        _require(self.depth <= MAX_DEPTH, f"must not be deeper than {MAX_DEPTH}", self.depth)

    @property
    def rules(self) -> int:
        """Decision rules "condition and condition -> output", as the paper counts them: leaves (6.1)."""
        return self.feature.count(LEAF)

    @cached_property
    def depth(self) -> int:
        """Most conditions of a rule."""
        depths = [0] * len(self.feature)
        for node, feature in enumerate(self.feature):
            if feature != LEAF:
                depths[self.left[node]] = depths[self.right[node]] = depths[node] + 1
        return max(depths)

    @cached_property
    def forest(self) -> Forest:
        """The tree as a forest of one, with float64 values."""
        return Forest(
            roots=np.zeros(1, np.int32),
            feature=np.array(self.feature, np.int16),
            threshold=np.array(self.threshold, np.float32),
            left=np.array(self.left, np.int32),
            right=np.array(self.right, np.int32),
            value=np.array(self.value, np.float64),
        )

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the values of feature vectors of shape (n, features), shape (n,)."""
        return forest_values(self.forest, features)

    def to_document(self) -> dict[str, Any]:
        """Return the tree as a JSON document, with features by name."""
        nodes: list[dict[str, Any]] = [
            {"value": self.value[node], "share": self.share[node]}
            if self.feature[node] == LEAF
            else {
                "feature": FEATURES[self.feature[node]],
                "at_most": self.threshold[node],
                "left": self.left[node],
                "right": self.right[node],
            }
            for node in range(len(self.feature))
        ]
        return {"answer": self.answer, "nodes": nodes}

    @staticmethod
    def from_document(document: object) -> Tree:
        """Return the tree of a JSON document, or raise `InputError` in one line."""
        read = validate_document(
            _TreeDocument, document, lambda key: f"tree: {format_key(key)}" if key else "tree"
        )
        nodes = read.nodes
        share = [getattr(node, "share", 0.0) for node in nodes]
        rows: list[tuple[int, float, int, int, float]] = [(LEAF, 0.0, LEAF, LEAF, 0.0)] * len(nodes)
        for number in reversed(range(len(nodes))):
            node = nodes[number]
            if isinstance(node, _Leaf):
                rows[number] = (LEAF, 0.0, LEAF, LEAF, node.value)
                continue
            forward = number < min(node.left, node.right) and max(node.left, node.right) < len(nodes)
            _require(forward, f"node {number}: children must be two later nodes", [node.left, node.right])
            _require(node.feature in FEATURES, f"node {number}: feature must be known", node.feature)
            share[number] = min(1.0, share[node.left] + share[node.right])
            rows[number] = (FEATURES.index(node.feature), node.at_most, node.left, node.right, 0.0)
        feature, threshold, left, right, value = zip(*rows, strict=True)
        return Tree(read.answer, feature, threshold, left, right, value, tuple(share))

    def _require_valid(self, node: int) -> None:
        low, high = ANSWERS[self.answer]
        feature, threshold, value = self.feature[node], self.threshold[node], self.value[node]
        children, share = (self.left[node], self.right[node]), self.share[node]
        _require(0.0 <= share <= 1.0 + 1e-9, f"node {node}: share must be 0 to 1", share)
        if feature == LEAF:
            _require(children == (LEAF, LEAF), f"node {node}: a leaf must have no children", children)
            _require(low <= value <= high, f"node {node}: value must be {low:g} to {high:g}", value)
            return
        _require(0 <= feature < len(FEATURES), f"node {node}: feature must be known", feature)
        _require(_is_float32(threshold), f"node {node}: at_most must be a finite float32", threshold)
        forward = all(node < child < len(self.feature) for child in children) and children[0] != children[1]
        _require(forward, f"node {node}: children must be two later nodes", children)


def tree_of(model: DecisionTreeRegressor | DecisionTreeClassifier, answer: str) -> Tree:
    """Return a fitted scikit-learn tree, its values one of `ANSWERS`.

    The value of a classifier is the share of its last class.
    """
    tree = model.tree_
    leaf = tree.children_left == LEAF
    columns = {
        "feature": np.where(leaf, LEAF, tree.feature),
        "threshold": np.where(leaf, 0.0, round_down(tree.threshold)),
        "left": tree.children_left,
        "right": tree.children_right,
        "value": np.where(leaf, tree.value[:, 0, -1], 0.0),
        "share": tree.weighted_n_node_samples / tree.weighted_n_node_samples[0],
    }
    return Tree(answer, **{name: tuple(column.tolist()) for name, column in columns.items()})


_LARGEST: Final = float(np.finfo(np.float32).max)


def _is_float32(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= _LARGEST and float(np.float32(value)) == value


def _require(holds: bool, rule: str, got: object = NO_VALUE) -> None:
    if not holds:
        raise InputError(rule, got, "tree")
