"""Tuning of a candidate: successive halving over the paper's grids, Optuna for boosted trees.

All candidates are judged on the same grouped folds, so their scores compare.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import joblib
import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning

from capplan.errors import InputError
from capplan.models.learning.boosting_search import boosting_trials
from capplan.models.learning.candidates import Candidate
from capplan.models.learning.grids import subset, whole
from capplan.models.learning.halving_search import halving_trials
from capplan.models.learning.scores import report
from capplan.models.learning.splits import grouped_folds
from capplan.models.learning.trials import OnProgress, Problem, Trial

Space: TypeAlias = Literal["small", "paper"]


@dataclass(frozen=True)
class Tuned:
    """The best of a search.

    Attributes
    ----------
    candidate
        What was tuned.
    estimator
        Fitted on all rows.
    params
        Its hyper-parameters, named as in the candidate's grid or distributions.
    scores
        In cross-validation on all rows: ``smape`` of throughput, in per cent; ``macro_f1`` of starvation, and
        ``log_loss`` where the model gives probabilities. Not those of `trials`: the folds are pooled.
    out_of_fold
        Answer to every row by a model that saw none of its group, shape (rows,): tokens per second, or the
        probability of starvation (0 or 1 of a model that gives none).
    trials
        All that was tried, in order.
    """

    candidate: Candidate
    estimator: Any
    params: Mapping[str, Any]
    scores: Mapping[str, float]
    out_of_fold: NDArray[np.float64]
    trials: tuple[Trial, ...]


def tune(
    candidate: Candidate,
    features: NDArray[np.float32],
    target: NDArray[Any],
    groups: NDArray[np.int64],
    *,
    budget: int = 24,
    seed: int = 0,
    folds: int = 5,
    space: Space = "small",
    storage: Path | None = None,
    progress: OnProgress | None = None,
    n_jobs: int = 1,
) -> Tuned:
    """Search for the hyper-parameters that do best on groups that a model has not seen.

    The result depends on the data and the seed, not on `n_jobs`, nor on whether a search was killed and
    resumed.

    Parameters
    ----------
    candidate
        What to tune.
    features
        Feature vectors, shape (rows, features).
    target
        Throughput in tokens per second, or whether the GPU starved, shape (rows,).
    groups
        Near twins share a group, shape (rows,).
    budget
        Combinations of a grid, or trials of Optuna.
    seed
        Of folds, search and models.
    folds
        Of cross-validation.
    space
        ``small``: `budget` combinations of the paper's grid, drawn with the seed. ``paper``: all of them,
        whatever the budget; hours. Boosted trees have no grid and ignore it.
    storage
        Journal of Optuna's study: a search on the same data that was killed goes on where it was. A grid has
        none.
    progress
        Called with the pieces of work done and their total.
    n_jobs
        Fits at a time, in threads.

    Raises
    ------
    InputError
        For a budget below 1, data that cannot be split, or a damaged journal.
    """
    if budget < 1:
        raise InputError("must be at least 1", budget, "budget")
    starvation = candidate.task == "starvation"
    known = np.asarray(target, int if starvation else float)
    splits = grouped_folds(groups, folds=folds, seed=seed, classes=known == 1 if starvation else None)
    problem = Problem(features, known, splits, seed, n_jobs, progress)
    with joblib.parallel_config(backend="threading"), warnings.catch_warnings():
        # A machine that is stopped before it converges is judged as it is.
        warnings.simplefilter("ignore", ConvergenceWarning)
        # One that answers nonsense loses; scikit-learn need not warn of it.
        warnings.filterwarnings("ignore", message="One or more of the test scores are non-finite")
        if candidate.distributions:
            trials = boosting_trials(candidate, problem, budget, storage)
        else:
            grid = candidate.grid
            combinations = whole(grid) if space == "paper" else subset(grid, budget, seed)
            trials = halving_trials(candidate, problem, combinations)
        best = _best(trials)
        estimator = candidate.make(best.params, seed)
        out_of_fold = np.empty(known.size)
        for split, answer in zip(splits, problem.answers(estimator, splits), strict=True):
            out_of_fold[split.test] = answer
        estimator.fit(features, known)
    probability = hasattr(estimator, "predict_proba")
    scores = report(candidate.task, out_of_fold, known, is_probability=probability)
    return Tuned(candidate, estimator, best.params, scores, out_of_fold, tuple(trials))


def _best(trials: list[Trial]) -> Trial:
    """Return the best of those that saw most rows."""
    most = max(trial.rows for trial in trials)
    losses = {i: t.loss for i, t in enumerate(trials) if t.rows == most and t.loss is not None}
    if not losses:
        raise InputError("no combination of hyper-parameters could be fitted", location="budget")
    return trials[min(losses, key=lambda i: losses[i])]
