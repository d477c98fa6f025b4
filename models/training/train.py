"""Training of surrogates on the twin's data: the best family, a random forest and a small tree.

Adapter-caching paper, section 6 and appendix B. Models are scored on held-out groups of scenarios and fitted
on all.
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
from capplan.models.surrogates.surrogate import Domain, Surrogate, fit_domain
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
    refine,
    starvation_objective,
    throughput_objective,
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
        kind: _surrogate(profile, kind, models, table, domain, report, chosen.seed)
        for kind, models in by_kind.items()
    }
    report["kinds"] = {kind: _scores(surrogates[kind], models, table) for kind, models in by_kind.items()}
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
