"""Hyper-parameter search with Optuna: seeded, pruned fold by fold, resumed from a journal after a kill.

All candidates are scored on the same grouped folds, so their scores compare.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

import joblib
import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import distribution_to_json
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sklearn.base import clone
from sklearn.utils.parallel import Parallel, delayed

from capplan.errors import InputError
from capplan.models.training.candidates import CandidateModel
from capplan.models.training.evaluation import Split, grouped_folds, predictions, tuning_loss

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with completed and total pieces of work."""

_FIRST_BYTES: Final = b'{"op_code":'
_STARTUP_TRIALS: Final = 5
"""Trials that run through all folds before pruning starts."""


@dataclass(frozen=True)
class SearchOptions:
    """Size of a search.

    Attributes
    ----------
    budget
        Optuna trials for each family and task.
    folds, seed
        Of cross-validation, sampler and models.
    n_jobs
        Concurrent fits, in threads; the result does not depend on it.
    storage
        Journal of Optuna's studies, so that a killed search can continue; None: in memory.
    """

    budget: int = 12
    folds: int = 5
    seed: int = 0
    n_jobs: int = 1
    storage: Path | None = None


@dataclass(frozen=True)
class TuningTrial:
    """One combination of hyper-parameters.

    Attributes
    ----------
    params
        Named as in the candidate's distributions.
    loss
        Mean over the folds of SMAPE in per cent or logarithmic loss; None if pruned.
    """

    params: Mapping[str, Any]
    loss: float | None


@dataclass(frozen=True)
class Tuned:
    """Best candidate of a search.

    Attributes
    ----------
    estimator
        Fitted on all rows.
    params
        Its hyper-parameters.
    out_of_fold
        Prediction for every row by a model that saw none of its group, shape (rows,): tokens per second, or
        the probability of starvation.
    trials
        All trials, in order.
    """

    estimator: Any
    params: Mapping[str, Any]
    out_of_fold: NDArray[np.float64]
    trials: tuple[TuningTrial, ...]


@dataclass(frozen=True)
class TuningProblem:
    """Candidate, data and folds of a search.

    Attributes
    ----------
    features
        Feature vectors, shape (rows, features).
    target
        Tokens per second, or 1 for starved and 0 for other rows, shape (rows,).
    """

    candidate: CandidateModel
    features: NDArray[np.float32]
    target: NDArray[Any]
    splits: list[Split]
    seed: int
    n_jobs: int

    def predictions(self, estimator: Any, splits: list[Split]) -> list[NDArray[np.float64]]:
        """Return, for each split, predictions for the test rows by a clone fitted on the training rows."""
        return list(
            Parallel(n_jobs=self.n_jobs)(delayed(self._predict)(estimator, split) for split in splits)
        )

    def _predict(self, estimator: Any, split: Split) -> NDArray[np.float64]:
        fitted = clone(estimator).fit(self.features[split.train], self.target[split.train])
        return predictions(fitted, self.features[split.test])

    @property
    def study_name(self) -> str:
        """Name that differs for other data, folds, seeds or search spaces."""
        digest = hashlib.sha256(f"{self.seed}".encode())
        for name, distribution in self.candidate.distributions.items():
            digest.update(f"{name} {distribution_to_json(distribution)}".encode())
        for array in (self.features, self.target, *(split.test for split in self.splits)):
            digest.update(np.ascontiguousarray(array).tobytes())
        return f"{self.candidate.name}-{self.candidate.task}-{digest.hexdigest()[:16]}"


def tune(
    candidate: CandidateModel,
    features: NDArray[np.float32],
    target: NDArray[Any],
    groups: NDArray[np.int64],
    options: SearchOptions,
    progress: OnProgress | None = None,
) -> Tuned:
    """Return the candidate with the hyper-parameters of least loss on held-out groups.

    The result depends on data and seed only.

    Parameters
    ----------
    candidate
        Model family and search space.
    features
        Feature vectors, shape (rows, features).
    target
        Throughput in tokens per second, or whether the GPU starved, shape (rows,).
    groups
        Near-duplicate scenarios share a group, shape (rows,).
    options, progress
        Size of the search, and callback.

    Raises
    ------
    InputError
        For a budget below 1, data that cannot be split, or a damaged journal.
    """
    if options.budget < 1:
        raise InputError("must be at least 1", options.budget, "budget")
    starvation = candidate.task == "starvation"
    known = np.asarray(target, int if starvation else float)
    classes = known == 1 if starvation else None
    splits = grouped_folds(groups, folds=options.folds, seed=options.seed, classes=classes)
    problem = TuningProblem(candidate, features, known, splits, options.seed, options.n_jobs)
    with joblib.parallel_config(backend="threading"):
        trials = _trials(problem, options, progress or (lambda *_: None))
        best = min((trial for trial in trials if trial.loss is not None), key=lambda trial: trial.loss or 0.0)
        estimator = candidate.make(best.params, options.seed)
        out_of_fold = np.empty(known.size)
        for split, predicted in zip(splits, problem.predictions(estimator, splits), strict=True):
            out_of_fold[split.test] = predicted
        estimator.fit(features, known)
    return Tuned(estimator, best.params, out_of_fold, tuple(trials))


def _trials(problem: TuningProblem, options: SearchOptions, progress: OnProgress) -> list[TuningTrial]:
    """Return `budget` trials, including those of an earlier, killed search.

    A trial is pruned after a fold if its mean loss so far exceeds the median of the others there. Each
    trial's sampler is seeded by the search's seed and the trial number, so that a resumed search repeats an
    uninterrupted one.
    """
    with quiet_storage(options.storage) as opened:
        name = problem.study_name
        known = name in optuna.get_all_study_names(opened)
        study = (optuna.load_study if known else optuna.create_study)(study_name=name, storage=opened)
        study.pruner = optuna.pruners.MedianPruner(n_startup_trials=_STARTUP_TRIALS)
        for unfinished in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(unfinished.number, state=TrialState.FAIL)
        finished = _finished(study)
        while len(finished) < options.budget:
            progress(len(finished), options.budget)
            study.sampler = optuna.samplers.TPESampler(seed=_trial_seed(options.seed, len(finished)))
            _run(study, study.ask(dict(problem.candidate.distributions)), problem)
            finished = _finished(study)
        progress(options.budget, options.budget)
    return [
        # A pruned trial has a value, too: of the folds it saw.
        TuningTrial(trial.params, trial.value if trial.state is TrialState.COMPLETE else None)
        for trial in finished[: options.budget]
    ]


def _run(study: optuna.Study, trial: optuna.Trial, problem: TuningProblem) -> None:
    """Score one trial, `n_jobs` folds at a time; folds after the one that prunes it do not count."""
    estimator = problem.candidate.make(trial.params, problem.seed)
    splits, losses = problem.splits, []
    for start in range(0, len(splits), problem.n_jobs):
        together = splits[start : start + problem.n_jobs]
        for split, predicted in zip(together, problem.predictions(estimator, together), strict=True):
            losses.append(tuning_loss(problem.candidate.task, predicted, problem.target[split.test]))
            trial.report(float(np.mean(losses)), len(losses) - 1)
            if len(losses) < len(splits) and trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                return
    study.tell(trial, float(np.mean(losses)))


def _finished(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def _trial_seed(seed: int, number: int) -> int:
    return int(np.random.default_rng([seed, number]).integers(2**31))


class _NoLock:
    """Replaces Optuna's lock file, which a killed process would leave behind; `_locked` locks instead."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


@contextmanager
def quiet_storage(path: Path | None) -> Iterator[BaseStorage]:
    """Open the storage of studies, with Optuna's messages silenced.

    Parameters
    ----------
    path
        Journal of JSON lines, created if missing; None: in memory.

    Raises
    ------
    InputError
        If the journal cannot be opened, is damaged, or is in use by another process.
    """
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        if path is None:
            yield InMemoryStorage()
            return
        with _locked(path) as file:
            _drop_partial_line(file, path)
            try:
                # Optuna does not export the class that its locks derive from.
                backend = JournalFileBackend(str(path), lock_obj=_NoLock())  # type: ignore[arg-type]
                storage = JournalStorage(backend)
                storage.get_all_studies()  # reads the journal
            except (ValueError, LookupError, TypeError, AttributeError, AssertionError):
                # Errors of replaying lines that Optuna did not write.
                raise InputError("damaged; delete it to start anew", location=str(path)) from None
            yield storage
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open the journal, locked until the end of the block or of the process."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", location=str(path)) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError("in use by another search", location=str(path)) from None
        yield file


def _drop_partial_line(file: BinaryIO, path: Path) -> None:
    """Truncate a half-written last line, to which Optuna would append; refuse other files."""
    file.seek(0)
    written = file.read()
    if written[: len(_FIRST_BYTES)] != _FIRST_BYTES[: len(written)]:
        raise InputError("no journal of a search", location=str(path))
    lines = written.splitlines(keepends=True)
    if lines and not _is_complete(lines[-1]):
        file.truncate(sum(map(len, lines[:-1])))


def _is_complete(line: bytes) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
