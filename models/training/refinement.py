"""Refinement of a surrogate to one small tree (adapter-caching paper, section 6.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.metrics import f1_score

from capplan.models.calibration.least_squares import smape
from capplan.models.surrogates.features import expected_tok_s
from capplan.models.surrogates.outputs import LEAF
from capplan.models.surrogates.tree import LOG_OVER_EXPECTED, LOG_TOK_S, PROBABILITY, Tree
from capplan.models.training.evaluation import Split, grouped_folds
from capplan.models.training.tree_growth import Cuts, GrowthProblem, Node, SplitNode, count, cut, grow, prune

Floats: TypeAlias = NDArray[np.float64]

_LEAST_TOK_S: Final = 1e-3

_LEAST_LEAF: Final = 10  # rows

_QUANTILES: Final = 40  # values that a throughput leaf may answer while a tree grows

_CHANCES: Final = 20  # bins of a teacher's probability

_HARD: Final = 0.5  # weight of a wrong class beside the squared error of the probability (Brier)


@dataclass(frozen=True)
class TreeObjective:
    """Scenarios and their answers.

    Attributes
    ----------
    answer
        What the target is, one of `tree.ANSWERS`.
    features
        In the order of `FEATURES`, shape (n, features).
    target
        What leaves should answer, shape (n,).
    weight
        Of each scenario, shape (n,).
    scale_tok_s
        Throughput of a target of 0, shape (n,); 1 for probabilities.
    """

    answer: str
    features: NDArray[np.float32]
    target: Floats
    weight: Floats
    scale_tok_s: Floats

    def of(self, rows: NDArray[np.int64]) -> TreeObjective:
        """Return the part of some rows."""
        return TreeObjective(
            self.answer, self.features[rows], self.target[rows], self.weight[rows], self.scale_tok_s[rows]
        )

    def taught(self, features: NDArray[np.float32], target: Floats, weight: Floats) -> TreeObjective:
        """Return the same lesson with a teacher's scenarios and answers; only trees grow on it."""
        return replace(self, features=features, target=target, weight=weight)

    def error(self, answers: Floats) -> float:
        """Return how wrong answers are, in percent: SMAPE of throughput, or 1 - macro-F1 of starvation."""
        if self.answer != PROBABILITY:
            return smape(self.scale_tok_s * np.exp(answers), self.scale_tok_s * np.exp(self.target))
        return 100.0 * (1.0 - float(f1_score(self.target >= 0.5, answers >= 0.5, average="macro")))

    def best_leaf(self, rows: NDArray[np.intp]) -> float:
        """Return what a leaf of these rows should answer.

        Throughput: the target of least SMAPE, which is one of the rows' own, because the error of each row is
        concave to either side of its target. Starvation: the share of starved, drawn towards a half as if one
        more of each kind had been seen (Laplace).
        """
        target = self.target[rows]
        if self.answer == PROBABILITY:
            return float((target.sum() + 1.0) / (rows.size + 2.0))
        tried = np.unique(np.quantile(target, np.linspace(0.2, 0.8, 61), method="nearest"))
        return float(tried[np.argmin(_smape_loss(tried, target) @ self.weight[rows])])

    def task(self) -> GrowthProblem:
        """Return the lesson in bins."""
        cuts = cut(self.features)
        if self.answer == PROBABILITY:
            chances = np.linspace(0.0, 1.0, _CHANCES + 1)
            values = (np.arange(_CHANCES) + 0.5) / _CHANCES
            squared = (values[:, None] - chances) ** 2
            wrong = np.where(values[:, None] >= 0.5, 1.0 - chances, chances)
            bins = np.rint(self.target * _CHANCES).astype(np.intp)
            return GrowthProblem(
                cuts, bins, self.weight, values, (1.0 - _HARD) * squared + _HARD * wrong, _LEAST_LEAF
            )
        values = np.unique(np.quantile(self.target, np.linspace(0.0, 1.0, _QUANTILES)))
        bins = np.searchsorted((values[1:] + values[:-1]) / 2.0, self.target)
        return GrowthProblem(cuts, bins, self.weight, values, _smape_loss(values, values), _LEAST_LEAF)


def throughput_objective(
    features: NDArray[np.float32], throughput_tok_s: Floats, *, relative: bool
) -> TreeObjective:
    """Return the lesson of throughput: its logarithm over what the features expect, or its logarithm."""
    scale = expected_tok_s(features) if relative else np.ones(len(features))
    target = np.log(np.maximum(throughput_tok_s, _LEAST_TOK_S) / np.maximum(scale, _LEAST_TOK_S))
    answer = LOG_OVER_EXPECTED if relative else LOG_TOK_S
    return TreeObjective(answer, features, target, np.ones(len(features)), scale)


def starvation_objective(features: NDArray[np.float32], starved: NDArray[np.bool_]) -> TreeObjective:
    """Return the lesson of starvation."""
    ones = np.ones(len(features))
    return TreeObjective(PROBABILITY, features, starved.astype(float), ones, ones)


def _smape_loss(answers: Floats, targets: Floats) -> Floats:
    """Return |p - a| / (p + a) of logarithms, shape (answers, targets)."""
    loss: Floats = np.abs(np.tanh((answers[:, None] - targets) / 2.0))
    return loss


@dataclass
class _TreeColumns:
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


def export_tree(root: Node, cuts: Cuts, lesson: TreeObjective) -> Tree:
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
    columns = _TreeColumns()

    def plant(node: Node, rows: NDArray[np.intp]) -> int:
        if isinstance(node, SplitNode):
            threshold = cuts.thresholds[node.feature, node.cut]
            goes_left = lesson.features[rows, node.feature] <= threshold
            if goes_left.all() or not goes_left.any():
                return plant(node.left if goes_left.all() else node.right, rows)
        number = columns.add(rows.size / len(lesson.features))
        if isinstance(node, SplitNode):
            columns.feature[number], columns.threshold[number] = node.feature, float(threshold)
            columns.left[number] = plant(node.left, rows[goes_left])
            columns.right[number] = plant(node.right, rows[~goes_left])
        else:
            columns.value[number] = lesson.best_leaf(rows)
        return number

    plant(root, np.arange(len(lesson.features)))
    return Tree(lesson.answer, **{name: tuple(column) for name, column in vars(columns).items()})


Features: TypeAlias = NDArray[np.float32]

LabelModel: TypeAlias = Callable[[Features, Floats], Callable[[Features], Floats]]

"""Fits a better model to features and targets, and returns what answers for others: the logarithm that leaves
hold, or the probability of starvation."""

THROUGHPUT_RULES: Final = 32

STARVATION_RULES: Final = 16

"""What the paper's small trees have at most (table 4)."""

_PENALTY: Final[Mapping[str, float]] = MappingProxyType({"throughput": 0.01, "starvation": 0.02})

"""What one more rule must win: percentage points of SMAPE, or of 1 - macro-F1."""

_WHOLE: Final = 1.5  # the largest tree, over what is allowed

_SYNTHETIC: Final = 2.0  # rows that only the teacher answers, over rows that the twin answered

_SYNTHETIC_WEIGHT: Final = 0.3

_JITTER: Final = 0.03  # standard deviation of the logarithm of each feature of a synthetic row


@dataclass(frozen=True)
class FrontPoint:
    """A tree, and what it costs.

    Attributes
    ----------
    rules
        Number of decision rules.
    error
        Of trees grown this way, on scenarios of groups that they were not grown on: SMAPE of throughput, or
        1 - macro-F1 of starvation, in percent.
    tree
        Grown on all scenarios.
    """

    rules: int
    error: float
    tree: Tree


@dataclass(frozen=True)
class Refinement:
    """What the search found.

    Attributes
    ----------
    front
        Trees that no other one beats in both rules and error, fewest rules first (Pareto front).
    chosen
        Least error plus penalty, within the limit.
    unseen
        What a tree grown the chosen way answers to scenarios of groups that it was not grown on, shape (n,).
    recipe
        What the trees learned from: ``twin`` or ``teacher``.
    errors
        Of each recipe: error by number of rules.
    """

    front: tuple[FrontPoint, ...]
    chosen: FrontPoint
    unseen: Floats
    recipe: str
    errors: Mapping[str, Mapping[int, float]]


def refine_throughput(
    features: Features,
    throughput_tok_s: Floats,
    groups: NDArray[np.int64],
    *,
    relative: bool = True,
    limit: int = THROUGHPUT_RULES,
    teacher: LabelModel | None = None,
    folds: int = 5,
    seed: int = 0,
) -> Refinement:
    """Return small trees of throughput.

    Parameters
    ----------
    features
        In the order of `FEATURES`, shape (n, features).
    throughput_tok_s
        The twin's answers, shape (n,).
    groups
        Near twins share one; they are never on both sides of a split. Shape (n,).
    relative
        Whether leaves correct `features.expected_tok_s`, or hold a throughput, as the paper's do.
    limit
        Most rules of the chosen tree.
    teacher
        Fits a better model; without one, trees learn from the twin only.
    folds, seed
        Of the cross-validation; the seed also draws the teacher's scenarios.
    """
    lesson = throughput_objective(features, throughput_tok_s, relative=relative)
    parts = grouped_folds(groups, folds=folds, seed=seed)
    return _refined(lesson, parts, limit, _PENALTY["throughput"], teacher, seed)


def refine_starvation(
    features: Features,
    starved: NDArray[np.bool_],
    groups: NDArray[np.int64],
    *,
    limit: int = STARVATION_RULES,
    teacher: LabelModel | None = None,
    folds: int = 5,
    seed: int = 0,
) -> Refinement:
    """Return small trees of the probability of starvation; parameters as for `refine_throughput`."""
    lesson = starvation_objective(features, starved)
    parts = grouped_folds(groups, folds=folds, seed=seed, classes=starved)
    return _refined(lesson, parts, limit, _PENALTY["starvation"], teacher, seed)


def _refined(
    lesson: TreeObjective,
    parts: Sequence[Split],
    limit: int,
    penalty: float,
    teacher: LabelModel | None,
    seed: int,
) -> Refinement:
    largest = int(np.ceil(limit * _WHOLE))
    recipes: dict[str, LabelModel | None] = {"twin": None} | ({"teacher": teacher} if teacher else {})
    answers = {name: _unseen(lesson, parts, largest, recipe, seed) for name, recipe in recipes.items()}
    errors = {
        name: {rules: lesson.error(found[rules]) for rules in range(1, largest + 1)}
        for name, found in answers.items()
    }
    best = {name: min(_charged(found, limit, penalty))[0] for name, found in errors.items()}
    recipe = min(best, key=lambda name: best[name])
    trees = _trees(lesson, largest, recipes[recipe], seed)
    points = [FrontPoint(tree.rules, errors[recipe][size], tree) for size, tree in sorted(trees.items())]
    allowed = [point for point in points if point.rules <= limit]
    chosen = min(allowed, key=lambda point: (point.error + penalty * point.rules, point.rules))
    unseen = answers[recipe][chosen.rules]
    return Refinement(_pareto(points), chosen, unseen, recipe, MappingProxyType(errors))


def _charged(errors: Mapping[int, float], limit: int, penalty: float) -> list[tuple[float, int]]:
    return [(error + penalty * rules, rules) for rules, error in errors.items() if rules <= limit]


def _pareto(points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Return the points, fewest rules first, that err less than all with fewer rules."""
    front: list[FrontPoint] = []
    for point in points:
        if not front or point.error < front[-1].error:
            front.append(point)
    return tuple(front)


def _unseen(
    lesson: TreeObjective, parts: Sequence[Split], largest: int, teacher: LabelModel | None, seed: int
) -> Floats:
    """Return the answers to held-out groups by number of rules, 1 to `largest`; shape (largest + 1, n).

    Where no tree of a fold has as many rules as asked, the next smaller one answers.
    """
    answers = np.empty((largest + 1, len(lesson.features)))
    for part in parts:
        trees = _trees(lesson.of(part.train), largest, teacher, seed)
        for rules in range(1, largest + 1):
            fitting = trees[max(n for n in trees if n <= rules)]
            answers[rules, part.test] = fitting.answers(lesson.features[part.test])
    return answers


def _trees(lesson: TreeObjective, largest: int, teacher: LabelModel | None, seed: int) -> dict[int, Tree]:
    """Return trees by number of rules: the largest one, and those that come of giving up its splits."""
    taught = lesson if teacher is None else _distilled(lesson, teacher, seed)
    task = taught.task()
    nodes: dict[int, Node] = {}
    whole = grow(task, largest)
    for node in (whole, *prune(task, whole)):
        nodes.setdefault(count(node), node)
    return {rules: export_tree(node, task.cuts, lesson) for rules, node in nodes.items()}


def _distilled(lesson: TreeObjective, teacher: LabelModel, seed: int) -> TreeObjective:
    """Return the lesson as the teacher gives it: its answers for the same scenarios, and for some between."""
    answer = teacher(lesson.features, lesson.target)
    rng = np.random.default_rng([seed, len(lesson.features)])
    origin = rng.integers(0, len(lesson.features), int(_SYNTHETIC * len(lesson.features)))
    noise = np.exp(rng.normal(0.0, _JITTER, (origin.size, lesson.features.shape[1])))
    between = (lesson.features[origin] * noise).astype(np.float32)
    return lesson.taught(
        features=np.concatenate([lesson.features, between]),
        target=np.concatenate([answer(lesson.features), answer(between)]),
        weight=np.concatenate(
            [lesson.weight, np.full(origin.size, _SYNTHETIC_WEIGHT) * lesson.weight[origin]]
        ),
    )


TeacherAnswer: TypeAlias = Callable[[Features], Floats]


def boosted_labels(seed: int) -> LabelModel:
    """Return a teacher of boosted trees for either task; of classes it learns the probability."""

    def fit(features: Features, target: Floats) -> TeacherAnswer:
        is_probability = bool(np.isin(target, (0.0, 1.0)).all())
        model = HistGradientBoostingRegressor(
            loss="squared_error" if is_probability else "absolute_error",
            max_iter=200,
            learning_rate=0.08,
            min_samples_leaf=20,
            random_state=seed,
        ).fit(features, target)
        bounds = (0.0, 1.0) if is_probability else (-np.inf, np.inf)
        return lambda asked: np.clip(model.predict(asked), *bounds)

    return fit
