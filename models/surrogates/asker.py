"""Asks a surrogate about GPUs whose adapters are plain numbers: no workload is built, and all is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.models.memory import KvBudget, kv_budget
from capplan.models.surrogates.features import FEATURES, common_of, untrained
from capplan.models.surrogates.replies import Learned, Replies, compiled_replies, learned_by, slow_replies
from capplan.models.surrogates.surrogate import Surrogate
from capplan.models.surrogates.vector import Common, fill_vectors
from capplan.spec import Workload


class Setting(NamedTuple):
    """Engine settings that planners vary, as in `Surrogate.predict`."""

    a_max: int
    s_max: int
    max_num_seqs: int


@dataclass(frozen=True)
class Asker:
    """A surrogate, and what all questions have in common; made by `asker_of`.

    Attributes
    ----------
    surrogate
        Who is asked.
    common
        Requests and engine.
    gpu_memory_utilization
        Share of the GPU's memory that the engine may take.
    learned
        The surrogate for compiled code, where it can be had.
    """

    surrogate: Surrogate
    common: Common
    gpu_memory_utilization: float
    learned: Learned | None

    def ask(
        self, rates_rps: NDArray[np.float64], ranks: NDArray[np.float64], settings: Sequence[Setting]
    ) -> Replies:
        """Answer for GPUs that all serve the same adapters, each under settings of its own.

        Parameters
        ----------
        rates_rps, ranks
            Of each adapter, at least one; shape (adapters,).
        settings
            At least one.

        Returns
        -------
        Replies
            What `Surrogate.predict` says of such workloads; arrays of shape (settings,).
        """
        rows = [(*setting, self._kv_budget.tokens(*setting)) for setting in settings]
        vectors = np.empty((len(rows), len(FEATURES)), np.float32)
        room = np.empty((4, rates_rps.size))
        fill_vectors(vectors, self.common, np.array(rows, float), rates_rps, ranks, np.sort(rates_rps), room)
        if self.learned is None:
            return slow_replies(self.surrogate, vectors)
        return compiled_replies(self.learned, vectors)

    @cached_property
    def _kv_budget(self) -> KvBudget:
        return kv_budget(self.surrogate.profile, self.gpu_memory_utilization)


def asker_of(
    surrogate: Surrogate,
    workload: Workload,
    *,
    max_num_batched_tokens: int = 2048,
    gpu_memory_utilization: float = 0.9,
) -> Asker | None:
    """Return who asks about GPUs that serve any adapters with the requests of a workload.

    None where the surrogate was not trained on such workloads: adapters with lengths of their own among them.
    """
    if untrained(workload, surrogate.profile):
        return None
    common = common_of(workload, surrogate.profile, max_num_batched_tokens)
    return Asker(surrogate, common, gpu_memory_utilization, learned_by(surrogate))
