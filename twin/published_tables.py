"""Memory and loading models of the shipped H100 profiles, from published tables of start-ups and loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from capplan.models import loading, memory
from capplan.models.calibration.least_squares import LinearProblem, fit_linear, fitted_model
from capplan.serving.memory import kv_bytes_per_token, slot_bytes, weight_bytes
from capplan.spec import Coefficient, FittedModel
from capplan.twin.published_models import ENGINE, GPU, UTILIZATION, PublishedModel
from capplan.twin.published_runs import MAX_NUM_SEQS


def fit_memory(reference: Path, model: PublishedModel) -> FittedModel:
    """Fit reserve, slot factor, slot overhead and bytes per sequence to the KV sizes that vLLM printed."""
    table = pd.read_csv(reference / "profiling_memory.csv")
    table = table[(table.model == model.key) & table.source.str.startswith("v0.8.5")]
    per_token = kv_bytes_per_token(model.arch)
    per_seq, seqs_free = _fit_sequences(table[table.a_max == 0], per_token)
    slots = table[
        (table.source == "v0.8.5_find_available_gpu_memory") & (table.kv_tokens_incl_crash_estimate > 0)
    ]
    kv_bytes = slots.kv_tokens_incl_crash_estimate.to_numpy(float) * per_token
    budget = GPU.memory_bytes * UTILIZATION - weight_bytes(model.arch) - per_seq * (MAX_NUM_SEQS - seqs_free)
    a_max = slots.a_max.to_numpy(float)
    one_slot = np.array([slot_bytes(model.arch, ENGINE, int(s)) for s in slots.s_max], float)
    names = ("reserved_bytes", "slot_factor", "slot_overhead_bytes")
    fit = fit_linear(
        LinearProblem(
            names, np.column_stack([np.ones_like(a_max), a_max * one_slot, a_max]), budget - kv_bytes
        )
    )
    predicted = budget - fit.predict(fit.problem.design)
    fitted = fitted_model(
        memory.FORM,
        fit,
        f"profiling_memory.csv: {len(slots)} start-ups of vLLM 0.8.5, max_num_seqs {MAX_NUM_SEQS}",
        ranges={
            "a_max": (slots.a_max.min(), slots.a_max.max()),
            "s_max": (slots.s_max.min(), slots.s_max.max()),
        },
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
    """Fit copies into slots and reads from disk to the table of loads; every row is the mean of about 50."""
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
            ("disk_base_ms", "disk_ms_per_rank"),
            np.column_stack([np.ones_like(rank), rank]),
            disk.mean_ms.to_numpy(),
        )
    )
    fitted = fitted_model(
        loading.FORM,
        gpu_fit,
        f"profiling_loading.csv: {len(swaps)} host-to-GPU and {len(disk)} disk rows of 49-50 loads each",
        ranges={"rank": (8.0, 32.0), "s_max": (8.0, 32.0)},
    )
    disk_part = fitted_model(loading.FORM, disk_fit, "").coefficients
    idle = {"serving_factor": Coefficient(value=1.0)}
    return fitted.replace(coefficients=fitted.coefficients | disk_part | idle)
