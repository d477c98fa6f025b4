"""Surrogate of the twin: throughput and starvation of one GPU, with intervals and training range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.models.surrogates._features import feature_vector, unsupported_workload
from capplan.models.surrogates._outputs import EnsembleOutput
from capplan.models.surrogates._tree import Tree
from capplan.spec import (
    DEFAULT_GPU_MEMORY_UTILIZATION,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    EngineArgs,
    Profile,
    Workload,
)

Features: TypeAlias = NDArray[np.float32]
Floats: TypeAlias = NDArray[np.float64]

COVERAGE: Final = 0.9
_EIGENVALUE_FLOOR: Final = 1e-3
_SLACK: Final = 1.02


@dataclass(frozen=True)
class Intervals:
    """Conformal intervals with one width per regime (Mondrian).

    The trees have the same regimes; their leaves are the 5 % and 95 % quantiles of the logarithm of true over
    predicted throughput on held-out scenarios.
    """

    low: Tree
    high: Tree

    def around(self, features: Features, predicted: Floats) -> tuple[Floats, Floats]:
        """Return the ends of the intervals around predictions in tokens per second, shape (n,) each."""
        return (
            predicted * np.exp(np.minimum(0.0, self.low.predict(features))),
            predicted * np.exp(np.maximum(0.0, self.high.predict(features))),
        )


@dataclass(frozen=True)
class SigmoidCalibration:
    """Logistic curve from scores to probabilities (Platt scaling)."""

    slope: float
    offset: float

    def probability(self, score: Floats) -> Floats:
        """Return the probability of starvation, shape (n,)."""
        return np.asarray(0.5 * (1.0 + np.tanh(0.5 * (self.slope * score + self.offset))))


@dataclass(frozen=True)
class Domain:
    """Range of the training data."""

    low: Features
    """Smallest training value of every feature, shape (features,)."""
    high: Features
    centre: Floats
    """Mean of the features on a logarithmic scale, shape (features,)."""
    whitening: Floats
    """Whitening matrix of their covariance, shape (features, features)."""
    farthest: float
    """Largest distance of a training scenario from the centre."""

    def novelty(self, features: Features) -> Floats:
        """Return the Mahalanobis distance over that of the farthest training scenario, shape (n,)."""
        away = (_scaled(features) - self.centre) @ self.whitening
        return np.asarray(np.sqrt((away**2).sum(axis=1)) / self.farthest)

    def contains(self, features: Features) -> NDArray[np.bool_]:
        """Return whether every feature is in range and the novelty at most 1, shape (n,)."""
        return self.within_bounds(features) & (self.novelty(features) <= 1.0)

    def within_bounds(self, features: Features) -> NDArray[np.bool_]:
        """Return whether every feature is in range, shape (n,)."""
        inside = (features >= self.low) & (features <= self.high)
        return np.asarray(inside.all(axis=1))


def fit_domain(features: Features) -> Domain:
    """Return the domain of training data, shape (n, features)."""
    scaled = _scaled(features)
    centre = scaled.mean(axis=0)
    # Derived features are nearly collinear; the floor bounds the weight of their small differences.
    values, vectors = np.linalg.eigh(np.cov(scaled, rowvar=False))
    whitening = vectors / np.sqrt(values + _EIGENVALUE_FLOOR * values.max())
    distance = np.sqrt((((scaled - centre) @ whitening) ** 2).sum(axis=1))
    return Domain(
        low=features.min(axis=0),
        high=features.max(axis=0),
        centre=centre,
        whitening=whitening,
        farthest=float(distance.max()) * _SLACK,
    )


def _scaled(features: Features) -> Floats:
    return np.asarray(np.arcsinh(features.astype(float)))


@dataclass(frozen=True)
class SurrogateAnswer:
    """Prediction for one GPU over an hour."""

    throughput_tok_s: float
    """Input and output tokens of completed requests per second."""
    low_tok_s: float
    """5 % of twin runs lie below."""
    high_tok_s: float
    """5 % of twin runs lie above."""
    starvation_probability: float
    starved: bool
    in_range: bool
    """Whether the scenario resembles the training data; if not, use the twin."""
    novelty: float
    """Distance from the centre of the training data over that of its farthest scenario."""


@dataclass(frozen=True)
class SurrogateAnswers:
    """Predictions for many feature vectors; every array has shape (n,)."""

    throughput_tok_s: Floats
    low_tok_s: Floats
    high_tok_s: Floats
    starvation_probability: Floats
    in_range: NDArray[np.bool_]
    novelty: Floats


@dataclass(frozen=True)
class Surrogate:
    """Surrogate of one profile's twin."""

    profile: Profile
    """Profile of the training simulations."""
    kind: str
    """``best``, ``forest`` or ``tree``."""
    throughput: EnsembleOutput
    starvation: EnsembleOutput
    calibration: SigmoidCalibration
    """From scores of starvation to probabilities."""
    intervals: Intervals
    """Around throughput."""
    domain: Domain
    """Range of the training data."""
    report: dict[str, object]
    """Training options and scores."""
    throughput_tree: Tree | None = None
    """For the kind ``tree``: the tree of throughput with its rules."""
    starvation_tree: Tree | None = None

    def predict(
        self,
        workload: Workload,
        *,
        a_max: int,
        s_max: int,
        max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
        max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
        gpu_memory_utilization: float = DEFAULT_GPU_MEMORY_UTILIZATION,
    ) -> SurrogateAnswer:
        """Predict one GPU that serves all of `workload`; parameters as in `capplan.simulate`.

        The prediction covers an hour behind a front end that holds at most 25,000 requests.
        """
        args = EngineArgs(
            max_loras=a_max,
            max_lora_rank=s_max,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            max_model_len=self.profile.model.default_max_model_len,
        )
        features = feature_vector(workload, self.profile, args)
        return self.predict_features(features, supported=not unsupported_workload(workload, self.profile))

    def predict_features(self, features: Features, *, supported: bool = True) -> SurrogateAnswer:
        """Predict one feature vector in the order of `FEATURES`; unsupported workloads are out of range."""
        answers = {name: each.item() for name, each in vars(self.predict_many(features[None, :])).items()}
        answers["in_range"] = supported and answers["in_range"]
        return SurrogateAnswer(**answers, starved=answers["starvation_probability"] >= 0.5)

    def predict_many(self, features: Features) -> SurrogateAnswers:
        """Predict many feature vectors, shape (n, features)."""
        throughput = self.throughput.predict(features)
        low, high = self.intervals.around(features, throughput)
        novelty = self.domain.novelty(features)
        return SurrogateAnswers(
            throughput_tok_s=throughput,
            low_tok_s=low,
            high_tok_s=high,
            starvation_probability=self.calibration.probability(self.starvation.predict(features)),
            in_range=self.domain.within_bounds(features) & (novelty <= 1.0),
            novelty=novelty,
        )
