"""Fit and selection of step models on steps of known coefficients."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError
from capplan.models import ADDITIVE
from capplan.models.calibration import MeasuredSteps, _step_model, calibrate_steps
from capplan.models.calibration._step_model import (
    TERM_GROUPS,
    candidate_named,
    candidates,
    predict_left_out,
    step_ranges,
)
from capplan.models.calibration._tables import step_table
from capplan.spec import Coefficient, Kernel
from tests.models.calibration.step_tables import (
    ADDITIVE_TRUTH,
    DIGITAL_TWIN_TRUTH,
    TOPPINGS_TRUTH,
    milliseconds,
    steps_of,
)

CASES = [
    pytest.param("additive", ADDITIVE_TRUTH, Kernel.VLLM, id="additive-vllm"),
    pytest.param("additive", ADDITIVE_TRUTH, Kernel.BGMV, id="additive-bgmv"),
    pytest.param("additive", ADDITIVE_TRUTH, Kernel.MBGMV, id="additive-mbgmv"),
    pytest.param("digital-twin", DIGITAL_TWIN_TRUTH, Kernel.VLLM, id="digital-twin"),
    pytest.param("toppings-bgmv", TOPPINGS_TRUTH, Kernel.VLLM, id="toppings-bgmv"),
    pytest.param("toppings-mbgmv", TOPPINGS_TRUTH, Kernel.VLLM, id="toppings-mbgmv"),
]


def table_of(frame: pd.DataFrame) -> MeasuredSteps:
    return step_table(frame, "steps.csv")


@pytest.mark.parametrize(("form", "truth", "kernel"), CASES)
def test_the_coefficients_of_exact_steps_are_recovered(
    form: str, truth: Mapping[str, float], kernel: Kernel
) -> None:
    table = table_of(steps_of(form, truth, kernel=kernel))
    fit = candidate_named(form, table, kernel).fit(table)
    found = {name: coefficient.value for name, coefficient in fit.coefficients().items()}
    if form == "digital-twin":  # k1 * B and k4 * B are told apart by the adapters beside them only
        assert found["k1"] + found["k4"] == pytest.approx(truth["k1"] + truth["k4"], rel=1e-3)
    assert found == pytest.approx(dict(truth), rel=2e-3, abs=1e-6)
    assert fit.serving_factor is not None
    assert fit.serving_factor.value == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize(("form", "truth", "kernel"), CASES)
def test_a_fit_predicts_the_step_times_of_the_twin(
    form: str, truth: Mapping[str, float], kernel: Kernel
) -> None:
    frame = steps_of(form, truth, kernel=kernel, rows=120, noise=0.2, seed=3)
    table = table_of(frame)
    fit = candidate_named(form, table, kernel).fit(table)
    assert fit.serving_factor is not None
    stored = {name: coefficient.value for name, coefficient in fit.coefficients().items()}
    by_twin = milliseconds(frame, form, stored, kernel) + table.load_ms * (fit.serving_factor.value - 1.5)
    assert fit.predict(table) == pytest.approx(by_twin)


def test_the_form_of_the_steps_is_selected() -> None:
    for form, truth in (
        ("additive", ADDITIVE_TRUTH),
        ("digital-twin", DIGITAL_TWIN_TRUTH),
        ("toppings-mbgmv", TOPPINGS_TRUTH),
    ):
        made = calibrate_steps(table_of(steps_of(form, truth, noise=0.01)))
        assert made.fit.candidate.label == form
        assert made.score.held_out_error == pytest.approx(0.4, abs=0.15)  # half the mean of |N(0, 1 %)|
        assert made.score.held_out_r2 > 0.99


def test_leaving_out_a_group_of_terms_increases_the_error() -> None:
    made = calibrate_steps(table_of(steps_of("additive", ADDITIVE_TRUTH, noise=0.01, rows=1000)))
    errors = {score.label: score.held_out_error for score in made.scores}
    for group, terms in TERM_GROUPS.items():
        assert errors[f"additive-without-{group}"] > errors["additive"]
        absent = candidate_named(f"additive-without-{group}", made.table, Kernel.VLLM).fit(made.table)
        assert not set(absent.names) & set(terms)
        assert all(
            absent.coefficients()[name].value == 0.0 for name in terms if name in ADDITIVE.coefficients
        )
    assert [score.held_out_error for score in made.scores] == sorted(errors.values())


def test_terms_without_effect_are_kept() -> None:
    flat = ADDITIVE_TRUTH | dict.fromkeys((*TERM_GROUPS["queue"], *TERM_GROUPS["graphs"]), 0.0)
    made = calibrate_steps(table_of(steps_of("additive", flat, noise=0.03)))
    assert made.fit.candidate.label == "additive"


def test_the_cost_of_several_requests_needs_steps_of_one() -> None:
    truth = ADDITIVE_TRUTH | {"ms_for_several": 0.0}
    frame = steps_of("additive", truth)
    frame = frame[frame["requests"] > 1]
    fit = candidate_named("additive", table_of(frame), Kernel.VLLM).fit(table_of(frame))
    assert fit.coefficients()["base_ms"].value == pytest.approx(truth["base_ms"], rel=2e-3)


def test_a_cache_is_found_where_kv_tokens_beyond_it_cost_more() -> None:
    beyond = {"ms_per_kv_ktoken_beyond_cache": 0.5, "cache_kv_ktokens": 80.0}
    frame = steps_of("additive", ADDITIVE_TRUTH | beyond, noise=0.02)
    made = calibrate_steps(table_of(frame))
    assert made.fit.candidate.label == "additive-cache-4th"  # the largest step has about 320,000 KV tokens
    found = {name: each.value for name, each in made.model().coefficients.items()}
    assert found["cache_kv_ktokens"] == pytest.approx(frame["kv_tokens"].max() / 4e3)
    assert found["ms_per_kv_ktoken_beyond_cache"] == pytest.approx(0.5, rel=0.1)
    errors = {score.label: score.held_out_error for score in made.scores}
    assert errors["additive-cache-4th"] < 0.7 * errors["additive"]


def test_the_attention_of_prompts_is_fitted_to_their_pairs_of_tokens() -> None:
    """Without them prompts of middle length are predicted too slow, and long ones too fast."""
    frame = steps_of("additive", ADDITIVE_TRUTH, noise=0.005)
    known = calibrate_steps(table_of(frame))
    fitted = known.model().coefficients["ms_per_prefill_mpair"].value
    assert fitted == pytest.approx(ADDITIVE_TRUTH["ms_per_prefill_mpair"], rel=0.2)
    unknown = calibrate_steps(table_of(frame.drop(columns="prefill_mpairs")))
    assert "ms_per_prefill_mpair" not in unknown.model().coefficients
    assert known.score.held_out_error < 0.9 * unknown.score.held_out_error


def test_the_attention_of_prompts_must_reduce_the_error() -> None:
    """It grows with the square of a prompt, which short prompts do not determine."""
    linear = ADDITIVE_TRUTH | {"ms_per_prefill_mpair": 0.0}
    made = calibrate_steps(table_of(steps_of("additive", linear, noise=0.03)))
    assert made.fit.candidate.label == "additive-without-attention"


@pytest.mark.parametrize("constant", [("a_max", "s_max"), ("a_max",)])
def test_slots_that_do_not_vary_have_no_cost_of_their_own(constant: tuple[str, ...]) -> None:
    """It is in the base, and not extrapolated to other numbers of slots."""
    frame = steps_of("additive", ADDITIVE_TRUTH)
    calibration = calibrate_steps(table_of(frame.assign(**dict.fromkeys(constant, 16.0))), form="additive")
    values = {name: each.value for name, each in calibration.model().coefficients.items()}
    unknown = {name for name in values if "_per_slot" in name}
    unknown |= {"ms_per_adapter_rank16"} if "s_max" in constant else set()
    assert {name for name in unknown if values[name] != 0.0} == set()
    assert values["base_ms"] > 0.0


def test_the_ranges_of_a_table_include_its_streams_and_request_rates() -> None:
    frame = steps_of("additive", ADDITIVE_TRUTH)
    assert "streams" not in step_ranges(table_of(frame))
    frame["streams"], frame["rate_rps"] = np.arange(len(frame)) + 1.0, 7.0
    ranges = step_ranges(table_of(frame))
    assert (ranges["streams"], ranges["rate_rps"]) == ((1.0, float(len(frame))), (7.0, 7.0))


@pytest.mark.parametrize(
    ("waiting", "with_prompts"), [(0.05, False), (0.05, True), (1.0, True), (18.0, True)]
)
def test_queue_terms_need_a_row_with_a_queue(waiting: float, with_prompts: bool) -> None:
    """Requests wait in steps that are full of prompts, and would have the cost of such steps."""
    frame = steps_of("additive", ADDITIVE_TRUTH, noise=0.05)
    full = (frame["prefills"] >= 1) == with_prompts
    full &= np.arange(len(frame)) % 10 == 0
    frame["waiting"] = np.where(full, waiting, 0.0)
    frame.loc[full, "step_ms"] *= 1.3
    table = table_of(frame)
    found = candidate_named("additive", table, Kernel.VLLM).fit(table).coefficients()
    for name in ("ms_per_waiting_krequest", "ms_per_adapter_queued"):
        assert found[name] == Coefficient(value=0.0)
    assert "additive-without-queue" not in {score.label for score in calibrate_steps(table).scores}


def test_a_given_form_is_taken_whatever_its_error() -> None:
    made = calibrate_steps(table_of(steps_of("additive", ADDITIVE_TRUTH)), form="toppings-bgmv")
    assert made.forced
    assert made.model().form == "toppings-bgmv"
    assert made.score.held_out_error > min(score.held_out_error for score in made.scores)


def test_forms_with_missing_columns_are_reported_and_left_out() -> None:
    frame = steps_of("additive", ADDITIVE_TRUTH | dict.fromkeys(ADDITIVE.optional, 0.0))
    frame = frame[[name for name in frame.columns if "rank" not in name and "lora" not in name]]
    frame = frame.drop(columns=["decodes", "prefills", "prefill_mpairs"])
    made = calibrate_steps(table_of(frame))
    missing = {score.label: score.missing for score in made.scores if score.missing}
    assert missing == {
        "toppings-bgmv": ("prefills", "max_rank"),
        "toppings-mbgmv": ("prefills", "decode_rank_sum", "prefill_rank_sum"),
    }
    assert made.fit.candidate.label == "additive"
    assert set(made.model().coefficients) == set(ADDITIVE.coefficients)
    with pytest.raises(InputError, match="needs the columns prefills, max_rank"):
        calibrate_steps(table_of(frame), form="toppings-bgmv")


def test_other_kernels_are_scored_and_never_selected() -> None:
    table = table_of(steps_of("additive", ADDITIVE_TRUTH, kernel=Kernel.MBGMV, noise=0.01))
    made = calibrate_steps(table, Kernel.VLLM)
    assert made.fit.candidate.kernel is Kernel.VLLM
    errors = {score.label: score.held_out_error for score in made.scores}
    assert errors["additive-as-mbgmv"] < errors["additive"]
    assert calibrate_steps(table, form="additive-as-mbgmv").fit.candidate.kernel is Kernel.MBGMV


def test_a_run_does_not_affect_its_own_prediction() -> None:
    frame = steps_of("additive", ADDITIVE_TRUTH, rows=300, runs=6)
    table = table_of(frame)
    plain = candidate_named("additive-without-ranks", table, Kernel.VLLM)
    blind = predict_left_out(plain, table, folds=6)
    changed = frame.copy()
    of_first = (frame["run"] == 0).to_numpy()
    changed.loc[of_first, "step_ms"] *= 3.0
    again = predict_left_out(plain, table_of(changed), folds=6)
    assert again[of_first] == pytest.approx(blind[of_first])
    assert not np.allclose(again[~of_first], blind[~of_first])


@pytest.mark.long
@given(st.integers(0, 50))
def test_residuals_by_regime_and_by_slots_cover_every_row_once(seed: int) -> None:
    frame = steps_of("additive", ADDITIVE_TRUTH, rows=150, noise=0.1, seed=seed)
    made = calibrate_steps(table_of(frame), form="toppings-bgmv", folds=3)
    for parts in (made.by_regime(), made.by_a_max()):
        assert sum(part.rows for part in parts) == 150
        weighted = sum(part.rows * part.error for part in parts) / 150
        assert weighted == pytest.approx(made.score.held_out_error)


def test_fewer_rows_than_coefficients_are_refused() -> None:
    frame = steps_of("additive", ADDITIVE_TRUTH, rows=12, runs=4)
    with pytest.raises(InputError, match=r"steps\.csv: must leave at least"):
        calibrate_steps(table_of(frame))


def test_an_unknown_form_is_refused_with_the_known_ones() -> None:
    table = table_of(steps_of("additive", ADDITIVE_TRUTH, rows=50))
    with pytest.raises(InputError, match=r"additive-without-kv.*toppings-mbgmv") as refused:
        calibrate_steps(table, form="quadratic")
    assert all(each.label in str(refused.value) for each in candidates(table, Kernel.VLLM))


@pytest.mark.parametrize("prompt_tokens", [20.0, 120.0, 900.0])
@pytest.mark.parametrize("requests", [5.0, 100.0, 127.5, 300.0, 700.0])
def test_window_means_average_terms_with_a_threshold_over_their_steps(
    requests: float, prompt_tokens: float
) -> None:
    """Prompts in a step are Poisson in number and gamma-distributed in length."""
    n, rng = 200_000, np.random.default_rng(0)
    mean, std = 223.0, 245.0
    prefills = prompt_tokens / mean
    number = rng.poisson(prefills, n)
    shape, scale = (mean / std) ** 2, std**2 / mean
    prompts = np.where(number > 0, rng.gamma(np.maximum(number, 1) * shape, scale), 0.0)
    row = {
        "step_ms": 10.0,
        "steps": 500,
        "tokens": requests + prompt_tokens,
        "requests": requests + prefills,
        "kv_tokens": 0.0,
        "adapters": 1.0,
        "a_max": 8,
        "s_max": 16,
        "waiting": 0.0,
        "adapters_served": 8,
        "decodes": requests,
        "prefills": prefills,
        "prompt_std": std,
    }
    table = table_of(pd.DataFrame([row]))
    columns = candidate_named("additive", table, Kernel.VLLM).columns(table)
    small = np.mean(requests + prompts < 128)
    assert columns["ms_per_adapter_small_rank16"][0] == pytest.approx(small, abs=0.07)
    beyond = np.mean(np.maximum(0.0, requests + prompts - 512)) / 1000
    assert columns["ms_per_ktoken_beyond_graphs"][0] == pytest.approx(beyond, rel=0.1, abs=0.012)


def test_a_form_that_is_not_linear_is_not_fitted_as_if_it_were(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(steps_of("digital-twin", DIGITAL_TWIN_TRUTH, kernel=Kernel.VLLM))
    candidate = candidate_named("digital-twin", table, Kernel.VLLM)
    monkeypatch.setattr(_step_model, "DIGITAL_TWIN", None)  # without its own fit
    with pytest.raises(TypeError, match="step model digital-twin: must be linear"):
        candidate.fit(table)
