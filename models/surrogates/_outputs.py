"""Tree ensembles as flat arrays, and the throughput and starvation computed from their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan._jit import jit
from capplan.models.surrogates._features import HORIZON_S, MAX_RUNNING_SHARE, expected_tok_s, feature_of
from capplan.spec import STARVED_BELOW

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

Features: TypeAlias = NDArray[np.float32]
Floats: TypeAlias = NDArray[np.float64]

LEAF: Final = -1
OVER_EXPECTED: Final = "over_expected"
SERVED_AND_STEP: Final = "served_and_step"
PROBABILITY: Final = "probability"
LOG_ODDS: Final = "log_odds"
LOG_SERVED: Final = "log_served"

LEAST_SHARE: Final = 0.01
"""Lower bound of served fractions."""

LEAST_PROBABILITY: Final = 1e-4


class Forest(NamedTuple):
    """Trees one after the other; the value of a feature vector is the mean of its leaves."""

    roots: NDArray[np.int32]
    """First node of each tree, shape (trees,)."""
    feature: NDArray[np.int16]
    """Feature that a node compares, shape (nodes,); LEAF in leaves."""
    threshold: NDArray[np.float32]
    """Go left where the feature is at most this."""
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: NDArray[np.floating[Any]]
    """Value of a leaf: a mean, or the probability of the second class."""


@jit
def forest_value(forest: Forest, x: NDArray[np.float32]) -> float:
    """Return the forest's value for one feature vector, shape (features,)."""
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


def forest_values(forest: Forest, features: Features) -> Floats:
    """Return the forest's values for feature vectors of shape (n, features), shape (n,)."""
    values = np.empty(len(features))
    _fill_values(forest, np.ascontiguousarray(features, np.float32), values)
    return values


@jit
def _fill_values(forest: Forest, features: NDArray[np.float32], values: NDArray[np.float64]) -> None:
    for row in range(values.size):
        values[row] = forest_value(forest, features[row])


def joined(forests: Sequence[Forest]) -> Forest:
    """Return the trees of several forests as one forest."""
    sizes = [forest.feature.size for forest in forests]
    starts = np.cumsum([0, *sizes[:-1]])
    feature, threshold, left, right, value = (
        np.concatenate([getattr(forest, name) for forest in forests]) for name in Forest._fields[1:]
    )
    is_leaf, shift = feature == LEAF, np.repeat(starts, sizes)
    roots = [forest.roots + start for forest, start in zip(forests, starts, strict=True)]
    return Forest(
        roots=np.concatenate(roots).astype(np.int32),
        feature=feature.astype(np.int16),
        threshold=threshold,
        left=np.where(is_leaf, LEAF, left + shift).astype(np.int32),
        right=np.where(is_leaf, LEAF, right + shift).astype(np.int32),
        value=value,
    )


def flatten_forest(model: RandomForestRegressor | RandomForestClassifier) -> Forest:
    """Return a fitted scikit-learn forest as flat arrays; a classifier gives the second class's share.

    scikit-learn compares float32 features with float64 thresholds. Rounding a threshold down to float32 keeps
    every comparison.
    """
    return joined(
        [
            Forest(
                np.zeros(1, np.int32),
                np.where(tree.children_left == LEAF, LEAF, tree.feature),
                round_down(tree.threshold),
                tree.children_left,
                tree.children_right,
                tree.value[:, 0, -1].astype(np.float32),  # mean of a regressor, share of the last class
            )
            for tree in (estimator.tree_ for estimator in model.estimators_)
        ]
    )


def round_down(threshold: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the largest float32 that is at most each threshold."""
    nearest = threshold.astype(np.float32)
    return np.where(nearest > threshold, np.nextafter(nearest, np.float32(-np.inf)), nearest)


@dataclass(frozen=True)
class EnsembleOutput:
    """Ensembles and the form of their joint output."""

    form: str
    """A key of `THROUGHPUT` or `STARVATION`."""
    forests: tuple[Forest, ...]

    def predict(self, features: Features) -> Floats:
        """Return tokens per second, or scores that rise with starvation and are 0 at its edge.

        Features have shape (n, features), in the order of `FEATURES`; the result has shape (n,).
        """
        form = THROUGHPUT[self.form] if self.form in THROUGHPUT else STARVATION[self.form]
        return form.values(features, [forest_values(forest, features) for forest in self.forests])


@dataclass(frozen=True)
class OutputForm:
    """Number of ensembles, and the function of their values."""

    forests: int
    values: Callable[[Features, list[Floats]], Floats]


def expected_share(features: Features) -> Floats:
    """Return the served share of the load by the fluid model, at least 1 %."""
    return np.maximum(LEAST_SHARE, feature_of(features, "expected_share"))


def served_share(features: Features, log_ratio: Floats) -> Floats:
    """Return the served fraction from the logarithm of its ratio to the fluid model's."""
    return np.minimum(1.0, expected_share(features) * np.exp(log_ratio))


def throughput_of(features: Features, served: Floats, step_ms: Floats) -> Floats:
    """Return tokens per second from served fraction and step time.

    Requests that still run at the end are not completed. A request runs for the steps of its output, so long
    ones are more often among them.
    """
    output = feature_of(features, "output_mean_tokens")
    prompt = feature_of(features, "prompt_mean_tokens")
    life_s = step_ms / 1e3 * output
    weight = (prompt + output + feature_of(features, "output_std_tokens") ** 2 / output) / (prompt + output)
    still_running = np.minimum(MAX_RUNNING_SHARE, life_s * served / HORIZON_S * weight)
    return feature_of(features, "offered_tok_s") * served * (1.0 - still_running)


def log_odds(probability: Floats) -> Floats:
    """Return the logarithm of p / (1 - p), bounded where p is 0 or 1."""
    bounded = np.clip(probability, LEAST_PROBABILITY, 1.0 - LEAST_PROBABILITY)
    odds: Floats = np.log(bounded / (1.0 - bounded))
    return odds


def _served_and_step(features: Features, values: list[Floats]) -> Floats:
    step_ms = feature_of(features, "step_ms") * np.exp(values[1])
    return throughput_of(features, served_share(features, values[0]), step_ms)


THROUGHPUT: Final[Mapping[str, OutputForm]] = MappingProxyType(
    {
        OVER_EXPECTED: OutputForm(1, lambda x, values: expected_tok_s(x) * np.exp(values[0])),
        SERVED_AND_STEP: OutputForm(2, _served_and_step),
    }
)
"""Values are the logarithm of throughput, or of served fraction and step time, over the fluid model's."""

STARVATION: Final[Mapping[str, OutputForm]] = MappingProxyType(
    {
        PROBABILITY: OutputForm(1, lambda _, values: log_odds(values[0])),
        LOG_ODDS: OutputForm(1, lambda _, values: values[0]),
        LOG_SERVED: OutputForm(1, lambda _, values: np.log(STARVED_BELOW) - values[0]),
    }
)
"""Values are the probability of starvation, its log odds, or the logarithm of the served fraction."""
