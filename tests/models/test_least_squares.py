import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import errors
from capplan.models.calibration.least_squares import (
    LinearProblem,
    cross_validate,
    fit_linear,
    fitted_model,
    smape,
)
from capplan.models.step_latency import (
    ADDITIVE,
    DIGITAL_TWIN,
    StepFeatures,
    coefficient_array,
    latency_form,
    step_ms,
)
from tests.twin.examples import part


def problem(values: list[float], seed: int, noise: float = 0.0) -> LinearProblem:
    rng = np.random.default_rng(seed)
    design = rng.uniform(0.5, 50.0, (200, len(values)))
    design[:, 0] = 1.0
    y = design @ values * np.exp(noise * rng.standard_normal(200))
    return LinearProblem(tuple(f"k{i}" for i in range(len(values))), design, y)


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6), st.integers(0, 99))
def test_known_coefficients_are_recovered(values: list[float], seed: int) -> None:
    assert fit_linear(problem(values, seed)).values == pytest.approx(values, rel=1e-3, abs=1e-4)


def test_noisy_coefficients_lie_within_their_stated_errors() -> None:
    values = np.array([5.0, 2.0, 0.3])
    fits = [fit_linear(problem(values.tolist(), seed, noise=0.05)) for seed in range(60)]
    z = np.array([(fit.values - values) / fit.std_errors for fit in fits])
    assert np.mean(np.abs(z) < 2.0) > 0.88
    assert fits[0].error == pytest.approx(2.0, abs=0.5)  # half the mean of |N(0, 5 %)|


def test_no_part_of_a_step_takes_less_than_no_time() -> None:
    fit = fit_linear(problem([50.0, -0.5, 1.0], 0))
    assert np.all(fit.values >= 0)
    assert np.isnan(fit.std_errors[1])


def test_a_group_left_out_does_not_help_its_own_prediction() -> None:
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
    model = fitted_model("any", fit, "made up", ranges={"x": (1.0, 2.0)}, fixed=(("given", 7.0),))
    assert model.value("given") == 7.0
    assert model.value("k0") == fit.values[0]
    assert model.fit.error == fit.error
    assert model.fit.samples == 200
    assert model.fitted_range == {"x": (1.0, 2.0)}


def test_smape_is_symmetric_and_of_nothing_unknown() -> None:
    assert smape([1.0, 3.0], [3.0, 1.0]) == pytest.approx(50.0)
    assert smape([2.0], [2.0]) == 0.0
    assert np.isnan(smape([], []))


STEP = StepFeatures(
    tokens=600.0,
    requests=100.0,
    kv_tokens=30_000.0,
    adapters=10.0,
    a_max=32.0,
    s_max=40.0,
    waiting=2000.0,
    slots_per_adapter=0.25,
)


def test_every_coefficient_of_the_additive_form_adds_its_own_part() -> None:
    expected = {
        "base_ms": 1.0,
        "ms_per_ktoken": 0.6,
        "ms_per_kv_ktoken": 30.0,
        "ms_per_slot": 32.0,
        "ms_per_slot_ktoken": 32 * 0.6,
        "ms_per_slot_rank16": 32.0 * 2.5,
        "ms_per_adapter": 10.0,
        "ms_per_adapter_rank16": 10.0 * 2.5,
        "ms_per_adapter_small_rank16": 0.0,
        "ms_per_adapter_krequest": 10 * 0.1,
        "ms_per_adapter_queued": 10.0,
        "ms_per_waiting_krequest": 2 * 0.75,
        "ms_per_ktoken_beyond_graphs": 0.088,
    }
    assert set(expected) == set(ADDITIVE.coefficients)
    for at, name in enumerate(ADDITIVE.coefficients):
        one = np.zeros(len(ADDITIVE.coefficients))
        one[at] = 1.0
        assert step_ms(ADDITIVE.code, one, STEP) == pytest.approx(expected[name]), name


def milliseconds(**changes: float) -> float:
    return step_ms(ADDITIVE.code, np.ones(len(ADDITIVE.coefficients)), STEP._replace(**changes))


def test_an_empty_queue_costs_nothing_extra() -> None:
    assert milliseconds() - milliseconds(waiting=0.0) == pytest.approx(10 + 1.5)


def test_tokens_beyond_the_graphs_cost_more_each_and_no_step_jumps_there() -> None:
    each = 0.001 * (1 + 32)
    assert milliseconds(tokens=512.0) - milliseconds(tokens=511.0) == pytest.approx(each)
    assert milliseconds(tokens=513.0) - milliseconds(tokens=512.0) == pytest.approx(each + 0.001)


def test_adapters_cost_blocks_of_16_ranks_in_steps_of_few_tokens() -> None:
    drop = milliseconds(tokens=127.0) - milliseconds(tokens=128.0)
    assert drop == pytest.approx(10 * 3 - 0.001 * (1 + 32))


def test_the_digital_twin_form_is_the_papers_equation() -> None:
    k = [0.01, 0.02, -0.003, 0.4, 5.0, 0.06, 1.0]
    scheduler = 0.01 * 100 + 0.02 * 2000 - 0.003 * 2000 * 0.25
    expected = scheduler + (0.4 * 100 + 5.0) * (0.06 * 10 + 1.0)
    assert step_ms(DIGITAL_TWIN.code, np.array(k), STEP) == pytest.approx(expected)


def test_coefficients_come_in_the_order_of_their_form() -> None:
    shuffled = {name: float(i) for i, name in reversed(list(enumerate(ADDITIVE.coefficients)))}
    assert coefficient_array(part("additive", **shuffled)).tolist() == list(range(len(shuffled)))


def test_an_unknown_form_is_an_input_error_that_lists_the_known_ones() -> None:
    with pytest.raises(errors.InputError, match="additive, digital-twin"):
        latency_form("quadratic")
