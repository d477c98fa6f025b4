"""Training of surrogates on the twin's data: the best family, a random forest and a small tree.

Adapter-caching paper, section 6 and appendix B. Models are scored on held-out groups of scenarios and fitted
on all.

Boosted trees: conversion of XGBoost models to flat arrays, and physics-informed estimators.

Physics-informed estimators learn the served fraction and the step time instead of tokens per second.
Throughput follows from both (`outputs.throughput_of`). A GPU starves if its served fraction is below 0.9:
the distance from there tells more than the class of one run, which a scenario at the edge gets by chance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, clone
from sklearn.utils.validation import check_is_fitted, validate_data
from xgboost import XGBRegressor

from capplan.errors import InputError
from capplan.models.calibration._least_squares import SMAPE_FORMULA
from capplan.models.surrogates._features import expected_tok_s, feature_of
from capplan.models.surrogates._files import KINDS, tree_forest
from capplan.models.surrogates._outputs import (
    LEAF,
    LEAST_SHARE,
    LOG_ODDS,
    OVER_EXPECTED,
    PROBABILITY,
    SERVED_AND_STEP,
    EnsembleOutput,
    Forest,
    expected_share,
    flatten_forest,
    joined,
    log_odds,
)
from capplan.models.surrogates._surrogate import Domain, Surrogate, fit_domain
from capplan.models.surrogates._tree import Tree
from capplan.models.training._candidates import (
    FAMILIES,
    SearchOptions,
    candidate_model,
    monotone_constraints,
    tune,
)
from capplan.models.training._data import TrainingTable
from capplan.models.training._evaluation import (
    Task,
    coverage,
    fit_calibration,
    fit_intervals,
    grouped_folds,
    importance,
    reliability,
    rounded,
    starvation_scores,
    throughput_errors,
)
from capplan.models.training._refinement import (
    Refinement,
    boosted_labels,
    refine,
    starvation_objective,
    throughput_objective,
)
from capplan.spec import STARVED_BELOW, Profile

if TYPE_CHECKING:
    from xgboost import Booster, XGBModel


_IDENTITY: Final = ("reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror", "reg:quantileerror")
_LOGISTIC: Final = ("binary:logistic", "reg:logistic")

LEAST_SERVED: Final = 0.5
"""Lower bound of the served fraction in the starvation target, which ignores how severe starvation is."""

SERVED_SCATTER: Final = 0.01
"""Width of the starvation target in the logarithm of the served fraction. Runs of one scenario with different
seeds scatter by 0.006 (median) to 0.014 (mean) near the edge."""

_LEAST_STEP_MS: Final = 1e-3


def flatten_boosted(model: XGBModel | Booster) -> Forest:
    """Return a fitted XGBoost model as a `Forest` whose mean leaf is the model's margin.

    The margin is the prediction of a regressor, or the log odds of the second class of a classifier.

    A forest averages its leaves, boosting sums them and adds a base score. Every leaf is stored as
    ``trees * leaf + base``, whose mean is that sum. XGBoost goes left where ``x < threshold``, a forest where
    ``x <= threshold``; both compare float32, so the threshold becomes the next smaller float32. Missing
    values do not occur in features.

    The model has a single output and plain trees (booster ``gbtree``). Trees after the best iteration of
    early stopping are dropped, as XGBoost's scikit-learn interface does.
    """
    booster = model if not hasattr(model, "get_booster") else model.get_booster()
    if booster.attr("best_iteration") is not None:
        booster = booster[: booster.best_iteration + 1]
    learner = json.loads(booster.save_raw("json"))["learner"]
    gradient = learner["gradient_booster"]
    sizes = learner["learner_model_param"]
    if gradient["name"] != "gbtree":
        raise InputError("must be gbtree", gradient["name"], "booster")
    if int(sizes.get("num_class", 0)) > 1 or int(sizes.get("num_target", 1)) > 1:
        raise InputError("must have a single output", location="booster")
    trees = gradient["model"]["trees"]
    if not trees:
        raise InputError("must have at least one tree", location="booster")
    base = _base_margin(learner["objective"]["name"], sizes["base_score"])
    forest = joined([_flat_tree(tree) for tree in trees])
    leaves = len(trees) * forest.value.astype(float) + base
    return forest._replace(value=np.where(forest.feature == LEAF, leaves, 0.0).astype(np.float32))


def _base_margin(objective: str, written: str) -> float:
    """Return the base score on the scale of margins; the model stores it on the scale of predictions."""
    # A list of one since XGBoost 3.1, a number before.
    score = float(written.strip("[]"))
    if objective in _IDENTITY:
        return score
    if objective in _LOGISTIC:
        return math.log(score / (1.0 - score))
    raise InputError(f"must be one of {', '.join(_IDENTITY + _LOGISTIC)}", objective, "objective")


def _flat_tree(tree: Mapping[str, Any]) -> Forest:
    """Return one tree with its nodes in depth-first order, so that children come after their parent."""
    if any(tree["split_type"]):
        raise InputError("must not have categorical splits", location="booster")
    left, right = np.asarray(tree["left_children"]), np.asarray(tree["right_children"])
    order, waiting = [], [0]
    while waiting:
        node = waiting.pop()
        order.append(node)
        if left[node] >= 0:
            waiting += [int(right[node]), int(left[node])]
    place = np.zeros(left.size, np.int64)
    place[order] = np.arange(len(order))
    left, right = left[order], right[order]
    inner = left >= 0
    # Of an inner node this is the threshold, of a leaf its value; the JSON holds float32 exactly.
    condition = np.asarray(tree["split_conditions"])[order].astype(np.float32)
    below = np.nextafter(condition, np.float32(-np.inf))
    return Forest(
        roots=np.zeros(1, np.int32),
        feature=np.where(inner, np.asarray(tree["split_indices"])[order], LEAF).astype(np.int16),
        threshold=np.where(inner, below, np.float32(0.0)).astype(np.float32),
        left=place[left].astype(np.int32),
        right=place[right].astype(np.int32),
        value=condition,
    )


@dataclass(eq=False, repr=False)
class _Boosted(BaseEstimator):  # type: ignore[misc]
    """XGBoost's hyper-parameters under its names; defaults chosen on both designs of both shipped profiles.

    Predictions do not depend on `n_jobs`, the number of threads.
    """

    n_estimators: int = 400
    learning_rate: float = 0.06
    max_depth: int = 6
    min_child_weight: float = 4.0
    subsample: float = 0.7
    colsample_bytree: float = 0.5
    max_bin: int = 256
    random_state: int = 0
    n_jobs: int = 1

    def _boost(self, features: NDArray[np.float32], target: NDArray[np.float64], **more: Any) -> XGBRegressor:
        model = XGBRegressor(tree_method="hist", **self.get_params(), **more)
        return model.fit(features, target)


class ServedAndStep(RegressorMixin, _Boosted):  # type: ignore[misc]
    """Throughput from the served fraction and the step time, each relative to the fluid model's.

    Absolute error of logarithms is minimized: medians are robust to outlying scenarios.
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803 (scikit-learn's name)
        """Fit on feature vectors, shape (n, features), and on served fraction and step time in ms, (n, 2)."""
        features, targets = validate_data(self, X, y, dtype=np.float32, multi_output=True, y_numeric=True)
        served, step_ms = np.asarray(targets, float).T
        share = np.log(np.maximum(served, LEAST_SHARE) / expected_share(features))
        estimate_ms = feature_of(features, "step_ms")
        # Scenarios without a step keep the fluid model's step time.
        steps = np.where(step_ms > 0.0, np.log(np.maximum(step_ms, _LEAST_STEP_MS) / estimate_ms), 0.0)
        self.served_ = self._boost(features, share, objective="reg:absoluteerror")
        self.step_ = self._boost(features, steps, objective="reg:absoluteerror")
        return self

    def predict(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803 (scikit-learn's name)
        """Return throughput in tokens per second, shape (n,)."""
        check_is_fitted(self)
        return self.output().predict(validate_data(self, X, dtype=np.float32, reset=False))

    def output(self) -> EnsembleOutput:
        """Return the trees as a surrogate stores them."""
        return EnsembleOutput(SERVED_AND_STEP, (flatten_boosted(self.served_), flatten_boosted(self.step_)))


@dataclass(eq=False, repr=False)
class ServedEdge(ClassifierMixin, _Boosted):  # type: ignore[misc]
    """Probability of starvation in another run with the same features, under monotone constraints.

    The target of a scenario is a logistic function of its served fraction, of width `SERVED_SCATTER`.
    Defaults chosen by cross-validation on 38,604 scenarios of Llama-3.1-8B.
    """

    n_estimators: int = 150
    learning_rate: float = 0.15
    max_depth: int = 7
    colsample_bytree: float = 1.0
    max_bin: int = 1024

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:  # noqa: N803 (scikit-learn's name)
        """Fit on feature vectors, shape (n, features), and served fractions, shape (n,)."""
        features, served = validate_data(self, X, y, dtype=np.float32, y_numeric=True)
        self.classes_ = np.array([0, 1])
        self.edge_ = self._boost(
            features,
            starvation_target(np.asarray(served, float)),
            objective="reg:logistic",
            monotone_constraints=monotone_constraints("starvation"),
        )
        return self

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """Return the log odds of starvation, shape (n,)."""
        check_is_fitted(self)
        return self.output().predict(validate_data(self, X, dtype=np.float32, reset=False))

    def predict(self, X: ArrayLike) -> NDArray[np.int64]:  # noqa: N803
        """Return 1 where starvation is more likely than not, shape (n,)."""
        return (self.decision_function(X) > 0.0).astype(np.int64)

    def output(self) -> EnsembleOutput:
        """Return the trees as a surrogate stores them."""
        return EnsembleOutput(LOG_ODDS, (flatten_boosted(self.edge_),))


def starvation_target(served_fraction: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the target of `ServedEdge`: 0.5 at the edge of starvation, 1 far below, 0 far above it."""
    distance = np.log(STARVED_BELOW / np.maximum(served_fraction, LEAST_SERVED))
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * distance / SERVED_SCATTER)))


OnStage: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of a stage, completed and total pieces of work."""

PHYSICS: Final = "physics"
TASKS: Final[tuple[Task, ...]] = ("throughput", "starvation")


@dataclass(frozen=True)
class TrainingOptions(SearchOptions):
    """Size of a training."""

    families: tuple[str, ...] = FAMILIES
    """Of `FAMILIES`; physics-informed models are always included, ``forest`` for the kind of that name."""
    kinds: tuple[str, ...] = KINDS
    """Surrogates to make."""


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
    families = (*options.families, "forest") if "forest" in options.kinds else options.families
    for family in dict.fromkeys(families):
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


@dataclass(frozen=True)
class Trained:
    """The surrogates by kind, and the report they share.

    The report holds numbers, texts, lists and mappings only.
    """

    surrogates: Mapping[str, Surrogate]
    report: dict[str, Any]
    refined: Mapping[str, Refinement] = field(default_factory=dict)


def train_surrogates(
    profile: Profile,
    table: TrainingTable,
    options: TrainingOptions | None = None,
    progress: OnStage | None = None,
) -> Trained:
    """Train the surrogates of a profile.

    Parameters
    ----------
    profile
        Profile that the scenarios were simulated with.
    table
        Scenarios and results, by `read_tables`.
    options, progress
        Size of the search, and callback.

    Raises
    ------
    InputError
        For an unknown family, or data that cannot be split.
    """
    chosen = options or TrainingOptions()
    on_stage = progress or (lambda *_: None)
    candidates = [*fit_tuned(table, chosen, on_stage), *fit_physics(table, chosen, on_stage)]
    designs = sorted({str(name) for name in table.design})
    best: dict[str, FittedCandidate] = {task: best_candidate(candidates, task, designs) for task in TASKS}
    refined = _refined(table, chosen, on_stage) if "tree" in chosen.kinds else {}
    models: dict[str, Mapping[str, FittedCandidate]] = {
        "best": best,
        "forest": {each.task: each for each in candidates if each.name == "forest"},
        "tree": {task: _tree_candidate(task, found, table) for task, found in refined.items()},
    }
    by_kind = {kind: models[kind] for kind in chosen.kinds}
    report: dict[str, Any] = {
        "scenarios": {name: int((table.design == name).sum()) for name in designs},
        "starved_share": round(float(table.starved.mean()), 4),
        "judged_on": f"scenarios of other groups, {chosen.folds} folds",
        "error_formula": SMAPE_FORMULA,
        "options": {"budget": chosen.budget, "paper_space": False, "seed": chosen.seed},
        "models": [candidate.summary() for candidate in candidates],
        "chosen": {task: model.name for task, model in best.items()},
        "importance": {task: rounded(importance(model.output.forests)) for task, model in best.items()},
        "front": {
            task: [[point.rules, round(point.error, 4)] for point in found.front]
            for task, found in refined.items()
        },
    }
    domain = fit_domain(table.features)
    surrogates = {
        kind: _surrogate(profile, kind, fitted, table, domain, report, chosen.seed)
        for kind, fitted in by_kind.items()
    }
    report["kinds"] = {kind: _scores(surrogates[kind], fitted, table) for kind, fitted in by_kind.items()}
    return Trained(surrogates, report, refined)


def _surrogate(
    profile: Profile,
    kind: str,
    models: Mapping[str, FittedCandidate],
    table: TrainingTable,
    domain: Domain,
    report: dict[str, Any],
    seed: int,
) -> Surrogate:
    throughput, starvation = models["throughput"], models["starvation"]
    predicted, actual = throughput.out_of_fold, table.throughput_tok_s
    return Surrogate(
        profile=profile,
        kind=kind,
        throughput=throughput.output,
        starvation=starvation.output,
        calibration=fit_calibration(starvation.out_of_fold, table.starved),
        intervals=fit_intervals(table.features, predicted, actual, table.group, seed),
        domain=domain,
        report=report,
        throughput_tree=throughput.tree,
        starvation_tree=starvation.tree,
    )


def _scores(
    surrogate: Surrogate, models: Mapping[str, FittedCandidate], table: TrainingTable
) -> dict[str, Any]:
    """Return the scores of one kind on held-out groups."""
    predicted = models["throughput"].out_of_fold
    probability = surrogate.calibration.probability(models["starvation"].out_of_fold)
    low, high = surrogate.intervals.around(table.features, predicted)
    return {
        "throughput_smape": rounded(throughput_errors(table, predicted)),
        "starvation_macro_f1": rounded(starvation_scores(table, probability)),
        "interval_coverage": rounded(coverage(table, low, high)),
        "reliability": [
            [round(value, 4) for value in row] for row in reliability(probability, table.starved)
        ],
        "rules": [
            int(sum((forest.feature < 0).sum() for forest in each.output.forests))
            for each in (models["throughput"], models["starvation"])
        ],
    }


def _refined(table: TrainingTable, options: TrainingOptions, on_stage: OnStage) -> dict[str, Refinement]:
    objectives = {
        "throughput": throughput_objective(table.features, table.share_tok_s),
        "starvation": starvation_objective(table.features, table.starved),
    }
    labels = boosted_labels(options.seed)
    refined = {}
    for done, (task, objective) in enumerate(objectives.items()):
        on_stage("small trees", done, len(objectives))
        refined[task] = refine(objective, table.group, labels=labels, folds=options.folds, seed=options.seed)
    on_stage("small trees", len(objectives), len(objectives))
    return refined


def _tree_candidate(task: str, found: Refinement, table: TrainingTable) -> FittedCandidate:
    tree = found.chosen.tree
    output = EnsembleOutput(OVER_EXPECTED if task == "throughput" else PROBABILITY, (tree_forest(tree),))
    out_of_fold = np.exp(found.out_of_fold) * expected_tok_s(table.features)
    if task == "starvation":
        out_of_fold = log_odds(found.out_of_fold)
    return FittedCandidate("tree", task, {"rules": tree.rules}, output, out_of_fold, {}, tree)
