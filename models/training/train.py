"""Training of surrogates on the twin's data: the best family, a random forest and a small tree.

Adapter-caching paper, section 6 and appendix B. Models are scored on held-out groups of scenarios and fitted
on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from capplan.models.calibration.least_squares import SMAPE_FORMULA
from capplan.models.surrogates.features import expected_tok_s
from capplan.models.surrogates.files import KINDS, tree_forest
from capplan.models.surrogates.outputs import (
    LOG_ODDS,
    OVER_EXPECTED,
    PROBABILITY,
    EnsembleOutput,
    flatten_forest,
    log_odds,
)
from capplan.models.surrogates.surrogate import Domain, Surrogate, fit_domain
from capplan.models.surrogates.tree import Tree
from capplan.models.training.boosting import ServedAndStep, ServedEdge, flatten_boosted
from capplan.models.training.candidates import FAMILIES, Task, candidate_model
from capplan.models.training.data import TrainingTable
from capplan.models.training.evaluation import (
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
from capplan.models.training.refinement import (
    Refinement,
    boosted_labels,
    refine,
    starvation_objective,
    throughput_objective,
)
from capplan.models.training.search import SearchOptions, tune
from capplan.spec import Profile

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
