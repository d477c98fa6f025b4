"""Surrogates: throughput and starvation of one GPU in microseconds, with an interval and a valid range."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capplan.models.surrogates.features import feature_vector, untrained
from capplan.models.surrogates.heads import Head
from capplan.models.surrogates.tree import Tree
from capplan.models.surrogates.uncertainty import Calibration, Domain, Intervals
from capplan.spec import Profile, Workload


@dataclass(frozen=True)
class SurrogateAnswer:
    """What a surrogate says of one GPU over an hour."""

    throughput_tok_s: float
    """Input and output tokens of completed requests per second."""
    low_tok_s: float
    """5 % of twin runs lie below."""
    high_tok_s: float
    """5 % of twin runs lie above."""
    starvation_probability: float
    starved: bool
    in_range: bool
    """Whether the scenario is like those of the training data; if not, ask the twin."""
    novelty: float
    """Distance from the middle of the training data, over that of its farthest scenario."""


@dataclass(frozen=True)
class Answers:
    """The same of many feature vectors; every array has shape (n,)."""

    throughput_tok_s: NDArray[np.float64]
    low_tok_s: NDArray[np.float64]
    high_tok_s: NDArray[np.float64]
    starvation_probability: NDArray[np.float64]
    in_range: NDArray[np.bool_]
    novelty: NDArray[np.float64]


@dataclass(frozen=True)
class Surrogate:
    """What was learned from the twin of one profile.

    Attributes
    ----------
    profile
        The profile whose twin it was trained on.
    kind
        ``best``, ``forest`` or ``tree``.
    throughput, starvation
        The trees that answer.
    calibration
        From scores of starvation to probabilities.
    intervals
        Around throughput.
    domain
        Where the training data lies.
    report
        How it was trained and how well it does.
    throughput_tree, starvation_tree
        Of the kind ``tree``: the same answers as rules (`capplan.models.surrogates.codegen` compiles them).
    """

    profile: Profile
    kind: str
    throughput: Head
    starvation: Head
    calibration: Calibration
    intervals: Intervals
    domain: Domain
    report: dict[str, object]
    throughput_tree: Tree | None = None
    starvation_tree: Tree | None = None

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
        """Answer for one GPU that serves all of `workload`; parameters as in `capplan.simulate`.

        The answer is about an hour behind a front end that holds at most 25,000 requests.
        """
        features = feature_vector(
            workload,
            self.profile,
            a_max=a_max,
            s_max=s_max,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        return self.answer(features, is_known=not untrained(workload, self.profile))

    def answer(self, features: NDArray[np.float32], *, is_known: bool = True) -> SurrogateAnswer:
        """Answer for a feature vector in the order of `FEATURES`; `is_known`: a kind that was trained on."""
        answers = self.answers(features[None, :])
        probability = float(answers.starvation_probability[0])
        return SurrogateAnswer(
            throughput_tok_s=float(answers.throughput_tok_s[0]),
            low_tok_s=float(answers.low_tok_s[0]),
            high_tok_s=float(answers.high_tok_s[0]),
            starvation_probability=probability,
            starved=probability >= 0.5,
            in_range=is_known and bool(answers.in_range[0]),
            novelty=float(answers.novelty[0]),
        )

    def answers(self, features: NDArray[np.float32]) -> Answers:
        """Answer for many feature vectors, shape (n, features)."""
        throughput = self.throughput.answers(features)
        low, high = self.intervals.around(features, throughput)
        in_range, novelty = self.domain.place(features)
        return Answers(
            throughput_tok_s=throughput,
            low_tok_s=low,
            high_tok_s=high,
            starvation_probability=self.calibration.probability(self.starvation.answers(features)),
            in_range=in_range,
            novelty=novelty,
        )
