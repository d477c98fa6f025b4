"""Predicted output lengths of requests: exact ones, length classes of set accuracy, and a learned model.

A length class is a range of outputs, cut at the percentiles `CUT_PERCENTILES`; its prediction is the mean
output of the class. Chameleon's proxy model puts about 80 % of the requests into the right class (section
5.4.1). The classes are not in the paper (assumed).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.spec import Predictor, read_text

if TYPE_CHECKING:
    from xgboost import Booster

    from capplan.workload.requests import Requests

CUT_PERCENTILES: Final = (25.0, 50.0, 75.0, 99.0)

FEATURES: Final = ("prompt_tokens", "adapter", "hour")
"""What a learned predictor reads; the adapter by its number in the file, 0 the base model, NaN any other."""

CLASS_TOKENS: Final = "class_tokens"
"""Attribute of a learned predictor's file: the prediction of each class, ascending, as a JSON list."""

ADAPTERS: Final = "adapters"
"""Attribute of that file: the names of the adapters, numbered from 1, as a JSON list."""

_STREAM: Final = 0x70726564  # keeps the draws apart from those of other users of a seed
_NS_PER_HOUR: Final = 3_600_000_000_000
_HOURS: Final = 24


class LengthClasses(NamedTuple):
    """Classes of output lengths, ascending; every class occurs."""

    cuts: NDArray[np.float64]
    """Upper bounds of all classes but the last, exclusive, in tokens; shape (classes - 1,)."""
    tokens: NDArray[np.int64]
    """Mean output of each class, rounded, at least 1; shape (classes,)."""

    def classify(self, output_tokens: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the class of each output length."""
        return np.searchsorted(self.cuts, output_tokens, side="right").astype(np.int64)


def length_classes(output_tokens: NDArray[np.integer[Any]]) -> LengthClasses:
    """Return the classes of recorded output lengths, at least one length.

    Cuts are lengths that occur; percentiles that coincide make one cut.
    """
    cuts = np.unique(np.percentile(output_tokens, CUT_PERCENTILES, method="higher")).astype(np.float64)
    cuts = cuts[cuts > output_tokens.min()]
    of = np.searchsorted(cuts, output_tokens, side="right")
    totals = np.bincount(of, weights=output_tokens, minlength=cuts.size + 1)
    tokens = np.maximum(1, np.rint(totals / np.bincount(of, minlength=cuts.size + 1)))
    return LengthClasses(cuts, tokens.astype(np.int64))


def predicted_tokens(
    requests: Requests, predictor: Predictor, seed: int, adapters: Sequence[str] = ()
) -> NDArray[np.int64]:
    """Return the predicted output length of every request, at least 1 token.

    Parameters
    ----------
    requests
        The requests, whose output lengths are known here.
    predictor
        ``oracle`` returns the outputs. ``classes`` returns the mean of the right class with probability
        ``accuracy``, else that of another class, all equally likely; the classes are those of `requests`.
        ``learned`` evaluates the model in ``file``.
    seed
        Seed of ``classes``. Under one seed, requests with the right class keep it at higher accuracies.
    adapters
        Names of the adapters of `requests`, by which ``learned`` finds those that it was trained on.

    Returns
    -------
    ndarray of int64, shape (requests,)

    Raises
    ------
    InputError
        If the file of a learned predictor cannot be read.
    """
    outputs = requests.output_tokens.astype(np.int64)
    if predictor.kind == "oracle" or outputs.size == 0:
        return outputs
    if predictor.kind == "classes":
        return _of_classes(outputs, predictor.accuracy, seed)
    return _of_model(requests, read_predictor(str(predictor.file)), adapters)


def _of_classes(outputs: NDArray[np.int64], accuracy: float, seed: int) -> NDArray[np.int64]:
    """Return class means; wrong classes are drawn from all but the right one."""
    classes = length_classes(outputs)
    right = classes.classify(outputs)
    others = classes.tokens.size - 1
    if others == 0:
        return classes.tokens[right]
    draws = np.random.default_rng([seed, _STREAM]).random((outputs.size, 2))
    other = (draws[:, 1] * others).astype(np.int64)
    other += other >= right
    return classes.tokens[np.where(draws[:, 0] < accuracy, right, other)]


def numbered_adapters(names: Sequence[str]) -> dict[str | None, float]:
    """Return the numbers of adapters in a predictor's file by name; None: the base model."""
    return {None: 0.0, **{name: float(number) for number, name in enumerate(names, start=1)}}


def predictor_features(
    requests: Requests, adapters: Sequence[str], known: Mapping[str | None, float]
) -> NDArray[np.float32]:
    """Return the features of a learned predictor, shape (requests, 3), in the order of `FEATURES`.

    Parameters
    ----------
    requests
        The requests; arrivals count from midnight UTC.
    adapters
        Names of their adapters.
    known
        Numbers of the adapters in the predictor's file, by name.
    """
    hour = requests.arrival_ns // _NS_PER_HOUR % _HOURS
    numbers = np.array([known.get(name, math.nan) for name in (None, *adapters)])
    columns = (requests.prompt_tokens, numbers[requests.adapter], hour)
    return np.stack([column.astype(np.float32) for column in columns], axis=1)


class LearnedPredictor(NamedTuple):
    """The content of a learned predictor's file."""

    model: Booster
    tokens: NDArray[np.int64]
    """Prediction of each class."""
    adapters: Mapping[str | None, float]
    """Numbers of the adapters that it was trained on, by name."""


def _of_model(requests: Requests, learned: LearnedPredictor, adapters: Sequence[str]) -> NDArray[np.int64]:
    """Return the predictions of a learned predictor."""
    from xgboost import DMatrix

    model, tokens, known = learned
    features = DMatrix(predictor_features(requests, adapters, known), feature_names=list(FEATURES))
    scores = np.asarray(model.predict(features)).reshape(-1, tokens.size)
    predicted: NDArray[np.int64] = tokens[np.argmax(scores, axis=1)]
    return predicted


def read_predictor(file: str) -> LearnedPredictor:
    """Return the content of a learned predictor's file.

    Raises
    ------
    InputError
        If the file cannot be read, or was not written by ``capplan workload predictor``.
    """
    from xgboost import Booster
    from xgboost.core import XGBoostError

    content = read_text(file)
    wrong = InputError("must be a file written by capplan workload predictor", location=file)
    try:
        if not isinstance(json.loads(content), Mapping):
            raise wrong
        model = Booster()
        model.load_model(bytearray(content.encode()))
        tokens = np.array(json.loads(model.attr(CLASS_TOKENS) or "null"), np.int64)
        adapters = numbered_adapters(json.loads(model.attr(ADAPTERS) or "null"))
    except (ValueError, TypeError, XGBoostError):
        raise wrong from None
    if tokens.ndim != 1 or tokens.size < 2 or tokens.min() < 1 or model.num_features() != len(FEATURES):
        raise wrong
    return LearnedPredictor(model, tokens, adapters)
