"""Fit the shipped H100 profiles from the published measurements of Agullo et al. (arXiv 2508.08343).

``python -m capplan.twin.published_h100 REFERENCE_DIR OUT_DIR`` writes one profile JSON per model below OUT_DIR
(the shipped ones live in ``datasets/profiles``). REFERENCE_DIR holds the published tables: profiling_memory.csv,
profiling_loading.csv, step_windows.parquet, runs.csv.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from capplan.models import loading, memory
from capplan.models.calibrate import LinearProblem, cross_validate, fit_linear, fitted_model
from capplan.models.step_latency import ADDITIVE
from capplan.serving.memory import kv_bytes_per_token, slot_bytes, weight_bytes
from capplan.spec import (
    Coefficient,
    Engine,
    Fit,
    FittedModel,
    Gpu,
    ModelArch,
    Profile,
    Provenance,
    ProvenanceKind,
    write_text_atomic,
)
from capplan.twin.published_runs import GROUPS, MAX_NUM_SEQS, TOKEN_BUDGET, published_runs

GPU = Gpu(name="NVIDIA H100 64GB HBM2", memory_bytes=64 * 2**30)
UTILIZATION = 0.9

@dataclass(frozen=True)
class PublishedModel:
    """One of the two models that were measured."""

    key: str
    """Its name in the tables."""
    profile: str
    arch: ModelArch


PUBLISHED = (
    PublishedModel(
        key="llama-3.1-8b-instruct",
        profile="h100-64g/llama-3.1-8b/vllm-0.8.5",
        arch=ModelArch(
            name="Llama-3.1-8B",
            hf_ids=("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
            layers=32,
            hidden_size=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            intermediate_size=14336,
            vocab_size=128256,
            lora_on_embeddings=True,
        ),
    ),
    PublishedModel(
        key="qwen-2.5-7b-instruct",
        profile="h100-64g/qwen2.5-7b/vllm-0.8.5",
        arch=ModelArch(
            name="Qwen2.5-7B",
            hf_ids=("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B"),
            layers=28,
            hidden_size=3584,
            heads=28,
            kv_heads=4,
            head_dim=128,
            intermediate_size=18944,
            vocab_size=152064,
        ),
    ),
)

ENGINE = Engine(name="vllm", version="0.8.5", rules="vllm-0.8", lora_extra_vocab=256)


def fit_memory(reference: Path, model: PublishedModel) -> FittedModel:
    """Fit reserve, slot factor and slot overhead to the KV sizes that vLLM printed, then the cost of max_num_seqs."""
    table = pd.read_csv(reference / "profiling_memory.csv")
    table = table[(table.model == model.key) & table.source.str.startswith("v0.8.5")]
    per_token = kv_bytes_per_token(model.arch)
    per_seq, seqs_free = _fit_sequences(table[table.a_max == 0], per_token)
    slots = table[(table.source == "v0.8.5_find_available_gpu_memory") & (table.kv_tokens_incl_crash_estimate > 0)]
    kv_bytes = slots.kv_tokens_incl_crash_estimate.to_numpy(float) * per_token
    budget = GPU.memory_bytes * UTILIZATION - weight_bytes(model.arch) - per_seq * (MAX_NUM_SEQS - seqs_free)
    a_max = slots.a_max.to_numpy(float)
    one_slot = np.array([slot_bytes(model.arch, ENGINE, int(s)) for s in slots.s_max], float)
    names = ("reserved_bytes", "slot_factor", "slot_overhead_bytes")
    fit = fit_linear(
        LinearProblem(names, np.column_stack([np.ones_like(a_max), a_max * one_slot, a_max]), budget - kv_bytes)
    )
    predicted = budget - fit.predict(fit.problem.design)
    fitted = fitted_model(
        memory.FORM,
        fit,
        f"profiling_memory.csv: {len(slots)} start-ups of vLLM 0.8.5, max_num_seqs {MAX_NUM_SEQS}",
        ranges={"a_max": (slots.a_max.min(), slots.a_max.max()), "s_max": (slots.s_max.min(), slots.s_max.max())},
        fixed=(("bytes_per_seq", per_seq), ("seqs_in_reserve", seqs_free)),
    )
    return fitted.replace(
        fit=fitted.fit.replace(
            error_formula="100 * mean(|p - a| / a) of KV tokens",
            error=float(100 * np.mean(np.abs(predicted / kv_bytes - 1))),
            max_error=float(100 * np.max(np.abs(predicted / kv_bytes - 1))),
        )
    )


def _fit_sequences(no_lora: pd.DataFrame, per_token: int) -> tuple[float, float]:
    """Return bytes per sequence, and the number up to which sequences cost nothing."""
    sizes = no_lora.groupby("max_num_seqs").kv_tokens.mean()
    free = sizes.max()
    many = sizes[sizes < 0.995 * free]
    slope, intercept = np.polyfit(many.index.to_numpy(float), many.to_numpy(float), 1)
    return float(-slope * per_token), float((free - intercept) / slope)


def fit_loading(reference: Path, model: PublishedModel) -> FittedModel:
    """Fit copies into slots and reads from disk to the table of loads, weighted by the number of loads behind a row."""
    table = pd.read_csv(reference / "profiling_loading.csv")
    table = table[(table.model == model.key) & table.source.str.startswith("predictor")]
    swaps = table[table.kind == "cpu_to_gpu_swap"]
    disk = table[table.kind == "disk_to_cpu"]
    rank = swaps.adapter_rank.to_numpy(float)
    gpu_fit = fit_linear(
        LinearProblem(
            ("gpu_base_ms", "gpu_ms_per_rank", "gpu_padding_ms"),
            np.column_stack([np.ones_like(rank), rank, (swaps.adapter_rank < swaps.s_max).to_numpy(float)]),
            swaps.mean_ms.to_numpy(float),
        )
    )
    rank = disk.adapter_rank.to_numpy(float)
    disk_fit = fit_linear(
        LinearProblem(
            ("disk_base_ms", "disk_ms_per_rank"), np.column_stack([np.ones_like(rank), rank]), disk.mean_ms.to_numpy()
        )
    )
    fitted = fitted_model(
        loading.FORM,
        gpu_fit,
        f"profiling_loading.csv: {len(swaps)} host-to-GPU and {len(disk)} disk rows of 49-50 loads each",
        ranges={"rank": (8.0, 32.0), "s_max": (8.0, 32.0)},
    )
    disk_part = fitted_model(loading.FORM, disk_fit, "").coefficients
    return fitted.replace(coefficients=fitted.coefficients | disk_part)


def fit_steps(reference: Path, model: PublishedModel, groups: tuple[str, ...]) -> FittedModel:
    """Fit the additive step model to ten-second windows of real runs, of the named groups of runs."""
    windows = pd.read_parquet(reference / "step_windows.parquet")
    runs = pd.read_csv(reference / "runs.csv")
    disturbed = runs[runs.anomalies.fillna("").str.contains("exclude")].run_idx
    windows = windows[
        (windows.model == model.key) & windows.group.isin(groups) & ~windows.run_idx.isin(disturbed)
    ]
    problem = step_problem(windows)
    fit = fit_linear(problem)
    error = cross_validate(problem, windows.run_idx)
    return fitted_model(
        ADDITIVE.name,
        fit,
        f"step_windows.parquet: {len(windows)} windows of {windows.run_idx.nunique()} runs",
        cross_validated=error,
        ranges=_step_ranges(windows),
    )


def step_problem(windows: pd.DataFrame) -> LinearProblem:
    """Return the linear problem of the additive form for a table of windows."""
    tokens = np.minimum(TOKEN_BUDGET, windows.running_mean + windows.prefill_tokens_per_step).to_numpy(float)
    a_max = windows.a_max.to_numpy(float)
    adapters = windows.unique_adapters_est.to_numpy(float)
    blocked = np.maximum(0.0, 1.0 - a_max / windows.n_adapters.to_numpy(float))
    columns = (
        np.ones_like(tokens),
        tokens / 1000,
        windows.kv_ktokens.to_numpy(float),
        a_max,
        a_max * tokens / 1000,
        a_max * windows.s_max.to_numpy(float) / 16,
        adapters,
        adapters * tokens / 1000,
        windows.waiting_mean.to_numpy(float) / 1000 * blocked,
        (tokens > 512).astype(float),
    )
    return LinearProblem(ADDITIVE.coefficients, np.column_stack(columns), windows.step_ms.to_numpy(float))


def _step_ranges(windows: pd.DataFrame) -> dict[str, tuple[float, float]]:
    columns = {
        "requests": windows.running_mean,
        "kv_tokens": windows.kv_ktokens * 1000,
        "adapters": windows.unique_adapters_est,
        "a_max": windows.a_max,
        "s_max": windows.s_max,
        "waiting": windows.waiting_mean,
    }
    return {name: (float(column.min()), float(column.max())) for name, column in columns.items()}


def fit_host(reference: Path, profile: Profile, model: PublishedModel) -> FittedModel:
    """Fit the time a request spends outside engine steps: the median gap to the twin's TTFT where nobody queues."""
    calm = [run for run in published_runs(reference, model.key) if run.mean_waiting < 1.0 and not run.starved]
    ours = np.array([run.simulate(profile, duration_s=900.0).ttft_s_p50 for run in calm])
    measured = np.array([run.ttft_s_p50 for run in calm])
    request_ms = max(0.0, float(np.median(measured - ours)) * 1e3)
    return _host(request_ms, len(calm), float(np.median(np.abs((ours + request_ms / 1e3) / measured - 1)) * 100))


def _host(request_ms: float, samples: int = 0, error: float = 0.0) -> FittedModel:
    return FittedModel(
        form="per-request",
        coefficients={"request_ms": Coefficient(value=round(request_ms, 3))},
        fit=Fit(
            source="runs.csv: median TTFT of runs without a queue, twin in the loop",
            samples=samples,
            error_formula="100 * median(|p - a| / a) of the median TTFT",
            error=error,
        ),
    )


def build_profile(reference: Path, model: PublishedModel, groups: tuple[str, ...] = GROUPS) -> Profile:
    """Fit everything for one model; the step model on runs of the named groups only."""
    profile = Profile(
        name=model.profile,
        gpu=GPU,
        model=model.arch,
        engine=ENGINE,
        step_latency=fit_steps(reference, model, groups),
        memory=fit_memory(reference, model),
        loading=fit_loading(reference, model),
        host=_host(0.0),
        provenance=Provenance(
            kind=ProvenanceKind.PUBLISHED,
            source="Agullo et al., arXiv 2508.08343; tables extracted from GPULLMAdapterOptimization, commit bae36e2",
            license="Apache-2.0",
            command="python -m capplan.twin.published_h100 REFERENCE_DIR OUT_DIR",
            notes="One NVIDIA H100 64GB HBM2, vLLM 0.8.5 (V1 engine), bf16, prefix caching off, token budget 2048. "
            "Nothing was measured with a token budget above 2048 or a mean prompt above 1,100 tokens.",
        ),
    )
    return profile.replace(host=fit_host(reference, profile, model))


def main(arguments: list[str]) -> None:
    """Write the profiles of both models."""
    reference, out = Path(arguments[0]), Path(arguments[1])
    for model in PUBLISHED:
        profile = build_profile(reference, model)
        path = out / f"{model.profile}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, json.dumps(profile.model_dump(mode="json"), indent=2) + "\n")
        sys.stdout.write(f"{path}: step SMAPE {profile.step_latency.fit.cross_validated_error:.2f} % on left-out runs\n")


if __name__ == "__main__":
    main(sys.argv[1:])
