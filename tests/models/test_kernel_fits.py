"""Forms fitted to kernel timings whose truth is known."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import InputError
from capplan.models import COLUMNS, TOPPINGS_BGMV, TOPPINGS_MBGMV, explain_kernels, read_kernel_table
from capplan.models._kernel_fits import ADDITIVE_KERNEL, FORMS, fit_kernel

ALPHAS = st.floats(0.01, 10.0)
BETAS = st.floats(0.0, 500.0)
SEEDS = st.integers(0, 1000)


def batches(seed: int, number: int = 60) -> pd.DataFrame:
    """Return decode batches of adapters of ranks 8 to 64, without times."""
    rng = np.random.default_rng(seed)
    rows = []
    for at in range(number):
        ranks = rng.choice([8, 16, 32, 64], size=int(rng.integers(1, 33)))
        if at % 2:
            ranks = np.full(ranks.size, ranks[0])
        shared = int(rng.integers(1, 4))
        rows.append(
            {
                "width": 64,
                "case": str(at),
                "configuration": str(at),
                "grid": "paper",
                "phase": "decode",
                "requests": ranks.size * shared,
                "tokens": ranks.size * shared,
                "adapters": ranks.size,
                "max_rank": ranks.max(),
                "rank_sum": ranks.sum() * shared,
                "adapter_rank_sum": ranks.sum(),
                "rank_tokens": ranks.sum() * shared,
                "relative_error": 0.01,
                "visits": 5,
                "disturbed": 0,
                "visits_us": [],
            }
        )
    return pd.DataFrame(rows)


def timed(rows: pd.DataFrame, us: pd.Series, kernel: str = "grouped", half: str = "shrink") -> pd.DataFrame:
    return rows.assign(median_us=us, kernel=kernel, half=half)[list(COLUMNS)]


@given(SEEDS, ALPHAS, BETAS)
def test_each_toppings_form_finds_its_own_coefficients(seed: int, alpha: float, beta: float) -> None:
    rows = batches(seed)
    works = {TOPPINGS_BGMV: rows["requests"] * rows["max_rank"], TOPPINGS_MBGMV: rows["rank_sum"]}
    for form, work in works.items():
        fit = fit_kernel(timed(rows, alpha * work + beta), form)
        assert fit.coefficients["alpha"] == pytest.approx(alpha, rel=1e-6)
        assert fit.coefficients["beta"] == pytest.approx(beta, rel=1e-6, abs=1e-6 * alpha * work.max())
        assert fit.r2 == pytest.approx(1.0)
        assert fit.held_out_r2 == pytest.approx(1.0)


@settings(max_examples=4)
@given(SEEDS, ALPHAS)
def test_a_kernel_is_explained_by_what_it_pays_for(seed: int, alpha: float) -> None:
    rows = batches(seed)
    tables = []
    for kernel, work in (("padded", rows["requests"] * rows["max_rank"]), ("grouped", rows["rank_sum"])):
        noise = np.random.default_rng(seed).normal(1.0, 0.02, len(rows))
        tables += [timed(rows, (alpha * work + 50.0) * noise, kernel, half) for half in ("shrink", "expand")]
    reports = explain_kernels(pd.concat(tables, ignore_index=True))
    assert {(report.kernel, report.half) for report in reports} == {
        (kernel, half) for kernel in ("padded", "grouped") for half in ("shrink", "expand", "both")
    }
    for report in reports:
        assert report.explained_by == report.meant
        assert report.verdict().startswith(f"{report.meant} explains it")


def test_no_toppings_form_explains_prompts_of_all_lengths() -> None:
    rng = np.random.default_rng(0)
    rows = batches(0)
    length = pd.Series(rng.choice([16, 256], len(rows)))
    rows = rows.assign(phase="prefill", grid="prefill", tokens=rows["requests"] * length)
    rows["rank_tokens"] *= length
    tables = [timed(rows, 3.0 * rows["rank_tokens"] + 20.0, half=half) for half in ("shrink", "expand")]
    for report in explain_kernels(pd.concat(tables, ignore_index=True)):
        assert report.explained_by is None
        assert report.verdict().startswith("neither form of Toppings explains it")
        assert report.fits[ADDITIVE_KERNEL].held_out_r2 > 0.99


@settings(max_examples=10)
@given(SEEDS, ALPHAS, st.floats(1.0, 50.0))
def test_launches_and_shared_weights_are_for_the_additive_form(
    seed: int, alpha: float, launch_us: float
) -> None:
    rows = batches(seed)
    fit = fit_kernel(
        timed(rows, launch_us * rows["adapters"] + alpha * rows["adapter_rank_sum"]), ADDITIVE_KERNEL
    )
    assert fit.held_out_error < 0.01
    assert fit.coefficients["us_per_adapter"] == pytest.approx(launch_us, rel=0.02)
    assert fit.coefficients["us_per_adapter_rank"] == pytest.approx(alpha, rel=0.02)
    assert min(fit.coefficients.values()) >= 0.0


def test_a_configuration_is_never_on_both_sides() -> None:
    """Each configuration has its own offset and two draws, so one draw reveals the other."""
    rng = np.random.default_rng(0)
    rows = batches(0, 40)
    us = pd.Series(rng.uniform(100.0, 1000.0, len(rows)))
    twice = pd.concat([timed(rows, us), timed(rows.assign(case=rows["case"] + "b"), us)], ignore_index=True)
    for form in FORMS:
        once = fit_kernel(timed(rows, us), form)
        again = fit_kernel(twice, form)
        assert again.held_out_error == pytest.approx(once.held_out_error)


def test_the_sum_of_the_halves_is_fitted_too() -> None:
    rows = batches(3)
    work = rows["rank_sum"]
    tables = [timed(rows, 2.0 * work + 5.0), timed(rows, 3.0 * work + 7.0, half="expand")]
    reports = {report.half: report for report in explain_kernels(pd.concat(tables, ignore_index=True))}
    both = reports["both"].fits[TOPPINGS_MBGMV].coefficients
    assert both["alpha"] == pytest.approx(5.0)
    assert both["beta"] == pytest.approx(12.0)


def test_the_wide_grid_includes_the_papers() -> None:
    rows = batches(4)
    rows.loc[30:, "grid"] = "wide"
    tables = [timed(rows, 2.0 * rows["rank_sum"] + 5.0, half=half) for half in ("shrink", "expand")]
    reports = explain_kernels(pd.concat(tables, ignore_index=True))
    assert {(report.grid, len(report.rows)) for report in reports} == {("paper", 30), ("wide", 60)}


def test_too_few_cases_are_not_fitted() -> None:
    rows = batches(5, 6)
    assert explain_kernels(timed(rows, 2.0 * rows["rank_sum"])) == []


def test_a_file_that_is_no_table_of_timings_is_refused(tmp_path) -> None:
    path = tmp_path / "kernels.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(InputError, match="must be a table of kernel timings"):
        read_kernel_table(path)
    batches(0, 3).to_parquet(path)
    with pytest.raises(InputError, match="must have a column 'kernel'"):
        read_kernel_table(path)
