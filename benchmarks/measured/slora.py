"""S-LoRA on an H100 64 GB with Llama-2-7B: fit of its profile to 49 measured runs, and its errors.

    python -m benchmarks.measured.slora [--data DIR] [--workers N] [--out PROFILE]

With PROFILE the fit is repeated, with its errors on runs left out (five folds); otherwise the errors are
those of the shipped profile on all runs. DIR holds ``slora_h100_llama2_7b.csv``: prompts of 250 tokens,
outputs of 230, 32 to 640 adapters of rank 32.
Source: github.com/FerranAgulloLopez/GPULLMAdapterOptimizationSLoRA, commit c5feb1f, Apache-2.0.

The load generator of the runs counts chunks, not tokens. The more requests are in flight, the more tokens
come in one chunk: down to 200 chunks of 230 tokens, while chunks times their mean gap stay 12.4 s in every
overloaded run. The fit takes 230 tokens per completed request, and the TPOT that belongs to them. Errors are
stated against these and against the counts of the load generator.

The bandwidth of KV is that of the roofline: all requests have the same lengths, so that KV tokens and
requests are collinear in the runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from benchmarks.common import command_line, emit, mape, records_table, user_errors
from benchmarks.measured.case import data_folder
from capplan import Adapter, Lengths, Profile, Workload, load_profile
from capplan.datasets import gpu_sheet, model_arch
from capplan.models import EngineChoice, load_share, roofline_profile
from capplan.models._memory import MEMORY_FORM, assumed_model
from capplan.spec import ATTENTION_MODULES, FittedModel, Kernel, Provenance, ProvenanceKind, write_text_atomic
from capplan.twin.calibration import CalibrationOptions, RunCalibration
from capplan.twin.calibration._calibrate import fit_runs
from capplan.twin.calibration._runs import TARGETS, MeasuredRun

FILE: Final = "slora_h100_llama2_7b.csv"
NAME: Final = "h100-64g/llama-2-7b/s-lora-c1ddf48"
PROMPT, OUTPUT, RANK = 250, 230, 32
FOLDS: Final = 5
STARVED: Final = "starved"
NOT_STARVED: Final = "not starved"
_SERVED: Final = 0.9

_SETTINGS: Final = {
    "a_max": RANK,  # not used under these rules
    "s_max": RANK,
    "max_num_seqs": 1000,  # --running_max_req_size
    "max_num_batched_tokens": 13_600,  # --batch_max_tokens: a sixth of the pool
    "max_model_len": 3072,  # --max_req_total_len
}
"""Defaults of S-LoRA; those of the runs are not recorded."""

_START: Final = {
    "base_ms": 14.9,
    "ms_per_ktoken": 24.4,
    "ms_per_ktoken_beyond_graphs": 21.5,
    "ms_per_adapter_rank16": 0.0187,
    "ms_per_request": 0.0298,
    "ms_per_prefill": 2.34,
}
"""Start of the fit: the result of an earlier run."""

_RESERVED_BYTES: Final = 4.75e9
_FREE: Final = (*_START, "reserved_bytes", "request_ms")


def measured_runs(folder: Path) -> tuple[MeasuredRun, ...]:
    """Return the runs of the file, in its order."""
    table = pd.read_csv(folder / FILE)
    return tuple(_run(number, row) for number, row in enumerate(table.to_dict("index").values()))


def _run(number: int, row: Mapping[Any, Any]) -> MeasuredRun:
    adapters, sent, completed = int(row["adapters"]), row["num_prompts"], row["completed"]
    served = completed / sent
    # Runs that the client ended early have sent at the nominal rate, the others as their duration says.
    whole = row["duration"] > 1400.0
    rate_rps = sent / row["duration"] if whole else adapters * row["rate_per_adapter"]
    lengths = {"prompt_tokens": Lengths(mean=PROMPT), "output_tokens": Lengths(mean=OUTPUT)}
    chunks = row["total_output_tokens"] / completed
    measured = {
        "throughput_tok_s": row["request_throughput"] * (PROMPT + OUTPUT),
        "tpot_ms_mean": row["mean_tpot_ms"] * (chunks - 1.0) / (OUTPUT - 1.0),
    }
    if served > _SERVED and row["median_ttft_ms"] < 1e3:
        measured["ttft_s_p50"] = row["median_ttft_ms"] / 1e3
    return MeasuredRun(
        name=f"{adapters} x {row['rate_per_adapter']:g} rps",
        workload=Workload(
            base_model="meta-llama/Llama-2-7b-hf",
            adapters=[
                Adapter(name=f"a{i}", rank=RANK, rate_rps=rate_rps / adapters) for i in range(adapters)
            ],
            **lengths,
        ),
        settings=_SETTINGS | {"duration_s": row["duration"]},
        measured=measured,
        regime=NOT_STARVED if served >= _SERVED else STARVED,
        location=f"{FILE}: row {number + 1}",
    )


def counted(folder: Path) -> dict[str, np.ndarray]:
    """Return throughput and TPOT as the load generator counted them."""
    table = pd.read_csv(folder / FILE)
    return {
        "throughput_tok_s": (table["input_throughput"] + table["output_throughput"]).to_numpy(),
        "tpot_ms_mean": table["mean_tpot_ms"].to_numpy(),
    }


def base_profile() -> Profile:
    """Return GPU, model and engine, with the coefficients that the fit starts from."""
    engine = EngineChoice(rules="slora", kernel=Kernel.MBGMV, lora=False)
    analytic = roofline_profile(gpu_sheet("h100-64g"), model_arch("llama-2-7b"), engine)
    loads, share = analytic.loading, load_share(analytic, ATTENTION_MODULES)
    of_modules = {
        "gpu_base_ms": share.matrices * loads.value("gpu_base_ms"),
        "gpu_ms_per_rank": share.elements * loads.value("gpu_ms_per_rank"),
        "disk_ms_per_rank": share.elements * loads.value("disk_ms_per_rank"),
    }
    kept = {name: each.value for name, each in loads.coefficients.items()}
    kv = {"ms_per_kv_ktoken": analytic.step_latency.value("ms_per_kv_ktoken")}
    zeros = dict.fromkeys(analytic.step_latency.coefficients, 0.0)
    pool = {
        "reserved_bytes": _RESERVED_BYTES,
        "slot_factor": 1.0,
        "slot_overhead_bytes": 0.0,
        "bytes_per_seq": 0.0,
        "seqs_in_reserve": 0.0,
    }
    return analytic.replace(
        name=NAME,
        step_latency=assumed_model(analytic.step_latency.form, zeros | kv | _START),
        memory=assumed_model(MEMORY_FORM, pool),
        loading=assumed_model(loads.form, kept | of_modules, loads.fit.source),
    )


def calibrated(folder: Path, workers: int = 1) -> tuple[RunCalibration, Profile]:
    """Fit the profile to all runs; the predictions of left-out runs are of fits without their fold."""
    runs = measured_runs(folder)
    options = CalibrationOptions(free=_FREE, folds=FOLDS, workers=workers)
    found, profile = fit_runs(runs, base_profile(), False, options)
    return found, _described(profile, runs)


def _described(profile: Profile, runs: Iterable[MeasuredRun]) -> Profile:
    adapters = [len(run.workload.adapters) for run in runs]
    ranges = {
        "rank": (float(RANK), float(RANK)),
        "prompt_tokens": (float(PROMPT), float(PROMPT)),
        "adapters": (0.0, float(max(adapters))),
    }
    steps: FittedModel = profile.step_latency.replace(fitted_range=ranges)
    return profile.replace(
        step_latency=steps,
        provenance=Provenance(
            kind=ProvenanceKind.PUBLISHED,
            source="FerranAgulloLopez/GPULLMAdapterOptimizationSLoRA, commit c5feb1f: 49 runs",
            license="Apache-2.0",
            command="python -m benchmarks.measured.slora --out PROFILE",
            notes="One NVIDIA H100 64GB HBM2, S-LoRA, Llama-2-7B, adapters of rank 32 on q, k, v and o, "
            "prompts of 250 and outputs of 230 tokens. The size of the pool is fitted. Bandwidth of KV and "
            "loads are analytic. Nothing was measured with other ranks or lengths.",
        ),
    )


def shipped_errors(folder: Path) -> str:
    """Return mean absolute percentage errors of the shipped profile, simulated at the runs' own settings."""
    profile, runs = load_profile(NAME), measured_runs(folder)
    found = [run.simulate(profile, seed) for seed, run in enumerate(runs)]
    rows = []
    for target, of_generator in counted(folder).items():
        predicted = np.array([getattr(each, target) for each in found])
        actual = np.array([run.measured[target] for run in runs])
        for regime in (STARVED, NOT_STARVED):
            keep = np.array([run.regime == regime for run in runs])
            errors = {
                "230 tokens": mape(predicted[keep], actual[keep]),
                "chunks": mape(predicted[keep], of_generator[keep]),
            }
            rows.append({"metric": target, "runs": f"{keep.sum()} {regime}"} | errors)
    return records_table(rows)


def error_table(found: RunCalibration, folder: Path) -> str:
    """Return mean absolute percentage errors in sample and of left-out runs, starved ones apart."""
    rows = []
    for target, of_generator in counted(folder).items():
        at = TARGETS.index(target)
        corrected = found.measured()[:, at]
        for regime in (STARVED, NOT_STARVED):
            keep = np.array([each == regime for each in found.regimes])
            errors = {
                f"{sample}, {words}": mape(predicted[keep, at], actual[keep])
                for sample, predicted in (("in sample", found.after), ("left out", found.held_out))
                for words, actual in (("230 tokens", corrected), ("chunks", of_generator))
            }
            rows.append({"metric": target, "runs": f"{keep.sum()} {regime}"} | errors)
    return records_table(rows)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--data", type=Path, help="folder of measured data")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="threads of the simulations")
    parser.add_argument("--out", type=Path, metavar="PROFILE", help="profile JSON to write")
    args = parser.parse_args()
    with user_errors():
        folder = data_folder(args.data)
        if args.out is None:
            emit(shipped_errors(folder) + "\n")
            return
        found, profile = calibrated(folder, args.workers)
        write_text_atomic(args.out, json.dumps(profile.model_dump(mode="json"), indent=2) + "\n")
        emit(error_table(found, folder) + "\n")


if __name__ == "__main__":
    main()
