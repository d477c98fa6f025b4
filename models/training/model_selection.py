"""Model selection: fitted candidates of each task and the best of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from capplan.models.surrogates.outputs import (
    LOG_ODDS,
    OVER_EXPECTED,
    OVER_OFFERED,
    PROBABILITY,
    EnsembleOutput,
    flatten_forest,
    log_odds,
)
from capplan.models.surrogates.tree import Tree
from capplan.models.training.boosting import ServedAndStep, ServedEdge, flatten_boosted
from capplan.models.training.candidates import FeatureOptions, candidate_model, learner_of
from capplan.models.training.data import TrainingTable
from capplan.models.training.evaluation import grouped_folds, rounded, starvation_scores, throughput_errors
from capplan.models.training.search import Tuned, tune

OnStage: TypeAlias = Callable[[str, int, int], None]

"""Called with the name of a stage, the pieces of work done in it and their total."""

SEARCHED: Final = ("knn", "forest", "svm", "xgboost")


@dataclass(frozen=True)
class TrainingOptions:
    """How much is searched.

    Attributes
    ----------
    families
        Of `capplan.models.training.candidates.FAMILIES`; ``forest`` is always among them, since it is a
        kind of its own. The physics-informed models always take part.
    budget
        Combinations of a grid, and trials of Optuna, for each family and task.
    paper_space
        Search the paper's whole grids; hours.
    folds, seed, n_jobs
        Of cross-validation and models.
    storage
        Journal of Optuna's studies, so that a killed search goes on; None: in memory.
    """

    families: tuple[str, ...] = SEARCHED
    budget: int = 12
    paper_space: bool = False
    folds: int = 5
    seed: int = 0
    n_jobs: int = 1
    storage: Path | None = None


PHYSICS: Final = "physics"

TASKS: Final = ("throughput", "starvation")

_COMPILED: Final = ("forest", "xgboost")


@dataclass(frozen=True)
class FittedCandidate:
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
    head: EnsembleOutput
    unseen: NDArray[np.float64]
    scores: Mapping[str, float]
    tree: Tree | None = None

    def line(self) -> dict[str, Any]:
        """Return what a report says of it."""
        scores = rounded(self.scores)
        return {"name": self.name, "task": self.task, "params": dict(self.params), "scores": scores}


def best_candidate(
    contestants: Sequence[FittedCandidate], task: str, designs: Sequence[str]
) -> FittedCandidate:
    """Return the best, in the mean over designs, of those that compiled code can answer."""
    sign = 1.0 if task == "throughput" else -1.0

    def loss(contestant: FittedCandidate) -> float:
        return sign * float(np.mean([contestant.scores[name] for name in designs]))

    return min((each for each in contestants if each.task == task and each.head.forests), key=loss)


def fit_tuned(
    table: TrainingTable, families: Sequence[str], options: TrainingOptions, tell: OnStage
) -> Iterator[FittedCandidate]:
    """Tune families on both tasks and give what they answer."""
    for family in dict.fromkeys((*families, "forest")):
        for task in TASKS:
            wanted = candidate_model(family, task, FeatureOptions())
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
            yield _fitted_candidate(family, task, tuned.params, _head(family, task, tuned), unseen, table)


def fit_physics(table: TrainingTable, options: TrainingOptions, tell: OnStage) -> Iterator[FittedCandidate]:
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
        yield _fitted_candidate(PHYSICS, task, models[task].get_params(), fitted.head(), unseen, table)


def _fitted_candidate(
    name: str,
    task: str,
    params: Mapping[str, Any],
    head: EnsembleOutput,
    unseen: NDArray[np.float64],
    table: TrainingTable,
) -> FittedCandidate:
    score: Callable[[TrainingTable, NDArray[np.float64]], dict[str, float]] = throughput_errors
    answers = unseen
    if task == "starvation":
        score, answers = starvation_scores, (unseen > 0.0).astype(float)
    return FittedCandidate(name, task, params, head, unseen, score(table, answers))


def _head(family: str, task: str, tuned: Tuned) -> EnsembleOutput:
    """Return what compiled code answers of a tuned model; neighbours and support vectors have no trees."""
    if family not in _COMPILED:
        return EnsembleOutput("", ())
    learner = learner_of(tuned.estimator)
    if family == "forest":
        return EnsembleOutput(
            OVER_EXPECTED if task == "throughput" else PROBABILITY, (flatten_forest(learner),)
        )
    if task == "starvation":
        return EnsembleOutput(LOG_ODDS, (flatten_boosted(learner),))
    over_offered = getattr(tuned.estimator, "baseline", "expected") == "offered"
    return EnsembleOutput(OVER_OFFERED if over_offered else OVER_EXPECTED, (flatten_boosted(learner),))
