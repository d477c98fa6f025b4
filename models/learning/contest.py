"""Models that contend for a task: each with what it answers to scenarios that it had not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from capplan.models.learning.boosted import flatten_boosted
from capplan.models.learning.candidates import Options, candidate, learner_of
from capplan.models.learning.judging import rounded, starvation_scores, throughput_errors
from capplan.models.learning.options import OnStage, TrainingOptions
from capplan.models.learning.physics import ServedAndStep, ServedEdge
from capplan.models.learning.search import Tuned, tune
from capplan.models.learning.splits import grouped_folds
from capplan.models.learning.table import TrainingTable
from capplan.models.surrogates.forest import flatten_forest
from capplan.models.surrogates.heads import LOG_ODDS, OVER_EXPECTED, OVER_OFFERED, PROBABILITY, Head, log_odds
from capplan.models.surrogates.tree import Tree

PHYSICS: Final = "physics"
TASKS: Final = ("throughput", "starvation")
_COMPILED: Final = ("forest", "xgboost")


@dataclass(frozen=True)
class Contestant:
    """A fitted model of one task.

    Attributes
    ----------
    name
        Its family.
    task
        ``throughput`` or ``starvation``.
    params
        Hyper-parameters that the search chose.
    head
        What a surrogate keeps of it; without forests if it cannot be shipped.
    unseen
        Tokens per second, or scores that rise with starvation and are 0 at its edge, of every training
        scenario, by a model that saw none of its group; shape (n,).
    scores
        SMAPE in per cent, or macro-F1, by regime.
    tree
        The small tree that it is, or None.
    """

    name: str
    task: str
    params: Mapping[str, Any]
    head: Head
    unseen: NDArray[np.float64]
    scores: Mapping[str, float]
    tree: Tree | None = None

    def line(self) -> dict[str, Any]:
        """Return what a report says of it."""
        scores = rounded(self.scores)
        return {"name": self.name, "task": self.task, "params": dict(self.params), "scores": scores}


def best_of(contestants: Sequence[Contestant], task: str, designs: Sequence[str]) -> Contestant:
    """Return the best, in the mean over designs, of those that compiled code can answer."""
    sign = 1.0 if task == "throughput" else -1.0

    def loss(contestant: Contestant) -> float:
        return sign * float(np.mean([contestant.scores[name] for name in designs]))

    return min((each for each in contestants if each.task == task and each.head.forests), key=loss)


def tuned_contestants(
    table: TrainingTable, families: Sequence[str], options: TrainingOptions, tell: OnStage
) -> Iterator[Contestant]:
    """Tune families on both tasks and give what they answer."""
    for family in dict.fromkeys((*families, "forest")):
        for task in TASKS:
            wanted = candidate(family, task, Options())
            target = table.share_tok_s if task == "throughput" else table.starved
            tuned = tune(
                wanted,
                table.features,
                target,
                table.group,
                budget=options.budget,
                seed=options.seed,
                folds=options.folds,
                space="paper" if options.paper_space else "small",
                storage=options.storage,
                progress=partial(tell, f"{family}: {task}"),
                n_jobs=options.n_jobs,
            )
            unseen = tuned.out_of_fold if task == "throughput" else log_odds(tuned.out_of_fold)
            yield _contestant(family, task, tuned.params, _head(family, task, tuned), unseen, table)


def physics_contestants(
    table: TrainingTable, options: TrainingOptions, tell: OnStage
) -> Iterator[Contestant]:
    """Fit the physics-informed models of both tasks."""
    targets = {
        "throughput": np.column_stack([table.served_fraction, table.step_ms]),
        "starvation": table.served_fraction,
    }
    shared = {"random_state": options.seed, "n_jobs": options.n_jobs}
    models = {"throughput": ServedAndStep(**shared), "starvation": ServedEdge(**shared)}
    for task in TASKS:
        classes = table.starved if task == "starvation" else None
        splits = grouped_folds(table.group, folds=options.folds, seed=options.seed, classes=classes)
        unseen = np.empty(len(table))
        for number, split in enumerate(splits):
            tell(f"{PHYSICS}: {task}", number, len(splits) + 1)
            fitted = clone(models[task]).fit(table.features[split.train], targets[task][split.train])
            unseen[split.test] = fitted.head().answers(table.features[split.test])
        fitted = models[task].fit(table.features, targets[task])
        tell(f"{PHYSICS}: {task}", len(splits) + 1, len(splits) + 1)
        yield _contestant(PHYSICS, task, models[task].get_params(), fitted.head(), unseen, table)


def _contestant(
    name: str,
    task: str,
    params: Mapping[str, Any],
    head: Head,
    unseen: NDArray[np.float64],
    table: TrainingTable,
) -> Contestant:
    score: Callable[[TrainingTable, NDArray[np.float64]], dict[str, float]] = throughput_errors
    answers = unseen
    if task == "starvation":
        score, answers = starvation_scores, (unseen > 0.0).astype(float)
    return Contestant(name, task, params, head, unseen, score(table, answers))


def _head(family: str, task: str, tuned: Tuned) -> Head:
    """Return what compiled code answers of a tuned model; neighbours and support vectors have no trees."""
    if family not in _COMPILED:
        return Head("", ())
    learner = learner_of(tuned.estimator)
    if family == "forest":
        return Head(OVER_EXPECTED if task == "throughput" else PROBABILITY, (flatten_forest(learner),))
    if task == "starvation":
        return Head(LOG_ODDS, (flatten_boosted(learner),))
    over_offered = getattr(tuned.estimator, "baseline", "expected") == "offered"
    return Head(OVER_OFFERED if over_offered else OVER_EXPECTED, (flatten_boosted(learner),))
