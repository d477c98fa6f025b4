"""Growth of small trees: histograms, best splits, tree alternating optimization, pruning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.models.surrogates.outputs import round_down


@dataclass(frozen=True)
class Cuts:
    """A table of features, each in bins of about equal numbers of rows.

    Attributes
    ----------
    codes
        Bin of each row and feature, shape (n, features).
    thresholds
        float32 of each feature and cut; a row's bin is at most `cut` where its feature is at most
        ``thresholds[feature, cut]``. Features with fewer cuts repeat their last: shape (features, cuts).
    """

    codes: NDArray[np.int16]
    thresholds: NDArray[np.float32]

    @property
    def bins(self) -> int:
        """Bins per feature, one more than cuts."""
        return int(self.thresholds.shape[1]) + 1

    def counts(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the number of `rows` by feature and bin, shape (features, bins)."""
        sums = np.zeros((self.codes.shape[1], self.bins), np.int64)
        _count(self.codes, rows, sums)
        return sums

    def histogram(self, rows: NDArray[np.intp], weight: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of `weight`, one per row of `rows`, by feature and bin, shape (features, bins)."""
        sums = np.zeros((self.codes.shape[1], self.bins))
        _add(self.codes, rows, weight, sums)
        return sums

    def joint_histogram(
        self,
        rows: NDArray[np.intp],
        targets: NDArray[np.intp],
        weight: NDArray[np.float64],
        target_bins: int,
    ) -> NDArray[np.float64]:
        """Return sums by feature, bin and bin of the target, shape (features, bins, target bins)."""
        sums = np.zeros((self.codes.shape[1], self.bins, target_bins))
        _add_jointly(self.codes, rows, targets, weight, sums)
        return sums


@jit
def _count(codes: NDArray[np.int16], rows: NDArray[np.intp], sums: NDArray[np.int64]) -> None:
    for row in rows:
        for feature in range(codes.shape[1]):
            sums[feature, codes[row, feature]] += 1


@jit
def _add(
    codes: NDArray[np.int16],
    rows: NDArray[np.intp],
    weight: NDArray[np.float64],
    sums: NDArray[np.float64],
) -> None:
    for i in range(rows.size):
        for feature in range(codes.shape[1]):
            sums[feature, codes[rows[i], feature]] += weight[i]


@jit
def _add_jointly(
    codes: NDArray[np.int16],
    rows: NDArray[np.intp],
    targets: NDArray[np.intp],
    weight: NDArray[np.float64],
    sums: NDArray[np.float64],
) -> None:
    for i in range(rows.size):
        for feature in range(codes.shape[1]):
            sums[feature, codes[rows[i], feature], targets[i]] += weight[i]


def cut(features: NDArray[np.float32], most: int = 160) -> Cuts:
    """Return a table of features in at most `most` + 1 bins each; features of shape (n, features)."""
    columns = [_thresholds(column, most) for column in features.T]
    width = max(1, *(column.size for column in columns))
    thresholds = np.array([_padded(column, width) for column in columns], np.float32)
    return Cuts(coded(features, thresholds), thresholds)


def coded(features: NDArray[np.float32], thresholds: NDArray[np.float32]) -> NDArray[np.int16]:
    """Return the bin of each row and feature, shape (n, features)."""
    columns = [
        np.searchsorted(own, column, side="left") for own, column in zip(thresholds, features.T, strict=True)
    ]
    return np.stack(columns, axis=1).astype(np.int16)


def short_between(low: float, high: float) -> float:
    """Return the number with the fewest digits, and a float32, that is at least `low` and below `high`."""
    middle = low + (high - low) / 2.0
    if middle != 0.0:
        magnitude = math.floor(math.log10(abs(middle)))
        for decimals in range(-magnitude, 9 - magnitude):
            short = float(np.float32(round(middle, decimals)))
            if low <= short < high:
                return short
    elif low <= 0.0 < high:
        return 0.0
    return float(round_down(np.array([middle]))[0])


def _thresholds(column: NDArray[np.float32], most: int) -> NDArray[np.float32]:
    values = np.unique(column)
    if values.size > most + 1:
        ranks = np.linspace(0, column.size - 1, most + 2).round().astype(int)[1:-1]
        ends = np.unique(np.searchsorted(values, np.sort(column)[ranks]))
        ends = ends[ends < values.size - 1]
    else:
        ends = np.arange(values.size - 1)
    return np.array([short_between(float(values[e]), float(values[e + 1])) for e in ends], np.float32)


def _padded(column: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    last = column[-1] if column.size else np.float32(np.finfo(np.float32).max)
    return np.concatenate([column, np.full(width - column.size, last, np.float32)])


_GAIN: Final = 1e-9  # of the whole loss: less is rounding


@dataclass(frozen=True)
class GrowthProblem:
    """What a tree is to learn.

    Attributes
    ----------
    cuts
        Features by bin.
    bins
        Bin of each row's target, shape (n,).
    weight
        Of each row, shape (n,).
    values
        What a leaf may answer, shape (values,).
    loss
        Of each value where the target is in each bin, shape (values, bins).
    min_rows
        Fewest rows of a leaf.
    """

    cuts: Cuts
    bins: NDArray[np.intp]
    weight: NDArray[np.float64]
    values: NDArray[np.float64]
    loss: NDArray[np.float64]
    min_rows: int

    def leaf(self, rows: NDArray[np.intp]) -> LeafNode:
        """Return the leaf that answers `rows` best."""
        histogram = np.bincount(self.bins[rows], self.weight[rows], self.loss.shape[1])
        return LeafNode(int(np.argmin(self.loss @ histogram)))


@dataclass(frozen=True)
class LeafNode:
    """An end of a tree."""

    value: int
    """Index into `Task.values`."""


@dataclass(frozen=True)
class SplitNode:
    """A question: rows whose bin of `feature` is at most `cut` go left."""

    feature: int
    cut: int
    left: Node
    right: Node


Node = LeafNode | SplitNode


class _Choice(NamedTuple):
    cost: float
    feature: int
    cut: int


def grow(task: GrowthProblem, leaves: int, sweeps: int = 4) -> Node:
    """Return a tree of at most `leaves` leaves.

    Parameters
    ----------
    task
        What to learn.
    leaves
        Most leaves.
    sweeps
        How often, at most, all questions are asked again after every fourth new leaf.
    """
    rows = np.arange(task.bins.size)
    root: Node = task.leaf(rows)
    known: dict[bytes, _Choice] = {}
    for size in range(2, leaves + 1):
        root = _split_best(task, root, rows, known)
        if size % 4 == 0 or size == leaves:
            root = improve(task, root, sweeps)
    return root


def prune(task: GrowthProblem, root: Node, sweeps: int = 1) -> Iterator[Node]:
    """Yield ever smaller trees: the split that is missed least is given up, the others are asked again."""
    rows = np.arange(task.bins.size)
    while isinstance(root, SplitNode):
        root = improve(task, _merge_weakest(task, root, rows), sweeps)
        yield root


def improve(task: GrowthProblem, root: Node, sweeps: int) -> Node:
    """Return the tree with every question and every leaf chosen again, from the leaves up."""
    rows = np.arange(task.bins.size)
    before = cost(task, root)
    for _ in range(sweeps):
        root = _swept(task, root, rows)
        after = cost(task, root)
        if after >= before * (1.0 - 1e-5):
            break
        before = after
    return root


def cost(task: GrowthProblem, root: Node) -> float:
    """Return the weighted loss of a tree over all rows."""
    return float(_losses(task, root, np.arange(task.bins.size)).sum())


def count(node: Node) -> int:
    """Return the number of leaves."""
    return 1 if isinstance(node, LeafNode) else count(node.left) + count(node.right)


def _swept(task: GrowthProblem, node: Node, rows: NDArray[np.intp]) -> Node:
    if isinstance(node, LeafNode):
        return task.leaf(rows)
    goes_left = task.cuts.codes[rows, node.feature] <= node.cut
    lefts = int(goes_left.sum())
    if min(lefts, rows.size - lefts) < task.min_rows:  # rows moved away above: the question is idle
        return _swept(task, node.left if 2 * lefts >= rows.size else node.right, rows)
    left, right = _swept(task, node.left, rows[goes_left]), _swept(task, node.right, rows[~goes_left])
    if left == right:
        return left
    on_left, on_right = _losses(task, left, rows), _losses(task, right, rows)
    now = float(on_left[goes_left].sum() + on_right[~goes_left].sum())
    sums = task.cuts.histogram(rows, on_left - on_right).cumsum(axis=1)[:, :-1]
    allowed = _allowed(task, rows)
    choice = _least(np.where(allowed, on_right.sum() + sums, np.inf))
    if choice.cost < now * (1.0 - _GAIN):
        return SplitNode(choice.feature, choice.cut, left, right)
    return replace(node, left=left, right=right)


def _losses(task: GrowthProblem, node: Node, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the weighted loss of each of `rows` under a part of a tree."""
    if isinstance(node, LeafNode):
        own: NDArray[np.float64] = task.loss[node.value][task.bins[rows]] * task.weight[rows]
        return own
    goes_left = task.cuts.codes[rows, node.feature] <= node.cut
    losses = np.empty(rows.size)
    losses[goes_left] = _losses(task, node.left, rows[goes_left])
    losses[~goes_left] = _losses(task, node.right, rows[~goes_left])
    return losses


def _split_best(task: GrowthProblem, root: Node, rows: NDArray[np.intp], known: dict[bytes, _Choice]) -> Node:
    """Return the tree with that leaf split whose split lowers the loss most; the same one if none does.

    `known` remembers the best split of rows that were looked at before.
    """
    gains: list[tuple[float, int, SplitNode]] = []
    for number, (leaf, own) in enumerate(_ends(task, root, rows)):
        key = own.tobytes()
        choice = known[key] = known[key] if key in known else _best_split(task, own)
        gain = float(_losses(task, leaf, own).sum()) - choice.cost
        if np.isfinite(choice.cost) and gain > _GAIN:
            goes_left = task.cuts.codes[own, choice.feature] <= choice.cut
            sides = task.leaf(own[goes_left]), task.leaf(own[~goes_left])
            gains.append((gain, -number, SplitNode(choice.feature, choice.cut, *sides)))
    if not gains:
        return root
    _, number, split = max(gains, key=lambda each: each[:2])
    return _with_end(root, [-number], split)


def _best_split(task: GrowthProblem, rows: NDArray[np.intp]) -> _Choice:
    """Return the question that leaves the least loss when both sides get their best leaves."""
    if rows.size < 2 * task.min_rows:
        return _Choice(np.inf, 0, 0)
    joint = task.cuts.joint_histogram(rows, task.bins[rows], task.weight[rows], task.loss.shape[1])
    below = joint.cumsum(axis=1)  # features, cuts + 1, bins
    losses = below @ task.loss.T
    left, right = losses[:, :-1], losses[:, -1:] - losses[:, :-1]
    total = left.min(axis=2) + right.min(axis=2)
    return _least(np.where(_allowed(task, rows), total, np.inf))


def _allowed(task: GrowthProblem, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Tell which questions leave enough rows on both sides, shape (features, cuts)."""
    lefts = task.cuts.counts(rows).cumsum(axis=1)[:, :-1]
    allowed: NDArray[np.bool_] = (lefts >= task.min_rows) & (rows.size - lefts >= task.min_rows)
    return allowed


def _least(costs: NDArray[np.float64]) -> _Choice:
    at = int(np.argmin(costs))
    feature, cut = divmod(at, costs.shape[1])
    return _Choice(float(costs.flat[at]), feature, cut)


def _merge_weakest(task: GrowthProblem, root: Node, rows: NDArray[np.intp]) -> Node:
    """Return the tree with those two sister leaves made one that are missed least."""
    best: tuple[float, Node] | None = None
    for path, own, split in _twigs(root, rows, (), task):
        leaf = task.leaf(own)
        loss = float(_losses(task, leaf, own).sum() - _losses(task, split, own).sum())
        if best is None or loss < best[0]:
            best = (loss, _with(root, path, leaf))
    return root if best is None else best[1]


def _twigs(
    node: Node, rows: NDArray[np.intp], path: tuple[bool, ...], task: GrowthProblem
) -> Iterator[tuple[tuple[bool, ...], NDArray[np.intp], SplitNode]]:
    """Yield the splits whose children are both leaves: the way there (left is True) and their rows."""
    if isinstance(node, LeafNode):
        return
    if isinstance(node.left, LeafNode) and isinstance(node.right, LeafNode):
        yield path, rows, node
        return
    goes_left = task.cuts.codes[rows, node.feature] <= node.cut
    yield from _twigs(node.left, rows[goes_left], (*path, True), task)
    yield from _twigs(node.right, rows[~goes_left], (*path, False), task)


def _with(node: Node, path: tuple[bool, ...], new: Node) -> Node:
    """Return the tree with another node at the end of a path."""
    if not path:
        return new
    assert isinstance(node, SplitNode)  # noqa: S101 - a path leads through splits
    if path[0]:
        return replace(node, left=_with(node.left, path[1:], new))
    return replace(node, right=_with(node.right, path[1:], new))


def _ends(
    task: GrowthProblem, node: Node, rows: NDArray[np.intp]
) -> Iterator[tuple[LeafNode, NDArray[np.intp]]]:
    """Yield the leaves from left to right, with their rows."""
    if isinstance(node, LeafNode):
        yield node, rows
        return
    goes_left = task.cuts.codes[rows, node.feature] <= node.cut
    yield from _ends(task, node.left, rows[goes_left])
    yield from _ends(task, node.right, rows[~goes_left])


def _with_end(node: Node, left_to_go: list[int], new: Node) -> Node:
    """Return the tree with another node in place of a leaf, counted from the left."""
    if isinstance(node, LeafNode):
        left_to_go[0] -= 1
        return new if left_to_go[0] == -1 else node
    left = _with_end(node.left, left_to_go, new)
    return replace(node, left=left, right=_with_end(node.right, left_to_go, new))
