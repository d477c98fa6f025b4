"""Profile components other than the step model: fits of memory, loading and lengths, and assumed values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag
from scipy.optimize import brentq
from scipy.stats import gamma, norm, qmc

from capplan.errors import InputError
from capplan.models._memory import ASSUMED, HOST_FORM, LOADING_FORM, MEMORY_FORM, assumed_model
from capplan.models._step_latency import ADDITIVE
from capplan.models.calibration._least_squares import (
    LinearFit,
    LinearProblem,
    fit_linear,
    fitted_model,
    uncertainty,
)
from capplan.models.calibration._tables import read_table, require_positive
from capplan.serving import adapter_bytes, kv_bytes_per_token, slot_bytes, weight_bytes
from capplan.spec import (
    FittedModel,
    Gpu,
    Lengths,
    ModelArch,
    Profile,
    ProfileEngine,
    Provenance,
    ProvenanceKind,
)

MEMORY_COLUMNS: Final = ("a_max", "s_max", "kv_tokens")
MEMORY_OPTIONS: Final = ("max_num_seqs", "gpu_memory_utilization", "max_num_batched_tokens")
LOADING_COLUMNS: Final = ("rank", "s_max", "ms")
LOADING_OPTIONS: Final = ("kind",)
_MEMORY_RANGES: Final = ("a_max", "s_max", "max_num_seqs", "max_num_batched_tokens")
_GPU: Final = "gpu"
_DISK: Final = "disk"
_UTILIZATION: Final = 0.9
_THRESHOLDS: Final = 65
_MAX_CORRELATION: Final = 0.95
_LOG2_SCORES: Final = 14
_MEMORY_BYTES_PER_MS: Final = 2e9  # GPU memory bandwidth, about that of data-centre GPUs of 2023
_FLOP_PER_MS: Final = 3e11
_PCIE_BYTES_PER_MS: Final = 1e7
_DISK_BYTES_PER_MS: Final = 1e6
_RESERVED_BYTES: Final = 4e9
_REQUEST_MS: Final = 5.0


def fit_memory(path: str | Path, base: Profile) -> FittedModel:
    """Fit the memory model to the KV tokens that engines report at start-up.

    Parameters
    ----------
    path
        CSV or Parquet table with `MEMORY_COLUMNS`: slots, their rank, KV tokens. Of `MEMORY_OPTIONS`,
        ``max_num_seqs`` determines the cost of sequences if it has three values or more,
        ``gpu_memory_utilization`` defaults to 0.9, and ``max_num_batched_tokens`` is for the range only.
    base
        GPU, model and engine. The cost of sequences is the base's unless fitted.

    Raises
    ------
    InputError
        For a broken table, or more KV tokens than the GPU can hold beside the weights.
    """
    frame = read_table(path, MEMORY_COLUMNS, MEMORY_OPTIONS, blank=MEMORY_OPTIONS[-1:])
    require_positive(frame, ("kv_tokens", *MEMORY_OPTIONS), str(path))
    column = {name: frame[name].to_numpy(np.float64) for name in frame.columns}
    per_token = kv_bytes_per_token(base.model, base.tp)
    share = column.get("gpu_memory_utilization", np.full(len(frame), _UTILIZATION))
    budget = base.gpu.memory_bytes * share - weight_bytes(base.model, base.tp)
    taken = budget - column["kv_tokens"] * per_token
    if (taken < 0.0).any():
        row = int(np.argmax(taken < 0.0))
        most = int(budget[row] // per_token)
        rule = f"must be at most {most}, all that a {base.gpu.name} has left beside the weights"
        raise InputError(rule, float(column["kv_tokens"][row]), f"{path}: kv_tokens, row {row + 1}")
    slots = np.array([slot_bytes(base.model, base.engine, int(s), base.tp) for s in column["s_max"]], float)
    columns = {
        "reserved_bytes": np.ones_like(taken),
        "slot_factor": column["a_max"] * slots,
        "slot_overhead_bytes": column["a_max"],
    }
    seqs = column.get("max_num_seqs")
    fit, fixed = _fit_with_sequences(columns, taken, seqs, base)
    fitted = fitted_model(
        MEMORY_FORM,
        fit,
        f"{Path(path).name}: {len(frame)} start-ups",
        ranges={name: _range(column[name]) for name in _MEMORY_RANGES if name in column},
        fixed=fixed,
    )
    predicted = fit.predict(fit.problem.design) + _sequence_bytes(fixed, seqs)
    relative = np.abs(taken - predicted) / (column["kv_tokens"] * per_token)
    quality = fitted.fit.replace(
        error_formula="100 * mean(|p - a| / a) of KV tokens",
        error=float(100 * relative.mean()),
        max_error=float(100 * relative.max()),
    )
    return fitted.replace(fit=quality)


def _fit_with_sequences(
    columns: dict[str, NDArray[np.float64]],
    taken: NDArray[np.float64],
    max_num_seqs: NDArray[np.float64] | None,
    base: Profile,
) -> tuple[LinearFit, dict[str, float]]:
    """Return the fit and the fixed coefficients: the cost of sequences unless ``max_num_seqs`` varies."""
    if max_num_seqs is None or np.unique(max_num_seqs).size < 3:
        fixed = {name: base.memory.value(name) for name in ("bytes_per_seq", "seqs_in_reserve")}
        rest = np.maximum(taken - _sequence_bytes(fixed, max_num_seqs), 1.0)
        return fit_linear(LinearProblem.of(columns, rest)), fixed
    thresholds = np.linspace(max_num_seqs.min(), max_num_seqs.max(), _THRESHOLDS)[:-1]
    trials = [
        fit_linear(LinearProblem.of(columns | {"bytes_per_seq": np.maximum(0.0, max_num_seqs - free)}, taken))
        for free in thresholds
    ]
    best = int(np.argmin([trial.error for trial in trials]))
    return trials[best], {"seqs_in_reserve": float(thresholds[best])}


def _range(values: NDArray[np.float64]) -> tuple[float, float]:
    return float(np.nanmin(values)), float(np.nanmax(values))


def _sequence_bytes(
    fixed: Mapping[str, float], max_num_seqs: NDArray[np.float64] | None
) -> NDArray[np.float64] | float:
    """Return the bytes of sequences by fixed coefficients; 0 if they were fitted or are unknown."""
    if "bytes_per_seq" not in fixed or max_num_seqs is None:
        return 0.0
    return fixed["bytes_per_seq"] * np.maximum(0.0, max_num_seqs - fixed["seqs_in_reserve"])


def fit_loading(path: str | Path, base: Profile) -> FittedModel:
    """Fit copies into slots and reads from disk to a table of adapter loads.

    Parameters
    ----------
    path
        CSV or Parquet table with `LOADING_COLUMNS`: rank of the adapter, of the slot, milliseconds. Column
        ``kind``: ``gpu`` (host to slot, the default) or ``disk`` (disk to host).
    base
        Source of the coefficients that the table does not determine, including the serving factor.

    Raises
    ------
    InputError
        For a broken table or an unknown kind.
    """
    frame = read_table(path, LOADING_COLUMNS, LOADING_OPTIONS, text=LOADING_OPTIONS)
    require_positive(frame, LOADING_COLUMNS, str(path))
    kind = frame["kind"].to_numpy(str) if "kind" in frame.columns else np.full(len(frame), _GPU)
    unknown = ~np.isin(kind, (_GPU, _DISK))
    if unknown.any():
        row = int(np.argmax(unknown))
        raise InputError(f"must be {_GPU} or {_DISK}", str(kind[row]), f"{path}: kind, row {row + 1}")
    rank, s_max, ms = (frame[name].to_numpy(np.float64) for name in LOADING_COLUMNS)
    padding = (rank < s_max).astype(float)
    columns = {
        _GPU: {"gpu_base_ms": np.ones_like(rank), "gpu_ms_per_rank": rank, "gpu_padding_ms": padding},
        _DISK: {"disk_base_ms": np.ones_like(rank), "disk_ms_per_rank": rank},
    }
    present = [name for name in columns if (kind == name).any()]
    source = f"{Path(path).name}: {len(frame)} loads ({', '.join(sorted(present))})"
    ranges = {"rank": _range(rank), "s_max": _range(s_max)}
    coefficients = dict(base.loading.coefficients)
    fitted = []
    for name in present:
        keep = kind == name
        kept = {each: values[keep] for each, values in columns[name].items()}
        fit = fit_linear(LinearProblem.of(kept, ms[keep]))
        fitted.append(fitted_model(LOADING_FORM, fit, source, ranges=ranges))
        coefficients |= fitted[-1].coefficients
    known = [each.uncertainty for each in fitted if each.uncertainty is not None]
    apart = block_diag(*(np.reshape(each.covariance, (len(each.names),) * 2) for each in known))
    together = uncertainty([name for each in known for name in each.names], apart)
    return fitted[0].replace(coefficients=coefficients, uncertainty=together)


def fit_length_correlation(
    lengths: Sequence[tuple[Lengths, Lengths]], kv_tokens_per_request: Sequence[float], block_size: int
) -> float:
    """Fit the correlation of prompt and output lengths to the KV tokens that running requests hold.

    A decoding request holds its prompt and on average half of its output, and long outputs decode longest.
    The KV tokens of a running request therefore grow with the correlation.

    Parameters
    ----------
    lengths
        Prompt and output lengths of each run, gamma-distributed.
    kv_tokens_per_request
        Measured mean KV tokens of a running request in each run.
    block_size
        Tokens of a KV block.

    Returns
    -------
    float
        Correlation of normal scores, within 0.95 of 0.
    """
    scores = norm.ppf(qmc.Sobol(2, rng=np.random.default_rng(0)).random_base2(_LOG2_SCORES))
    measured = float(np.mean(kv_tokens_per_request))
    runs = {pair: lengths.count(pair) for pair in dict.fromkeys(lengths)}

    def excess(correlation: float) -> float:
        held = [n * held_kv_tokens(*pair, correlation, scores, block_size) for pair, n in runs.items()]
        return float(np.sum(held)) / len(lengths) - measured

    if excess(-_MAX_CORRELATION) > 0.0:
        return -_MAX_CORRELATION
    if excess(_MAX_CORRELATION) < 0.0:
        return _MAX_CORRELATION
    return round(float(brentq(excess, -_MAX_CORRELATION, _MAX_CORRELATION, xtol=1e-4)), 3)


def held_kv_tokens(
    prompts: Lengths, outputs: Lengths, correlation: float, scores: NDArray[np.float64], block_size: int
) -> float:
    """Return the mean KV tokens of a decoding request, in whole blocks of `block_size` tokens.

    Lengths are gamma-distributed, and `correlation` is that of their normal scores. The mean is taken over
    independent normal scores, shape (n, 2).
    """
    first = scores[:, 0]
    second = correlation * first + np.sqrt(1.0 - correlation**2) * scores[:, 1]
    prompt, output = _gamma(prompts, first), _gamma(outputs, second)
    held = prompt + output / 2.0 + block_size / 2.0
    return float((output * held).sum() / output.sum())


def _gamma(lengths: Lengths, score: NDArray[np.float64]) -> NDArray[np.float64]:
    mean, std = lengths.mean_tokens, lengths.std_tokens
    if std == 0.0:
        return np.full_like(score, mean)
    values: NDArray[np.float64] = gamma.ppf(norm.cdf(score), (mean / std) ** 2, scale=std**2 / mean)
    return np.maximum(values, 1.0)


@dataclass(frozen=True)
class Hardware:
    """GPU and engine of an assumed profile."""

    gpu: str
    gpu_memory_bytes: int
    tp: int = 1
    engine: str = "vllm"
    engine_version: str = "0.8.5"
    rules: str = "vllm-0.8"
    lora_extra_vocab: int = 0
    """Rows of extra vocabulary in an adapter slot."""


def assumed_profile(arch: ModelArch, hardware: Hardware) -> Profile:
    """Return a profile of round numbers, the start of a calibration without a base."""
    weights, per_rank = weight_bytes(arch, hardware.tp), adapter_bytes(arch, 1)
    step = dict.fromkeys(ADDITIVE.coefficients, 0.0) | {
        "base_ms": weights / _MEMORY_BYTES_PER_MS,
        "ms_per_ktoken": 1e3 * weights / arch.dtype_bytes * 2 / _FLOP_PER_MS,
        "ms_per_kv_ktoken": 1e3 * kv_bytes_per_token(arch, hardware.tp) / _MEMORY_BYTES_PER_MS,
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
    engine = ProfileEngine(
        name=hardware.engine,
        version=hardware.engine_version,
        rules=hardware.rules,
        lora_extra_vocab=hardware.lora_extra_vocab,
    )
    return Profile(
        name=f"local/{arch.name}/{engine.name}-{engine.version}",
        gpu=Gpu(name=hardware.gpu, memory_bytes=hardware.gpu_memory_bytes),
        tp=hardware.tp,
        model=arch,
        engine=engine,
        step_latency=assumed_model(ADDITIVE.name, step),
        memory=assumed_model(MEMORY_FORM, slots),
        loading=assumed_model(LOADING_FORM, loads),
        host=assumed_model(HOST_FORM, {"request_ms": _REQUEST_MS, "client_itl_factor": 1.0}),
        provenance=Provenance(kind=ProvenanceKind.ROOFLINE, source=ASSUMED, command="capplan calibrate"),
    )
