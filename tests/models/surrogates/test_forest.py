import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

from capplan.models.surrogates._outputs import LEAF, flatten_forest, forest_value


@pytest.fixture(scope="module")
def table() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    # Few distinct values, so that many answers hang on a comparison with a threshold between two of them.
    x = np.round(rng.uniform(0, 20, (600, 5)), 1).astype(np.float32)
    return x, x[:, 0] * x[:, 1] + np.sin(x[:, 2]) + rng.normal(0, 0.1, 600)


def on_thresholds(model: RandomForestRegressor | RandomForestClassifier, x: np.ndarray) -> np.ndarray:
    """Return rows whose features stand exactly on thresholds, and one float32 to either side."""
    rows = [x]
    for estimator in model.estimators_[:5]:
        tree = estimator.tree_
        for node in np.flatnonzero(tree.feature >= 0)[:40]:
            near = np.float32(tree.threshold[node])
            for value in (
                near,
                np.nextafter(near, np.float32(-np.inf)),
                np.nextafter(near, np.float32(np.inf)),
            ):
                row = x[:1].copy()
                row[0, tree.feature[node]] = value
                rows.append(row)
    return np.concatenate(rows)


def test_a_flat_regressor_answers_as_scikit_learn_does(table: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = table
    model = RandomForestRegressor(n_estimators=20, random_state=0).fit(x, y)
    forest = flatten_forest(model)
    asked = on_thresholds(
        model, np.concatenate([x, np.random.default_rng(1).uniform(-5, 30, (400, 5))]).astype(np.float32)
    )
    ours = [forest_value(forest, row) for row in asked]
    assert ours == pytest.approx(model.predict(asked), rel=1e-6)


def test_a_flat_classifier_answers_the_share_of_its_second_class(
    table: tuple[np.ndarray, np.ndarray],
) -> None:
    x, y = table
    model = RandomForestClassifier(n_estimators=20, min_samples_leaf=3, random_state=0).fit(x, y > 80)
    forest = flatten_forest(model)
    ours = [forest_value(forest, row) for row in on_thresholds(model, x)]
    assert ours == pytest.approx(model.predict_proba(on_thresholds(model, x))[:, 1], abs=1e-6)


def test_children_come_after_their_parent(table: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = table
    forest = flatten_forest(RandomForestRegressor(n_estimators=3, random_state=0).fit(x, y))
    inner = forest.feature != LEAF
    nodes = np.arange(forest.feature.size)
    assert np.all(forest.left[inner] > nodes[inner])
    assert np.all(forest.right[inner] > nodes[inner])
