"""Calibration with the twin in the loop, on runs simulated with a known profile."""

from pathlib import Path

import pandas as pd
import pytest

from capplan import InputError, Profile
from capplan.models import ADDITIVE
from capplan.spec import Coefficient
from capplan.twin.calibration import CalibrationOptions, CalibrationTables, calibrate
from capplan.twin.calibration._calibrate import (
    calibrate_runs,
    free_coefficients,
    predict_targets,
    simulate_runs,
    with_coefficients,
)
from capplan.twin.calibration._runs import TARGETS, MeasuredRun, read_runs
from tests.twin.examples import part, profile

BASE = dict.fromkeys(ADDITIVE.coefficients, 0.0) | {
    "base_ms": 6.0,
    "ms_per_ktoken": 30.0,
    "ms_per_adapter": 0.1,
}
TRUTH = BASE | {"base_ms": 10.0, "ms_per_ktoken": 45.0, "ms_per_adapter": 0.4}
LOADS = {
    "serving_factor": 1.0,
    "gpu_base_ms": 4.0,
    "gpu_ms_per_rank": 0.0,
    "gpu_padding_ms": 0.0,
    "disk_base_ms": 0.0,
    "disk_ms_per_rank": 0.0,
}
SCRAPED = {
    "scrape_interval_s": 2.0,
    "scrape_us_per_series": 1000.0,
    "scrape_us_per_series_adapter": 10.0,
    "scrape_share": 1.0,
}


def engine(request_ms: float = 20.0, serving_factor: float = 1.0, **step: float) -> Profile:
    """Return a profile of the additive form on a GPU that holds any number of tiny slots."""
    tiny = profile(request_ms=request_ms)
    return tiny.replace(
        step_latency=part("additive", **(BASE | step)),
        loading=part("copies-and-bytes", **(LOADS | {"serving_factor": serving_factor})),
    )


def run_table(truth: Profile, tmp_path: Path) -> Path:
    """Write a table of simulated runs, from idle to starved."""
    rows = [
        {
            "run": f"run-{number}",
            "adapters": adapters,
            "ranks": "8 16",
            "rates_rps": f"{rate} {rate / 2}",
            "prompt_mean": prompt,
            "prompt_std": 20.0,
            "output_mean": output,
            "output_std": 10.0,
            "a_max": a_max,
            "s_max": 16,
            "max_num_seqs": 64,
            "duration_s": 60.0,
        }
        for number, (adapters, a_max, rate, prompt, output) in enumerate(
            [
                (4, 4, 0.5, 40.0, 30.0),
                (8, 8, 1.0, 100.0, 20.0),
                (16, 16, 0.8, 30.0, 60.0),
                (16, 4, 1.0, 60.0, 40.0),
                (32, 8, 8.0, 60.0, 40.0),
                (8, 2, 20.0, 200.0, 20.0),
                (2, 2, 8.0, 250.0, 8.0),
                (24, 24, 2.0, 80.0, 50.0),
            ]
        )
    ]
    path = tmp_path / "runs.csv"
    pd.DataFrame(rows).assign(throughput_tok_s=1.0).to_csv(path, index=False)
    for row, run in zip(rows, read_runs(path, "org/tiny"), strict=True):
        result = run.simulate(truth, seed=1000 + len(str(row["run"])))
        row["throughput_tok_s"] = result.throughput_tok_s
        row["itl_ms_mean"] = result.itl_ms_mean
        row["ttft_s_p50"] = result.ttft_s_p50 if result.waiting_mean < 1.0 else None
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_coefficients_are_recovered_from_runs(tmp_path: Path) -> None:
    truth = engine(**{name: TRUTH[name] for name in ("base_ms", "ms_per_ktoken", "ms_per_adapter")})
    path = run_table(truth, tmp_path)
    free = ("base_ms", "ms_per_ktoken", "ms_per_adapter", "request_ms")
    done: list[tuple[int, int]] = []
    made = calibrate(
        engine(request_ms=5.0),
        CalibrationTables(runs=str(path)),
        CalibrationOptions(free=free, folds=4),
        lambda stage, at, total: done.append((at, total)),
    )
    assert made.runs is not None
    before, after = made.runs.errors(made.runs.before), made.runs.errors(made.runs.after)
    held_out = made.runs.errors(made.runs.held_out)
    assert before["itl_ms_mean"] > 20.0
    assert after["itl_ms_mean"] < 2.0
    assert held_out["itl_ms_mean"] < 4.0
    assert after["throughput_tok_s"] < 5.0  # other requests than measured arrive, for a minute
    starved = "slot-bound"  # where throughput is the engine's, not the clients'
    assert made.runs.errors(made.runs.before, starved)["throughput_tok_s"] > 8.0
    assert made.runs.errors(made.runs.after, starved)["throughput_tok_s"] < 4.0
    found = made.profile.step_latency
    assert found.value("base_ms") == pytest.approx(10.0, rel=0.08)
    assert found.value("ms_per_ktoken") == pytest.approx(45.0, rel=0.25)
    assert found.value("ms_per_adapter") == pytest.approx(0.4, rel=0.25)
    assert made.profile.host.value("request_ms") == pytest.approx(20.0, rel=0.4)
    assert all(found.coefficients[name].std_error for name in free if name in found.coefficients)
    assert made.profile.memory == made.base.memory
    assert done[-1][0] == done[-1][1]
    assert all(at <= total for at, total in done)


def test_the_number_of_threads_does_not_change_the_profile(tmp_path: Path) -> None:
    path = run_table(engine(base_ms=8.0), tmp_path)
    options = [CalibrationOptions(free=("base_ms",), workers=workers) for workers in (1, 3)]
    first, second = (calibrate(engine(), CalibrationTables(runs=str(path)), each).profile for each in options)
    assert first == second


def test_the_twin_counts_loads_that_the_step_table_lacks(tmp_path: Path) -> None:
    truth = engine(serving_factor=3.0)
    path = run_table(truth, tmp_path)
    rows = []
    for number, run in enumerate(read_runs(path, "org/tiny")):
        for stretch in range(4):
            result = run.simulate(truth, seed=50 * number + stretch)
            tokens = (result.input_tok_s + result.output_tok_s) * result.duration_s / result.steps
            rows.append(
                {
                    "run": run.name,
                    "steps": result.steps,
                    "step_ms": result.busy_fraction * result.duration_s * 1e3 / result.steps,
                    "tokens": tokens,
                    "requests": result.running_mean,
                    "kv_tokens": result.kv_tokens_mean,
                    "adapters": result.adapters_mean,
                    "a_max": run.settings["a_max"],
                    "s_max": run.settings["s_max"],
                    "waiting": result.waiting_mean,
                    "adapters_served": len(run.workload.adapters),
                }
            )
    pd.DataFrame(rows).to_csv(tmp_path / "steps.csv", index=False)
    tables = CalibrationTables(steps=str(tmp_path / "steps.csv"), runs=str(path))
    made = calibrate(engine(), tables, CalibrationOptions(folds=3))
    assert made.loads == "the twin"
    assert made.profile.loading.value("serving_factor") == pytest.approx(3.0, rel=0.5)
    assert made.steps is not None
    blind = calibrate(engine(), CalibrationTables(steps=tables.steps), CalibrationOptions(folds=3))
    assert blind.loads == "unknown"
    assert blind.profile.loading == blind.base.loading
    assert blind.steps is not None
    assert made.steps.score.error < blind.steps.score.error
    assert made.runs is not None
    assert {free.name for free in made.runs.free} == {"client_itl_factor", "request_ms"}
    strange = pd.DataFrame(rows).assign(run="elsewhere")
    strange.to_csv(tmp_path / "steps.csv", index=False)
    with pytest.raises(InputError, match=r"steps\.csv: run: must name runs of the table of runs"):
        calibrate(engine(), tables)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"request_ms": 20.0}, {"request_ms": 75.0, "client_itl_factor": 1.2}),
        (SCRAPED, SCRAPED | {"scrape_us_per_series": 3000.0, "scrape_share": 0.8}),
    ],
    ids=["constants", "scrapes"],
)
def test_another_host_model_needs_no_simulation(
    tmp_path: Path, before: dict[str, float], after: dict[str, float]
) -> None:
    base, changed = (
        engine().replace(host=part("per-request", **({"request_ms": 0.0, "client_itl_factor": 1.0} | values)))
        for values in (before, after)
    )
    runs = read_runs(run_table(base, tmp_path), "org/tiny")[3:6]
    for seed, simulated in enumerate(simulate_runs(runs, base, range(3), workers=1)):
        predicted = predict_targets(simulated, base.host, changed.host)
        again = runs[seed].simulate(changed, seed)
        assert predicted == pytest.approx([getattr(again, target) for target in TARGETS], rel=1e-6)


def test_the_cost_of_scrapes_follows_from_the_itl_of_runs(tmp_path: Path) -> None:
    host = {"request_ms": 20.0, "client_itl_factor": 1.0}
    truth = engine().replace(host=part("per-request", **(host | SCRAPED)))
    path = run_table(truth, tmp_path)
    start = part("per-request", **(host | SCRAPED | {"scrape_us_per_series": 300.0}))
    base = engine().replace(host=start)
    made = calibrate(
        base, CalibrationTables(runs=str(path)), CalibrationOptions(free=("scrape_us_per_series",), folds=2)
    )
    assert made.profile.host.value("scrape_us_per_series") == pytest.approx(1000.0, rel=0.3)


def test_the_length_correlation_follows_from_the_kv_tokens_of_runs(tmp_path: Path) -> None:
    path = run_table(engine(), tmp_path)
    frame = pd.read_csv(path).assign(prompt_std=60.0, output_std=40.0, prompt_mean=60.0, output_mean=40.0)
    for name, low in (("low", 90.0), ("high", 130.0)):
        frame.assign(kv_tokens_per_request=low).to_csv(tmp_path / f"{name}.csv", index=False)
    options = CalibrationOptions(free=("length_correlation", "request_ms"))
    low, high = (
        calibrate(engine(), CalibrationTables(runs=str(tmp_path / f"{name}.csv")), options).profile
        for name in ("low", "high")
    )
    assert -0.95 <= low.length_correlation < 0.0 < high.length_correlation <= 0.95
    with pytest.raises(InputError, match="kv_tokens_per_request: must have a value"):
        calibrate(engine(), CalibrationTables(runs=str(path)), options)


def test_a_coefficient_that_is_0_starts_small() -> None:
    base = engine()
    free = free_coefficients(base, ("ms_per_slot", "base_ms"), steps_known=False, latency_measured=False)
    assert free[0].start > 0.0
    assert free[1].start == base.step_latency.value("base_ms")
    for names, rule in ((("weight",), "must be one of base_ms"), (("base_ms", "base_ms"), "once")):
        with pytest.raises(InputError, match=rule):
            free_coefficients(base, names, steps_known=False, latency_measured=False)


def test_coefficients_without_effect_on_the_runs_stay(tmp_path: Path) -> None:
    base = engine()
    runs = read_runs(run_table(base, tmp_path), "org/tiny")[:3]
    free = free_coefficients(base, ("base_ms", "disk_base_ms"), steps_known=False, latency_measured=False)
    found = calibrate_runs(runs, base, free)
    assert found.fitted[1] == pytest.approx(free[1].start)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"throughput_tok_s": None, "itl_ms_mean": None, "ttft_s_p50": None}, "row 1: must have a value of"),
        ({"itl_ms_mean": -3.0}, "itl_ms_mean, row 1: must be a finite number above 0"),
        ({"a_max": 2.5}, "a_max, row 1: must be a whole number"),
        ({"a_max": 0}, "a_max, row 1: must be a finite number of at least 1"),
        ({"ranks": "8 x"}, "ranks, row 1: must be one number above 0, or several"),
        ({"rates_rps": ""}, "rates_rps, row 1: must be one number above 0, or several"),
        ({"rate_counts": "1 1"}, "rate_counts, row 1: must hold one number for each rate, 4 in sum"),
        ({"ranks": "1024"}, "row 1: .*rank"),
        ({"prompt_mean": 0.2}, "row 1: .*mean"),
        ({"workload": "nowhere.yaml"}, "nowhere.yaml: cannot be read"),
    ],
)
def test_an_invalid_row_is_refused_with_its_number(
    tmp_path: Path, changes: dict[str, object], rule: str
) -> None:
    path = run_table(engine(), tmp_path)
    frame = pd.read_csv(path).head(1).astype(object)
    for name, value in changes.items():
        frame[name] = [value]
    frame.to_csv(path, index=False)
    with pytest.raises(InputError, match=rule):
        read_runs(path, "org/tiny")


def test_impossible_settings_are_refused_with_their_row(tmp_path: Path) -> None:
    path = run_table(engine(), tmp_path)
    frame = pd.read_csv(path)
    for column, value, rule in (
        ("s_max", 8, "row 2: s_max: must be at least"),
        ("a_max", 4000, "was measured, but"),
    ):
        frame.assign(**{column: [16 if column == "s_max" else 4, value] + [value] * 6}).to_csv(
            path, index=False
        )
        with pytest.raises(InputError, match=rule):
            calibrate(engine(), CalibrationTables(runs=str(path)), CalibrationOptions(free=("base_ms",)))


def test_a_workload_file_replaces_the_columns(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(
        "base_model: org/tiny\nprofile: ./p.json\n"
        "requests: {prompt_tokens: {mean: 50}, output_tokens: {mean: 20}}\n"
        "adapters: [{name: a, rank: 8, rate_rps: 1.0}]\n"
    )
    path = tmp_path / "runs.csv"
    path.write_text("workload,a_max,s_max,throughput_tok_s\nw.yaml,1,8,70\n")
    (run,) = read_runs(path, "org/other")
    assert isinstance(run, MeasuredRun)
    assert (run.name, run.workload.base_model, run.settings["duration_s"]) == ("1", "org/tiny", 3600.0)


def test_options_without_their_table_are_refused() -> None:
    with pytest.raises(InputError, match="needs a table of steps, runs, memory, loading or kernels"):
        calibrate(engine(), CalibrationTables())
    for options, flag in (
        (CalibrationOptions(free=("base_ms",)), "--free"),
        (CalibrationOptions(form="additive"), "--form"),
    ):
        with pytest.raises(InputError, match=flag):
            calibrate(engine(), CalibrationTables(memory="memory.csv"), options)


def test_fitted_values_replace_only_what_was_fitted() -> None:
    base = engine()
    free = free_coefficients(base, ("base_ms", "serving_factor"), steps_known=False, latency_measured=False)
    changed = with_coefficients(base, free, [11.0, 2.0])
    assert changed.step_latency.coefficients == base.step_latency.coefficients | {
        "base_ms": Coefficient(value=11.0)
    }
    assert changed.loading.value("serving_factor") == 2.0
    assert changed.host == base.host
