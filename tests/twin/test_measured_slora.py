"""The shipped profile of S-LoRA: its pool, and measured runs that it simulates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.measured import slora
from capplan import Adapter, InputError, Lengths, Workload, load_profile, simulate
from capplan.spec import Coefficient
from capplan.twin.calibration import CalibrationOptions
from capplan.twin.calibration._calibrate import fit_runs
from capplan.twin.calibration._runs import MeasuredRun

PROFILE = load_profile(slora.NAME)


def served(adapters: int, rate_rps: float = 4.0, **fields: object) -> Workload:
    return Workload(
        base_model="meta-llama/Llama-2-7b-hf",
        adapters=[
            Adapter(name=f"a{i}", rank=32, rate_rps=rate_rps / adapters, **fields) for i in range(adapters)
        ],
        prompt_tokens=Lengths(mean=250),
        output_tokens=Lengths(mean=230),
    )


def run(workload: Workload) -> float:
    result = simulate(workload, PROFILE, a_max=32, s_max=32, duration_s=200.0, max_num_seqs=1000)
    return result.throughput_tok_s


def test_more_adapters_leave_less_of_the_pool_to_requests() -> None:
    """An overloaded engine serves fewer requests the more adapters share the pool with them."""
    assert run(served(32, 30.0)) > run(served(128, 30.0)) > run(served(512, 30.0))


def test_adapters_of_fewer_matrices_leave_more_of_the_pool_to_requests() -> None:
    every, two = served(256, 30.0), served(256, 30.0, target_modules=["q_proj", "v_proj"])
    assert run(two) > run(every)


def test_layers_that_s_lora_does_not_adapt_are_refused_by_adapter() -> None:
    with pytest.raises(InputError, match="adapter a0: target_modules: must be among q_proj, k_proj, v_proj"):
        run(served(2, target_modules=["gate_proj"]))


@pytest.mark.parametrize("row", [6, 19, 42])
def test_measured_runs_are_met(reference_dir: Path, row: int) -> None:
    """A run below capacity, one near it and one far beyond, with 64, 160 and 512 adapters."""
    measured = slora.measured_runs(reference_dir / "measured")[row]
    result = measured.simulate(PROFILE, seed=row)
    assert result.throughput_tok_s == pytest.approx(measured.measured["throughput_tok_s"], rel=0.05)
    assert result.tpot_ms_mean == pytest.approx(measured.measured["tpot_ms_mean"], rel=0.08)


def test_the_size_of_the_pool_follows_from_overloaded_runs() -> None:
    settings = {"a_max": 32, "s_max": 32, "max_num_seqs": 1000, "duration_s": 200.0}
    runs = []
    for seed, adapters in enumerate((32, 256)):
        known = MeasuredRun(f"{adapters}", served(adapters, 30.0), settings, {})
        result = known.simulate(PROFILE, seed)
        measured = {"throughput_tok_s": result.throughput_tok_s, "tpot_ms_mean": result.tpot_ms_mean}
        runs.append(replace(known, measured=measured))
    reserve = PROFILE.memory.coefficients["reserved_bytes"].value
    other = PROFILE.memory.coefficients | {"reserved_bytes": Coefficient(value=1.5 * reserve)}
    start = PROFILE.replace(memory=PROFILE.memory.replace(coefficients=other))
    options = CalibrationOptions(free=("reserved_bytes",), folds=2)
    found, fitted = fit_runs(runs, start, False, options)
    assert fitted.memory.value("reserved_bytes") == pytest.approx(reserve, rel=0.05)
    assert found.after == pytest.approx(found.measured(), rel=0.01, nan_ok=True)
