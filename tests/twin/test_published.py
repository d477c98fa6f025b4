"""The shipped H100 profiles against the published measurements, and the calibration that makes them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.shipped_profiles import base_profile, published_profile
from capplan import Profile, SimulationResult, load_profile, simulate
from capplan.datasets.published._runs import (
    PUBLISHED,
    TABLES,
    PublishedModel,
    PublishedRun,
    published_runs,
    write_tables,
)
from capplan.models import ADDITIVE
from capplan.models.calibration import fit_length_correlation, read_steps, smape
from capplan.twin.calibration import CalibrationTables, calibrate
from capplan.twin.calibration._runs import read_runs
from tests.models.memory import kv_tokens

pytestmark = pytest.mark.long

PER_SIDE = 6
EVERY = 12


@pytest.fixture(scope="module")
def reference(reference_dir: Path) -> Path:
    return reference_dir / "vllm_h100"


@pytest.fixture(scope="module", params=PUBLISHED, ids=lambda model: model.key)
def model(request: pytest.FixtureRequest) -> PublishedModel:
    return request.param


@pytest.fixture(scope="module")
def folder(reference: Path, model: PublishedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published tables as input of `capplan calibrate`."""
    path = tmp_path_factory.mktemp("published")
    write_tables(reference, model, path)
    assert {each.name for each in path.iterdir()} == set(TABLES)
    return path


def test_step_windows_select_the_additive_form(folder: Path, model: PublishedModel, tmp_path: Path) -> None:
    steps = pd.read_parquet(folder / "steps.parquet")
    assert len(steps) > 10_000
    steps[::EVERY].to_parquet(tmp_path / "steps.parquet", index=False)
    made = calibrate(base_profile(model), CalibrationTables(steps=str(tmp_path / "steps.parquet"))).steps
    assert made is not None
    assert made.fit.candidate.form is ADDITIVE
    errors = {score.label: score.held_out_error for score in made.scores}
    assert errors["additive"] < 2.5 < errors["digital-twin"] < 4.0 < errors["toppings-mbgmv"]
    assert {part.name for part in made.by_regime()} >= {"un-queued", "slot-bound", "KV-bound", "overloaded"}
    shipped = load_profile(model.profile).step_latency.fit
    assert shipped.cross_validated_error is not None
    assert shipped.error <= shipped.cross_validated_error < 2.0


def test_start_ups_and_loads_give_the_shipped_models(folder: Path, model: PublishedModel) -> None:
    shipped = load_profile(model.profile)
    tables = CalibrationTables(memory=str(folder / "memory.csv"), loading=str(folder / "loading.csv"))
    ours = calibrate(base_profile(model), tables).profile
    assert ours.memory.fit.error < 1.5
    for a_max, s_max in ((8, 8), (32, 16), (96, 16), (64, 32)):
        expected = kv_tokens(shipped, a_max, s_max, 0.9, 2048)
        assert kv_tokens(ours, a_max, s_max, 0.9, 2048) == pytest.approx(expected, rel=0.015)
    for name in set(shipped.loading.coefficients) - {"serving_factor"}:
        assert ours.loading.value(name) == pytest.approx(shipped.loading.value(name), rel=1e-4, abs=1e-6)


def test_the_runs_determine_loads_latencies_and_the_shipped_length_correlation(
    folder: Path, model: PublishedModel
) -> None:
    runs = read_runs(folder / "runs.csv", "org/any")
    assert len(runs) > 300
    table = read_steps(folder / "steps.parquet")
    assert {table.run_names[at] for at in table.run[table.unknown_loads]} <= {run.name for run in runs}
    offered = np.array([run.workload.total_rate_rps for run in runs])
    calm = np.array(["ttft_s_p50" in run.measured for run in runs])
    assert offered[calm].mean() < offered[~calm].mean()
    held = [run for run in runs if run.kv_tokens_per_request]
    lengths = [(run.workload.prompt_tokens, run.workload.output_tokens) for run in held]
    fitted = fit_length_correlation(lengths, [run.kv_tokens_per_request or 0.0 for run in held], 16)
    assert fitted == pytest.approx(load_profile(model.profile).length_correlation, abs=0.03)


def stratified(runs: list[PublishedRun]) -> list[PublishedRun]:
    """Return starved and other runs in equal number, spread over the load."""
    chosen = []
    for starved in (False, True):
        side = sorted((run for run in runs if run.starved == starved), key=lambda run: run.offered_tok_s)
        chosen += [side[round(at)] for at in np.linspace(0, len(side) - 1, PER_SIDE)]
    return chosen


def predict(profile: Profile, runs: list[PublishedRun]) -> list[SimulationResult]:
    return [simulate(run.workload, profile, **run.settings) for run in runs]


def errors(results: list[SimulationResult], runs: list[PublishedRun]) -> dict[str, float]:
    """Return the SMAPE of the throughput of starved and other runs, and of the mean ITL, in percent."""
    pairs = list(zip(results, runs, strict=True))
    found = {
        name: smape(
            [result.throughput_tok_s for result, run in pairs if run.starved == starved],
            [run.throughput_tok_s for run in runs if run.starved == starved],
        )
        for name, starved in (("starved", True), ("not starved", False))
    }
    reliable = [(result.itl_ms_mean, run.itl_ms_mean) for result, run in pairs if run.itl_is_reliable]
    return found | {"itl": smape(*np.transpose(reliable))}


def test_real_runs_are_predicted_within_bounds(reference: Path, model: PublishedModel) -> None:
    runs = stratified(published_runs(reference, model))
    assert sum(run.starved for run in runs) == PER_SIDE
    results = predict(load_profile(model.profile), runs)
    found = errors(results, runs)
    assert found["not starved"] < 2.5
    assert found["starved"] < 6.0
    assert found["itl"] < 10.0
    assert sum(each.starved == run.starved for each, run in zip(results, runs, strict=True)) >= 10


@pytest.mark.long
def test_the_public_calibration_predicts_as_well_as_the_shipped_profile(reference: Path) -> None:
    model = PUBLISHED[0]
    ours, shipped = published_profile(reference, model), load_profile(model.profile)
    for name in ("name", "gpu", "model", "engine"):
        assert getattr(ours, name) == getattr(shipped, name)
    runs = stratified(published_runs(reference, model))
    expected = errors(predict(shipped, runs), runs)
    for name, error in errors(predict(ours, runs), runs).items():
        assert error < expected[name] + 0.5, name
