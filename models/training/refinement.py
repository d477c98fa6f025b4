"""Refinement of a surrogate to one small tree (adapter-caching paper, section 6.1).

Complexity is the number of decision rules. A tree of each size up to 1.5 times the limit is scored on
held-out groups; the chosen one has the least error plus a penalty per rule. Trees are fitted to the twin's
results or to soft labels of a boosted model (distillation), whichever gives the smaller error. Soft labels
also cover scenarios between the simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import f1_score

from capplan.models.calibration.least_squares import smape
from capplan.models.surrogates.features import FEATURES, expected_tok_s
from capplan.models.surrogates.tree import LOG_OVER_EXPECTED, PROBABILITY, Tree
from capplan.models.training.evaluation import Split, grouped_folds
from capplan.models.training.tree_growth import Cuts, GrowthProblem, Node, SplitNode, count, cut, grow, prune

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
    loss: Floats = np.abs(np.tanh((predicted[:, None] - targets) / 2.0))
    return loss


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
    """Return small trees of one objective.

    Parameters
    ----------
    objective
        By `throughput_objective` or `starvation_objective`.
    groups
        Near-duplicate scenarios share a group, shape (n,).
    limit
        Most rules of the chosen tree; None: that of the paper's small trees.
    labels
        Soft-label model; None: trees are fitted to the twin's results only.
    folds, seed
        Of the cross-validation; the seed also draws the synthetic scenarios.
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
