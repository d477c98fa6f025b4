"""How good a candidate is: SMAPE of throughput, macro-F1 and logarithmic loss of starvation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import f1_score, log_loss

from capplan.models.calibration.least_squares import smape
from capplan.models.learning.grids import Task


def answer_of(estimator: Any, features: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return tokens per second or the probability of starvation, shape (rows,); 0 or 1 if it has none."""
    if hasattr(estimator, "predict_proba"):
        return np.asarray(estimator.predict_proba(features), float)[:, 1]
    return np.asarray(estimator.predict(features), float)


def loss(task: Task, estimator: Any, features: NDArray[np.float32], target: NDArray[Any]) -> float:
    """Return what halving minimises: SMAPE in per cent, or 1 - macro-F1, as the paper judges."""
    return answer_loss(task, answer_of(estimator, features), target, smooth=False)


def answer_loss(task: Task, answer: NDArray[np.float64], target: NDArray[Any], *, smooth: bool) -> float:
    """Return the loss of answers; `smooth`: the logarithmic loss of probabilities, not 1 - macro-F1."""
    if task == "throughput":
        return smape(answer, target)
    if smooth:
        return float(log_loss(target, answer, labels=[0, 1]))
    return 1.0 - macro_f1(answer, target)


def macro_f1(probability: NDArray[np.float64], starved: NDArray[Any]) -> float:
    """Return the mean of the F1 of both classes, starved and not."""
    return float(f1_score(np.asarray(starved, int), np.asarray(probability) >= 0.5, average="macro"))


def report(
    task: Task, answer: NDArray[np.float64], target: NDArray[Any], *, is_probability: bool
) -> dict[str, float]:
    """Return all scores of answers by name."""
    if task == "throughput":
        return {"smape": smape(answer, target)}
    scores = {"macro_f1": macro_f1(answer, target)}
    if is_probability:
        scores["log_loss"] = answer_loss(task, answer, target, smooth=True)
    return scores
