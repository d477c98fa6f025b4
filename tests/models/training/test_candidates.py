from collections.abc import Mapping

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LinearRegression
from sklearn.tree import DecisionTreeRegressor
from sklearn.utils.estimator_checks import check_estimator

from capplan.errors import InputError
from capplan.models.surrogates.features import FEATURES, PAPER_FEATURES, expected_tok_s
from capplan.models.surrogates.outputs import forest_answer
from capplan.models.training.boosting import flatten_boosted, probability_of
from capplan.models.training.candidates import (
    EXPECTED_RATIO_SIGNS,
    FAMILIES,
    SERVED_SHARE_SIGNS,
    STARVATION_SIGNS,
    FeatureOptions,
    RelativeRegressor,
    boosting_space,
    candidate_model,
    forest_grid,
    knn_grid,
    learner_of,
    signs,
    subset,
    svm_grid,
    whole,
)
from tests.models.training.scenarios import scenarios

TASKS = ("throughput", "starvation")


def test_the_wrapper_keeps_scikit_learns_contract() -> None:
    check_estimator(RelativeRegressor(LinearRegression(), relative=False))


def test_the_wrapper_is_cloned_with_all_its_parameters() -> None:
    made = RelativeRegressor(LinearRegression(fit_intercept=False), relative=True, baseline="offered")
    copy = clone(made).set_params(regressor__fit_intercept=True)
    assert copy.get_params()["baseline"] == "offered"
    assert copy.regressor.fit_intercept
    assert not made.regressor.fit_intercept


def test_what_follows_the_formula_is_learnt_from_any_row() -> None:
    x, throughput, _, _ = scenarios()
    target = 0.7 * expected_tok_s(x)
    model = RelativeRegressor(DecisionTreeRegressor(max_depth=1)).fit(x[:50], target[:50])
    assert model.predict(x) == pytest.approx(target, rel=1e-6)
    assert throughput.size == target.size


@pytest.mark.parametrize("bad", ["nothing", ""])
def test_an_unknown_baseline_is_refused(bad: str) -> None:
    x, throughput, _, _ = scenarios()
    with pytest.raises(InputError):
        RelativeRegressor(LinearRegression(), baseline=bad).fit(x, throughput)


def test_other_vectors_than_features_are_refused() -> None:
    x, throughput, _, _ = scenarios()
    with pytest.raises(InputError):
        RelativeRegressor(LinearRegression()).fit(x[:, 1:], throughput)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("columns", [FEATURES, PAPER_FEATURES], ids=["all", "paper"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_candidate_learns_and_is_deterministic(
    family: str, columns: tuple[str, ...], relative: bool, task: str
) -> None:
    x, throughput, starved, _ = scenarios()
    target = throughput if task == "throughput" else starved.astype(int)
    chosen = candidate_model(family, task, FeatureOptions(columns=columns, relative=relative))
    answers = []
    for _ in range(2):
        made = chosen.make(_some_params(chosen.grid, chosen.distributions), seed=3)
        fitted = clone(made).fit(x, target)
        answers.append(fitted.predict(x))
        assert np.all(np.isfinite(answers[-1]))
    assert np.array_equal(*answers)
    assert np.unique(answers[0]).size > 1
    if task == "starvation" and family != "svm":
        assert fitted.predict_proba(x).shape == (len(x), 2)


def test_a_candidate_looks_at_its_columns_only() -> None:
    x, _, starved, _ = scenarios()
    others = [i for i, name in enumerate(FEATURES) if name not in PAPER_FEATURES]
    fitted = (
        candidate_model("xgboost", "starvation", FeatureOptions(columns=PAPER_FEATURES))
        .make({}, 0)
        .fit(x, starved)
    )
    changed = x.copy()
    changed[:, others] += 1000.0
    assert np.array_equal(fitted.predict_proba(changed), fitted.predict_proba(x))


@pytest.mark.parametrize(
    "options", [FeatureOptions(), FeatureOptions(columns=PAPER_FEATURES, monotone=False)]
)
def test_a_tuned_candidate_can_be_flattened(options: FeatureOptions) -> None:
    x, throughput, starved, _ = scenarios()
    columns = [FEATURES.index(name) for name in options.columns]
    regressor = (
        candidate_model("xgboost", "throughput", options).make({"n_estimators": 20}, 0).fit(x, throughput)
    )
    forest = flatten_boosted(learner_of(regressor), columns)
    ratio = np.log(regressor.predict(x) / regressor._baseline_tok_s(x))
    assert [forest_answer(forest, row) for row in x] == pytest.approx(ratio, abs=1e-5)
    classifier = (
        candidate_model("xgboost", "starvation", options).make({"n_estimators": 20}, 0).fit(x, starved)
    )
    forest = flatten_boosted(learner_of(classifier), columns)
    assert probability_of(np.array([forest_answer(forest, row) for row in x])) == pytest.approx(
        classifier.predict_proba(x)[:, 1], abs=1e-5
    )


@pytest.mark.parametrize(
    ("task", "baseline"), [("starvation", "expected"), ("throughput", "expected"), ("throughput", "offered")]
)
def test_boosted_answers_follow_their_signs(task: str, baseline: str) -> None:
    x, throughput, starved, _ = scenarios()
    target = throughput if task == "throughput" else starved
    chosen = candidate_model("xgboost", task, FeatureOptions(baseline=baseline))
    fitted = chosen.make({"max_depth": 6, "n_estimators": 100}, 0).fit(x, target)
    for column, sign in enumerate(signs(task, baseline=baseline)):
        if sign == 0:
            continue
        moved = np.repeat(x[:40, None], 30, axis=1)
        moved[:, :, column] = np.linspace(x[:, column].min() * 0.5, x[:, column].max() * 2, 30)
        asked = moved.reshape(-1, len(FEATURES))
        if task == "throughput":
            answer = learner_of(fitted).predict(asked)  # the ratio's logarithm
        else:
            answer = fitted.predict_proba(asked)[:, 1]
        assert np.all(sign * np.diff(answer.reshape(40, 30), axis=1) >= -1e-6), FEATURES[column]


def test_signs_name_features_that_there_are() -> None:
    assert set(STARVATION_SIGNS) | set(SERVED_SHARE_SIGNS) | set(EXPECTED_RATIO_SIGNS) <= set(FEATURES)
    assert signs("starvation", ("kv_tokens", "rank_max", "rate_sum_rps")) == (-1, 0, 1)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: candidate_model("oracle", "starvation"),
        lambda: FeatureOptions(columns=("luck",)),
        lambda: FeatureOptions(baseline="luck"),
    ],
)
def test_unknown_names_are_refused(bad: object) -> None:
    assert callable(bad)
    with pytest.raises(InputError):
        bad()


def test_the_grids_hold_each_model_of_appendix_b_once() -> None:
    assert len(whole(knn_grid())) == 2
    # linear, poly, rbf, sigmoid, each with what its kernel heeds; four tubes for regression.
    assert len(whole(svm_grid("starvation"))) == 6 * (1 + 4 * 6 * 4 + 6 + 6 * 4)
    assert len(whole(svm_grid("throughput"))) == 4 * len(whole(svm_grid("starvation")))
    # 3 sizes, 4 depths, 3 max_features; 13 pairs of leaf and split size; criteria that differ.
    assert len(whole(forest_grid("starvation", signed_target=False))) == 3 * 4 * 3 * 13 * 2
    assert len(whole(forest_grid("throughput", signed_target=False))) == 3 * 4 * 3 * 13 * 3
    for grid in (knn_grid(), svm_grid("throughput"), forest_grid("throughput", signed_target=True)):
        assert len({repr(sorted(c.items())) for c in whole(grid)}) == len(whole(grid))


def test_a_subset_is_seeded_and_takes_every_kind() -> None:
    grid = svm_grid("throughput")
    chosen = subset(grid, 12, seed=5)
    assert chosen == subset(grid, 12, seed=5)
    assert chosen != subset(grid, 12, seed=6)
    assert all(combination in whole(grid) for combination in chosen)
    kernels = [combination["kernel"] for combination in chosen]
    assert {kernel: kernels.count(kernel) for kernel in kernels} == dict.fromkeys(
        ("linear", "poly", "rbf", "sigmoid"), 3
    )
    assert len(subset(knn_grid(), 100, seed=0)) == 2


@pytest.mark.parametrize("huber", [True, False])
def test_the_largest_boosted_model_is_quick_to_answer(huber: bool) -> None:
    space = boosting_space(huber=huber)
    assert space["n_estimators"].high * space["max_depth"].high <= 4000


def _some_params(grid: tuple, distributions: Mapping) -> dict:
    if grid:
        return dict(grid[0][0])
    return {"n_estimators": 10, "max_depth": 3} if distributions else {}
