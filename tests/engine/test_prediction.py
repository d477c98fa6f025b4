"""Predictions of output lengths in the engine."""

import numpy as np
import pytest

from capplan import InputError
from capplan.engine._engine import OutputPredictor
from capplan.spec import Predictor
from capplan.workload import length_classes


def test_an_oracle_is_the_declared_length() -> None:
    assert OutputPredictor(Predictor(), 0).predict(10, "a", 50) == 0


@pytest.mark.parametrize("accuracy", [1.0, 0.7, 0.0])
def test_classes_of_the_declared_lengths_are_right_with_the_set_accuracy(accuracy: float) -> None:
    rng = np.random.default_rng(0)
    declared = rng.geometric(0.02, 4000)
    predictor = OutputPredictor(Predictor(kind="classes", accuracy=accuracy), 1)
    predicted = np.array([predictor.predict(5, "a", int(each)) for each in declared])
    assert np.all(predicted[:49] == 0)  # too few to form classes
    assert np.all(predicted <= declared)
    declared, predicted = declared[-1000:], predicted[-1000:]
    classes = length_classes(declared)
    shown = np.minimum(classes.tokens, declared[:, None])
    nearest = np.abs(shown - predicted[:, None]).argmin(axis=1, keepdims=True)
    right = np.take_along_axis(shown, classes.classify(declared)[:, None], axis=1)
    alike = np.mean(np.sum(shown == right, axis=1) - 1) / (classes.tokens.size - 1)
    share = np.mean(np.take_along_axis(shown, nearest, axis=1) == right)
    assert abs(share - (accuracy + (1.0 - accuracy) * alike)) < 0.05


def test_a_learned_predictor_needs_its_file() -> None:
    with pytest.raises(InputError, match="no-such-file: cannot be read"):
        OutputPredictor(Predictor(kind="learned", file="no-such-file"), 0)
