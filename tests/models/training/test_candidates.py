import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.tree import DecisionTreeRegressor

from capplan import InputError
from capplan.models.surrogates import FEATURES
from capplan.models.surrogates._features import expected_tok_s
from capplan.models.surrogates._outputs import flatten_forest, forest_values
from capplan.models.surrogates._surrogate import SigmoidCalibration
from capplan.models.training import FAMILIES
from capplan.models.training._candidates import (
    STARVATION_SIGNS,
    THROUGHPUT_SIGNS,
    RelativeRegressor,
    boosting_space,
    candidate_model,
    monotone_constraints,
)
from capplan.models.training._train import flatten_boosted
from tests.models.training.scenarios import scenarios

TASKS = ("throughput", "starvation")


def test_the_wrapper_is_cloned_with_all_its_parameters() -> None:
    made = RelativeRegressor(LinearRegression(fit_intercept=False))
    copy = clone(made).set_params(regressor__fit_intercept=True)
    assert copy.regressor.fit_intercept
    assert not made.regressor.fit_intercept


def test_a_constant_ratio_is_learnt_from_any_rows() -> None:
    x, _, _, _ = scenarios()
    target = 0.7 * expected_tok_s(x)
    model = RelativeRegressor(DecisionTreeRegressor(max_depth=1)).fit(x[:50], target[:50])
    assert model.predict(x) == pytest.approx(target, rel=1e-6)


def test_other_vectors_than_features_are_refused() -> None:
    x, throughput, _, _ = scenarios()
    with pytest.raises(InputError):
        RelativeRegressor(LinearRegression()).fit(x[:, 1:], throughput)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_candidate_is_deterministic_and_keeps_its_predictions_as_flat_arrays(
    family: str, task: str
) -> None:
    x, throughput, starved, _ = scenarios()
    target = throughput if task == "throughput" else starved.astype(int)
    made = [candidate_model(family, task).make({"n_estimators": 20}, seed=3).fit(x, target) for _ in range(2)]
    assert np.array_equal(*(each.predict(x) for each in made))
    assert np.unique(made[0].predict(x)).size > 1
    flatten = flatten_forest if family == "forest" else flatten_boosted
    values = forest_values(flatten(getattr(made[0], "regressor_", made[0])), x)
    if task == "throughput":
        predicted = np.log(made[0].predict(x) / expected_tok_s(x))
    else:
        predicted = made[0].predict_proba(x)[:, 1]
        values = SigmoidCalibration(1.0, 0.0).probability(values) if family == "xgboost" else values
    assert values == pytest.approx(predicted, abs=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_boosted_answers_follow_their_signs(task: str) -> None:
    x, throughput, starved, _ = scenarios()
    target = throughput if task == "throughput" else starved
    fitted = candidate_model("xgboost", task).make({"max_depth": 6, "n_estimators": 100}, 0).fit(x, target)
    for column, sign in enumerate(monotone_constraints(task)):
        if sign == 0:
            continue
        moved = np.repeat(x[:40, None], 30, axis=1)
        moved[:, :, column] = np.linspace(x[:, column].min() * 0.5, x[:, column].max() * 2, 30)
        rows = moved.reshape(-1, len(FEATURES))
        # Of throughput, the logarithm of the ratio.
        model = getattr(fitted, "regressor_", fitted)
        predicted = model.predict(rows) if task == "throughput" else model.predict_proba(rows)[:, 1]
        assert np.all(sign * np.diff(predicted.reshape(40, 30), axis=1) >= -1e-6), FEATURES[column]


def test_signs_name_features_that_there_are() -> None:
    assert set(STARVATION_SIGNS) | set(THROUGHPUT_SIGNS) <= set(FEATURES)
    signs = dict(zip(FEATURES, monotone_constraints("starvation"), strict=True))
    assert (signs["kv_tokens"], signs["rank_max"], signs["rate_sum_rps"]) == (-1, 0, 1)


@pytest.mark.parametrize("task", TASKS)
def test_the_largest_boosted_model_is_quick_to_answer(task: str) -> None:
    space = boosting_space(task)
    assert space["n_estimators"].high * space["max_depth"].high <= 4000
