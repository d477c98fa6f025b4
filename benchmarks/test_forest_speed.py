"""How fast a surrogate's forest answers, beside scikit-learn on the same forest."""

from __future__ import annotations

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from sklearn.ensemble import RandomForestRegressor

from capplan.models.surrogates.forest import flatten_forest, forest_answer


@pytest.fixture(scope="module")
def forest() -> tuple[RandomForestRegressor, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 1, (5000, 20)).astype(np.float32)
    y = np.sin(6 * x[:, 0]) * x[:, 1] + x[:, 2] + rng.normal(0, 0.05, 5000)
    return RandomForestRegressor(64, min_samples_leaf=2, max_features=0.5, random_state=0).fit(x, y), x


def test_an_answer_of_the_compiled_forest(
    benchmark: BenchmarkFixture, forest: tuple[RandomForestRegressor, np.ndarray]
) -> None:
    model, x = forest
    flat = flatten_forest(model)
    answer = benchmark(forest_answer, flat, x[0])
    assert answer == pytest.approx(model.predict(x[:1])[0], rel=1e-6)


def test_an_answer_of_scikit_learn(
    benchmark: BenchmarkFixture, forest: tuple[RandomForestRegressor, np.ndarray]
) -> None:
    model, x = forest
    benchmark(model.predict, x[:1])
