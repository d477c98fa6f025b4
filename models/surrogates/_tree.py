"""Small decision trees: flat tuples, validated on creation, with a JSON form.

A tree is also written as decision rules, Python source, a compiled function and an SVG drawing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import numba
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


EXPECTED: Final = "expected = the offered load in tok/s, as far as a formula of the features lets it through"


@dataclass(frozen=True)
class Condition:
    """Range of one feature: above `low`, at most `high`."""

    feature: str
    low: float = -math.inf
    high: float = math.inf

    @property
    def text(self) -> str:
        """The condition in words, with four significant digits."""
        if self.low == -math.inf:
            return f"{self.feature} <= {short_figure(self.high)}"
        if self.high == math.inf:
            return f"{self.feature} > {short_figure(self.low)}"
        return f"{short_figure(self.low)} < {self.feature} <= {short_figure(self.high)}"


@dataclass(frozen=True)
class DecisionRule:
    """One leaf of a tree."""

    conditions: tuple[Condition, ...]
    """All must hold; at most one per feature, from the root to the leaf."""
    answer: str
    """Meaning of the value, as in `Tree.answer`."""
    value: float
    share: float
    """Share of the training scenarios that it covers."""

    @property
    def output(self) -> str:
        """Prediction in words: ``throughput = 0.97 x expected``."""
        return output_text(self.answer, self.value)

    @property
    def text(self) -> str:
        """The whole rule on one line."""
        conditions = " and ".join(condition.text for condition in self.conditions) or "always"
        return f"if {conditions} then {self.output}"


def decision_rules(tree: Tree) -> tuple[DecisionRule, ...]:
    """Return the rules of a tree, the one that covers most training scenarios first."""
    return tuple(sorted(paths_of(tree).values(), key=lambda rule: -rule.share))


def paths_of(tree: Tree) -> dict[int, DecisionRule]:
    """Return the rule of each leaf, by its node."""
    return dict(_walk(tree, 0, {}))


def output_text(answer: str, value: float) -> str:
    """Return the prediction of a leaf in words."""
    if answer == LOG_OVER_EXPECTED:
        return f"throughput = {math.exp(value):.3g} x expected"
    verdict = "starved" if value >= 0.5 else "not starved"
    return f"{verdict} (probability {value:.2f})"


def _walk(tree: Tree, node: int, held: dict[str, Condition]) -> Iterator[tuple[int, DecisionRule]]:
    if tree.feature[node] == LEAF:
        yield node, DecisionRule(tuple(held.values()), tree.answer, tree.value[node], tree.share[node])
        return
    name, at = FEATURES[tree.feature[node]], tree.threshold[node]
    before = held.get(name, Condition(name))
    below = Condition(name, before.low, min(before.high, at))
    above = Condition(name, max(before.low, at), before.high)
    yield from _walk(tree, tree.left[node], held | {name: below})
    yield from _walk(tree, tree.right[node], held | {name: above})


def short_figure(value: float) -> str:
    """Return a number with four significant digits, without an exponent from 0.001 to 1e6."""
    if value == 0.0 or not 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


TreeFunction: TypeAlias = Callable[[NDArray[np.float32]], float]

_INDENT: Final = "    "

_MEANING: Final[Mapping[str, str]] = MappingProxyType(
    {
        LOG_OVER_EXPECTED: "the natural logarithm of throughput over the throughput that the features expect",
        PROBABILITY: "the probability that requests starve",
    }
)


def export_python(tree: Tree, name: str = "answer") -> str:
    """Return the source of a Python function of one feature vector `x`, in the order of `FEATURES`.

    Every number reads back as the same float. Thresholds are float32, so comparisons with float32 features
    are exact in Python, NumPy and compiled code.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"not a plain name: {name!r}")
    head = [f"def {name}(x):", f'{_INDENT}"""Return {_MEANING[tree.answer]}; {tree.rules} rules."""']
    return "\n".join([*head, *_lines(tree, 0, 1)]) + "\n"


def compile_tree(tree: Tree) -> TreeFunction:
    """Return the compiled function of a tree, from float32[:] to float64, callable from compiled code too."""
    namespace: dict[str, Any] = {"__builtins__": {}}
    code = compile(export_python(tree), f"<tree of {tree.rules} rules>", "exec")
    exec(code, namespace)  # noqa: S102 - only numbers of a validated tree
    compiled = numba.njit("float64(float32[::1])", nogil=True, error_model="numpy")(namespace["answer"])
    return cast(TreeFunction, compiled)


def _lines(tree: Tree, node: int, depth: int) -> Iterator[str]:
    indent = _INDENT * depth
    feature = tree.feature[node]
    if feature == LEAF:
        yield f"{indent}return {float(tree.value[node])!r}"
        return
    name = re.sub(r"[^a-z0-9_]", "?", FEATURES[feature])
    yield f"{indent}if x[{int(feature)}] <= {float(tree.threshold[node])!r}:  # {name}"
    yield from _lines(tree, tree.left[node], depth + 1)
    yield f"{indent}else:  # {name} > {tree.threshold[node]:.4g}"
    yield from _lines(tree, tree.right[node], depth + 1)


_COLUMN: Final = 236.0
_BOX: Final = 200.0
_ROW: Final = 32.0
_HEIGHT: Final = 24.0
_LEAF_BOX: Final = 232.0
_TITLE: Final = 34.0
_GAP: Final = 28.0
_MARGIN: Final = 10.0
_INK: Final = "#1c2530"
_NEUTRAL: Final = "#767676"  # contrast 4.5 to 1 on white and on black
_SPLIT: Final = "#eef2f6"
_SERVED: Final = (205, 233, 214)
_UNCERTAIN: Final = (250, 240, 200)
_STARVED: Final = (246, 205, 198)

_Place: TypeAlias = tuple[float, float]
"""Left and middle of a node's box."""


def export_svg(trees: Sequence[tuple[str, Tree]]) -> str:
    """Return one SVG document of titled trees, one below the other."""
    parts: list[str] = []
    width, top = 0.0, 0.0
    for title, tree in trees:
        parts += _draw(title, tree, top)
        width = max(width, tree.depth * _COLUMN + _LEAF_BOX + 2 * _MARGIN)
        top += _TITLE + tree.rules * _ROW + _GAP
    label = escape(", ".join(title for title, _ in trees), quote=True)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {top:.0f}" '
            f'width="{width:.0f}" height="{top:.0f}" role="img" aria-label="{label}" '
            'font-family="system-ui, sans-serif" font-size="11.5">',
            *parts,
            "</svg>\n",
        ]
    )


def _draw(title: str, tree: Tree, top: float) -> Iterator[str]:
    places = _places(tree, top + _TITLE)
    rules = paths_of(tree)
    yield _text(_MARGIN, top + 18, title, size=15, weight=600)
    for node, place in enumerate(places):
        if tree.feature[node] != LEAF:
            yield _branch(place, places[tree.left[node]], "yes")
            yield _branch(place, places[tree.right[node]], "no")
    for node, place in enumerate(places):
        if tree.feature[node] == LEAF:
            rule = rules[node]
            share = f"{rule.share:.1%}"
            tip = f"{rule.text} ({share} of training scenarios)"
            yield _box(place, _LEAF_BOX, _tint(rule), f"{rule.output} · {share}", tip)
        else:
            text = f"{FEATURES[tree.feature[node]]} ≤ {short_figure(tree.threshold[node])}"
            tip = f"{text}?  {tree.share[node]:.1%} of training scenarios come by here"
            yield _box(place, _BOX, _SPLIT, text, tip)


def _places(tree: Tree, top: float) -> list[_Place]:
    """Return the place of each node: leaves on rows from top to bottom, a parent between its children."""
    places = [(0.0, 0.0)] * len(tree.feature)
    rows = iter(range(tree.rules))

    def put(node: int, depth: int) -> float:
        if tree.feature[node] == LEAF:
            y = top + (next(rows) + 0.5) * _ROW
        else:
            y = (put(tree.left[node], depth + 1) + put(tree.right[node], depth + 1)) / 2
        places[node] = (_MARGIN + depth * _COLUMN, y)
        return y

    put(0, 0)
    return places


def _box(place: _Place, width: float, fill: str, text: str, tip: str) -> str:
    x, y = place
    # A text longer than its box is squeezed; the tooltip has all of it.
    squeezed = f' textLength="{width - 12:.0f}" lengthAdjust="spacingAndGlyphs"'
    fits = len(text) * 6.1 <= width - 12
    return (
        f"<g><title>{escape(tip)}</title>"
        f'<rect x="{x:.1f}" y="{y - _HEIGHT / 2:.1f}" width="{width:.0f}" height="{_HEIGHT:.0f}" '
        f'rx="4" fill="{fill}" stroke="{_NEUTRAL}" stroke-width="0.8"/>'
        f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{_INK}"{"" if fits else squeezed}>'
        f"{escape(text)}</text></g>"
    )


def _branch(parent: _Place, child: _Place, label: str) -> str:
    start, end = parent[0] + _BOX, child[0]
    middle = (start + end) / 2
    path = f"M{start:.1f} {parent[1]:.1f}H{middle:.1f}V{child[1]:.1f}H{end:.1f}"
    line = f'<path d="{path}" fill="none" stroke="{_NEUTRAL}" stroke-width="1.2"/>'
    return line + _text(middle - 4, child[1] - 4, label, size=10, anchor="end")


def _text(x: float, y: float, text: str, *, size: int, weight: int = 400, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{_NEUTRAL}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _tint(rule: DecisionRule) -> str:
    """Return the fill of a leaf: from green to red with the probability of starvation, else white."""
    if rule.answer != PROBABILITY:
        return "#ffffff"
    low, high, at = (
        (_SERVED, _UNCERTAIN, 2 * rule.value)
        if rule.value < 0.5
        else (_UNCERTAIN, _STARVED, 2 * rule.value - 1)
    )
    return "#" + "".join(f"{round(a + (b - a) * at):02x}" for a, b in zip(low, high, strict=True))
