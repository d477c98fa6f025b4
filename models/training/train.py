"""Training of surrogates: all families on the twin's data, the best of them, and one small tree each.

Adapter-caching paper, section 6 and appendix B. Models are scored on scenarios of held-out groups, in five
folds; the shipped ones are fitted on all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from capplan.models.calibration.least_squares import SMAPE_FORMULA
from capplan.models.surrogates.features import expected_tok_s
from capplan.models.surrogates.files import tree_forest
from capplan.models.surrogates.outputs import OVER_EXPECTED, PROBABILITY, EnsembleOutput, log_odds
from capplan.models.surrogates.surrogate import Domain, Intervals, SigmoidCalibration, Surrogate, fit_domain
from capplan.models.training.data import TrainingTable
from capplan.models.training.evaluation import (
    coverage,
    fit_calibration,
    fit_intervals,
    importance,
    reliability,
    rounded,
    starvation_scores,
    throughput_errors,
)
from capplan.models.training.model_selection import (
    TASKS,
    FittedCandidate,
    OnStage,
    TrainingOptions,
    best_candidate,
    fit_physics,
    fit_tuned,
)
from capplan.models.training.refinement import (
    Refinement,
    boosted_labels,
    refine_starvation,
    refine_throughput,
)
from capplan.spec import Profile


@dataclass(frozen=True)
class Trained:
    """A surrogate of each kind, and the report they share.

    The report holds numbers, texts, lists and mappings only.
    """

    surrogates: Mapping[str, Surrogate]
    report: dict[str, Any]
    refined: Mapping[str, Refinement] = field(default_factory=dict)


@dataclass(frozen=True)
class _ErrorModel:
    """Intervals and calibration of one kind, and its scores."""

    intervals: Intervals
    calibration: SigmoidCalibration
    report: dict[str, Any]


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
    refined = _refined(table, chosen, on_stage)
    by_kind: dict[str, Mapping[str, FittedCandidate]] = {
        "best": best,
        "forest": {each.task: each for each in candidates if each.name == "forest"},
        "tree": {task: _tree_candidate(task, found, table) for task, found in refined.items()},
    }
    errors = {kind: _error_model(models, table, chosen.seed) for kind, models in by_kind.items()}
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
        "kinds": {kind: error_model.report for kind, error_model in errors.items()},
    }
    domain = fit_domain(table.features)
    surrogates = {
        kind: _surrogate(profile, kind, models, errors[kind], domain, report)
        for kind, models in by_kind.items()
    }
    return Trained(surrogates, report, refined)


def _error_model(models: Mapping[str, FittedCandidate], table: TrainingTable, seed: int) -> _ErrorModel:
    throughput, starvation = models["throughput"], models["starvation"]
    predicted = throughput.out_of_fold
    intervals = fit_intervals(table.features, predicted, table.throughput_tok_s, table.group, seed)
    calibration = fit_calibration(starvation.out_of_fold, table.starved)
    probability = calibration.probability(starvation.out_of_fold)
    low, high = intervals.around(table.features, predicted)
    report = {
        "throughput_smape": rounded(throughput_errors(table, predicted)),
        "starvation_macro_f1": rounded(starvation_scores(table, probability)),
        "interval_coverage": rounded(coverage(table, low, high)),
        "reliability": [
            [round(value, 4) for value in row] for row in reliability(probability, table.starved)
        ],
        "rules": [
            int(sum((forest.feature < 0).sum() for forest in each.output.forests))
            for each in (throughput, starvation)
        ],
    }
    return _ErrorModel(intervals, calibration, report)


def _surrogate(
    profile: Profile,
    kind: str,
    models: Mapping[str, FittedCandidate],
    errors: _ErrorModel,
    domain: Domain,
    report: dict[str, Any],
) -> Surrogate:
    throughput, starvation = models["throughput"], models["starvation"]
    return Surrogate(
        profile=profile,
        kind=kind,
        throughput=throughput.output,
        starvation=starvation.output,
        calibration=errors.calibration,
        intervals=errors.intervals,
        domain=domain,
        report=report,
        throughput_tree=throughput.tree,
        starvation_tree=starvation.tree,
    )


def _refined(table: TrainingTable, options: TrainingOptions, on_stage: OnStage) -> dict[str, Refinement]:
    shared: dict[str, Any] = {
        "labels": boosted_labels(options.seed),
        "folds": options.folds,
        "seed": options.seed,
    }
    on_stage("small trees", 0, 2)
    throughput = refine_throughput(table.features, table.share_tok_s, table.group, **shared)
    on_stage("small trees", 1, 2)
    starvation = refine_starvation(table.features, table.starved, table.group, **shared)
    on_stage("small trees", 2, 2)
    return {"throughput": throughput, "starvation": starvation}


def _tree_candidate(task: str, found: Refinement, table: TrainingTable) -> FittedCandidate:
    tree = found.chosen.tree
    output = EnsembleOutput(OVER_EXPECTED if task == "throughput" else PROBABILITY, (tree_forest(tree),))
    out_of_fold = np.exp(found.out_of_fold) * expected_tok_s(table.features)
    if task == "starvation":
        out_of_fold = log_odds(found.out_of_fold)
    return FittedCandidate("tree", task, {"rules": tree.rules}, output, out_of_fold, {}, tree)
