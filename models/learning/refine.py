"""Refinement of a surrogate to one small tree (adapter-caching paper, section 6.1).

Complexity is the number of decision rules. For every number of rules up to half as many again as allowed,
there is a tree and its error on scenarios of other groups; the chosen has the least error plus a penalty per
rule. Trees learn from the twin's answers or from a better model's (distillation), whichever errs less: the
teacher also answers for scenarios between those that were simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.models.learning.grow import Node, count, grow, smaller
from capplan.models.learning.lessons import Floats, Lesson, starvation_lesson, throughput_lesson
from capplan.models.learning.planting import planted
from capplan.models.learning.splits import Split, grouped_folds
from capplan.models.surrogates.tree import Tree

Features: TypeAlias = NDArray[np.float32]
Teacher: TypeAlias = Callable[[Features, Floats], Callable[[Features], Floats]]
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
    teacher: Teacher | None = None,
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
    lesson = throughput_lesson(features, throughput_tok_s, relative=relative)
    parts = grouped_folds(groups, folds=folds, seed=seed)
    return _refined(lesson, parts, limit, _PENALTY["throughput"], teacher, seed)


def refine_starvation(
    features: Features,
    starved: NDArray[np.bool_],
    groups: NDArray[np.int64],
    *,
    limit: int = STARVATION_RULES,
    teacher: Teacher | None = None,
    folds: int = 5,
    seed: int = 0,
) -> Refinement:
    """Return small trees of the probability of starvation; parameters as for `refine_throughput`."""
    lesson = starvation_lesson(features, starved)
    parts = grouped_folds(groups, folds=folds, seed=seed, classes=starved)
    return _refined(lesson, parts, limit, _PENALTY["starvation"], teacher, seed)


def _refined(
    lesson: Lesson, parts: Sequence[Split], limit: int, penalty: float, teacher: Teacher | None, seed: int
) -> Refinement:
    largest = int(np.ceil(limit * _WHOLE))
    recipes: dict[str, Teacher | None] = {"twin": None} | ({"teacher": teacher} if teacher else {})
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
    lesson: Lesson, parts: Sequence[Split], largest: int, teacher: Teacher | None, seed: int
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


def _trees(lesson: Lesson, largest: int, teacher: Teacher | None, seed: int) -> dict[int, Tree]:
    """Return trees by number of rules: the largest one, and those that come of giving up its splits."""
    taught = lesson if teacher is None else _distilled(lesson, teacher, seed)
    task = taught.task()
    nodes: dict[int, Node] = {}
    whole = grow(task, largest)
    for node in (whole, *smaller(task, whole)):
        nodes.setdefault(count(node), node)
    return {rules: planted(node, task.cuts, lesson) for rules, node in nodes.items()}


def _distilled(lesson: Lesson, teacher: Teacher, seed: int) -> Lesson:
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
