"""The twin against the published runs of real engines, and the fit behind the shipped profiles."""

from pathlib import Path

import numpy as np
import pytest

from capplan import Profile, load_profile
from capplan.models.calibration.least_squares import smape
from capplan.models.step_latency import ADDITIVE
from capplan.spec import FittedModel, Lengths
from capplan.twin.published_h100 import build_profile
from capplan.twin.published_host import SCRAPE_INTERVAL_S, scrape_s
from capplan.twin.published_lengths import fit_length_correlation, held_kv_tokens
from capplan.twin.published_lumps import share_of_small_steps, tokens_beyond_graphs
from capplan.twin.published_models import PUBLISHED, PublishedModel
from capplan.twin.published_runs import GROUPS, PublishedRun, published_runs
from capplan.twin.published_steps import fit_steps
from capplan.twin.published_tables import fit_loading, fit_memory

MODELS = [pytest.param(model, id=model.key) for model in PUBLISHED]
PER_SIDE = 6


@pytest.fixture(scope="module")
def tables(reference_dir: Path) -> Path:
    return reference_dir / "vllm_h100"


def assert_same_fit(
    ours: FittedModel, shipped: FittedModel, names: set[str], tolerance: float = 1e-4
) -> None:
    assert names <= set(shipped.coefficients)
    for name in names:
        # Coefficients on their bound are not exactly 0, and differ between linear algebra libraries.
        assert ours.value(name) == pytest.approx(shipped.value(name), rel=tolerance, abs=1e-6), name


@pytest.mark.parametrize("model", MODELS)
def test_the_shipped_memory_model_is_the_fit_of_the_published_table(
    tables: Path, model: PublishedModel
) -> None:
    shipped = load_profile(model.profile)
    ours = fit_memory(tables, model)
    assert_same_fit(ours, shipped.memory, set(shipped.memory.coefficients))
    assert ours.fit.error == pytest.approx(shipped.memory.fit.error)


@pytest.mark.parametrize("model", MODELS)
def test_the_shipped_loading_model_is_the_fit_of_the_published_table(
    tables: Path, model: PublishedModel
) -> None:
    shipped = load_profile(model.profile).loading
    # How much slower a busy engine loads comes from the runs, not from this table.
    assert_same_fit(fit_loading(tables, model), shipped, set(shipped.coefficients) - {"serving_factor"})


@pytest.mark.parametrize("model", MODELS)
def test_measured_windows_are_met_within_the_stated_error(tables: Path, model: PublishedModel) -> None:
    shipped = load_profile(model.profile).step_latency
    blind, _ = fit_steps(tables, model, GROUPS)
    assert blind.fit.samples == shipped.fit.samples > 10_000
    assert set(shipped.coefficients) == set(ADDITIVE.coefficients)
    assert shipped.fit.cross_validated_error is not None
    # Loads explain a part of the step time that the other coefficients alone cannot.
    assert shipped.fit.error < blind.fit.error < 5.0
    assert shipped.fit.error <= shipped.fit.cross_validated_error < 3.0


@pytest.mark.parametrize("model", MODELS)
def test_the_shipped_correlation_of_lengths_is_the_one_that_holds_as_much_kv(
    tables: Path, model: PublishedModel
) -> None:
    assert fit_length_correlation(tables, model) == load_profile(model.profile).length_correlation < 0


def test_the_more_lengths_go_together_the_more_kv_is_held() -> None:
    scores = np.random.default_rng(0).standard_normal((20_000, 2))
    lengths = Lengths(mean=223, std=245), Lengths(mean=194, std=206)
    held = [held_kv_tokens(*lengths, correlation, scores, 16) for correlation in (-0.8, -0.4, 0.0, 0.4)]
    assert held == sorted(held)
    independent = 223 + (194 + 206**2 / 194) / 2 + 8  # while it decodes, a long output counts by its length
    assert held[2] == pytest.approx(independent, rel=0.02)


@pytest.mark.parametrize("prompt_tokens", [0.0, 20.0, 120.0, 900.0])
@pytest.mark.parametrize("requests", [5.0, 100.0, 127.5, 300.0, 700.0])
def test_bent_terms_are_averaged_over_prompts_that_come_in_lumps(
    requests: float, prompt_tokens: float
) -> None:
    prompts, n, rng = Lengths(mean=223, std=245), 200_000, np.random.default_rng(0)
    number = rng.poisson(prompt_tokens / 223, n)
    lump = np.where(number > 0, rng.gamma(np.maximum(number, 1) * (223 / 245) ** 2, 245**2 / 223), 0.0)
    at = np.array([requests]), np.array([prompt_tokens]), prompts
    small = np.mean(requests + lump < 128)
    assert share_of_small_steps(*at)[0] == pytest.approx(small, abs=0.005)
    beyond = np.mean(np.maximum(0.0, np.minimum(requests + lump, 2048) - 512))
    assert tokens_beyond_graphs(*at, 2048)[0] == pytest.approx(beyond, rel=0.02, abs=0.5)


def test_scrapes_take_longer_where_more_sets_of_adapters_were_seen(tables: Path) -> None:
    took = scrape_s(tables)
    calm = [
        (len(run.workload.adapters), took[run.index])
        for run in published_runs(tables, PUBLISHED[0].key)
        if not run.queued and run.index in took
    ]
    few, many = ([s for n, s in calm if low <= n < high] for low, high in ((0, 33), (64, 1000)))
    assert 0.0 <= np.median(few) < np.median(many) < SCRAPE_INTERVAL_S


@pytest.mark.slow
def test_the_fitting_command_makes_the_shipped_profile(tables: Path) -> None:
    model = PUBLISHED[0]
    ours, shipped = build_profile(tables, model), load_profile(model.profile)
    for name in ("step_latency", "memory", "loading", "host"):
        part = getattr(shipped, name)
        # The twin counts the loads: how requests are drawn moves its counts by some tenths of a percent, and
        # the share of a scrape, which is searched in steps of 0.025, by one of these.
        tolerance = 0.03 if name == "host" else 0.02
        assert_same_fit(getattr(ours, name), part, set(part.coefficients), tolerance)
    for name in ("engine", "length_correlation", "provenance"):
        assert getattr(ours, name) == getattr(shipped, name)


def stratified(runs: list[PublishedRun]) -> list[PublishedRun]:
    """Return starved and other runs in equal number, spread over the load."""
    chosen = []
    for starved in (False, True):
        side = sorted((run for run in runs if run.starved == starved), key=lambda run: run.offered_tok_s)
        chosen += [side[round(at)] for at in np.linspace(0, len(side) - 1, PER_SIDE)]
    return chosen


@pytest.mark.parametrize("model", MODELS)
def test_real_runs_are_predicted_within_bounds(tables: Path, model: PublishedModel) -> None:
    profile: Profile = load_profile(model.profile)
    runs = stratified(published_runs(tables, model.key))
    results = [run.simulate(profile) for run in runs]
    starved = np.array([run.starved for run in runs])
    ours = np.array([result.throughput_tok_s for result in results])
    measured = np.array([run.throughput_tok_s for run in runs])
    assert starved.sum() == PER_SIDE
    assert smape(ours[~starved], measured[~starved]) < 2.5
    assert smape(ours[starved], measured[starved]) < 6.0
    assert np.mean([result.starved for result in results] == starved) >= 10 / 12
    reliable = [i for i, run in enumerate(runs) if run.itl_is_reliable]
    itl = smape([results[i].itl_ms_mean for i in reliable], [runs[i].itl_ms_mean for i in reliable])
    assert itl < 10.0
