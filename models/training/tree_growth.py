"""Growth of small trees for any loss, beyond greedy splits.

CART chooses each split once, for the variance. Here a tree grows for the loss that scores it. Every split is
then optimized with the rest of the tree fixed (tree alternating optimization, Carreira-Perpiñán and
Tavallali, NeurIPS 2018). Pruning merges the weakest split each time (cost-complexity pruning) and optimizes
again. Growth is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import jit
from capplan.models.surrogates.outputs import round_down

_MIN_GAIN: Final = 1e-9  # of the whole loss; less is rounding
_CONVERGED: Final = 1e-5
_SWEEP_EVERY: Final = 4  # leaves


@dataclass(frozen=True)
class Cuts:
    """Features in bins of about equal numbers of rows."""

    codes: NDArray[np.int16]
    """Bin of each row and feature, shape (n, features)."""
    thresholds: NDArray[np.float32]
    """Shape (features, cuts); a row's bin is at most `cut` where its feature is at most
    ``thresholds[feature, cut]``. Features with fewer cuts repeat their last."""

    @property
    def bins(self) -> int:
        """Bins per feature, one more than cuts."""
        return int(self.thresholds.shape[1]) + 1

    def histogram(self, rows: NDArray[np.intp], weight: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of `weight`, one per row of `rows`, by feature and bin, shape (features, bins)."""
        return self.joint_histogram(rows, np.zeros(rows.size, np.intp), weight, 1)[:, :, 0]

    def joint_histogram(
        self, rows: NDArray[np.intp], targets: NDArray[np.intp], weight: NDArray[np.float64], target_bins: int
    ) -> NDArray[np.float64]:
        """Return sums by feature, bin and bin of the target, shape (features, bins, target bins)."""
        sums = np.zeros((self.codes.shape[1], self.bins, target_bins))
        _add(self.codes, rows, targets, weight, sums)
        return sums


@jit
def _add(
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
    """Return features of shape (n, features) in at most `most` + 1 bins each."""
    columns = [_thresholds(column, most) for column in features.T]
    width = max(1, *(column.size for column in columns))
    thresholds = np.array([_padded(column, width) for column in columns], np.float32)
    codes = [
        np.searchsorted(own, column, side="left") for own, column in zip(thresholds, features.T, strict=True)
    ]
    return Cuts(np.stack(codes, axis=1).astype(np.int16), thresholds)


def short_between(low: float, high: float) -> float:
    """Return the float32 with the fewest digits that is at least `low` and below `high`."""
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


@dataclass(frozen=True)
class GrowthProblem:
    """Data and loss of a tree in bins; arrays of n rows."""

    cuts: Cuts
    bins: NDArray[np.intp]
    """Bin of each row's target."""
    weight: NDArray[np.float64]
    loss: NDArray[np.float64]
    """Loss of each candidate leaf value for a target in each bin, shape (values, bins)."""
    min_rows: int
    """Fewest rows of a leaf."""

    @property
    def rows(self) -> NDArray[np.intp]:
        """All row numbers."""
        return np.arange(self.bins.size)

    def leaf(self, rows: NDArray[np.intp]) -> LeafNode:
        """Return the leaf of least loss on `rows`."""
        histogram = np.bincount(self.bins[rows], self.weight[rows], self.loss.shape[1])
        return LeafNode(int(np.argmin(self.loss @ histogram)))

    def goes_left(self, node: SplitNode | _Choice, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return whether each of `rows` goes left at a split."""
        left: NDArray[np.bool_] = self.cuts.codes[rows, node.feature] <= node.cut
        return left


@dataclass(frozen=True)
class LeafNode:
    """Leaf of a growing tree."""

    value: int
    """Row of `GrowthProblem.loss`."""


@dataclass(frozen=True)
class SplitNode:
    """Split of a growing tree: rows whose bin of `feature` is at most `cut` go left."""

    feature: int
    cut: int
    left: Node
    right: Node


Node = LeafNode | SplitNode


class _Choice(NamedTuple):
    loss: float
    feature: int
    cut: int


def grow(problem: GrowthProblem, leaves: int, sweeps: int = 4) -> Node:
    """Return a tree of at most `leaves` leaves, optimized in up to `sweeps` sweeps at every fourth leaf."""
    root: Node = problem.leaf(problem.rows)
    known: dict[bytes, _Choice] = {}
    for size in range(2, leaves + 1):
        root = _split_best(problem, root, known)
        if size % _SWEEP_EVERY == 0 or size == leaves:
            root = optimize(problem, root, sweeps)
    return root


def prune(problem: GrowthProblem, root: Node, sweeps: int = 1) -> Iterator[Node]:
    """Yield ever smaller trees: the weakest split is merged, the others are optimized."""
    while isinstance(root, SplitNode):
        root = optimize(problem, _merge_weakest(problem, root), sweeps)
        yield root


def optimize(problem: GrowthProblem, root: Node, sweeps: int) -> Node:
    """Return the tree with every split and leaf chosen again, from the leaves up."""
    before = total_loss(problem, root)
    for _ in range(sweeps):
        root = _swept(problem, root, problem.rows)
        after = total_loss(problem, root)
        if after >= before * (1.0 - _CONVERGED):
            break
        before = after
    return root


def total_loss(problem: GrowthProblem, root: Node) -> float:
    """Return the weighted loss of a tree over all rows."""
    return float(_losses(problem, root, problem.rows).sum())


def count(node: Node) -> int:
    """Return the number of leaves."""
    return 1 if isinstance(node, LeafNode) else count(node.left) + count(node.right)


def _swept(problem: GrowthProblem, node: Node, rows: NDArray[np.intp]) -> Node:
    if isinstance(node, LeafNode):
        return problem.leaf(rows)
    goes_left = problem.goes_left(node, rows)
    lefts = int(goes_left.sum())
    if min(lefts, rows.size - lefts) < problem.min_rows:  # splits above moved the rows of one side away
        return _swept(problem, node.left if 2 * lefts >= rows.size else node.right, rows)
    left, right = _swept(problem, node.left, rows[goes_left]), _swept(problem, node.right, rows[~goes_left])
    if left == right:
        return left
    on_left, on_right = _losses(problem, left, rows), _losses(problem, right, rows)
    now = float(on_left[goes_left].sum() + on_right[~goes_left].sum())
    sums = problem.cuts.histogram(rows, on_left - on_right).cumsum(axis=1)[:, :-1]
    choice = _least(np.where(_allowed(problem, rows), on_right.sum() + sums, np.inf))
    if choice.loss < now * (1.0 - _MIN_GAIN):
        return SplitNode(choice.feature, choice.cut, left, right)
    return replace(node, left=left, right=right)


def _losses(problem: GrowthProblem, node: Node, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the weighted loss of each of `rows` in a subtree."""
    if isinstance(node, LeafNode):
        own: NDArray[np.float64] = problem.loss[node.value][problem.bins[rows]] * problem.weight[rows]
        return own
    goes_left = problem.goes_left(node, rows)
    losses = np.empty(rows.size)
    losses[goes_left] = _losses(problem, node.left, rows[goes_left])
    losses[~goes_left] = _losses(problem, node.right, rows[~goes_left])
    return losses


def _split_best(problem: GrowthProblem, root: Node, known: dict[bytes, _Choice]) -> Node:
    """Return the tree with the best leaf split; `known` caches splits by rows."""
    best_gain, best = _MIN_GAIN, root
    for path, leaf, rows in _nodes(problem, root, problem.rows):
        if isinstance(leaf, SplitNode):
            continue
        key = rows.tobytes()
        choice = known[key] = known[key] if key in known else _best_split(problem, rows)
        gain = float(_losses(problem, leaf, rows).sum()) - choice.loss
        if gain > best_gain:
            goes_left = problem.goes_left(choice, rows)
            sides = problem.leaf(rows[goes_left]), problem.leaf(rows[~goes_left])
            split = SplitNode(choice.feature, choice.cut, *sides)
            best_gain, best = gain, _replaced(root, path, split)
    return best


def _best_split(problem: GrowthProblem, rows: NDArray[np.intp]) -> _Choice:
    """Return the split of least loss when both sides get their best leaves."""
    if rows.size < 2 * problem.min_rows:
        return _Choice(np.inf, 0, 0)
    weight, target_bins = problem.weight[rows], problem.loss.shape[1]
    joint = problem.cuts.joint_histogram(rows, problem.bins[rows], weight, target_bins)
    below = joint.cumsum(axis=1)  # features, cuts + 1, bins
    losses = below @ problem.loss.T
    left, right = losses[:, :-1], losses[:, -1:] - losses[:, :-1]
    total = left.min(axis=2) + right.min(axis=2)
    return _least(np.where(_allowed(problem, rows), total, np.inf))


def _allowed(problem: GrowthProblem, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Return the splits that leave enough rows on both sides, shape (features, cuts)."""
    lefts = problem.cuts.histogram(rows, np.ones(rows.size)).cumsum(axis=1)[:, :-1]
    allowed: NDArray[np.bool_] = (lefts >= problem.min_rows) & (rows.size - lefts >= problem.min_rows)
    return allowed


def _least(losses: NDArray[np.float64]) -> _Choice:
    at = int(np.argmin(losses))
    feature, cut = divmod(at, losses.shape[1])
    return _Choice(float(losses.flat[at]), feature, cut)


def _merge_weakest(problem: GrowthProblem, root: Node) -> Node:
    """Return the tree with the two sibling leaves merged whose split lowers the loss least."""
    least, best = np.inf, root
    for path, node, rows in _nodes(problem, root, problem.rows):
        if (
            isinstance(node, SplitNode)
            and isinstance(node.left, LeafNode)
            and isinstance(node.right, LeafNode)
        ):
            leaf = problem.leaf(rows)
            loss = float(_losses(problem, leaf, rows).sum() - _losses(problem, node, rows).sum())
            if loss < least:
                least, best = loss, _replaced(root, path, leaf)
    return best


def _nodes(
    problem: GrowthProblem, node: Node, rows: NDArray[np.intp], path: tuple[bool, ...] = ()
) -> Iterator[tuple[tuple[bool, ...], Node, NDArray[np.intp]]]:
    """Yield the path (left is True), node and rows of every node, parents first, left before right."""
    yield path, node, rows
    if isinstance(node, SplitNode):
        goes_left = problem.goes_left(node, rows)
        yield from _nodes(problem, node.left, rows[goes_left], (*path, True))
        yield from _nodes(problem, node.right, rows[~goes_left], (*path, False))


def _replaced(node: Node, path: tuple[bool, ...], new: Node) -> Node:
    """Return the tree with another node at the end of a path."""
    if not path or isinstance(node, LeafNode):
        return new
    if path[0]:
        return replace(node, left=_replaced(node.left, path[1:], new))
    return replace(node, right=_replaced(node.right, path[1:], new))
