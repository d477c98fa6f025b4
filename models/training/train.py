"""Training of surrogates: every family on the twin's answers, the best of them, and one small tree each.

Adapter-caching paper, section 6 and appendix B. Models are judged by answers to scenarios of groups that they
did not see, in five folds; what ships is fitted on all.
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
    """What training gives: a surrogate of each kind, and its report, the same in all of them.

    The report holds numbers, texts, lists and mappings only; docs/surrogates.md describes it.
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
        Whose twin answered.
    table
        Scenarios and answers, as `read_tables` gives them.
    options, progress
        How much to search, and whom to tell.

    Raises
    ------
    InputError
        For an unknown family, or data that cannot be split.
    """
    chosen = options or TrainingOptions()
    tell = progress or (lambda *_: None)
    contestants = [
        *fit_tuned(table, chosen.families, chosen, tell),
        *fit_physics(table, chosen, tell),
    ]
    designs = sorted({str(name) for name in table.design})
    best = {task: best_candidate(contestants, task, designs) for task in TASKS}
    refined = _refined(table, chosen, tell)
    answering = {
        "best": best,
        "forest": {each.task: each for each in contestants if each.name == "forest"},
        "tree": {task: _tree_candidate(task, found, table) for task, found in refined.items()},
    }
    errors = {kind: _errors(models, table, chosen.seed) for kind, models in answering.items()}
    report: dict[str, Any] = {
        "scenarios": {name: int((table.design == name).sum()) for name in designs},
        "starved_share": round(float(table.starved.mean()), 4),
        "judged_on": f"scenarios of other groups, {chosen.folds} folds",
        "error_formula": SMAPE_FORMULA,
        "options": {"budget": chosen.budget, "paper_space": chosen.paper_space, "seed": chosen.seed},
        "models": [contestant.line() for contestant in contestants],
        "chosen": {task: model.name for task, model in best.items()},
        "importance": {task: rounded(importance(model.head.forests)) for task, model in best.items()},
        "front": {
            task: [[point.rules, round(point.error, 4)] for point in found.front]
            for task, found in refined.items()
        },
        "kinds": {kind: known.report for kind, known in errors.items()},
    }
    domain = fit_domain(table.features)
    surrogates = {
        kind: _surrogate(profile, kind, models, errors[kind], domain, report)
        for kind, models in answering.items()
    }
    return Trained(surrogates, report, refined)


@dataclass(frozen=True)
class _Errors:
    """What a kind knows of its own error, from scenarios that it had not seen."""

    intervals: Intervals
    calibration: SigmoidCalibration
    report: dict[str, Any]


def _errors(models: Mapping[str, FittedCandidate], table: TrainingTable, seed: int) -> _Errors:
    throughput, starvation = models["throughput"], models["starvation"]
    intervals = fit_intervals(table.features, throughput.unseen, table.throughput_tok_s, table.group, seed)
    calibration = fit_calibration(starvation.unseen, table.starved)
    probability = calibration.probability(starvation.unseen)
    low, high = intervals.around(table.features, throughput.unseen)
    report = {
        "throughput_smape": rounded(throughput_errors(table, throughput.unseen)),
        "starvation_macro_f1": rounded(starvation_scores(table, probability)),
        "interval_coverage": rounded(coverage(table, low, high)),
        "reliability": [
            [round(value, 4) for value in row] for row in reliability(probability, table.starved)
        ],
        "rules": [
            int(sum((forest.feature < 0).sum() for forest in each.head.forests))
            for each in (throughput, starvation)
        ],
    }
    return _Errors(intervals, calibration, report)


def _surrogate(
    profile: Profile,
    kind: str,
    models: Mapping[str, FittedCandidate],
    errors: _Errors,
    domain: Domain,
    report: dict[str, Any],
) -> Surrogate:
    throughput, starvation = models["throughput"], models["starvation"]
    return Surrogate(
        profile=profile,
        kind=kind,
        throughput=throughput.head,
        starvation=starvation.head,
        calibration=errors.calibration,
        intervals=errors.intervals,
        domain=domain,
        report=report,
        throughput_tree=throughput.tree,
        starvation_tree=starvation.tree,
    )


def _refined(table: TrainingTable, options: TrainingOptions, tell: OnStage) -> dict[str, Refinement]:
    shared: dict[str, Any] = {"folds": options.folds, "seed": options.seed}
    tell("small trees", 0, 2)
    throughput = refine_throughput(
        table.features, table.share_tok_s, table.group, teacher=boosted_labels(options.seed), **shared
    )
    tell("small trees", 1, 2)
    starvation = refine_starvation(
        table.features, table.starved, table.group, teacher=boosted_labels(options.seed), **shared
    )
    tell("small trees", 2, 2)
    return {"throughput": throughput, "starvation": starvation}


def _tree_candidate(task: str, found: Refinement, table: TrainingTable) -> FittedCandidate:
    """Return a small tree as a contestant."""
    tree = found.chosen.tree
    head = EnsembleOutput(OVER_EXPECTED if task == "throughput" else PROBABILITY, (tree_forest(tree),))
    unseen = np.exp(found.unseen) * expected_tok_s(table.features)
    if task == "starvation":
        unseen = log_odds(found.unseen)
    return FittedCandidate("tree", task, {"rules": tree.rules}, head, unseen, {}, tree)
