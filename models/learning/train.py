"""Training of surrogates: every family on the twin's answers, the best of them, and one small tree each.

Adapter-caching paper, section 6 and appendix B. Models are judged by answers to scenarios of groups that they
did not see, in five folds; what ships is fitted on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from capplan.models.calibrate import SMAPE_FORMULA
from capplan.models.learning.contest import Contestant, best_of, physics_contestants, tuned_contestants
from capplan.models.learning.judging import (
    calibration_of,
    coverage,
    importance,
    intervals_of,
    reliability,
    rounded,
    starvation_scores,
    throughput_errors,
)
from capplan.models.learning.refine import Refinement, refine_starvation, refine_throughput
from capplan.models.learning.table import TrainingTable
from capplan.models.learning.teachers import boosted_teacher
from capplan.models.surrogates.documents import tree_forest
from capplan.models.surrogates.features import expected_tok_s
from capplan.models.surrogates.heads import OVER_EXPECTED, PROBABILITY, Head, log_odds
from capplan.models.surrogates.surrogate import Surrogate
from capplan.models.surrogates.uncertainty import Domain, domain_of
from capplan.spec import Profile

OnStage: TypeAlias = Callable[[str, int, int], None]
"""Called with the name of a stage, the pieces of work done in it and their total."""

SEARCHED: Final = ("knn", "forest", "svm", "xgboost")


@dataclass(frozen=True)
class TrainingOptions:
    """How much is searched.

    Attributes
    ----------
    families
        Of `capplan.models.learning.candidates.FAMILIES`; ``forest`` is always among them, since it is a
        kind of its own. The physics-informed models always take part.
    budget
        Combinations of a grid, and trials of Optuna, for each family and task.
    paper_space
        Search the paper's whole grids; hours.
    folds, seed, n_jobs
        Of cross-validation and models.
    storage
        Journal of Optuna's studies, so that a killed search goes on; None: in memory.
    """

    families: tuple[str, ...] = SEARCHED
    budget: int = 12
    paper_space: bool = False
    folds: int = 5
    seed: int = 0
    n_jobs: int = 1
    storage: Path | None = None


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
        *tuned_contestants(table, chosen.families, chosen, tell),
        *physics_contestants(table, chosen, tell),
    ]
    designs = sorted({str(name) for name in table.design})
    throughput, starvation = (best_of(contestants, task, designs) for task in ("throughput", "starvation"))
    refined = _refined(table, chosen, tell)
    domain = domain_of(table.features)
    report: dict[str, Any] = {
        "scenarios": {name: int((table.design == name).sum()) for name in designs},
        "starved_share": round(float(table.starved.mean()), 4),
        "judged_on": f"scenarios of other groups, {chosen.folds} folds",
        "error_formula": SMAPE_FORMULA,
        "options": {"budget": chosen.budget, "paper_space": chosen.paper_space, "seed": chosen.seed},
        "models": [contestant.line() for contestant in contestants],
        "chosen": {"throughput": throughput.name, "starvation": starvation.name},
        "importance": {
            each.task: rounded(importance(each.head.forests)) for each in (throughput, starvation)
        },
        "front": {
            task: [[point.rules, round(point.error, 4)] for point in found.front]
            for task, found in refined.items()
        },
        "kinds": {},
    }
    forest = {each.task: each for each in contestants if each.name == "forest"}
    heads = {
        "best": (throughput, starvation),
        "forest": (forest["throughput"], forest["starvation"]),
        "tree": tuple(_tree_contestant(task, found, table) for task, found in refined.items()),
    }
    surrogates = {
        kind: _surrogate(profile, kind, pair[0], pair[1], table, domain, report, chosen.seed)
        for kind, pair in heads.items()
    }
    return Trained(surrogates, report, refined)


def _surrogate(
    profile: Profile,
    kind: str,
    throughput: Contestant,
    starvation: Contestant,
    table: TrainingTable,
    domain: Domain,
    report: dict[str, Any],
    seed: int,
) -> Surrogate:
    """Return one kind, with errors from answers to scenarios that it had not seen."""
    intervals = intervals_of(table.features, throughput.unseen, table.throughput_tok_s, table.group, seed)
    calibration = calibration_of(starvation.unseen, table.starved)
    probability = calibration.probability(starvation.unseen)
    low, high = intervals.around(table.features, throughput.unseen)
    report["kinds"][kind] = {
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
    return Surrogate(
        profile=profile,
        kind=kind,
        throughput=throughput.head,
        starvation=starvation.head,
        calibration=calibration,
        intervals=intervals,
        domain=domain,
        report=report,
        throughput_tree=throughput.tree,
        starvation_tree=starvation.tree,
    )


def _refined(table: TrainingTable, options: TrainingOptions, tell: OnStage) -> dict[str, Refinement]:
    shared: dict[str, Any] = {"folds": options.folds, "seed": options.seed}
    tell("small trees", 0, 2)
    throughput = refine_throughput(
        table.features, table.share_tok_s, table.group, teacher=boosted_teacher(options.seed), **shared
    )
    tell("small trees", 1, 2)
    starvation = refine_starvation(
        table.features, table.starved, table.group, teacher=boosted_teacher(options.seed), **shared
    )
    tell("small trees", 2, 2)
    return {"throughput": throughput, "starvation": starvation}


def _tree_contestant(task: str, found: Refinement, table: TrainingTable) -> Contestant:
    """Return a small tree as a contestant."""
    tree = found.chosen.tree
    head = Head(OVER_EXPECTED if task == "throughput" else PROBABILITY, (tree_forest(tree),))
    unseen = np.exp(found.unseen) * expected_tok_s(table.features)
    if task == "starvation":
        unseen = log_odds(found.unseen)
    return Contestant("tree", task, {"rules": tree.rules}, head, unseen, {}, tree)
