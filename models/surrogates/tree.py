"""Small decision trees: flat tuples, checked when made, with a JSON form that cannot run or loop on load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.errors import NO_VALUE, InputError
from capplan.models.surrogates.features import FEATURES
from capplan.models.surrogates.outputs import LEAF, round_down

if TYPE_CHECKING:
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

MAX_RULES: Final = 256
MAX_DEPTH: Final = 32
"""Deeper ones are not for people, and Python refuses code that is indented by a hundred levels."""

LOG_OVER_EXPECTED: Final = "log_over_expected"
LOG_TOK_S: Final = "log_tok_s"
PROBABILITY: Final = "probability"
ANSWERS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {LOG_OVER_EXPECTED: (-700.0, 700.0), LOG_TOK_S: (-700.0, 700.0), PROBABILITY: (0.0, 1.0)}
)
"""What leaves may say, and within which bounds: natural logarithm of throughput over
`features.expected_tok_s`, or of throughput in tokens per second (both with a finite exponential), or the
probability of starvation."""

_INNER_KEYS: Final = frozenset({"feature", "at_most", "left", "right"})
_LEAF_KEYS: Final = frozenset({"value", "share"})


class FlatTree(NamedTuple):
    """A tree's nodes as arrays, for walks in NumPy or compiled code; a leaf is its own child."""

    feature: NDArray[np.int16]
    threshold: NDArray[np.float32]
    left: NDArray[np.int16]
    right: NDArray[np.int16]
    value: NDArray[np.float64]


@dataclass(frozen=True)
class Tree:
    """A decision tree over `FEATURES`; node 0 is the root, and children come after their parent.

    Attributes
    ----------
    answer
        What the values mean, one of `ANSWERS`.
    feature
        Index into `FEATURES` of what a node asks for; LEAF (-1) in leaves.
    threshold
        Go left where the feature is at most this; a float32. 0 in leaves.
    left, right
        Children; LEAF in leaves.
    value
        What a leaf answers; 0 in other nodes.
    share
        Share of the training scenarios that end in a leaf, or come by another node.

    Raises
    ------
    InputError
        In one line, when the nodes are no tree, too many, or hold numbers that a tree may not hold.
    """

    answer: str
    feature: tuple[int, ...]
    threshold: tuple[float, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    value: tuple[float, ...]
    share: tuple[float, ...]

    def __post_init__(self) -> None:
        _require(self.answer in ANSWERS, f"answer must be one of {', '.join(ANSWERS)}", self.answer)
        nodes = len(self.feature)
        columns = (self.threshold, self.left, self.right, self.value, self.share)
        _require(all(len(column) == nodes for column in columns), "must say everything of every node")
        _require(1 <= nodes < 2 * MAX_RULES, f"must have 1 to {MAX_RULES} rules")
        for node in range(nodes):
            self._require_sound(node)
        self._require_tree()

    @property
    def rules(self) -> int:
        """Decision rules "condition and condition -> output", as the paper counts them: leaves (6.1)."""
        return self.feature.count(LEAF)

    @property
    def is_leaf(self) -> tuple[bool, ...]:
        """Whether each node is a leaf."""
        return tuple(feature == LEAF for feature in self.feature)

    @cached_property
    def depth(self) -> int:
        """Most conditions of a rule."""
        return max(self._depths())

    @cached_property
    def flat(self) -> FlatTree:
        """Its nodes as arrays."""
        own = np.arange(len(self.feature))
        leaf = np.array(self.is_leaf)
        return FlatTree(
            feature=np.where(leaf, LEAF, self.feature).astype(np.int16),
            threshold=np.array(self.threshold, np.float32),
            left=np.where(leaf, own, self.left).astype(np.int16),
            right=np.where(leaf, own, self.right).astype(np.int16),
            value=np.array(self.value, np.float64),
        )

    def leaves(self, features: NDArray[np.float32]) -> NDArray[np.intp]:
        """Return the leaf that each feature vector ends in; features of shape (n, features), result (n,)."""
        flat, rows = self.flat, np.arange(len(features))
        node = np.zeros(len(features), np.intp)
        for _ in range(self.depth):
            goes_left = features[rows, flat.feature[node]] <= flat.threshold[node]
            node = np.where(goes_left, flat.left[node], flat.right[node]).astype(np.intp)
        return node

    def predict(self, features: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the values of feature vectors of shape (n, features), shape (n,)."""
        answers: NDArray[np.float64] = self.flat.value[self.leaves(features)]
        return answers

    def to_document(self) -> dict[str, Any]:
        """Return the tree as a JSON document; features go by name, which outlives an index."""
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
        known = isinstance(document, dict) and set(document) == {"answer", "nodes"}
        _require(known, "must be a mapping with answer and nodes")
        assert isinstance(document, dict)  # noqa: S101 - told apart above, in words for people
        answer, nodes = document["answer"], document["nodes"]
        _require(isinstance(answer, str), "answer must be a text", answer)
        _require(isinstance(nodes, list), "nodes must be a list")
        _require(1 <= len(nodes) < 2 * MAX_RULES, f"must have 1 to {MAX_RULES} rules")
        return _tree(answer, [_read_node(node, number) for number, node in enumerate(nodes)])

    def _require_sound(self, node: int) -> None:
        """Check the numbers of one node."""
        low, high = ANSWERS[self.answer]
        feature, threshold, value = self.feature[node], self.threshold[node], self.value[node]
        children = (self.left[node], self.right[node])
        _require(
            0.0 <= self.share[node] <= 1.0 + 1e-9, f"node {node}: share must be 0 to 1", self.share[node]
        )
        if feature == LEAF:
            _require(children == (LEAF, LEAF), f"node {node}: a leaf must have no children", children)
            _require(low <= value <= high, f"node {node}: value must be {low:g} to {high:g}", value)
            return
        _require(0 <= feature < len(FEATURES), f"node {node}: feature must be known", feature)
        _require(_is_float32(threshold), f"node {node}: at_most must be a finite float32", threshold)
        forward = all(node < child < len(self.feature) for child in children) and children[0] != children[1]
        _require(forward, f"node {node}: children must be two later nodes", children)

    def _require_tree(self) -> None:
        """Check that every node but the root has one parent: a shared one could make endless code."""
        children = sorted(child for child in (*self.left, *self.right) if child != LEAF)
        _require(
            children == list(range(1, len(self.feature))), "every node but the first must have one parent"
        )
        _require(self.depth <= MAX_DEPTH, f"must not be deeper than {MAX_DEPTH}", self.depth)

    def _depths(self) -> list[int]:
        depths = [0] * len(self.feature)
        for node, feature in enumerate(self.feature):
            if feature != LEAF:
                depths[self.left[node]] = depths[self.right[node]] = depths[node] + 1
        return depths


def tree_of(
    model: DecisionTreeRegressor | DecisionTreeClassifier, answer: str, columns: Sequence[int] | None = None
) -> Tree:
    """Return a fitted scikit-learn tree; a classifier answers the share of its last class.

    Parameters
    ----------
    model
        The tree.
    answer
        What its values mean, one of `ANSWERS`.
    columns
        Which of `FEATURES` it was fitted on; all, unless given.
    """
    tree = model.tree_
    leaf = tree.children_left == LEAF
    names = np.arange(len(FEATURES)) if columns is None else np.asarray(columns)
    return Tree(
        answer=answer,
        feature=_ints(np.where(leaf, LEAF, names[np.maximum(tree.feature, 0)])),
        threshold=_floats(np.where(leaf, 0.0, round_down(tree.threshold))),
        left=_ints(tree.children_left),
        right=_ints(tree.children_right),
        value=_floats(np.where(leaf, tree.value[:, 0, -1], 0.0)),
        share=_floats(tree.weighted_n_node_samples / tree.weighted_n_node_samples[0]),
    )


class _Node(NamedTuple):
    feature: int = LEAF
    threshold: float = 0.0
    left: int = LEAF
    right: int = LEAF
    value: float = 0.0
    share: float = 0.0


def _tree(answer: str, nodes: Sequence[_Node]) -> Tree:
    """Return the tree of nodes read from a file; shares of inner nodes are those of their leaves together."""
    share = [node.share for node in nodes]
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        if node.feature != LEAF and max(node.left, node.right) < len(nodes):
            share[number] = min(1.0, share[node.left] + share[node.right])
    columns = {field: tuple(getattr(node, field) for node in nodes) for field in _Node._fields}
    return Tree(answer, **(columns | {"share": tuple(share)}))


def _read_node(node: object, number: int) -> _Node:
    _require(isinstance(node, dict), f"node {number}: must be a mapping", node)
    assert isinstance(node, dict)  # noqa: S101 - told apart above, in words for people
    if set(node) == _LEAF_KEYS:
        return _Node(value=_number(node, "value", number), share=_number(node, "share", number))
    _require(set(node) == _INNER_KEYS, f"node {number}: must have {_either()}", sorted(map(str, node)))
    _require(node["feature"] in FEATURES, f"node {number}: feature must be known", node["feature"])
    children = [node["left"], node["right"]]
    forward = all(type(child) is int and number < child < 2 * MAX_RULES for child in children)
    _require(forward, f"node {number}: children must be two later nodes", children)
    feature = FEATURES.index(node["feature"])
    return _Node(feature, _number(node, "at_most", number), children[0], children[1])


def _number(node: Mapping[str, object], key: str, number: int) -> float:
    value = node[key]
    sound = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
    _require(sound, f"node {number}: {key} must be a finite number", value)
    return float(value)  # type: ignore[arg-type]


_LARGEST: Final = float(np.finfo(np.float32).max)


def _is_float32(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= _LARGEST and float(np.float32(value)) == value


def _either() -> str:
    return f"{', '.join(sorted(_LEAF_KEYS))} or {', '.join(sorted(_INNER_KEYS))}"


def _require(holds: bool, rule: str, got: object = NO_VALUE) -> None:
    if not holds:
        raise InputError(rule, got, "tree")


def _ints(column: NDArray[Any]) -> tuple[int, ...]:
    return tuple(map(int, column))


def _floats(column: NDArray[Any]) -> tuple[float, ...]:
    return tuple(map(float, column))
