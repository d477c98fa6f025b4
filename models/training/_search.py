"""Hyper-parameter search with Optuna: seeded, pruned fold by fold, resumed from a journal after a kill.

All candidates are scored on the same grouped folds, so their scores compare.
"""

from __future__ import annotations

import fcntl
import hashlib
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
from capplan.models.training._candidates import CandidateModel
from capplan.models.training._evaluation import Split, grouped_folds, predictions, tuning_loss
from capplan.spec import error_reason

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with completed and total pieces of work."""

_FIRST_BYTES: Final = b'{"op_code":'
_STARTUP_TRIALS: Final = 5
"""Trials that run through all folds before pruning starts."""
_FINISHED: Final = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class SearchOptions:
    """Size of a search."""

    budget: int = 12
    """Optuna trials for each family and task."""
    folds: int = 5
    seed: int = 0
    """Seed of cross-validation, sampler and models."""
    n_jobs: int = 1
    """Concurrent fits, in threads; the result does not depend on it."""
    storage: Path | None = None
    """Journal of Optuna's studies, from which a killed search resumes; None: in memory."""


@dataclass(frozen=True)
class Tuned:
    """Best candidate of a search."""

    estimator: Any
    """Fitted on all rows."""
    params: Mapping[str, Any]
    """Hyper-parameters."""
    out_of_fold: NDArray[np.float64]
    """Tokens per second or probability of starvation by models fitted without the row's group, (rows,)."""
    trials: tuple[FrozenTrial, ...]
    """Complete and pruned trials, in order. The value of a complete one is its mean loss over the folds:
    SMAPE in per cent or logarithmic loss."""


@dataclass(frozen=True)
class _TuningProblem:
    candidate: CandidateModel
    features: NDArray[np.float32]
    target: NDArray[Any]
    splits: list[Split]
    options: SearchOptions

    def estimator(self, params: Mapping[str, Any]) -> Any:
        return self.candidate.make(params, self.options.seed)

    def predictions(self, estimator: Any, splits: list[Split]) -> list[NDArray[np.float64]]:
        """Return, for each split, predictions for the test rows by a clone fitted on the training rows."""

        def predict(split: Split) -> NDArray[np.float64]:
            fitted = clone(estimator).fit(self.features[split.train], self.target[split.train])
            return predictions(fitted, self.features[split.test])

        return list(Parallel(n_jobs=self.options.n_jobs)(delayed(predict)(split) for split in splits))

    @property
    def study_name(self) -> str:
        """Name that differs for other data, folds, seeds or search spaces."""
        digest = hashlib.sha256(f"{self.options.seed} {dict(self.candidate.start)}".encode())
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
    candidate, options, progress
        Model family and search space, size of the search, and callback.
    features, target, groups
        Feature vectors, shape (rows, features); throughput in tokens per second, or whether the GPU starved,
        shape (rows,); and groups of near-duplicate scenarios, shape (rows,).

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
    problem = _TuningProblem(candidate, features, known, splits, options)
    with joblib.parallel_config(backend="threading"):
        trials = _trials(problem, progress or (lambda *_: None))
        complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
        params = min(complete, key=lambda trial: trial.value or 0.0).params
        estimator = problem.estimator(params)
        out_of_fold = np.empty(known.size)
        for split, predicted in zip(splits, problem.predictions(estimator, splits), strict=True):
            out_of_fold[split.test] = predicted
        estimator.fit(features, known)
    return Tuned(estimator, params, out_of_fold, tuple(trials))


def _trials(problem: _TuningProblem, progress: OnProgress) -> list[FrozenTrial]:
    """Return `budget` trials, including those of an earlier, killed search.

    The first trial has the hyper-parameters that the candidate starts from. A trial is pruned after a fold if
    its mean loss so far exceeds the median of the others there. Each trial's sampler is seeded by the seed of
    the search and the trial number, so that a resumed search repeats an uninterrupted one.
    """
    budget, seed = problem.options.budget, problem.options.seed
    with quiet_storage(problem.options.storage) as opened:
        name = problem.study_name
        known = name in optuna.get_all_study_names(opened)
        study = (optuna.load_study if known else optuna.create_study)(study_name=name, storage=opened)
        study.pruner = optuna.pruners.MedianPruner(n_startup_trials=_STARTUP_TRIALS)
        for unfinished in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            study.tell(unfinished.number, state=TrialState.FAIL)
        while len(finished := study.get_trials(deepcopy=False, states=_FINISHED)) < budget:
            progress(len(finished), budget)
            if not finished and not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                study.enqueue_trial(dict(problem.candidate.start))
            trial_seed = int(np.random.default_rng([seed, len(finished)]).integers(2**31))
            study.sampler = optuna.samplers.TPESampler(seed=trial_seed)
            _run(study, study.ask(dict(problem.candidate.distributions)), problem)
        progress(budget, budget)
    return finished[:budget]


def _run(study: optuna.Study, trial: optuna.Trial, problem: _TuningProblem) -> None:
    """Score one trial, `n_jobs` folds at a time; folds after the one that prunes it do not count."""
    estimator = problem.estimator(trial.params)
    splits, losses = problem.splits, []
    for start in range(0, len(splits), problem.options.n_jobs):
        together = splits[start : start + problem.options.n_jobs]
        for split, predicted in zip(together, problem.predictions(estimator, together), strict=True):
            losses.append(tuning_loss(problem.candidate.task, predicted, problem.target[split.test]))
            trial.report(float(np.mean(losses)), len(losses) - 1)
            if len(losses) < len(splits) and trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                return
    study.tell(trial, float(np.mean(losses)))


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
                raise InputError("damaged; delete it to start again", location=str(path)) from None
            yield storage
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open the journal, locked until the end of the block or of the process."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise InputError(f"cannot be written: {error_reason(error)}", location=str(path)) from None
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
    if lines and not lines[-1].endswith(b"\n"):
        file.truncate(len(written) - len(lines[-1]))
