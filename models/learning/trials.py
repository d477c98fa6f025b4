"""What a search works on, and what it records of one try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.utils.parallel import Parallel, delayed

from capplan.models.learning.scores import answer_of
from capplan.models.learning.splits import Split

OnProgress: TypeAlias = Callable[[int, int], None]
"""Called with the pieces of work done and their total."""


@dataclass(frozen=True)
class Problem:
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
class Trial:
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
