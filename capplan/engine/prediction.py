"""Predicted output lengths, request by request, as they arrive.

An engine knows the declared length of an output, `max_tokens`, and not where it will stop: the declared
length takes the place of the output for the predictors ``oracle`` and ``classes``.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from capplan.spec import Predictor
from capplan.workload.predictors import LengthClasses, length_classes, read_predictor

_REMEMBERED: Final = 1000
_REFIT_EVERY: Final = 50
"""Requests between two fits of the length classes to the declared lengths remembered."""
_S_PER_HOUR: Final = 3600
_HOURS: Final = 24


class OutputPredictor:
    """Predictor of the output lengths of one engine.

    Parameters
    ----------
    predictor
        ``classes`` are those of the last requests' declared lengths.
    seed
        Seed of the wrong classes.
    time_s
        Clock of the hour of day: seconds since 1970, UTC.

    Raises
    ------
    InputError
        If the file of a learned predictor cannot be read.
    """

    def __init__(self, predictor: Predictor, seed: int, time_s: Callable[[], float] = time.time) -> None:
        self._time_s = time_s
        self._kind = predictor.kind
        self._accuracy = predictor.accuracy
        self._rng = np.random.default_rng(seed)
        self._declared: deque[int] = deque(maxlen=_REMEMBERED)
        self._since_fit = 0
        self._classes: LengthClasses | None = None
        self._model = read_predictor(str(predictor.file)) if predictor.kind == "learned" else None

    def predict(self, prompt_tokens: int, adapter: str | None, declared: int) -> int:
        """Return the predicted output tokens of a request, at most the declared ones; 0: those."""
        predicted = 0
        if self._model is not None:
            hour = self._time_s() // _S_PER_HOUR % _HOURS
            number = self._model.adapters.get(adapter, math.nan)
            predicted = int(self._model.predict(np.array([[prompt_tokens, number, hour]], np.float32))[0])
        elif self._kind == "classes":
            predicted = self._drawn(declared)
        return min(predicted, declared)

    def _drawn(self, declared: int) -> int:
        """Return the mean of the right class with the set accuracy, otherwise of another one."""
        self._declared.append(declared)
        self._since_fit += 1
        if self._since_fit >= _REFIT_EVERY:
            self._classes, self._since_fit = length_classes(np.array(self._declared)), 0
        if self._classes is None:
            return 0
        chosen = int(self._classes.classify(np.array([declared]))[0])
        others = self._classes.tokens.size - 1
        if others and self._rng.random() >= self._accuracy:
            other = int(self._rng.integers(others))
            chosen = other + (other >= chosen)
        return int(self._classes.tokens[chosen])
