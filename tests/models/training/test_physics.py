"""Physics-informed models: scikit-learn contract, monotonicity, and export to a surrogate."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.exceptions import NotFittedError

from capplan.models.calibration import smape
from capplan.models.surrogates import FEATURES, feature_of
from capplan.models.surrogates._outputs import LOG_ODDS, SERVED_AND_STEP, expected_share, throughput_of
from capplan.models.training._candidates import monotone_constraints
from capplan.models.training._train import ServedAndStep, ServedEdge, starvation_target
from capplan.spec import STARVED_BELOW
from tests.models.training.scenarios import scenarios

SMALL = {"n_estimators": 60, "learning_rate": 0.15, "max_depth": 4}


def truth() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, served fractions and step times that the estimate nearly knows."""
    x, *_ = scenarios()
    rng = np.random.default_rng(1)
    served = np.minimum(1.0, expected_share(x) * np.exp(rng.normal(0.05, 0.02, len(x))))
    return x, served, feature_of(x, "step_ms") * (1.1 + 0.1 * np.sin(feature_of(x, "a_max")))


def targets(model: ServedAndStep | ServedEdge) -> np.ndarray:
    _, served, step_ms = truth()
    return np.column_stack([served, step_ms]) if isinstance(model, ServedAndStep) else served


@pytest.fixture(params=[ServedAndStep, ServedEdge])
def model(request: pytest.FixtureRequest) -> Any:
    return request.param(**SMALL)


@pytest.fixture(scope="module")
def edge() -> ServedEdge:
    x, served, _ = truth()
    return ServedEdge(**SMALL).fit(x, served)


def test_parameters_are_kept_as_given_and_cloned(model: Any) -> None:
    assert model.get_params() == type(model)().get_params() | SMALL
    assert clone(model).get_params() == model.get_params()
    assert model.set_params(max_depth=2, n_jobs=1) is model
    assert model.get_params()["max_depth"] == 2
    with pytest.raises(ValueError, match="depth"):
        model.set_params(depth=2)


def test_one_is_a_regressor_and_the_other_a_classifier() -> None:
    assert is_regressor(ServedAndStep())
    assert is_classifier(ServedEdge())


def test_fitting_gives_the_model_back_and_leaves_its_parameters_and_the_data_alone(model: Any) -> None:
    x, y = truth()[0].copy(), targets(model).copy()
    before = model.get_params()
    assert model.fit(x, y) is model
    assert model.get_params() == before
    assert np.array_equal(x, truth()[0])
    assert np.array_equal(y, targets(model))
    assert model.n_features_in_ == len(FEATURES)
    assert model.predict(x[:7]).shape == (7,)
    assert not hasattr(clone(model), "served_")
    assert not hasattr(clone(model), "edge_")


def test_the_same_seed_gives_the_same_model_and_another_one_another(model: Any) -> None:
    x, y = truth()[0], targets(model)

    def said(**changed: int) -> np.ndarray:
        fitted = clone(model).set_params(**changed).fit(x, y)
        return fitted.output().predict(x)

    assert np.array_equal(said(), said())
    assert np.array_equal(said(), said(n_jobs=2))
    assert not np.array_equal(said(), said(random_state=1))


def test_what_was_not_fitted_does_not_answer(model: Any) -> None:
    with pytest.raises(NotFittedError):
        model.predict(truth()[0])


@pytest.mark.parametrize("spoil", [lambda x: x[:, :-1], lambda x: np.where(x > 0, np.nan, x), lambda x: x[0]])
def test_features_of_another_shape_or_without_a_value_are_refused(model: Any, spoil: Any) -> None:
    x, y = truth()[0], targets(model)
    fitted = model.fit(x, y)
    with pytest.raises(ValueError, match=r"features|NaN|2D"):
        fitted.predict(spoil(x))
    with pytest.raises(ValueError, match="inconsistent"):
        clone(model).fit(x[:-1], y)


def test_throughput_is_learned_and_its_output_is_equal() -> None:
    x, served, step_ms = truth()
    seen, unseen = slice(0, 300), slice(300, None)
    model = ServedAndStep(**SMALL).fit(x[seen], np.column_stack([served, step_ms])[seen])
    said, meant = model.predict(x[unseen]), throughput_of(x[unseen], served[unseen], step_ms[unseen])
    assert smape(said, meant) < 3.0
    output = model.output()
    assert output.form == SERVED_AND_STEP
    assert np.array_equal(output.predict(x[unseen]), said)
    margins = model.step_.predict(x[unseen])
    step = feature_of(x[unseen], "step_ms") * np.exp(margins)
    share = np.minimum(1.0, expected_share(x[unseen]) * np.exp(model.served_.predict(x[unseen])))
    assert said == pytest.approx(throughput_of(x[unseen], share, step), rel=1e-4)


def test_scenarios_without_a_step_or_with_nothing_served_can_be_learned_from() -> None:
    x, served, step_ms = truth()
    served, step_ms = served.copy(), step_ms.copy()
    served[:20], step_ms[:20] = 0.0, 0.0
    assert np.all(np.isfinite(ServedAndStep(**SMALL).fit(x, np.column_stack([served, step_ms])).predict(x)))
    assert np.all(np.isfinite(ServedEdge(**SMALL).fit(x, served).decision_function(x)))


def test_starvation_is_learned_and_its_output_is_equal(edge: ServedEdge) -> None:
    x, served, _ = truth()
    score = edge.decision_function(x)
    assert edge.output().form == LOG_ODDS
    assert np.array_equal(edge.output().predict(x), score)
    assert np.array_equal(edge.predict(x), (score > 0).astype(int))
    assert np.mean(edge.predict(x) == (served < STARVED_BELOW)) > 0.95
    assert edge.classes_.tolist() == [0, 1]


def test_the_target_of_starvation_is_even_at_the_edge_and_falls_with_the_served_fraction() -> None:
    target = starvation_target(np.array([0.0, 0.5, 0.85, STARVED_BELOW, 0.95, 1.0]))
    assert target[3] == 0.5
    assert np.all(np.diff(target[1:]) < 0.0)
    assert target[0] == target[1] > 0.999
    assert target[-1] < 0.01


@settings(max_examples=30)
@given(
    rows=st.lists(st.integers(0, 399), min_size=1, max_size=20),
    moved=st.sets(
        st.sampled_from([i for i, s in enumerate(monotone_constraints("starvation")) if s]), min_size=1
    ),
    factor=st.floats(1.001, 20.0),
)
def test_what_loads_more_never_lowers_the_score_of_starvation(
    edge: ServedEdge, rows: list[int], moved: set[int], factor: float
) -> None:
    x = truth()[0][rows]
    worse = x.copy()
    for column in moved:
        worse[:, column] *= np.float32(
            factor if monotone_constraints("starvation")[column] > 0 else 1 / factor
        )
    assert np.all(edge.decision_function(worse) >= edge.decision_function(x) - 1e-6)
