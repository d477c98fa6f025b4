"""Successive halving over a grid, as the adapter-caching paper tunes (section 6, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sklearn.experimental import enable_halving_search_cv  # noqa: F401 (makes the next line work)
from sklearn.model_selection import HalvingGridSearchCV

from capplan.models.learning.candidates import Candidate
from capplan.models.learning.grids import Combination
from capplan.models.learning.scores import loss
from capplan.models.learning.trials import Problem, Trial

_FACTOR: Final = 3
_LEAST_ROWS: Final = 200
"""Fewer rows than these say nothing of a model."""


def halving_trials(
    candidate: Candidate, problem: Problem, combinations: Sequence[Combination]
) -> list[Trial]:
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
        Trial(
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
