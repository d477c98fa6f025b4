from typing import Any

import numpy as np
import pytest
import xgboost
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import InputError
from capplan.models.surrogates._outputs import LEAF, Forest, forest_value
from capplan.models.training._train import flatten_boosted

COLUMNS = 4


def table(seed: int, rows: int = 200) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    # Few distinct values, so that many answers hang on a comparison with a threshold.
    x = np.round(rng.uniform(-5, 5, (rows, COLUMNS)), 1).astype(np.float32)
    return x, np.sin(x[:, 0]) + 0.3 * x[:, 1] * (x[:, 2] > 0) + rng.normal(0, 0.1, rows)


def on_thresholds(forest: Forest, x: np.ndarray) -> np.ndarray:
    """Return rows, and copies of one with a feature on a threshold and one float32 above it."""
    inner = np.flatnonzero(forest.feature != LEAF)[:200]
    copies = np.repeat(x[:1], 2 * inner.size, axis=0)
    at = forest.threshold[inner]
    copies[np.arange(inner.size), forest.feature[inner]] = at
    copies[inner.size + np.arange(inner.size), forest.feature[inner]] = np.nextafter(at, np.float32(np.inf))
    return np.concatenate([x, copies])


def margins(forest: Forest, x: np.ndarray) -> np.ndarray:
    return np.array([forest_value(forest, row) for row in x])


learners = st.fixed_dictionaries(
    {
        "n_estimators": st.integers(1, 40),
        "max_depth": st.integers(1, 8),
        "learning_rate": st.floats(0.05, 0.5),
        "gamma": st.sampled_from((0.0, 0.5)),
        "subsample": st.floats(0.5, 1.0),
        "num_parallel_tree": st.integers(1, 2),
        "grow_policy": st.sampled_from(("depthwise", "lossguide")),
        "random_state": st.integers(0, 1000),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    learners,
    st.integers(0, 1000),
    st.sampled_from(("reg:squarederror", "reg:absoluteerror", "reg:pseudohubererror")),
)
def test_a_flat_regressor_answers_as_xgboost_does(params: dict[str, Any], seed: int, objective: str) -> None:
    x, y = table(seed)
    model = xgboost.XGBRegressor(objective=objective, n_jobs=1, **params).fit(x, y)
    forest = flatten_boosted(model)
    asked = on_thresholds(forest, x)
    assert margins(forest, asked) == pytest.approx(model.predict(asked), abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(learners, st.integers(0, 1000), st.floats(0.05, 0.95))
def test_a_flat_classifier_answers_the_log_odds(params: dict[str, Any], seed: int, edge: float) -> None:
    x, y = table(seed)
    model = xgboost.XGBClassifier(n_jobs=1, **params).fit(x, (y > np.quantile(y, edge)).astype(int))
    forest = flatten_boosted(model)
    asked = on_thresholds(forest, x)
    found = margins(forest, asked)
    assert found == pytest.approx(model.predict(asked, output_margin=True), abs=1e-5)


def test_children_come_after_their_parent_though_pruning_leaves_gaps() -> None:
    x, y = table(0, rows=2000)
    forest = flatten_boosted(
        xgboost.XGBRegressor(n_estimators=20, max_depth=8, gamma=0.2, n_jobs=1).fit(x, y)
    )
    inner = np.flatnonzero(forest.feature != LEAF)
    assert inner.size
    assert np.all(forest.left[inner] > inner)
    assert np.all(forest.right[inner] > inner)


def test_trees_after_the_best_iteration_are_left_out() -> None:
    x, y = table(2)
    model = xgboost.XGBRegressor(n_estimators=200, learning_rate=0.9, early_stopping_rounds=3, n_jobs=1)
    noise = np.random.default_rng(0).normal(size=len(y))
    model.fit(x, y, eval_set=[(x, y + noise)], verbose=False)
    assert model.best_iteration + 1 < model.get_booster().num_boosted_rounds()
    forest = flatten_boosted(model)
    assert forest.roots.size == model.best_iteration + 1
    assert margins(forest, x) == pytest.approx(model.predict(x), abs=1e-5)


@pytest.mark.parametrize(
    "params",
    [{"booster": "dart"}, {"booster": "gblinear"}, {"objective": "count:poisson"}, {"num_target": True}],
)
def test_other_kinds_of_models_are_refused(params: dict[str, Any]) -> None:
    x, y = table(3)
    target = np.stack([y, y], axis=1) if params.pop("num_target", False) else np.abs(y)
    model = xgboost.XGBRegressor(n_estimators=2, n_jobs=1, **params).fit(x, target)
    with pytest.raises(InputError):
        flatten_boosted(model)
