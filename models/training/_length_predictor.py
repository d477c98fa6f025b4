"""Training of a learned predictor of output lengths: boosted trees over what is known at arrival."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from capplan.errors import InputError
from capplan.workload import (
    ADAPTERS,
    CLASS_TOKENS,
    FEATURES,
    Requests,
    length_classes,
    numbered_adapters,
    predictor_features,
)

LEAST_REQUESTS: Final = 200
"""Fewer requests would hold too few of the rarest class, 1 % of the outputs."""


@dataclass(frozen=True)
class TrainedPredictor:
    """A learned predictor with its accuracy."""

    content: bytes
    """The file: XGBoost's JSON."""
    class_tokens: tuple[int, ...]
    """Prediction of each length class."""
    trained: int
    held_out: int
    """Requests of training and test, the latest ones."""
    accuracy: float
    """Share of the held-out requests in the predicted class."""
    baseline: float
    """The same for the class that is most frequent in training."""


@dataclass(frozen=True)
class PredictorOptions:
    """Settings of the training."""

    held_out: float = 0.2
    """Share of the requests, the latest ones, that only test the predictor."""
    trees: int = 60
    depth: int = 4
    learning_rate: float = 0.15
    seed: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        if not 0.0 < self.held_out < 1.0:
            raise InputError("must be a share above 0 and below 1", self.held_out, "--held-out")


def train_predictor(
    requests: Requests, adapters: Sequence[str], options: PredictorOptions | None = None
) -> TrainedPredictor:
    """Return a predictor of the length class of a request, trained on its earlier part.

    Parameters
    ----------
    requests
        Recorded requests in order of arrival.
    adapters
        Names of their adapters, by which the predictor finds them in any workload.
    options
        Settings of the training.

    Raises
    ------
    InputError
        For too few requests, or outputs that are all equal.
    """
    import xgboost

    given = options or PredictorOptions()
    count = requests.arrival_ns.size
    first_held_out = count - max(1, round(count * given.held_out))
    if first_held_out < LEAST_REQUESTS:
        rule = f"must leave at least {LEAST_REQUESTS} requests to train on"
        raise InputError(rule, max(0, first_held_out), "requests")
    outputs = requests.output_tokens.astype(np.int64)
    classes = length_classes(outputs[:first_held_out])
    kinds = classes.tokens.size
    if kinds == 1:
        raise InputError("must have outputs of different lengths", int(outputs[0]), "output_tokens")
    right = classes.classify(outputs)
    features = predictor_features(requests, adapters, numbered_adapters(adapters))

    def matrix(rows: slice) -> xgboost.DMatrix:
        return xgboost.DMatrix(features[rows], label=right[rows], feature_names=list(FEATURES))

    train, test = matrix(slice(first_held_out)), matrix(slice(first_held_out, None))
    parameters = {
        "objective": "multi:softprob",
        "num_class": kinds,
        "max_depth": given.depth,
        "eta": given.learning_rate,
        "tree_method": "hist",
        "seed": given.seed,
        "nthread": given.workers,
    }
    model = xgboost.train(parameters, train, num_boost_round=given.trees)
    model.set_attr(
        **{CLASS_TOKENS: json.dumps(classes.tokens.tolist()), ADAPTERS: json.dumps(list(adapters))}
    )
    chosen = np.argmax(model.predict(test).reshape(-1, kinds), axis=1)
    usual = np.bincount(right[:first_held_out]).argmax()
    return TrainedPredictor(
        content=bytes(model.save_raw("json")),
        class_tokens=tuple(classes.tokens.tolist()),
        trained=first_held_out,
        held_out=count - first_held_out,
        accuracy=float(np.mean(chosen == right[first_held_out:])),
        baseline=float(np.mean(usual == right[first_held_out:])),
    )
