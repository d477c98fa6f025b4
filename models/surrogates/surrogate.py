"""Surrogates: throughput and starvation of one GPU in microseconds, with an interval and a valid range."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capplan.models.surrogates.features import expected_tok_s, feature_vector
from capplan.models.surrogates.forest import Forest, forest_answer
from capplan.spec import Profile, Workload


@dataclass(frozen=True)
class SurrogateAnswer:
    """What a surrogate says of one GPU."""

    throughput_tok_s: float
    low_tok_s: float
    """5 % of twin runs lie below."""
    high_tok_s: float
    """5 % of twin runs lie above."""
    starvation_probability: float
    starved: bool
    in_range: bool
    """Whether every feature lies within the range of the training data; if not, ask the twin."""


@dataclass(frozen=True)
class Surrogate:
    """Two forests for one profile.

    Attributes
    ----------
    profile
        The profile whose twin they were trained on.
    throughput
        Answers the natural logarithm of throughput over the load that the mean field expects to be carried.
    starvation
        Answers the probability that the served fraction is below 0.9.
    low, high
        Smallest and largest training value of every feature, shape (features,).
    interval
        5 % and 95 % quantiles of the logarithmic error on training scenarios that a tree had not seen.
    report
        How it was trained and how well it does.
    """

    profile: Profile
    throughput: Forest
    starvation: Forest
    low: NDArray[np.float32]
    high: NDArray[np.float32]
    interval: tuple[float, float]
    report: dict[str, object]

    def predict(
        self,
        workload: Workload,
        *,
        a_max: int,
        s_max: int,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        gpu_memory_utilization: float = 0.9,
    ) -> SurrogateAnswer:
        """Answer for one GPU that serves all of `workload`; parameters as in `capplan.simulate`."""
        features = feature_vector(
            workload,
            self.profile,
            a_max=a_max,
            s_max=s_max,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        return self.answer(features)

    def answer(self, features: NDArray[np.float32]) -> SurrogateAnswer:
        """Answer for a feature vector in the order of `FEATURES`."""
        expected = float(expected_tok_s(features))
        share = forest_answer(self.throughput, features)
        probability = float(forest_answer(self.starvation, features))
        return SurrogateAnswer(
            throughput_tok_s=expected * float(np.exp(share)),
            low_tok_s=expected * float(np.exp(share + self.interval[0])),
            high_tok_s=expected * float(np.exp(share + self.interval[1])),
            starvation_probability=probability,
            starved=probability >= 0.5,
            in_range=bool(np.all((features >= self.low) & (features <= self.high))),
        )
