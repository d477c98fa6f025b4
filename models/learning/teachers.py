"""The better model that a small tree may learn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor

from capplan.models.learning.refine import Teacher

Features: TypeAlias = NDArray[np.float32]
Floats: TypeAlias = NDArray[np.float64]
TeacherAnswer: TypeAlias = Callable[[Features], Floats]


def boosted_teacher(seed: int) -> Teacher:
    """Return a teacher of boosted trees for either task; of classes it learns the probability."""

    def fit(features: Features, target: Floats) -> TeacherAnswer:
        is_probability = bool(np.isin(target, (0.0, 1.0)).all())
        model = HistGradientBoostingRegressor(
            loss="squared_error" if is_probability else "absolute_error",
            max_iter=200,
            learning_rate=0.08,
            min_samples_leaf=20,
            random_state=seed,
        ).fit(features, target)
        bounds = (0.0, 1.0) if is_probability else (-np.inf, np.inf)
        return lambda asked: np.clip(model.predict(asked), *bounds)

    return fit
