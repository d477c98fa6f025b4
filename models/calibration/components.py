"""Profile components other than the step model: memory and loading fits, and assumed values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.models import loading, memory
from capplan.models.calibration.least_squares import LinearFit, LinearProblem, fit_linear, fitted_model
from capplan.models.calibration.tables import read_table, require_positive
from capplan.models.step_latency import ADDITIVE
from capplan.serving.memory import adapter_bytes, kv_bytes_per_token, slot_bytes, weight_bytes
from capplan.spec import (
    Coefficient,
    Fit,
    FittedModel,
    Gpu,
    ModelArch,
    Profile,
    ProfileEngine,
    Provenance,
    ProvenanceKind,
    read_text,
)
from capplan.spec.files import parse_json

MEMORY_COLUMNS: Final = ("a_max", "s_max", "kv_tokens")

MEMORY_OPTIONS: Final = ("max_num_seqs", "gpu_memory_utilization")

LOADING_COLUMNS: Final = ("rank", "s_max", "ms")

LOADING_OPTIONS: Final = ("kind",)

GPU: Final = "gpu"

DISK: Final = "disk"

_UTILIZATION: Final = 0.9

_THRESHOLDS: Final = 65

_KV_ERROR: Final = "100 * mean(|p - a| / a) of KV tokens"


def fit_memory(path: str | Path, base: Profile) -> FittedModel:
    """Fit the memory model to the KV tokens that engines found free at their start.

    Parameters
    ----------
    path
        CSV or Parquet table with `MEMORY_COLUMNS`: slots, their rank, KV tokens. Of `MEMORY_OPTIONS`,
        ``max_num_seqs`` lets the cost of sequences be fitted where it takes three values or more, and
        ``gpu_memory_utilization`` is 0.9 unless given.
    base
        GPU, model and engine; what sequences cost stays as it is there unless it is fitted.

    Raises
    ------
    InputError
        For a broken table, or more KV than the GPU can hold beside the weights.
    """
    frame = read_table(path, MEMORY_COLUMNS, MEMORY_OPTIONS)
    require_positive(frame, ("kv_tokens", "max_num_seqs", "gpu_memory_utilization"), str(path))
    column = {name: frame[name].to_numpy(np.float64) for name in frame.columns}
    per_token = kv_bytes_per_token(base.model, base.tp)
    share = column.get("gpu_memory_utilization", np.full(len(frame), _UTILIZATION))
    budget = base.gpu.memory_bytes * share - weight_bytes(base.model, base.tp)
    taken = budget - column["kv_tokens"] * per_token
    if (taken <= 0.0).any():
        row = int(np.argmax(taken <= 0.0))
        most = int(budget[row] // per_token)
        rule = f"must be below {most}, all that a {base.gpu.name} has left beside the weights"
        raise InputError(rule, float(column["kv_tokens"][row]), f"{path}: kv_tokens, row {row + 1}")
    slots = np.array([slot_bytes(base.model, base.engine, int(s), base.tp) for s in column["s_max"]], float)
    columns = {
        "reserved_bytes": np.ones_like(taken),
        "slot_factor": column["a_max"] * slots,
        "slot_overhead_bytes": column["a_max"],
    }
    fit, fixed = _with_sequences(columns, taken, column.get("max_num_seqs"), base)
    fitted = fitted_model(
        memory.FORM,
        fit,
        f"{Path(path).name}: {len(frame)} start-ups",
        ranges={name: (float(column[name].min()), float(column[name].max())) for name in ("a_max", "s_max")},
        fixed=fixed,
    )
    measured = column["kv_tokens"] * per_token
    missed = np.abs(taken - fit.predict(fit.problem.design) - _constant(fixed, column)) / measured
    quality = fitted.fit.replace(
        error_formula=_KV_ERROR,
        error=float(100 * missed.mean()),
        max_error=float(100 * missed.max()),
    )
    return fitted.replace(fit=quality)


def _with_sequences(
    columns: dict[str, NDArray[np.float64]],
    taken: NDArray[np.float64],
    max_num_seqs: NDArray[np.float64] | None,
    base: Profile,
) -> tuple[LinearFit, tuple[tuple[str, float], ...]]:
    """Fit with the cost of sequences if the table can tell it, else with the base's; also what is fixed."""
    if max_num_seqs is None or np.unique(max_num_seqs).size < 3:
        fixed = tuple((name, base.memory.value(name)) for name in ("bytes_per_seq", "seqs_in_reserve"))
        known = {} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}
        return _fit(columns, np.maximum(taken - _constant(fixed, known), 1.0)), fixed
    thresholds = np.linspace(max_num_seqs.min(), max_num_seqs.max(), _THRESHOLDS)[:-1]
    trials = [
        _fit(columns | {"bytes_per_seq": np.maximum(0.0, max_num_seqs - free)}, taken) for free in thresholds
    ]
    best = int(np.argmin([trial.error for trial in trials]))
    return trials[best], (("seqs_in_reserve", float(thresholds[best])),)


def _fit(columns: dict[str, NDArray[np.float64]], taken: NDArray[np.float64]) -> LinearFit:
    return fit_linear(LinearProblem(tuple(columns), np.column_stack(list(columns.values())), taken))


def _constant(
    fixed: tuple[tuple[str, float], ...], column: dict[str, NDArray[np.float64]]
) -> NDArray[np.float64] | float:
    """Return the bytes of sequences by the base's numbers; 0 where they were fitted or are not known."""
    known = dict(fixed)
    if "bytes_per_seq" not in known or "max_num_seqs" not in column:
        return 0.0
    return known["bytes_per_seq"] * np.maximum(0.0, column["max_num_seqs"] - known["seqs_in_reserve"])


def fit_loading(path: str | Path, base: Profile) -> FittedModel:
    """Fit copies into slots and reads from disk to a table of adapter loads.

    Parameters
    ----------
    path
        CSV or Parquet table with `LOADING_COLUMNS`: rank of the adapter, of the slot, milliseconds. The
        column ``kind`` tells ``gpu`` (host to slot, the default) from ``disk`` (to the host).
    base
        What no row tells stays as it is there, the serving factor among it.

    Raises
    ------
    InputError
        For a broken table or an unknown kind.
    """
    frame = read_table(path, LOADING_COLUMNS, LOADING_OPTIONS, text=LOADING_OPTIONS)
    require_positive(frame, LOADING_COLUMNS, str(path))
    kind = frame["kind"].to_numpy(str) if "kind" in frame.columns else np.full(len(frame), GPU)
    unknown = ~np.isin(kind, (GPU, DISK))
    if unknown.any():
        row = int(np.argmax(unknown))
        raise InputError(f"must be {GPU} or {DISK}", str(kind[row]), f"{path}: kind, row {row + 1}")
    rank, s_max, ms = (frame[name].to_numpy(np.float64) for name in LOADING_COLUMNS)
    padding = (rank < s_max).astype(float)
    parts = {
        GPU: {"gpu_base_ms": np.ones_like(rank), "gpu_ms_per_rank": rank, "gpu_padding_ms": padding},
        DISK: {"disk_base_ms": np.ones_like(rank), "disk_ms_per_rank": rank},
    }
    coefficients: dict[str, Coefficient] = dict(base.loading.coefficients)
    fits = {}
    for name, columns in parts.items():
        keep = kind == name
        if keep.any():
            fit = _fit({each: values[keep] for each, values in columns.items()}, ms[keep])
            fits[name] = fit
            coefficients |= fitted_model(loading.FORM, fit, "").coefficients
    source = f"{Path(path).name}: {len(frame)} loads ({', '.join(sorted(fits))})"
    ranges = {
        "rank": (float(rank.min()), float(rank.max())),
        "s_max": (float(s_max.min()), float(s_max.max())),
    }
    shown = fitted_model(
        loading.FORM, fits.get(GPU, fits.get(DISK, next(iter(fits.values())))), source, ranges=ranges
    )
    return shown.replace(coefficients=coefficients)


ASSUMED: Final = "assumed, not measured"

_READ_BYTES_PER_MS: Final = 2e9  # of GPU memory, about what data-centre GPUs of 2023 do

_FLOP_PER_MS: Final = 3e11

_PCIE_BYTES_PER_MS: Final = 1e7

_DISK_BYTES_PER_MS: Final = 1e6

_RESERVED_BYTES: Final = 4e9

_REQUEST_MS: Final = 5.0

_WITH_EMBEDDING_ADAPTERS: Final = ("LlamaForCausalLM", "MistralForCausalLM")

"""Models whose slots hold embedding and output head, too (vLLM: ``embedding_modules``)."""


@dataclass(frozen=True)
class Hardware:
    """What a profile is of, besides the model."""

    gpu: str
    gpu_memory_bytes: int
    tp: int = 1
    engine: str = "vllm"
    engine_version: str = "0.8.5"
    rules: str = "vllm-0.8"


def read_arch(path: str | os.PathLike[str], hf_id: str) -> ModelArch:
    """Return the shape of a model from the ``config.json`` that Hugging Face models come with.

    Raises
    ------
    InputError
        When the file cannot be read, lacks a size, or holds one that is no whole number above 0.
    """
    name = os.fspath(path)
    config = parse_json(read_text(path), name)
    if not isinstance(config, Mapping):
        raise InputError("must hold a mapping, as config.json of a Hugging Face model does", location=name)
    heads = _size(config, "num_attention_heads", name)
    hidden = _size(config, "hidden_size", name)
    architectures = config.get("architectures") or []
    return ModelArch(
        name=hf_id.rsplit("/", maxsplit=1)[-1],
        hf_ids=(hf_id,),
        layers=_size(config, "num_hidden_layers", name),
        hidden_size=hidden,
        heads=heads,
        kv_heads=_size(config, "num_key_value_heads", name, heads),
        head_dim=_size(config, "head_dim", name, hidden // heads),
        intermediate_size=_size(config, "intermediate_size", name),
        vocab_size=_size(config, "vocab_size", name),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        lora_on_embeddings=any(each in _WITH_EMBEDDING_ADAPTERS for each in architectures),
    )


def _size(config: Mapping[str, Any], key: str, location: str, otherwise: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = otherwise
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError("must be a whole number above 0", value, f"{location}: {key}")
    return value


def assumed_profile(arch: ModelArch, hardware: Hardware) -> Profile:
    """Return a profile of round numbers, from which a calibration can start and whose rest it replaces."""
    weights, per_rank = weight_bytes(arch, hardware.tp), adapter_bytes(arch, 1)
    step = dict.fromkeys(ADDITIVE.coefficients, 0.0) | {
        "base_ms": weights / _READ_BYTES_PER_MS,
        "ms_per_ktoken": 1e3 * weights / arch.dtype_bytes * 2 / _FLOP_PER_MS,
        "ms_per_kv_ktoken": 1e3 * kv_bytes_per_token(arch, hardware.tp) / _READ_BYTES_PER_MS,
        "ms_per_adapter": 0.2,
    }
    slots = {
        "reserved_bytes": _RESERVED_BYTES,
        "slot_factor": 1.0,
        "slot_overhead_bytes": 0.0,
        "bytes_per_seq": 0.0,
        "seqs_in_reserve": 0.0,
    }
    loads = {
        "serving_factor": 1.0,
        "gpu_base_ms": 3.0,
        "gpu_ms_per_rank": per_rank / _PCIE_BYTES_PER_MS,
        "gpu_padding_ms": 0.0,
        "disk_base_ms": 10.0,
        "disk_ms_per_rank": per_rank / _DISK_BYTES_PER_MS,
    }
    engine = ProfileEngine(name=hardware.engine, version=hardware.engine_version, rules=hardware.rules)
    return Profile(
        name=f"local/{arch.name}/{engine.name}-{engine.version}",
        gpu=Gpu(name=hardware.gpu, memory_bytes=hardware.gpu_memory_bytes),
        tp=hardware.tp,
        model=arch,
        engine=engine,
        step_latency=_assumed(ADDITIVE.name, step),
        memory=_assumed(memory.FORM, slots),
        loading=_assumed(loading.FORM, loads),
        host=_assumed("per-request", {"request_ms": _REQUEST_MS, "client_itl_factor": 1.0}),
        provenance=Provenance(kind=ProvenanceKind.ROOFLINE, source=ASSUMED, command="capplan calibrate"),
    )


def _assumed(form: str, values: Mapping[str, float]) -> FittedModel:
    return FittedModel(
        form=form,
        coefficients={name: Coefficient(value=value) for name, value in values.items()},
        fit=Fit(source=ASSUMED, samples=0, error_formula="none: nothing was measured", error=0.0),
    )
