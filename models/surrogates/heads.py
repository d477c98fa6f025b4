"""What the trees of a surrogate answer, turned into throughput and starvation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.models.surrogates.features import HORIZON_S, expected_tok_s, feature_of
from capplan.models.surrogates.forest import Forest, forest_answers
from capplan.spec import STARVED_BELOW

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
class Head:
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
class Form:
    """How ensembles answer together."""

    forests: int
    answer: Callable[[Features, list[Floats]], Floats]


THROUGHPUT: Final[Mapping[str, Form]] = MappingProxyType(
    {
        OVER_EXPECTED: Form(1, _over_expected),
        OVER_OFFERED: Form(1, _over_offered),
        SERVED_AND_STEP: Form(2, _served_and_step),
    }
)
"""Forests answer the logarithm of throughput over the fluid estimate's, or over the offered load; or two of
them those of served fraction and step time over the estimate's."""

STARVATION: Final[Mapping[str, Form]] = MappingProxyType(
    {
        PROBABILITY: Form(1, lambda _, trees: log_odds(trees[0])),
        LOG_ODDS: Form(1, lambda _, trees: trees[0]),
        LOG_SERVED: Form(1, _log_served),
    }
)
"""Forests answer the probability of starvation, its log odds, or the logarithm of the served fraction."""
