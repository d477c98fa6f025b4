"""Candidate models of surrogates behind the scikit-learn estimator interface.

Every candidate reads whole feature vectors in the order of `FEATURES`. It predicts throughput in tokens per
second, or whether a GPU starves (0 or 1).

Their hyper-parameters are searched with Optuna: seeded, pruned fold by fold, resumed from a journal after a
kill. All candidates are scored on the same grouped folds, so their scores compare.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, TypeAlias

import joblib
import numpy as np
import optuna
from numpy.typing import ArrayLike, NDArray
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState
from sklearn.base import BaseEstimator, MetaEstimatorMixin, RegressorMixin, clone
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import check_is_fitted, validate_data
from xgboost import XGBClassifier, XGBRegressor

from capplan.errors import InputError
from capplan.models.surrogates._features import FEATURES, expected_tok_s
from capplan.models.training._evaluation import Split, Task, grouped_folds, predictions, tuning_loss
from capplan.spec import error_reason

Space: TypeAlias = Mapping[str, BaseDistribution]

FAMILIES: Final = ("forest", "xgboost")
PAPER_FAMILIES: Final = ("knn", "svm")
"""Families of the adapter-caching paper without compiled predictions; a benchmark compares them."""

_LEAST_TOK_S: Final = 1e-3

STARVATION_SIGNS: Final[Mapping[str, int]] = MappingProxyType(
    {
        # Load. Spread and largest rate scale with it.
        "rate_sum_rps": 1,
        "rate_std_rps": 1,
        "rate_max_rps": 1,
        "offered_tok_s": 1,
        "load_over_capacity": 1,
        "batch_over_limit": 1,
        # Served shares of the fluid model.
        "expected_share": -1,
        "slots_share": -1,
        "full_queue_share": -1,
        # Contention for slots.
        "active_adapters": 1,
        "active_adapters_over_slots": 1,
        "slot_wait_s": 1,
        # Memory.
        "kv_tokens": -1,
        "kv_requests_over_seqs": -1,
        "batch_limit": -1,
    }
)
"""Monotone constraints of the probability of starvation: more load never lowers it, more KV never raises it.

They hold for two vectors that differ in these features only. Of two workloads it follows as far as the fluid
model moves its features that way: where slots bind, more load can leave the batch emptier.
"""

THROUGHPUT_SIGNS: Final[Mapping[str, int]] = MappingProxyType(
    {"kv_tokens": 1, "kv_requests_over_seqs": 1, "batch_limit": 1}
)
"""Monotone constraints of throughput over the expected throughput: memory only.

Far above capacity the ratio rises again, since the batch is always full there.
"""


_STARTS: Final[Mapping[tuple[str, str], Mapping[str, Any]]] = MappingProxyType(
    {
        ("forest", "throughput"): {
            "n_estimators": 32,
            "min_samples_leaf": 10,
            "max_depth": None,
            "max_features": 1.0,
        },
        ("forest", "starvation"): {
            "n_estimators": 32,
            "min_samples_leaf": 5,
            "max_depth": 10,
            "max_features": 1.0,
            "criterion": "gini",
        },
        ("xgboost", "throughput"): {
            "n_estimators": 150,
            "learning_rate": 0.038,
            "max_depth": 7,
            "min_child_weight": 1.05,
            "subsample": 0.94,
            "colsample_bytree": 0.74,
            "reg_lambda": 0.53,
            "max_bin": 256,
            "huber_slope": 0.043,
        },
        ("xgboost", "starvation"): {
            "n_estimators": 400,
            "learning_rate": 0.043,
            "max_depth": 4,
            "min_child_weight": 0.32,
            "subsample": 0.77,
            "colsample_bytree": 0.57,
            "reg_lambda": 0.044,
            "max_bin": 1024,
        },
    }
)
"""Found by earlier searches on both shipped profiles."""


def monotone_constraints(task: Task) -> tuple[int, ...]:
    """Return -1, 0 or 1 for every feature, as XGBoost's ``monotone_constraints``."""
    signs = STARVATION_SIGNS if task == "starvation" else THROUGHPUT_SIGNS
    return tuple(signs.get(name, 0) for name in FEATURES)


class RelativeRegressor(RegressorMixin, MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """Regressor of the logarithm of throughput over `expected_tok_s`; `regressor_` is the fitted clone.

    Relative errors have equal weight at all loads, and no extrapolation is needed where load is unbounded.
    """

    def __init__(self, regressor: Any) -> None:
        self.regressor = regressor

    def fit(self, X: ArrayLike, y: ArrayLike) -> RelativeRegressor:  # noqa: N803 (scikit-learn's name)
        """Fit on feature vectors, shape (rows, features), and tokens per second, shape (rows,)."""
        features, throughput = validate_data(self, X, y, dtype=np.float32, y_numeric=True)
        ratio = np.maximum(np.asarray(throughput, float), _LEAST_TOK_S) / _baseline_tok_s(features)
        self.regressor_ = clone(self.regressor).fit(features, np.log(ratio))
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803 (scikit-learn's name)
        """Return throughput in tokens per second, shape (rows,)."""
        check_is_fitted(self)
        features = validate_data(self, X, dtype=np.float32, reset=False)
        ratio: NDArray[np.float64] = np.exp(np.asarray(self.regressor_.predict(features), float))
        return _baseline_tok_s(features) * ratio


def _baseline_tok_s(features: NDArray[np.float32]) -> NDArray[np.float64]:
    if features.shape[1] != len(FEATURES):
        raise InputError(f"must have {len(FEATURES)} features", features.shape[1], "X")
    return np.asarray(np.maximum(expected_tok_s(features), _LEAST_TOK_S))


@dataclass(frozen=True)
class CandidateModel:
    """One family of models for one task."""

    name: str
    """One of `FAMILIES`."""
    task: Task
    template: Any
    """Unfitted estimator with its defaults."""
    distributions: Space
    """Search space of hyper-parameters for Optuna."""
    start: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters of the first trial; others are sampled."""

    def make(self, params: Mapping[str, Any], seed: int) -> Any:
        """Return the unfitted estimator with hyper-parameters named as in the distributions."""
        path = "regressor__" if isinstance(self.template, RelativeRegressor) else ""
        made = clone(self.template).set_params(**{path + name: value for name, value in params.items()})
        return made.set_params(**{f"{path}random_state": seed})


def candidate_model(family: str, task: Task) -> CandidateModel:
    """Return the candidate of a family."""
    if family not in FAMILIES:
        raise InputError(f"must be one of {', '.join(FAMILIES)}", family, "family")
    classifies = task == "starvation"
    learner: Any
    if family == "forest":
        learner = RandomForestClassifier() if classifies else RandomForestRegressor()
    else:
        # With absolute error XGBoost replaces leaf values by medians, which breaks the constraints.
        learner = (XGBClassifier if classifies else XGBRegressor)(
            objective="binary:logistic" if classifies else "reg:pseudohubererror",
            tree_method="hist",
            n_jobs=1,
            monotone_constraints=monotone_constraints(task),
        )
    space = forest_space(task) if family == "forest" else boosting_space(task)
    template = learner if classifies else RelativeRegressor(learner)
    return CandidateModel(family, task, template, space, _STARTS[family, task])


def forest_space(task: Task) -> Space:
    """Return the random forest's search space; the forests stay small enough to ship."""
    space: dict[str, BaseDistribution] = {
        "n_estimators": IntDistribution(32, 128, step=32),
        "min_samples_leaf": IntDistribution(5, 32, log=True),
        "max_depth": CategoricalDistribution((None, 5, 10, 20)),
        "max_features": CategoricalDistribution((1.0, "sqrt", "log2")),
    }
    if task == "starvation":
        space["criterion"] = CategoricalDistribution(("gini", "entropy"))
    return space


def boosting_space(task: Task) -> Space:
    """Return XGBoost's search space; 500 trees of depth 7 predict in less than 20 microseconds."""
    space: dict[str, BaseDistribution] = {
        "n_estimators": IntDistribution(100, 500, step=50),
        "learning_rate": FloatDistribution(0.03, 0.3, log=True),
        "max_depth": IntDistribution(3, 7),
        "min_child_weight": FloatDistribution(0.1, 20.0, log=True),
        "subsample": FloatDistribution(0.5, 1.0),
        "colsample_bytree": FloatDistribution(0.4, 1.0),
        "reg_lambda": FloatDistribution(0.01, 10.0, log=True),
        "max_bin": CategoricalDistribution((256, 1024)),
    }
    if task == "throughput":
        # Where squared error turns into absolute error, in units of the logarithm: 0.01 is 1 %.
        space["huber_slope"] = FloatDistribution(0.01, 0.5, log=True)
    return space


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

    The result depends on data and seed only. The target is throughput in tokens per second, or whether the
    GPU starved, shape (rows,); near-duplicate scenarios share a group, shape (rows,).
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
    """Open the storage of studies, with Optuna's messages silenced: a journal of JSON lines, or memory.

    The journal is created if it is missing. One that is damaged, or in use by another process, is an error.
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
