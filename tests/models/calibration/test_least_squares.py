"""Fits with relative scatter, cross-validation and clustered standard errors."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from capplan.models.calibration import LinearProblem, cross_validate, smape
from capplan.models.calibration._least_squares import (
    LinearFit,
    clustered_covariance,
    fit_linear,
    fit_mean,
    fitted_model,
)

Fitter = Callable[[LinearProblem], LinearFit]


def problem(values: list[float], seed: int, noise: float = 0.0) -> LinearProblem:
    rng = np.random.default_rng(seed)
    design = rng.uniform(0.5, 50.0, (200, len(values)))
    design[:, 0] = 1.0
    y = design @ values * np.exp(noise * rng.standard_normal(200))
    return LinearProblem(tuple(f"k{i}" for i in range(len(values))), design, y)


@pytest.mark.parametrize("fit", [fit_linear, fit_mean])
@given(values=st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_known_coefficients_are_recovered(fit: Fitter, values: list[float], seed: int) -> None:
    assert fit(problem(values, seed)).values == pytest.approx(values, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("fit", [fit_linear, fit_mean])
def test_noisy_coefficients_lie_within_their_stated_errors(fit: Fitter) -> None:
    values = np.array([5.0, 2.0, 0.3])
    fits = [fit(problem(values.tolist(), seed, noise=0.05)) for seed in range(60)]
    z = np.array([(each.values - values) / each.std_errors for each in fits])
    assert np.mean(np.abs(z) < 2.0) > 0.88
    assert fits[0].error == pytest.approx(2.0, abs=0.5)  # half the mean of |N(0, 5 %)|


def test_scatter_does_not_bias_the_mean() -> None:
    made = problem([5.0, 2.0, 0.3], 3, noise=0.3)  # the mean of exp(noise) is above 1
    predicted = made.design @ fit_mean(made).values
    assert np.mean(made.y / predicted) == pytest.approx(1.0, abs=1e-6)
    assert np.sum(made.y) / np.sum(predicted) == pytest.approx(1.0, abs=0.02)


def test_coefficients_are_not_negative() -> None:
    fit = fit_linear(problem([50.0, -0.5, 1.0], 0))
    assert np.all(fit.values >= 0)
    assert np.isnan(fit.std_errors[1])


def test_a_left_out_group_does_not_improve_its_own_prediction() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(10), 20)
    level = rng.uniform(1.0, 9.0, 10)[groups]  # nothing in the design tells the level of a group
    one_column = LinearProblem(("k",), np.ones((200, 1)), level)
    own_column = LinearProblem(tuple("abcdefghij"), np.eye(10)[groups], level)
    assert fit_linear(own_column).error == pytest.approx(0.0, abs=1e-6)
    assert cross_validate(own_column, groups) == pytest.approx(100.0)  # its column is unknown to the others
    assert cross_validate(one_column, groups) > fit_linear(one_column).error


def test_a_fitted_model_stores_values_errors_and_range() -> None:
    fit = fit_linear(problem([5.0, 0.0, 1.0], 1, noise=0.02))
    model = fitted_model("any", fit, "made up", ranges={"x": (1.0, 2.0)}, fixed={"given": 7.0})
    assert model.value("given") == 7.0
    assert model.value("k0") == fit.values[0]
    assert model.fit.error == fit.error
    assert model.fit.samples == 200
    assert model.fitted_range == {"x": (1.0, 2.0)}


def test_smape_is_symmetric_and_nan_without_samples() -> None:
    assert smape([1.0, 3.0], [3.0, 1.0]) == pytest.approx(50.0)
    assert smape([2.0], [2.0]) == 0.0
    assert np.isnan(smape([], []))


def test_standard_errors_allow_for_correlated_residuals_within_a_run() -> None:
    """Twenty rows of a run with a common residual hold the information of one."""
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(60), 20)
    x = rng.uniform(1.0, 2.0, 60)[groups]
    jacobian = np.column_stack([np.ones_like(x), x])
    shared = rng.standard_normal(60)[groups]
    own = rng.standard_normal(groups.size)

    def errors(residuals: NDArray[np.float64], of: NDArray[np.int64], *free: bool) -> NDArray[np.float64]:
        return np.sqrt(np.diag(clustered_covariance(jacobian, residuals, np.array(free), of)))

    rows = np.arange(groups.size)
    assert errors(shared, groups, True, True) == pytest.approx(
        np.sqrt(20) * errors(shared, rows, True, True), rel=0.25
    )
    assert errors(own, groups, True, True) == pytest.approx(errors(own, rows, True, True), rel=0.35)
    assert np.isnan(errors(own, groups, True, False)[1])
