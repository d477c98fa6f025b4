"""Tree ensembles as flat arrays, and the throughput and starvation computed from their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.models.surrogates.features import HORIZON_S, expected_tok_s, feature_of
from capplan.spec import STARVED_BELOW

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

LEAF = -1


class Forest(NamedTuple):
    """Trees one after the other; the answer is the mean of their leaves."""

    roots: NDArray[np.int32]
    """First node of each tree, shape (trees,)."""
    feature: NDArray[np.int16]
    """Feature that a node asks for, shape (nodes,); LEAF in leaves."""
    threshold: NDArray[np.float32]
    """Go left where the feature is at most this."""
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: NDArray[np.float32]
    """Answer of a leaf: a mean, or the probability of the second class."""


@jit
def forest_answer(forest: Forest, x: NDArray[np.float32]) -> float:
    """Return the forest's answer to one feature vector, shape (features,)."""
    total = 0.0
    for root in forest.roots:
        node = root
        while forest.feature[node] >= 0:
            if x[forest.feature[node]] <= forest.threshold[node]:
                node = forest.left[node]
            else:
                node = forest.right[node]
        total += forest.value[node]
    return total / forest.roots.size


def forest_answers(forest: Forest, features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the forest's answers to many feature vectors, shape (n, features); the result has shape (n,)."""
    answers = np.empty(len(features))
    _answer_all(forest, np.ascontiguousarray(features, np.float32), answers)
    return answers


@jit
def _answer_all(forest: Forest, features: NDArray[np.float32], answers: NDArray[np.float64]) -> None:
    for row in range(answers.size):
        answers[row] = forest_answer(forest, features[row])


def flatten_forest(model: RandomForestRegressor | RandomForestClassifier) -> Forest:
    """Return a fitted scikit-learn forest as flat arrays; a classifier answers the second class's share.

    scikit-learn compares float32 features with float64 thresholds. Rounding a threshold down to float32 keeps
    every comparison as it was.
    """
    roots, parts, offset = [], [], 0
    for estimator in model.estimators_:
        tree = estimator.tree_
        leaf = tree.children_left == LEAF
        # A regressor's leaf holds its mean, a classifier's the shares of its classes.
        value = tree.value[:, 0, -1]
        parts.append(
            (
                np.where(leaf, LEAF, tree.feature),
                round_down(tree.threshold),
                np.where(leaf, LEAF, tree.children_left + offset),
                np.where(leaf, LEAF, tree.children_right + offset),
                value,
            )
        )
        roots.append(offset)
        offset += tree.node_count
    feature, threshold, left, right, value = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Forest(
        roots=np.array(roots, np.int32),
        feature=feature.astype(np.int16),
        threshold=threshold,
        left=left.astype(np.int32),
        right=right.astype(np.int32),
        value=value.astype(np.float32),
    )


def round_down(threshold: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the largest float32 that is at most each threshold."""
    nearest = threshold.astype(np.float32)
    return np.where(nearest > threshold, np.nextafter(nearest, np.float32(-np.inf)), nearest)


Features: TypeAlias = NDArray[np.float32]

Floats: TypeAlias = NDArray[np.float64]

OVER_EXPECTED: Final = "over_expected"

OVER_OFFERED: Final = "over_offered"

SERVED_AND_STEP: Final = "served_and_step"

PROBABILITY: Final = "probability"

LOG_ODDS: Final = "log_odds"

LOG_SERVED: Final = "log_served"

LEAST_SHARE: Final = 0.01

"""Of a load that is served: the least that is told apart."""

LEAST_PROBABILITY: Final = 1e-4


@dataclass(frozen=True)
class EnsembleOutput:
    """Ensembles, and what they answer together.

    Attributes
    ----------
    form
        A key of `THROUGHPUT` or `STARVATION`.
    forests
        As many as the form needs.
    """

    form: str
    forests: tuple[Forest, ...]

    def answers(self, features: Features) -> Floats:
        """Return tokens per second, or scores that rise with starvation and are 0 at its edge.

        Parameters
        ----------
        features
            Shape (n, features), in the order of `FEATURES`; the result has shape (n,).
        """
        form = THROUGHPUT[self.form] if self.form in THROUGHPUT else STARVATION[self.form]
        return form.answer(features, [forest_answers(forest, features) for forest in self.forests])


def served_share(features: Features, log_ratio: Floats) -> Floats:
    """Return the served fraction from the logarithm of its ratio to the fluid estimate's."""
    return np.minimum(1.0, expected_share(features) * np.exp(log_ratio))


def expected_share(features: Features) -> Floats:
    """Return the share of the load that the fluid estimate expects to be served, at least 1 %."""
    return np.maximum(LEAST_SHARE, feature_of(features, "expected_share"))


def throughput_of(features: Features, served: Floats, step_ms: Floats) -> Floats:
    """Return tokens per second from served fraction and step time.

    What is served but for the requests that still run at the end: a request runs for its output's steps, and
    long ones are more often among them.
    """
    output = feature_of(features, "output_mean_tokens")
    prompt = feature_of(features, "prompt_mean_tokens")
    life_s = step_ms / 1e3 * output
    weight = (prompt + output + feature_of(features, "output_std_tokens") ** 2 / output) / (prompt + output)
    still_running = np.minimum(0.98, life_s * served / HORIZON_S * weight)
    return feature_of(features, "offered_tok_s") * served * (1.0 - still_running)


def _over_expected(features: Features, trees: list[Floats]) -> Floats:
    return expected_tok_s(features) * np.exp(trees[0])


def _over_offered(features: Features, trees: list[Floats]) -> Floats:
    return feature_of(features, "offered_tok_s") * np.exp(trees[0])


def _served_and_step(features: Features, trees: list[Floats]) -> Floats:
    step_ms = feature_of(features, "step_ms") * np.exp(trees[1])
    return throughput_of(features, served_share(features, trees[0]), step_ms)


def log_odds(probability: Floats) -> Floats:
    """Return the logarithm of p / (1 - p), bounded where p is 0 or 1."""
    bounded = np.clip(probability, LEAST_PROBABILITY, 1.0 - LEAST_PROBABILITY)
    odds: Floats = np.log(bounded / (1.0 - bounded))
    return odds


def _log_served(_: Features, trees: list[Floats]) -> Floats:
    score: Floats = np.log(STARVED_BELOW) - trees[0]
    return score


@dataclass(frozen=True)
class OutputForm:
    """How ensembles answer together."""

    forests: int
    answer: Callable[[Features, list[Floats]], Floats]


THROUGHPUT: Final[Mapping[str, OutputForm]] = MappingProxyType(
    {
        OVER_EXPECTED: OutputForm(1, _over_expected),
        OVER_OFFERED: OutputForm(1, _over_offered),
        SERVED_AND_STEP: OutputForm(2, _served_and_step),
    }
)

"""Forests answer the logarithm of throughput over the fluid estimate's, or over the offered load; or two of
them those of served fraction and step time over the estimate's."""

STARVATION: Final[Mapping[str, OutputForm]] = MappingProxyType(
    {
        PROBABILITY: OutputForm(1, lambda _, trees: log_odds(trees[0])),
        LOG_ODDS: OutputForm(1, lambda _, trees: trees[0]),
        LOG_SERVED: OutputForm(1, _log_served),
    }
)

"""Forests answer the probability of starvation, its log odds, or the logarithm of the served fraction."""
