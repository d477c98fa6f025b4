"""Surrogates: throughput and starvation of one GPU in microseconds, with an interval and a valid range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.models.surrogates.features import feature_vector, unsupported_workload
from capplan.models.surrogates.outputs import EnsembleOutput
from capplan.models.surrogates.tree import Tree
from capplan.spec import Profile, Workload

Features: TypeAlias = NDArray[np.float32]

Floats: TypeAlias = NDArray[np.float64]

COVERAGE: Final = 0.9


@dataclass(frozen=True)
class Intervals:
    """Conformal intervals, one width per regime (Mondrian): the leaves of a tree of how hard scenarios are.

    Attributes
    ----------
    low, high
        Two trees of the same regimes, whose leaves hold the 5 % and 95 % quantiles of the logarithm of true
        over answered throughput, on scenarios that the answering model had not seen.
    """

    low: Tree
    high: Tree

    def around(self, features: Features, answers: Floats) -> tuple[Floats, Floats]:
        """Return the ends of the intervals around answers in tokens per second, shape (n,) each."""
        return (
            answers * np.exp(np.minimum(0.0, self.low.answers(features))),
            answers * np.exp(np.maximum(0.0, self.high.answers(features))),
        )


@dataclass(frozen=True)
class SigmoidCalibration:
    """From a score to a probability: a logistic curve (Platt scaling)."""

    slope: float
    offset: float

    def probability(self, score: Floats) -> Floats:
        """Return the probability of starvation of scores, shape (n,)."""
        chance: Floats = 0.5 * (1.0 + np.tanh(0.5 * (self.slope * score + self.offset)))
        return chance


@dataclass(frozen=True)
class Domain:
    """Where the training data lies.

    Attributes
    ----------
    low, high
        Smallest and largest training value of every feature, shape (features,).
    centre, whitening
        Of features on a logarithmic scale: their mean, shape (features,), and what makes their covariance a
        unit matrix, shape (features, features).
    farthest
        The largest distance of a training scenario from the centre.
    """

    low: Features
    high: Features
    centre: Floats
    whitening: Floats
    farthest: float

    def novelty(self, features: Features) -> Floats:
        """Return the Mahalanobis distance over that of the farthest training scenario, shape (n,)."""
        away = (_scaled(features) - self.centre) @ self.whitening
        distance: Floats = np.sqrt((away**2).sum(axis=1)) / self.farthest
        return distance

    def contains(self, features: Features) -> NDArray[np.bool_]:
        """Return whether every feature is in range, and their combination no stranger than in training."""
        return self.place(features)[0]

    def place(self, features: Features) -> tuple[NDArray[np.bool_], Floats]:
        """Return what `contains` and `novelty` say, shape (n,) each."""
        inside = (features >= self.low) & (features <= self.high)
        novelty = self.novelty(features)
        known: NDArray[np.bool_] = inside.all(axis=1) & (novelty <= 1.0)
        return known, novelty


def fit_domain(features: Features) -> Domain:
    """Return the domain of training data, shape (n, features)."""
    scaled = _scaled(features)
    centre = scaled.mean(axis=0)
    # Derived features nearly depend on each other; a floor keeps their small differences from weighing most.
    values, vectors = np.linalg.eigh(np.cov(scaled, rowvar=False))
    whitening = vectors / np.sqrt(values + _FLOOR * values.max())
    distance = np.sqrt((((scaled - centre) @ whitening) ** 2).sum(axis=1))
    return Domain(
        low=features.min(axis=0),
        high=features.max(axis=0),
        centre=centre,
        whitening=whitening,
        farthest=float(distance.max()) * _SLACK,
    )


_FLOOR: Final = 1e-3

_SLACK: Final = 1.02


def _scaled(features: Features) -> Floats:
    scaled: Floats = np.arcsinh(features.astype(float))
    return scaled


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
class SurrogateAnswers:
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
        Of the kind ``tree``: the same answers as rules.
    """

    profile: Profile
    kind: str
    throughput: EnsembleOutput
    starvation: EnsembleOutput
    calibration: SigmoidCalibration
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
        return self.answer(features, is_known=not unsupported_workload(workload, self.profile))

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

    def answers(self, features: NDArray[np.float32]) -> SurrogateAnswers:
        """Answer for many feature vectors, shape (n, features)."""
        throughput = self.throughput.answers(features)
        low, high = self.intervals.around(features, throughput)
        in_range, novelty = self.domain.place(features)
        return SurrogateAnswers(
            throughput_tok_s=throughput,
            low_tok_s=low,
            high_tok_s=high,
            starvation_probability=self.calibration.probability(self.starvation.answers(features)),
            in_range=in_range,
            novelty=novelty,
        )
