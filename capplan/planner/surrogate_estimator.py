"""Asks a surrogate what instances would do, many at once; and the twin what no surrogate can know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from capplan.models import Surrogate
from capplan.models.surrogates.asker import Asker, Setting, asker_of
from capplan.planner.parallel import ask_all
from capplan.planner.problem import Assignment, Estimate, Estimator, Part, Problem
from capplan.spec import Workload

_STARVED = 0.5


def _id_of_parts(assignment: Assignment) -> int:
    return id(assignment.parts)


@dataclass(frozen=True)
class SurrogateEstimator:
    """Asks a surrogate of one pool's profile, and the twin for what lies outside its training range.

    A scenario that is out of range for want of load only, and that the surrogate does not fear for, is no
    reason to ask the twin: with less load than any that was trained on, nothing starves.
    """

    problem: Problem
    surrogate: Surrogate
    twin: Estimator
    guesses: bool = False
    """Whether to answer beyond the training range, too, rather than ask the twin; and to take an adapter with
    lengths of its own for one with the usual lengths that asks for as many tokens."""

    def ready(self) -> Self:
        """Prepare what all questions share, rather than within the first of them."""
        _ = self._asker
        return self

    def __call__(self, assignment: Assignment) -> Estimate:
        """Answer at the workload's load over (1 - headroom)."""
        return self.ask_all((assignment,))[0]

    def ask_all(self, assignments: Sequence[Assignment]) -> list[Estimate]:
        """Return the estimates of several instances; those that follow each other may share their parts."""
        known: list[Estimate | None] = []
        for _, alike in groupby(assignments, key=_id_of_parts):
            known += self._ask(list(alike))
        if None not in known:
            return cast(list[Estimate], known)
        unknown = [asked for asked, estimate in zip(assignments, known, strict=True) if estimate is None]
        twins = iter(ask_all(self.twin, unknown) if unknown else ())
        return [next(twins) if estimate is None else estimate for estimate in known]

    def _ask(self, alike: Sequence[Assignment]) -> list[Estimate | None]:
        """Return what the surrogate knows of instances that serve the same parts."""
        parts, asker = alike[0].parts, self._asker
        names = [part.name for part in parts]
        own = self._own_lengths
        if asker is None or (own and not self.guesses and not own.keys().isdisjoint(names)):
            return [None] * len(alike)
        rates_rps, ranks = _numbers(parts, names, own)
        s_max = self.problem.s_max((parts[int(ranks.argmax())],))
        settings = [Setting(a.a_max, s_max, self.problem.max_num_seqs(a)) for a in alike]
        replies = asker.ask(rates_rps / (1.0 - self.problem.workload.headroom), ranks, settings)
        return [
            Estimate(throughput, probability >= _STARVED, e2e_s_mean=request_s, strain=probability)
            if self.guesses or in_range or (is_lighter and probability < _STARVED)
            else None
            for throughput, probability, request_s, in_range, is_lighter in zip(
                replies.throughput_tok_s.tolist(),
                replies.starvation_probability.tolist(),
                replies.request_s.tolist(),
                replies.in_range.tolist(),
                replies.is_lighter.tolist(),
                strict=True,
            )
        ]

    @cached_property
    def _asker(self) -> Asker | None:
        """Who asks about adapters without lengths of their own; None where nobody can."""
        workload, engine = self.problem.workload, self.problem.engine
        if self.guesses:
            workload = with_usual_lengths(workload)
        else:
            usual = tuple(a for a in workload.adapters if a.name not in self._own_lengths)
            workload = workload.model_copy(update={"adapters": usual})
        if not workload.adapters:
            return None
        return asker_of(
            self.surrogate,
            workload,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            gpu_memory_utilization=engine.gpu_memory_utilization,
        )

    @cached_property
    def _own_lengths(self) -> Mapping[str, float]:
        """Return for adapters with lengths of their own how many usual requests one of theirs is worth."""
        workload = self.problem.workload
        usual = workload.prompt_tokens.mean_tokens + workload.output_tokens.mean_tokens
        return {
            adapter.name: sum(lengths.mean_tokens for lengths in workload.lengths_of(adapter)) / usual
            for adapter in workload.adapters
            if adapter.prompt_tokens or adapter.output_tokens
        }


def with_usual_lengths(workload: Workload) -> Workload:
    """Return the workload without lengths that adapters have of their own."""
    plain = {"prompt_tokens": None, "output_tokens": None}
    adapters = tuple(adapter.model_copy(update=plain) for adapter in workload.adapters)
    return workload.model_copy(update={"adapters": adapters})


def _numbers(
    parts: Sequence[Part], names: Sequence[str], worth: Mapping[str, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the rates and ranks of the adapters that these are parts of; shares of one are one adapter."""
    rates = [part.rate_rps for part in parts]
    if worth:
        rates = [rate * worth.get(name, 1.0) for rate, name in zip(rates, names, strict=True)]
    rates_rps, ranks = np.array(rates), np.array([part.rank for part in parts], np.float64)
    if len(set(names)) == len(names):
        return rates_rps, ranks
    _, first, which = np.unique(names, return_index=True, return_inverse=True)
    return np.bincount(which, rates_rps).astype(np.float64), ranks[first]
