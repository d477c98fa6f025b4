"""The twin against the published runs of real engines, and the fit behind the shipped profiles."""

from pathlib import Path

import numpy as np
import pytest

from capplan import Profile, load_profile
from capplan.models.calibrate import smape
from capplan.models.step_latency import ADDITIVE
from capplan.spec import FittedModel
from capplan.twin.published_h100 import build_profile, fit_steps
from capplan.twin.published_models import PUBLISHED, PublishedModel
from capplan.twin.published_runs import GROUPS, PublishedRun, published_runs
from capplan.twin.published_tables import fit_loading, fit_memory

MODELS = [pytest.param(model, id=model.key) for model in PUBLISHED]
PER_SIDE = 6


@pytest.fixture(scope="module")
def tables(reference_dir: Path) -> Path:
    return reference_dir / "vllm_h100"


def assert_same_fit(ours: FittedModel, shipped: FittedModel, names: set[str]) -> None:
    assert names <= set(shipped.coefficients)
    for name in names:
        # Coefficients on their bound are not exactly 0, and differ between linear algebra libraries.
        assert ours.value(name) == pytest.approx(shipped.value(name), rel=1e-4, abs=1e-6), name


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


@pytest.mark.slow
def test_the_fitting_command_makes_the_shipped_profile(tables: Path) -> None:
    model = PUBLISHED[0]
    ours, shipped = build_profile(tables, model), load_profile(model.profile)
    for name in ("step_latency", "memory", "loading", "host"):
        part = getattr(shipped, name)
        assert_same_fit(getattr(ours, name), part, set(part.coefficients))
    assert ours.provenance == shipped.provenance


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
