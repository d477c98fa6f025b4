"""Intervals, calibration and range of surrogates, on made-up data whose truth is known."""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.models.surrogates import COVERAGE, FEATURES
from capplan.models.surrogates._surrogate import SigmoidCalibration, fit_domain
from capplan.models.training._evaluation import fit_calibration, fit_intervals


def errors(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, answers and truth; the error is ten times wider where the first feature is large."""
    rng = np.random.default_rng(seed)
    features = rng.uniform(0, 1, (rows, len(FEATURES))).astype(np.float32)
    answers = rng.uniform(1e3, 1e4, rows)
    hard = features[:, 0] > 0.7
    return features, answers, answers * np.exp(rng.normal(0.01, np.where(hard, 0.2, 0.02)))


def each(answers: np.ndarray) -> np.ndarray:
    """Return a group of its own for each scenario."""
    return np.arange(answers.size)


def test_nine_of_ten_lie_inside_overall_and_in_each_regime_and_both_ends_miss_alike() -> None:
    features, answers, truth = errors(4000, seed=0)
    intervals = fit_intervals(features, answers, truth, each(answers), seed=0)
    features, answers, truth = errors(8000, seed=1)
    low, high = intervals.around(features, answers)
    inside = (low <= truth) & (truth <= high)
    hard = features[:, 0] > 0.7
    assert inside.mean() == pytest.approx(COVERAGE, abs=0.02)
    assert inside[hard].mean() == pytest.approx(COVERAGE, abs=0.035)
    assert inside[~hard].mean() == pytest.approx(COVERAGE, abs=0.03)
    width = np.log(high / low)
    assert np.median(width[hard]) > 5 * np.median(width[~hard])
    assert np.mean(truth < low) == pytest.approx(0.05, abs=0.02)
    assert np.mean(truth > high) == pytest.approx(0.05, abs=0.02)


@given(st.integers(4, 60), st.integers(0, 99))
def test_few_scenarios_give_wide_intervals_around_every_answer(rows: int, seed: int) -> None:
    features, answers, truth = errors(rows, seed)
    low, high = fit_intervals(features, answers, truth, each(answers), seed=0).around(features, answers)
    assert np.all(low <= answers)
    assert np.all(answers <= high)


def test_an_answer_of_nothing_at_all_does_not_widen_intervals_without_bound() -> None:
    features, answers, truth = errors(400, seed=0)
    truth[:40] = 0.0
    low, high = fit_intervals(features, answers, truth, each(answers), seed=0).around(features, answers)
    assert np.all(np.isfinite(high))
    assert np.all(low > 0.0)


def test_calibrated_probabilities_are_the_shares_that_starve() -> None:
    rng = np.random.default_rng(0)
    score = rng.normal(0, 3, 20_000)
    starved = rng.random(score.size) < 1 / (1 + np.exp(-(0.5 * score - 1)))
    said = fit_calibration(score[:10_000], starved[:10_000]).probability(score[10_000:])
    for tenth in range(10):
        rows = (said * 10).astype(int) == tenth
        assert starved[10_000:][rows].mean() == pytest.approx(said[rows].mean(), abs=0.05)


@given(st.floats(0.01, 20), st.floats(-20, 20), st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_probabilities_are_bounded_and_rise_with_the_score(
    slope: float, offset: float, scores: list[float]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = SigmoidCalibration(slope, offset).probability(np.sort(scores))
    assert np.all((said >= 0.0) & (said <= 1.0))
    assert np.all(np.diff(said) >= 0.0)


@pytest.fixture(scope="module")
def training() -> np.ndarray:
    """Two features that go together, over four orders of magnitude; the others by themselves."""
    rng = np.random.default_rng(0)
    rows = np.exp(rng.uniform(0, 9, (3000, len(FEATURES))))
    rows[:, 1] = rows[:, 0] * np.exp(rng.normal(0, 0.05, 3000))
    return rows.astype(np.float32)


def test_training_scenarios_lie_in_their_domain(training: np.ndarray) -> None:
    domain = fit_domain(training)
    assert domain.contains(training).all()
    assert domain.novelty(training).max() == pytest.approx(1 / 1.02)


@pytest.mark.parametrize("feature", range(0, len(FEATURES), 5))
def test_beyond_the_range_of_any_one_feature_is_outside(training: np.ndarray, feature: int) -> None:
    domain = fit_domain(training)
    for value in (
        np.nextafter(domain.high[feature], np.float32(np.inf)),
        np.nextafter(domain.low[feature], np.float32(0)),
        *(0.0, -1.0, 1e30, np.inf, -np.inf, np.nan),
    ):
        asked = np.median(training, axis=0)[None].copy()
        assert domain.contains(asked).all()
        asked[0, feature] = value
        with np.errstate(all="ignore"):
            assert not domain.contains(asked).any()


def test_a_strange_combination_of_common_values_is_outside(training: np.ndarray) -> None:
    domain = fit_domain(training)
    asked = np.median(training, axis=0)[None].copy()
    asked[0, :2] = np.quantile(training[:, 0], [0.05, 0.95])
    assert domain.novelty(asked)[0] > 1.0
    assert not domain.contains(asked).any()


def test_a_feature_that_never_varied_is_known_at_its_one_value(training: np.ndarray) -> None:
    training = training.copy()
    training[:, 4] = 7.0
    domain = fit_domain(training)
    assert domain.contains(training).all()
    asked = training[:1].copy()
    asked[0, 4] = 7.001
    assert not domain.contains(asked).any()
