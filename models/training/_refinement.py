"""Refinement of a surrogate to one small tree (adapter-caching paper, section 6.1).

Complexity is the number of decision rules. A tree of each size up to 1.5 times the limit is scored on
held-out groups; the chosen one has the least error plus a penalty per rule. Trees are fitted to the twin's
results or to soft labels of a boosted model (distillation), whichever gives the smaller error. Soft labels
also cover scenarios between the simulated ones.

Growth of small trees for any loss, beyond greedy splits.

CART chooses each split once, for the variance. Here a tree grows for the loss that scores it. Every split is
then optimized with the rest of the tree fixed (tree alternating optimization, Carreira-Perpiñán and
Tavallali, NeurIPS 2018). Pruning merges the weakest split each time (cost-complexity pruning) and optimizes
again. Growth is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import f1_score

from capplan._jit import jit
from capplan.models.calibration._least_squares import smape
from capplan.models.surrogates._features import FEATURES, expected_tok_s
from capplan.models.surrogates._outputs import round_down
from capplan.models.surrogates._tree import LOG_OVER_EXPECTED, PROBABILITY, Tree
from capplan.models.training._evaluation import Split, grouped_folds

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
        return np.asarray(self.cuts.codes[rows, node.feature] <= node.cut)


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


def prune(problem: GrowthProblem, root: Node) -> Iterator[Node]:
    """Yield ever smaller trees: the weakest split is merged, the others are optimized."""
    while isinstance(root, SplitNode):
        root = optimize(problem, _merge_weakest(problem, root), sweeps=1)
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
        return np.asarray(problem.loss[node.value][problem.bins[rows]] * problem.weight[rows])
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
    return np.asarray((lefts >= problem.min_rows) & (rows.size - lefts >= problem.min_rows))


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


Features: TypeAlias = NDArray[np.float32]
Floats: TypeAlias = NDArray[np.float64]
LabelModel: TypeAlias = Callable[[Features, Floats], Callable[[Features], Floats]]
"""Fits a model to features and targets, and returns its prediction function: soft labels for a tree."""

_LIMIT: Final[Mapping[str, int]] = MappingProxyType({LOG_OVER_EXPECTED: 32, PROBABILITY: 16})
"""Rules of the paper's small trees (table 4)."""

_PENALTY: Final[Mapping[str, float]] = MappingProxyType({LOG_OVER_EXPECTED: 0.01, PROBABILITY: 0.02})
"""Penalty per rule in percentage points of SMAPE, or of 1 - macro-F1."""

_OVERSIZE: Final = 1.5  # largest tree over the limit
_SYNTHETIC: Final = 2.0  # synthetic over simulated rows
_SYNTHETIC_WEIGHT: Final = 0.3
_JITTER: Final = 0.03  # standard deviation of the logarithm of each feature of a synthetic row
_LEAST_TOK_S: Final = 1e-3
_MIN_LEAF_ROWS: Final = 10
_LEAF_QUANTILES: Final = 40  # candidate values of a throughput leaf during growth
_PROBABILITY_BINS: Final = 20
_CLASS_WEIGHT: Final = 0.5  # weight of a wrong class beside the Brier score


@dataclass(frozen=True)
class TreeObjective:
    """Targets and loss of a tree; arrays of n scenarios."""

    answer: str
    """Meaning of the target, one of `tree.ANSWERS`."""
    features: Features
    target: Floats
    weight: Floats
    scale_tok_s: Floats
    """Throughput of a target of 0; 1 for probabilities."""

    def of(self, rows: NDArray[np.int64]) -> TreeObjective:
        """Return the objective on a subset of rows."""
        arrays = {name: value[rows] for name, value in vars(self).items() if name != "answer"}
        return replace(self, **arrays)

    def error(self, predicted: Floats) -> float:
        """Return SMAPE of throughput, or 1 - macro-F1 of starvation, in per cent."""
        if self.answer != PROBABILITY:
            return smape(self.scale_tok_s * np.exp(predicted), self.scale_tok_s * np.exp(self.target))
        return 100.0 * (1.0 - float(f1_score(self.target >= 0.5, predicted >= 0.5, average="macro")))

    def leaf_value(self, rows: NDArray[np.intp]) -> float:
        """Return the best value of a leaf of these rows.

        Throughput: the target of least SMAPE, which is one of the rows' own, because the error of each row is
        concave to either side of its target. Starvation: the starved share with Laplace smoothing.
        """
        target = self.target[rows]
        if self.answer == PROBABILITY:
            return float((target.sum() + 1.0) / (rows.size + 2.0))
        tried = np.unique(np.quantile(target, np.linspace(0.2, 0.8, 61), method="nearest"))
        return float(tried[np.argmin(_smape_loss(tried, target) @ self.weight[rows])])

    def growth_problem(self) -> GrowthProblem:
        """Return the objective in bins."""
        cuts = cut(self.features)
        if self.answer == PROBABILITY:
            chances = np.linspace(0.0, 1.0, _PROBABILITY_BINS + 1)
            values = (np.arange(_PROBABILITY_BINS) + 0.5) / _PROBABILITY_BINS
            squared = (values[:, None] - chances) ** 2
            wrong = np.where(values[:, None] >= 0.5, 1.0 - chances, chances)
            bins = np.rint(self.target * _PROBABILITY_BINS).astype(np.intp)
            loss = (1.0 - _CLASS_WEIGHT) * squared + _CLASS_WEIGHT * wrong
            return GrowthProblem(cuts, bins, self.weight, loss, _MIN_LEAF_ROWS)
        values = np.unique(np.quantile(self.target, np.linspace(0.0, 1.0, _LEAF_QUANTILES)))
        bins = np.searchsorted((values[1:] + values[:-1]) / 2.0, self.target)
        return GrowthProblem(cuts, bins, self.weight, _smape_loss(values, values), _MIN_LEAF_ROWS)


def throughput_objective(features: Features, throughput_tok_s: Floats) -> TreeObjective:
    """Return the objective of throughput: the logarithm of its ratio to `expected_tok_s`."""
    scale = expected_tok_s(features)
    target = np.log(np.maximum(throughput_tok_s, _LEAST_TOK_S) / np.maximum(scale, _LEAST_TOK_S))
    return TreeObjective(LOG_OVER_EXPECTED, features, target, np.ones(len(features)), scale)


def starvation_objective(features: Features, starved: NDArray[np.bool_]) -> TreeObjective:
    """Return the objective of the probability of starvation."""
    ones = np.ones(len(features))
    return TreeObjective(PROBABILITY, features, starved.astype(float), ones, ones)


def _smape_loss(predicted: Floats, targets: Floats) -> Floats:
    """Return |p - a| / (p + a) of logarithms, shape (predicted, targets)."""
    return np.asarray(np.abs(np.tanh((predicted[:, None] - targets) / 2.0)))


@dataclass(frozen=True)
class FrontPoint:
    """Tree of a Pareto front, grown on all scenarios."""

    rules: int
    error: float
    """Error on held-out groups: SMAPE of throughput, or 1 - macro-F1 of starvation, in per cent."""
    tree: Tree


@dataclass(frozen=True)
class Refinement:
    """Result of a refinement."""

    front: tuple[FrontPoint, ...]
    """Pareto front of rules and error, fewest rules first."""
    chosen: FrontPoint
    """Least error plus penalty within the limit."""
    out_of_fold: Floats
    """Predictions for held-out groups by trees grown like the chosen one, shape (n,)."""
    recipe: str
    """Labels of the trees: ``twin`` or ``teacher`` (the soft labels)."""
    errors: Mapping[str, Mapping[int, float]]
    """Error by number of rules, for each recipe."""


def refine(
    objective: TreeObjective,
    groups: NDArray[np.int64],
    *,
    limit: int | None = None,
    labels: LabelModel | None = None,
    folds: int = 5,
    seed: int = 0,
) -> Refinement:
    """Return small trees of one objective, by default with at most the rules of the paper's (`_LIMIT`).

    Near-duplicate scenarios share a group, shape (n,). Without `labels`, trees are fitted to the twin's
    results only. The seed is of the cross-validation, and draws the synthetic scenarios.
    """
    limit = _LIMIT[objective.answer] if limit is None else limit
    classes = objective.target >= 0.5 if objective.answer == PROBABILITY else None
    splits = grouped_folds(groups, folds=folds, seed=seed, classes=classes)
    largest = int(np.ceil(limit * _OVERSIZE))
    penalty = _PENALTY[objective.answer]
    recipes: dict[str, LabelModel | None] = {"twin": None} | ({"teacher": labels} if labels else {})
    predicted = {
        name: _out_of_fold(objective, splits, largest, model, seed) for name, model in recipes.items()
    }
    errors = {
        name: {rules: objective.error(by_rules[rules]) for rules in range(1, largest + 1)}
        for name, by_rules in predicted.items()
    }
    least = {
        name: min(error + penalty * rules for rules, error in by_rules.items() if rules <= limit)
        for name, by_rules in errors.items()
    }
    recipe = min(least, key=lambda name: least[name])
    trees = _trees(objective, largest, recipes[recipe], seed)
    points = [FrontPoint(tree.rules, errors[recipe][size], tree) for size, tree in sorted(trees.items())]
    allowed = [point for point in points if point.rules <= limit]
    chosen = min(allowed, key=lambda point: (point.error + penalty * point.rules, point.rules))
    out_of_fold = predicted[recipe][chosen.rules]
    return Refinement(_pareto(points), chosen, out_of_fold, recipe, MappingProxyType(errors))


def boosted_labels(seed: int) -> LabelModel:
    """Return a soft-label model of boosted trees for either task."""

    def fit(features: Features, target: Floats) -> Callable[[Features], Floats]:
        is_probability = bool(np.isin(target, (0.0, 1.0)).all())
        model = HistGradientBoostingRegressor(
            loss="squared_error" if is_probability else "absolute_error",
            max_iter=200,
            learning_rate=0.08,
            min_samples_leaf=20,
            random_state=seed,
        ).fit(features, target)
        bounds = (0.0, 1.0) if is_probability else (-np.inf, np.inf)
        return lambda rows: np.clip(model.predict(rows), *bounds)

    return fit


def _pareto(points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    front: list[FrontPoint] = []
    for point in points:
        if not front or point.error < front[-1].error:
            front.append(point)
    return tuple(front)


def _out_of_fold(
    objective: TreeObjective, splits: Sequence[Split], largest: int, labels: LabelModel | None, seed: int
) -> Floats:
    """Return predictions for held-out groups by number of rules 1 to `largest`, shape (largest + 1, n).

    If no tree of a fold has that many rules, the next smaller one predicts.
    """
    predicted = np.empty((largest + 1, len(objective.features)))
    for split in splits:
        trees = _trees(objective.of(split.train), largest, labels, seed)
        for rules in range(1, largest + 1):
            fitting = trees[max(n for n in trees if n <= rules)]
            predicted[rules, split.test] = fitting.predict(objective.features[split.test])
    return predicted


def _trees(objective: TreeObjective, largest: int, labels: LabelModel | None, seed: int) -> dict[int, Tree]:
    """Return trees by number of rules: the largest one, and its pruned versions."""
    problem = (objective if labels is None else _distilled(objective, labels, seed)).growth_problem()
    nodes: dict[int, Node] = {}
    whole = grow(problem, largest)
    for node in (whole, *prune(problem, whole)):
        nodes.setdefault(count(node), node)
    return {rules: export_tree(node, problem.cuts, objective) for rules, node in nodes.items()}


def _distilled(objective: TreeObjective, labels: LabelModel, seed: int) -> TreeObjective:
    """Return the objective with soft labels for the same scenarios and for synthetic ones between them."""
    predict = labels(objective.features, objective.target)
    rng = np.random.default_rng([seed, len(objective.features)])
    origin = rng.integers(0, len(objective.features), int(_SYNTHETIC * len(objective.features)))
    noise = np.exp(rng.normal(0.0, _JITTER, (origin.size, objective.features.shape[1])))
    between = (objective.features[origin] * noise).astype(np.float32)
    weight = np.full(origin.size, _SYNTHETIC_WEIGHT) * objective.weight[origin]
    return replace(
        objective,
        features=np.concatenate([objective.features, between]),
        target=np.concatenate([predict(objective.features), predict(between)]),
        weight=np.concatenate([objective.weight, weight]),
    )


def export_tree(root: Node, cuts: Cuts, objective: TreeObjective) -> Tree:
    """Return a grown tree on features instead of bins, with leaf values set on the scenarios of `objective`.

    Splits that send all of these scenarios to one side are dropped.
    """
    nodes: list[dict[str, Any]] = []

    def add(node: Node, rows: NDArray[np.intp]) -> int:
        if isinstance(node, SplitNode):
            threshold = cuts.thresholds[node.feature, node.cut]
            goes_left = objective.features[rows, node.feature] <= threshold
            if goes_left.all() or not goes_left.any():
                return add(node.left if goes_left.all() else node.right, rows)
        number = len(nodes)
        nodes.append({})
        if isinstance(node, SplitNode):
            nodes[number] = {
                "feature": FEATURES[node.feature],
                "at_most": float(threshold),
                "left": add(node.left, rows[goes_left]),
                "right": add(node.right, rows[~goes_left]),
            }
        else:
            share = rows.size / len(objective.features)
            nodes[number] = {"value": objective.leaf_value(rows), "share": share}
        return number

    add(root, np.arange(len(objective.features)))
    return Tree.from_document({"answer": objective.answer, "nodes": nodes})
