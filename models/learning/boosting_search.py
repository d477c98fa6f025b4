"""Optuna's search for boosted trees: seeded, pruned fold by fold, and resumed as if it was never killed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import numpy as np
import optuna
from optuna.distributions import distribution_to_json
from optuna.trial import FrozenTrial, TrialState

from capplan.models.learning.candidates import Candidate
from capplan.models.learning.scores import answer_loss
from capplan.models.learning.study_files import quiet_storage
from capplan.models.learning.trials import Problem, Trial

_UNPRUNED: Final = 5
"""Trials that run through all folds before any is compared with them."""


def boosting_trials(candidate: Candidate, problem: Problem, budget: int, storage: Path | None) -> list[Trial]:
    """Return `budget` trials of a candidate's distributions, those of an earlier, killed search included.

    A trial is given up after a fold when the best mean of its losses so far is above the median of the
    others' there. The sampler of every trial has a seed of its own, made of the search's and the number of
    trials before, so that a search that was killed goes on exactly as one that was not.

    Parameters
    ----------
    candidate
        One with distributions.
    problem
        The data; a study on other data is another study, even in the same file.
    budget
        Trials in all.
    storage
        The journal; None: in memory.
    """
    with quiet_storage(storage) as opened:
        name = _study_name(candidate, problem)
        known = name in optuna.get_all_study_names(opened)
        study = (optuna.load_study if known else optuna.create_study)(study_name=name, storage=opened)
        study.pruner = optuna.pruners.MedianPruner(n_startup_trials=_UNPRUNED)
        for victim in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(victim.number, state=TrialState.FAIL)
        finished = _finished(study)
        while len(finished) < budget:
            problem.tell(len(finished), budget)
            study.sampler = optuna.samplers.TPESampler(seed=_seed_of(problem.seed, len(finished)))
            _run(study, study.ask(dict(candidate.distributions)), candidate, problem)
            finished = _finished(study)
        problem.tell(budget, budget)
    return [_trial(trial, problem.target.size) for trial in finished[:budget]]


def _run(study: optuna.Study, trial: optuna.Trial, candidate: Candidate, problem: Problem) -> None:
    """Judge one trial, some folds at a time; folds beyond the one it is given up at are not looked at."""
    estimator = candidate.make(trial.params, problem.seed)
    splits, losses = problem.splits, []
    for start in range(0, len(splits), problem.n_jobs):
        together = splits[start : start + problem.n_jobs]
        for split, answer in zip(together, problem.answers(estimator, together), strict=True):
            losses.append(answer_loss(candidate.task, answer, problem.target[split.test], smooth=True))
            trial.report(float(np.mean(losses)), len(losses) - 1)
            if len(losses) < len(splits) and trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                return
    study.tell(trial, float(np.mean(losses)))


def _trial(trial: FrozenTrial, rows: int) -> Trial:
    """Return the record; what was given up has a value too, of the folds it saw, which compares with none."""
    return Trial(trial.params, trial.value if trial.state is TrialState.COMPLETE else None, rows)


def _finished(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def _seed_of(seed: int, number: int) -> int:
    return int(np.random.default_rng([seed, number]).integers(2**31))


def _study_name(candidate: Candidate, problem: Problem) -> str:
    """Return a name that differs where trials would not compare: data, folds, seed, space or options."""
    digest = hashlib.sha256(f"{problem.seed} {candidate.options}".encode())
    for name, distribution in candidate.distributions.items():
        digest.update(f"{name} {distribution_to_json(distribution)}".encode())
    for array in (problem.features, problem.target, *(split.test for split in problem.splits)):
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{candidate.name}-{candidate.task}-{digest.hexdigest()[:16]}"
