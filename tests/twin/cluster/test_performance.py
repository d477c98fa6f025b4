"""Toppings' models, fitted to predictions of a profile."""

import numpy as np
import pytest

from capplan.models._step_latency import TOPPINGS_BGMV, TOPPINGS_MBGMV
from capplan.serving.routers import Toppings
from capplan.twin.cluster import Instance
from capplan.twin.cluster._routers import base_iteration_ms, fit_performance
from capplan.twin.cluster._scenario import build_cluster
from tests.twin.cluster.workloads import PROFILE, even

SCENARIO = build_cluster(even(16, 5.0, (8, 64)), [Instance(PROFILE, a_max=16, s_max=64)], 60.0, 0)


@pytest.mark.parametrize(("form", "kernel"), [(TOPPINGS_BGMV, "bgmv"), (TOPPINGS_MBGMV, "mbgmv")])
def test_a_profile_of_eq_2_gives_its_coefficients(form, kernel) -> None:
    costs = SCENARIO.engines[0].costs._replace(
        form=form.code, coefficients=np.array([0.0035, 32.166, 0.002, 40.0]), uses_ranks=True
    )
    found = fit_performance(costs, SCENARIO.requests, Toppings(kernel))
    assert found.row == pytest.approx((0.002, 40.0, 0.0, 0.0035, 32.166), abs=1e-9)


def test_the_time_per_prompt_token_is_the_profiles_unless_literal() -> None:
    costs = SCENARIO.engines[0].costs
    found = fit_performance(costs, SCENARIO.requests, Toppings())
    per_token = PROFILE.step_latency.value("ms_per_ktoken") / 1e3
    assert per_token < found.prefill_ms_per_token < 2.0 * per_token
    assert found.decode_alpha_ms > 0.0
    literal = fit_performance(costs, SCENARIO.requests, Toppings(literal=True))
    assert literal.prefill_ms_per_token == 0.0
    assert literal.decode_alpha_ms == found.decode_alpha_ms


def test_an_iteration_of_the_base_model_is_shorter_than_any_with_adapters() -> None:
    costs = SCENARIO.engines[0].costs
    found = fit_performance(costs, SCENARIO.requests, Toppings())
    assert base_iteration_ms(costs, SCENARIO.requests) < found.decode_alpha_ms * 16 * 8 + found.decode_beta_ms
