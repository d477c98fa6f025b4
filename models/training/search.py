"""Hyper-parameter search on grouped folds."""

from __future__ import annotations

import fcntl
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeAlias

import joblib
import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import distribution_to_json
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.experimental import enable_halving_search_cv  # noqa: F401 (makes the next line work)
from sklearn.model_selection import HalvingGridSearchCV
from sklearn.utils.parallel import Parallel, delayed

from capplan.errors import InputError
from capplan.models.training.candidates import CandidateModel, Combination, subset, whole
from capplan.models.training.evaluation import (
    Split,
    answer_loss,
    answer_of,
    grouped_folds,
    loss,
    pooled_scores,
)

_FIRST: Final = b'{"op_code":'


class _HeldAlready:
    """No lock of Optuna's own: what a killed process left of it would hold up the next for half a minute."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


@contextmanager
def quiet_storage(path: Path | None) -> Iterator[BaseStorage]:
    """Give the storage of a study, with Optuna's messages silenced meanwhile.

    Parameters
    ----------
    path
        The journal, made if there is none; None: in memory.

    Raises
    ------
    InputError
        When the journal cannot be opened, is damaged, or another process is at it.
    """
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        if path is None:
            yield InMemoryStorage()
            return
        with _held(path) as file:
            _drop_half_line(file, path)
            try:
                # Optuna does not export the class that its locks derive from.
                backend = JournalFileBackend(str(path), lock_obj=_HeldAlready())  # type: ignore[arg-type]
                storage = JournalStorage(backend)
                storage.get_all_studies()  # reads the journal
            except (ValueError, LookupError, TypeError, AttributeError, AssertionError):
                # Whatever replaying lines that are none of Optuna's may raise.
                raise InputError("damaged; delete it to start anew", location=str(path)) from None
            yield storage
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def _held(path: Path) -> Iterator[BinaryIO]:
    """Give the journal, locked until the end of the block or of the process."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", location=str(path)) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError("another search is at it", location=str(path)) from None
        yield file


def _drop_half_line(file: BinaryIO, path: Path) -> None:
    """Cut off what a kill left half written, since Optuna would append to it; other files stay."""
    file.seek(0)
    written = file.read()
    if written[: len(_FIRST)] != _FIRST[: len(written)]:
        raise InputError("no journal of a search", location=str(path))
    lines = written.splitlines(keepends=True)
    if lines and not _is_whole(lines[-1]):
        file.truncate(sum(map(len, lines[:-1])))


def _is_whole(line: bytes) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


OnProgress: TypeAlias = Callable[[int, int], None]

"""Called with the pieces of work done and their total."""


@dataclass(frozen=True)
class TuningProblem:
    """Data, folds and means of a search.

    Attributes
    ----------
    features
        Feature vectors, shape (rows, features).
    target
        Tokens per second, or 1 where the GPU starved and 0 elsewhere, shape (rows,).
    splits
        The folds.
    seed
        Of search and models.
    n_jobs
        Fits at a time, in threads.
    progress
        To be told of the work, or None.
    """

    features: NDArray[np.float32]
    target: NDArray[Any]
    splits: list[Split]
    seed: int
    n_jobs: int = 1
    progress: OnProgress | None = None

    def tell(self, done: int, total: int) -> None:
        """Report progress to whoever listens."""
        if self.progress is not None:
            self.progress(done, total)

    def answers(self, estimator: Any, splits: list[Split]) -> list[NDArray[np.float64]]:
        """Return, for each of some splits, what a clone fitted on one side answers to the other."""
        return list(Parallel(n_jobs=self.n_jobs)(delayed(self._answer)(estimator, split) for split in splits))

    def _answer(self, estimator: Any, split: Split) -> NDArray[np.float64]:
        fitted = clone(estimator).fit(self.features[split.train], self.target[split.train])
        return answer_of(fitted, self.features[split.test])


@dataclass(frozen=True)
class TuningTrial:
    """One combination of hyper-parameters.

    Attributes
    ----------
    params
        Named as in the candidate's grid or distributions.
    loss
        Mean over the folds, less is better; None when it was given up or could not be fitted. SMAPE in per
        cent; of starvation 1 - macro-F1 in a grid, the logarithmic loss in distributions.
    rows
        Rows that it was judged on, training and test sides together.
    """

    params: Mapping[str, Any]
    loss: float | None
    rows: int


_UNPRUNED: Final = 5

"""Trials that run through all folds before any is compared with them."""


def boosting_trials(
    candidate: CandidateModel, problem: TuningProblem, budget: int, storage: Path | None
) -> list[TuningTrial]:
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


def _run(study: optuna.Study, trial: optuna.Trial, candidate: CandidateModel, problem: TuningProblem) -> None:
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


def _trial(trial: FrozenTrial, rows: int) -> TuningTrial:
    """Return the record; what was given up has a value too, of the folds it saw, which compares with none."""
    return TuningTrial(trial.params, trial.value if trial.state is TrialState.COMPLETE else None, rows)


def _finished(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def _seed_of(seed: int, number: int) -> int:
    return int(np.random.default_rng([seed, number]).integers(2**31))


def _study_name(candidate: CandidateModel, problem: TuningProblem) -> str:
    """Return a name that differs where trials would not compare: data, folds, seed, space or options."""
    digest = hashlib.sha256(f"{problem.seed} {candidate.options}".encode())
    for name, distribution in candidate.distributions.items():
        digest.update(f"{name} {distribution_to_json(distribution)}".encode())
    for array in (problem.features, problem.target, *(split.test for split in problem.splits)):
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{candidate.name}-{candidate.task}-{digest.hexdigest()[:16]}"


_FACTOR: Final = 3

_LEAST_ROWS: Final = 200

"""Fewer rows than these say nothing of a model."""


def halving_trials(
    candidate: CandidateModel, problem: TuningProblem, combinations: Sequence[Combination]
) -> list[TuningTrial]:
    """Try combinations on few rows, the better third of them on three times as many, and so on to all rows.

    Parameters
    ----------
    candidate
        One with a grid.
    problem
        The data.
    combinations
        Those of the grid to be tried.
    """
    rows = problem.target.size
    rounds = _rounds(len(combinations), rows)
    evaluations = sum(-(-len(combinations) // _FACTOR**number) for number in range(rounds))
    total, done = evaluations * len(problem.splits), 0

    def score(fitted: Any, features: NDArray[np.float32], target: NDArray[Any]) -> float:
        nonlocal done
        done += 1
        problem.tell(min(done, total), total)
        return -loss(candidate.task, fitted, features, target)

    search = HalvingGridSearchCV(
        candidate.make({}, problem.seed),
        [{candidate.path + name: [value] for name, value in chosen.items()} for chosen in combinations],
        factor=_FACTOR,
        min_resources=rows // _FACTOR ** (rounds - 1),
        scoring=score,
        cv=problem.splits,
        refit=False,
        random_state=problem.seed,
        return_train_score=False,
        n_jobs=problem.n_jobs,
    )
    search.fit(problem.features, problem.target)
    found = search.cv_results_
    return [
        TuningTrial(
            params={name.removeprefix(candidate.path): value for name, value in params.items()},
            loss=float(-mean) if np.isfinite(mean) else None,
            rows=int(seen),
        )
        for params, mean, seen in zip(
            found["params"], found["mean_test_score"], found["n_resources"], strict=True
        )
    ]


def _rounds(combinations: int, rows: int) -> int:
    """Return how often a third is kept: down to the last three, but not on fewer than `_LEAST_ROWS` rows."""
    rounds = 1
    while _FACTOR**rounds <= combinations and rows // _FACTOR**rounds >= _LEAST_ROWS:
        rounds += 1
    return rounds


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

    candidate: CandidateModel
    estimator: Any
    params: Mapping[str, Any]
    scores: Mapping[str, float]
    out_of_fold: NDArray[np.float64]
    trials: tuple[TuningTrial, ...]


def tune(
    candidate: CandidateModel,
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
    problem = TuningProblem(features, known, splits, seed, n_jobs, progress)
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
    scores = pooled_scores(candidate.task, out_of_fold, known, is_probability=probability)
    return Tuned(candidate, estimator, best.params, scores, out_of_fold, tuple(trials))


def _best(trials: list[TuningTrial]) -> TuningTrial:
    """Return the best of those that saw most rows."""
    most = max(trial.rows for trial in trials)
    losses = {i: t.loss for i, t in enumerate(trials) if t.rows == most and t.loss is not None}
    if not losses:
        raise InputError("no combination of hyper-parameters could be fitted", location="budget")
    return trials[min(losses, key=lambda i: losses[i])]
