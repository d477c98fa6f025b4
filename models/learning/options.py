"""How much a training searches, and whom it tells of its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

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
