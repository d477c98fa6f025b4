"""Model selection: candidates of each task fitted with out-of-fold predictions, and the best of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from capplan.models.surrogates.outputs import (
    LOG_ODDS,
    OVER_EXPECTED,
    PROBABILITY,
    EnsembleOutput,
    flatten_forest,
    log_odds,
)
from capplan.models.surrogates.tree import Tree
from capplan.models.training.boosting import ServedAndStep, ServedEdge, flatten_boosted
from capplan.models.training.candidates import FAMILIES, Task, candidate_model
from capplan.models.training.data import TrainingTable
from capplan.models.training.evaluation import grouped_folds, rounded, starvation_scores, throughput_errors
from capplan.models.training.search import SearchOptions, tune

OnStage: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of a stage, completed and total pieces of work."""

PHYSICS: Final = "physics"
TASKS: Final[tuple[Task, ...]] = ("throughput", "starvation")


@dataclass(frozen=True)
class TrainingOptions(SearchOptions):
    """Size of a training."""

    families: tuple[str, ...] = FAMILIES
    """Of `FAMILIES`; ``forest`` and the physics-informed models are always included."""


@dataclass(frozen=True)
class FittedCandidate:
    """Fitted model of one task."""

    name: str
    """Family."""
    task: str
    params: Mapping[str, Any]
    """Hyper-parameters."""
    output: EnsembleOutput
    """Trees, as a surrogate stores them."""
    out_of_fold: NDArray[np.float64]
    """Tokens per second, or scores that rise with starvation and are 0 at its edge, by models fitted without
    a scenario's group; shape (n,)."""
    scores: Mapping[str, float]
    """SMAPE in per cent, or macro-F1, by regime."""
    tree: Tree | None = None
    """Small tree with its rules."""

    def summary(self) -> dict[str, Any]:
        """Return its entry in the report."""
        scores = rounded(self.scores)
        return {"name": self.name, "task": self.task, "params": dict(self.params), "scores": scores}


def best_candidate(
    candidates: Sequence[FittedCandidate], task: str, designs: Sequence[str]
) -> FittedCandidate:
    """Return the candidate with the best mean score over designs."""
    sign = 1.0 if task == "throughput" else -1.0

    def loss(candidate: FittedCandidate) -> float:
        return sign * float(np.mean([candidate.scores[name] for name in designs]))

    return min((each for each in candidates if each.task == task), key=loss)


def fit_tuned(table: TrainingTable, options: TrainingOptions, on_stage: OnStage) -> Iterator[FittedCandidate]:
    """Tune and fit every family on both tasks."""
    for family in dict.fromkeys((*options.families, "forest")):
        for task in TASKS:
            target = table.share_tok_s if task == "throughput" else table.starved
            tuned = tune(
                candidate_model(family, task),
                table.features,
                target,
                table.group,
                options,
                progress=partial(on_stage, f"{family}: {task}"),
            )
            scores = tuned.out_of_fold if task == "throughput" else log_odds(tuned.out_of_fold)
            # A regressor of throughput is fitted inside a RelativeRegressor.
            model = getattr(tuned.estimator, "regressor_", tuned.estimator)
            is_forest = family == "forest"
            form = OVER_EXPECTED if task == "throughput" else PROBABILITY if is_forest else LOG_ODDS
            forest = flatten_forest(model) if is_forest else flatten_boosted(model)
            output = EnsembleOutput(form, (forest,))
            yield _fitted_candidate(family, task, tuned.params, output, scores, table)


def fit_physics(
    table: TrainingTable, options: TrainingOptions, on_stage: OnStage
) -> Iterator[FittedCandidate]:
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
        out_of_fold = np.empty(len(table))
        for number, split in enumerate(splits):
            on_stage(f"{PHYSICS}: {task}", number, len(splits) + 1)
            fitted = clone(models[task]).fit(table.features[split.train], targets[task][split.train])
            out_of_fold[split.test] = fitted.output().predict(table.features[split.test])
        fitted = models[task].fit(table.features, targets[task])
        on_stage(f"{PHYSICS}: {task}", len(splits) + 1, len(splits) + 1)
        yield _fitted_candidate(PHYSICS, task, models[task].get_params(), fitted.output(), out_of_fold, table)


def _fitted_candidate(
    name: str,
    task: str,
    params: Mapping[str, Any],
    output: EnsembleOutput,
    out_of_fold: NDArray[np.float64],
    table: TrainingTable,
) -> FittedCandidate:
    if task == "starvation":
        scores = starvation_scores(table, (out_of_fold > 0.0).astype(float))
    else:
        scores = throughput_errors(table, out_of_fold)
    return FittedCandidate(name, task, params, output, out_of_fold, scores)
