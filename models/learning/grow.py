"""Growing small trees for a loss of one's own, beyond greedy splits.

CART chooses each split once, for the variance, and never returns to it. Here a tree grows for the loss that
it will be judged by; then every question is asked again while the rest of the tree stays (tree alternating
optimisation, Carreira-Perpiñán and Tavallali, NeurIPS 2018): among all thresholds, which sends the fewest
scenarios to the worse side? Smaller trees come from larger ones, by giving up the weakest split each time
(cost-complexity pruning) and asking again. Nothing is random.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.models.learning.cuts import Cuts

_GAIN: Final = 1e-9  # of the whole loss: less is rounding


@dataclass(frozen=True)
class Task:
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

    def leaf(self, rows: NDArray[np.intp]) -> Leaf:
        """Return the leaf that answers `rows` best."""
        histogram = np.bincount(self.bins[rows], self.weight[rows], self.loss.shape[1])
        return Leaf(int(np.argmin(self.loss @ histogram)))


@dataclass(frozen=True)
class Leaf:
    """An end of a tree."""

    value: int
    """Index into `Task.values`."""


@dataclass(frozen=True)
class Split:
    """A question: rows whose bin of `feature` is at most `cut` go left."""

    feature: int
    cut: int
    left: Node
    right: Node


Node = Leaf | Split


class _Choice(NamedTuple):
    cost: float
    feature: int
    cut: int


def grow(task: Task, leaves: int, sweeps: int = 4) -> Node:
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


def smaller(task: Task, root: Node, sweeps: int = 1) -> Iterator[Node]:
    """Yield ever smaller trees: the split that is missed least is given up, the others are asked again."""
    rows = np.arange(task.bins.size)
    while isinstance(root, Split):
        root = improve(task, _merge_weakest(task, root, rows), sweeps)
        yield root


def improve(task: Task, root: Node, sweeps: int) -> Node:
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


def cost(task: Task, root: Node) -> float:
    """Return the weighted loss of a tree over all rows."""
    return float(_losses(task, root, np.arange(task.bins.size)).sum())


def count(node: Node) -> int:
    """Return the number of leaves."""
    return 1 if isinstance(node, Leaf) else count(node.left) + count(node.right)


def _swept(task: Task, node: Node, rows: NDArray[np.intp]) -> Node:
    if isinstance(node, Leaf):
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
        return Split(choice.feature, choice.cut, left, right)
    return replace(node, left=left, right=right)


def _losses(task: Task, node: Node, rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the weighted loss of each of `rows` under a part of a tree."""
    if isinstance(node, Leaf):
        own: NDArray[np.float64] = task.loss[node.value][task.bins[rows]] * task.weight[rows]
        return own
    goes_left = task.cuts.codes[rows, node.feature] <= node.cut
    losses = np.empty(rows.size)
    losses[goes_left] = _losses(task, node.left, rows[goes_left])
    losses[~goes_left] = _losses(task, node.right, rows[~goes_left])
    return losses


def _split_best(task: Task, root: Node, rows: NDArray[np.intp], known: dict[bytes, _Choice]) -> Node:
    """Return the tree with that leaf split whose split lowers the loss most; the same one if none does.

    `known` remembers the best split of rows that were looked at before.
    """
    gains: list[tuple[float, int, Split]] = []
    for number, (leaf, own) in enumerate(_ends(task, root, rows)):
        key = own.tobytes()
        choice = known[key] = known[key] if key in known else _best_split(task, own)
        gain = float(_losses(task, leaf, own).sum()) - choice.cost
        if np.isfinite(choice.cost) and gain > _GAIN:
            goes_left = task.cuts.codes[own, choice.feature] <= choice.cut
            sides = task.leaf(own[goes_left]), task.leaf(own[~goes_left])
            gains.append((gain, -number, Split(choice.feature, choice.cut, *sides)))
    if not gains:
        return root
    _, number, split = max(gains, key=lambda each: each[:2])
    return _with_end(root, [-number], split)


def _best_split(task: Task, rows: NDArray[np.intp]) -> _Choice:
    """Return the question that leaves the least loss when both sides get their best leaves."""
    if rows.size < 2 * task.min_rows:
        return _Choice(np.inf, 0, 0)
    joint = task.cuts.joint_histogram(rows, task.bins[rows], task.weight[rows], task.loss.shape[1])
    below = joint.cumsum(axis=1)  # features, cuts + 1, bins
    losses = below @ task.loss.T
    left, right = losses[:, :-1], losses[:, -1:] - losses[:, :-1]
    total = left.min(axis=2) + right.min(axis=2)
    return _least(np.where(_allowed(task, rows), total, np.inf))


def _allowed(task: Task, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Tell which questions leave enough rows on both sides, shape (features, cuts)."""
    lefts = task.cuts.counts(rows).cumsum(axis=1)[:, :-1]
    allowed: NDArray[np.bool_] = (lefts >= task.min_rows) & (rows.size - lefts >= task.min_rows)
    return allowed


def _least(costs: NDArray[np.float64]) -> _Choice:
    at = int(np.argmin(costs))
    feature, cut = divmod(at, costs.shape[1])
    return _Choice(float(costs.flat[at]), feature, cut)


def _merge_weakest(task: Task, root: Node, rows: NDArray[np.intp]) -> Node:
    """Return the tree with those two sister leaves made one that are missed least."""
    best: tuple[float, Node] | None = None
    for path, own, split in _twigs(root, rows, (), task):
        leaf = task.leaf(own)
        loss = float(_losses(task, leaf, own).sum() - _losses(task, split, own).sum())
        if best is None or loss < best[0]:
            best = (loss, _with(root, path, leaf))
    return root if best is None else best[1]


def _twigs(
    node: Node, rows: NDArray[np.intp], path: tuple[bool, ...], task: Task
) -> Iterator[tuple[tuple[bool, ...], NDArray[np.intp], Split]]:
    """Yield the splits whose children are both leaves: the way there (left is True) and their rows."""
    if isinstance(node, Leaf):
        return
    if isinstance(node.left, Leaf) and isinstance(node.right, Leaf):
        yield path, rows, node
        return
    goes_left = task.cuts.codes[rows, node.feature] <= node.cut
    yield from _twigs(node.left, rows[goes_left], (*path, True), task)
    yield from _twigs(node.right, rows[~goes_left], (*path, False), task)


def _with(node: Node, path: tuple[bool, ...], new: Node) -> Node:
    """Return the tree with another node at the end of a path."""
    if not path:
        return new
    assert isinstance(node, Split)  # noqa: S101 - a path leads through splits
    if path[0]:
        return replace(node, left=_with(node.left, path[1:], new))
    return replace(node, right=_with(node.right, path[1:], new))


def _ends(task: Task, node: Node, rows: NDArray[np.intp]) -> Iterator[tuple[Leaf, NDArray[np.intp]]]:
    """Yield the leaves from left to right, with their rows."""
    if isinstance(node, Leaf):
        yield node, rows
        return
    goes_left = task.cuts.codes[rows, node.feature] <= node.cut
    yield from _ends(task, node.left, rows[goes_left])
    yield from _ends(task, node.right, rows[~goes_left])


def _with_end(node: Node, left_to_go: list[int], new: Node) -> Node:
    """Return the tree with another node in place of a leaf, counted from the left."""
    if isinstance(node, Leaf):
        left_to_go[0] -= 1
        return new if left_to_go[0] == -1 else node
    left = _with_end(node.left, left_to_go, new)
    return replace(node, left=left, right=_with_end(node.right, left_to_go, new))
