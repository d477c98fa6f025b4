"""Asks a surrogate what instances would do, many at once; and the twin what no surrogate can know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from capplan.models import Surrogate
from capplan.models.surrogates.asker import Asker, Setting, asker_of
from capplan.planner.parallel import ask_all
from capplan.planner.problem import Assignment, Estimate, Estimator, Part, Problem

_STARVED = 0.5


@dataclass(frozen=True)
class SurrogateEstimator:
    """Asks a surrogate of one pool's profile, and the twin for what lies outside its training range.

    A scenario that is out of range for want of load only, and that the surrogate does not fear for, is no
    reason to ask the twin: with less load than any that was trained on, nothing starves.
    """

    problem: Problem
    surrogate: Surrogate
    twin: Estimator

    def __call__(self, assignment: Assignment) -> Estimate:
        """Answer at the workload's load over (1 - headroom)."""
        return self.ask_all((assignment,))[0]

    def ask_all(self, assignments: Sequence[Assignment]) -> list[Estimate]:
        """Return the estimates of several instances; those that follow each other may share their parts."""
        known: list[Estimate | None] = []
        for _, alike in groupby(assignments, key=lambda assignment: id(assignment.parts)):
            known += self._ask(list(alike))
        unknown = [asked for asked, estimate in zip(assignments, known, strict=True) if estimate is None]
        twins = iter(ask_all(self.twin, unknown) if unknown else ())
        return [next(twins) if estimate is None else estimate for estimate in known]

    def _ask(self, alike: Sequence[Assignment]) -> list[Estimate | None]:
        """Return what the surrogate knows of instances that serve the same parts."""
        parts, asker = alike[0].parts, self._asker
        names = [part.name for part in parts]
        if asker is None or not self._own_lengths.isdisjoint(names):
            return [None] * len(alike)
        rates_rps, ranks = _numbers(parts, names)
        s_max = self.problem.s_max((parts[int(ranks.argmax())],))
        settings = [Setting(a.a_max, s_max, self.problem.max_num_seqs(a)) for a in alike]
        replies = asker.ask(rates_rps / (1.0 - self.problem.workload.headroom), ranks, settings)
        return [
            Estimate(throughput, probability >= _STARVED, strain=probability)
            if in_range or (is_lighter and probability < _STARVED)
            else None
            for throughput, probability, in_range, is_lighter in zip(
                replies.throughput_tok_s.tolist(),
                replies.starvation_probability.tolist(),
                replies.in_range.tolist(),
                replies.is_lighter.tolist(),
                strict=True,
            )
        ]

    @cached_property
    def _asker(self) -> Asker | None:
        """Who asks about adapters without lengths of their own; None where nobody can."""
        workload, engine = self.problem.workload, self.problem.engine
        usual = tuple(a for a in workload.adapters if a.name not in self._own_lengths)
        if not usual:
            return None
        return asker_of(
            self.surrogate,
            workload.model_copy(update={"adapters": usual}),
            max_num_batched_tokens=engine.max_num_batched_tokens,
            gpu_memory_utilization=engine.gpu_memory_utilization,
        )

    @cached_property
    def _own_lengths(self) -> frozenset[str]:
        adapters = self.problem.workload.adapters
        return frozenset(a.name for a in adapters if a.prompt_tokens or a.output_tokens)


def _numbers(parts: Sequence[Part], names: Sequence[str]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the rates and ranks of the adapters that these are parts of; shares of one are one adapter."""
    rates_rps = np.array([part.rate_rps for part in parts])
    ranks = np.array([part.rank for part in parts], np.float64)
    if len(set(names)) == len(names):
        return rates_rps, ranks
    _, first, which = np.unique(names, return_index=True, return_inverse=True)
    return np.bincount(which, rates_rps).astype(np.float64), ranks[first]
