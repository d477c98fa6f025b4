"""Measured operators of a GPU under vLLM: tables of latencies, and times between and beyond their shapes.

The package ``aiconfigurator-core`` (Apache-2.0) ships parquet tables of single operators, measured per GPU
type and vLLM version, and a compiled estimator of whole models. Its Python functions no longer answer for a
single operator, so the tables are read here, and the estimator serves as a comparison
(``benchmarks.measured_check``).

Dense matrix products: the interpolated quantity is the efficiency, measured time over the roofline of the
data sheet, which varies slowly over shapes where the time itself varies by orders of magnitude. Single times
scatter; at the sizes of CUDA graphs no product takes longer than one of more rows, which could be computed in
its place. Products were measured in a loop, so small weights stay in the L2 cache; in a serving engine the
layers in between replace them. No product is therefore faster than reading its weights at the rate of the
largest measured product.

Experts of one layer: a table holds each model's own shape, with the routed products of all experts that a GPU
has, for so many tokens of the whole batch. Tokens are routed unevenly, by a power law, as in served models.

Attention of one layer on one GPU, decode by requests and KV tokens, prefill by pairs: it was measured in a
loop over the same keys and values, so contexts that fit the L2 cache were read from it. In a serving engine
the weights of a layer replace them between two steps. Decode is therefore not faster than a kernel's start
and reading keys and values at the rate of the largest measured contexts.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from capplan.datasets import GpuSheet, find_gpu, gpu_sheet, other_gpu
from capplan.errors import InputError
from capplan.models._step_latency import GRAPH_TOKENS

if TYPE_CHECKING:
    import pandas as pd

    from capplan.spec import Experts

PACKAGE: Final = "aiconfigurator_core"

FLASHINFER_EXPERTS: Final = "w4a8_mxfp4_mxfp8"
"""MXFP4 weights with MXFP8 activations, measured for gpt-oss under SGLang alone."""


@dataclass(frozen=True)
class System:
    """GPU type with measured operators."""

    key: str
    """Name of its folder in the package."""
    sheet_key: str
    """Name of its data sheet, see `gpu_sheet`."""
    fuses_all_reduce: bool = False
    """Whether vLLM's all-reduces are FlashInfer's: TensorRT-LLM's, with the norm that follows in them."""

    @property
    def sheet(self) -> GpuSheet:
        """Data sheet of the GPU."""
        return gpu_sheet(self.sheet_key)


SYSTEMS: Final = (
    System("a100_sxm", "a100-80g"),
    System("h100_sxm", "h100-80g"),
    System("h200_sxm", "h200"),
    System("l40s", "l40s"),
    System("b200_sxm", "b200", fuses_all_reduce=True),
    System("rtx_pro_6000_server", "rtx-pro-6000"),
)


def system_of(gpu: str) -> System:
    """Return the measured GPU type of a name: the package's, or one that `gpu_sheet` knows."""
    sheet = find_gpu(gpu)
    for system in SYSTEMS:
        if gpu.lower() == system.key or (sheet is not None and sheet.key == system.sheet_key):
            return system
    known = ", ".join(f"{each.sheet_key} ({each.key})" for each in SYSTEMS)
    raise InputError(f"must be a GPU with measured operators: {known}; {other_gpu(gpu)}", gpu, "--gpu")


@dataclass(frozen=True)
class OperatorTables:
    """Measured operators of one GPU type, in milliseconds; see `operator_tables`."""

    system: System
    version: str
    """vLLM version of the matrix products and of attention."""
    gemm: pd.DataFrame
    """Columns ``gemm_dtype``, ``m``, ``n``, ``k``, ``latency``."""
    prefill: pd.DataFrame
    """Attention of whole prompts: ``batch_size``, ``isl``, ``num_heads``, ``num_key_value_heads``,
    ``head_dim``, ``kv_cache_dtype``.
    """
    decode: pd.DataFrame
    """Attention of one token per request: the same with ``step``, the tokens of context."""
    all_reduce: pd.DataFrame
    """Columns ``num_gpus``, ``message_size`` (elements), ``latency``, in CUDA graphs; see `System`."""
    experts: pd.DataFrame
    """Products of experts: ``moe_dtype``, ``num_tokens``, sizes, ``moe_tp_size``, ``moe_ep_size``,
    ``distribution``, ``latency``.
    """
    quantize: pd.DataFrame
    """Quantization of activations to FP8: ``m``, ``k``, ``latency``; empty where not measured."""

    @property
    def source(self) -> str:
        """Source of the tables, in words."""
        package = f"operator tables of aiconfigurator-core {package_version()}"
        return f"{package}: {self.system.key}, vLLM {self.version}"


def package_version() -> str:
    """Return the version of the installed package of tables."""
    from importlib.metadata import version

    return version("aiconfigurator-core")


@functools.cache
def operator_tables(gpu: str) -> OperatorTables:
    """Return the measured operators of a GPU type, of the newest vLLM version in the package.

    Raises
    ------
    InputError
        For a GPU without tables, or if the package is not installed.
    """
    system = system_of(gpu)
    folder = _data_folder() / system.key
    gemm, version = _newest(folder / "gemm" / "vllm", "gemm_perf")
    prefill, _ = _newest(folder / "attention" / "vllm", "context_attention_perf")
    decode, _ = _newest(folder / "attention" / "vllm", "generation_attention_perf")
    experts = _experts(folder / "moe")
    all_reduce, _ = _newest(
        folder / "comm" / ("trtllm" if system.fuses_all_reduce else "vllm"), "custom_allreduce_perf"
    )
    if not system.fuses_all_reduce:
        all_reduce = all_reduce[all_reduce["backend"] == "vllm_graph"]
    return OperatorTables(
        system=system,
        version=version,
        gemm=_fastest(gemm, ["gemm_dtype", "m", "n", "k"]),
        prefill=_full_attention(prefill, "isl"),
        decode=_full_attention(decode, "step"),
        all_reduce=_fastest(all_reduce, ["num_gpus", "message_size"]),
        experts=experts,
        quantize=_quantize(folder / "quantize" / "vllm"),
    )


def _data_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        rule = "needs the operator tables: pip install '.[measured]', in the checkout"
        raise InputError(rule, location="capplan profile compose")
    return Path(spec.submodule_search_locations[0]) / "systems" / "data"


def _newest(folder: Path, name: str) -> tuple[pd.DataFrame, str]:
    import pandas as pd

    files = sorted(folder.glob(f"*/{name}.parquet"), key=lambda file: _release(file.parent.name))
    if not files:
        raise InputError(
            "must hold tables of vLLM", location=f"{PACKAGE}: {folder.parent.parent.name}/{name}"
        )
    return pd.read_parquet(files[-1]), files[-1].parent.name


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def _fastest(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return one row per shape: the fastest of the kernels that were measured, which an engine selects."""
    return table.groupby(keys, as_index=False).agg({"latency": "min"})


def _full_attention(table: pd.DataFrame, length: str) -> pd.DataFrame:
    """Return attention without a window; a window is a shorter context, see `ForwardPass`."""
    chosen = table[table["window_size"] == 0] if "window_size" in table else table
    heads = ["kv_cache_dtype", "head_dim", "num_heads", "num_key_value_heads"]
    return _fastest(chosen, [*heads, "batch_size", length])


def _experts(folder: Path) -> pd.DataFrame:
    """Return experts under vLLM, and under SGLang where both call the same kernel of FlashInfer."""
    import pandas as pd

    under_vllm, _ = _newest(folder / "vllm", "moe_perf")
    if not (folder / "sglang").is_dir():
        return under_vllm
    others, _ = _newest(folder / "sglang", "moe_perf")
    shared = others[others["moe_dtype"] == FLASHINFER_EXPERTS]
    return pd.concat([under_vllm, shared], ignore_index=True)


def _quantize(folder: Path) -> pd.DataFrame:
    import pandas as pd

    if not folder.is_dir():
        return pd.DataFrame({"m": np.empty(0), "k": np.empty(0), "latency": np.empty(0)})
    parts = [_newest(folder, name)[0] for name in ("computescale_perf", "scale_matrix_perf")]
    both = pd.concat(_fastest(part, ["m", "k"]) for part in parts)
    return both.groupby(["m", "k"], as_index=False).agg({"latency": "sum"})


Floats = NDArray[np.float64]

_STREAMING_ELEMENTS: Final = 5e8
"""Weights from which on a product of few rows is the reading of them: 1 GB of 16-bit floats,
beyond any cache.
"""

_LEAST_SIZE: Final = 128
"""Smallest input and output of the products of a decoder; smaller ones are LoRA's."""

INT4_BYTES: Final = 0.5 + 2.5 / 128
"""Of a weight of 4 bits with its part of a scale and a zero per 128 inputs."""

WEIGHT_BYTES: Final = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "int4": INT4_BYTES}
CARRIED: Final = {"int4": "bfloat16", "fp8_block": "fp8"}
"""Dtypes and those of the same arithmetic whose efficiency they have: products of ``int4`` weights were not
measured, and those in blocks with the host's time for their start, 55 to 290 us, beside which large ones take
as long as those of ``fp8``.
"""


@dataclass(frozen=True)
class GemmTimes:
    """Times of products of ``m x k`` activations with ``k x n`` weights of one dtype."""

    efficiency: RegularGridInterpolator
    """Log of measured time over roofline, over the logs of m, n and k."""
    largest: tuple[float, float, float]
    """Largest measured m, n and k."""
    weight_bytes: float
    bytes_per_ms: float
    flop_per_ms: float
    streaming_bytes_per_ms: float
    """Rate at which the largest measured products read their weights."""

    def ms(self, rows: Floats, n: int, k: int) -> Floats:
        """Return milliseconds for `rows` tokens, of their shape."""
        rows = np.maximum(np.asarray(rows, dtype=float), 1.0)
        grids = self.efficiency.grid
        inside = [
            np.clip(np.log(each), grid[0], grid[-1])
            for each, grid in zip(np.broadcast_arrays(rows, float(n), float(k)), grids, strict=True)
        ]
        roof_ms = _roofline_ms(rows, n, k, self.weight_bytes, self.bytes_per_ms, self.flop_per_ms)
        measured = np.exp(self.efficiency(np.stack(inside, axis=-1))) * roof_ms
        return np.maximum(measured, self.weight_bytes * n * k / self.streaming_bytes_per_ms)

    def beyond(self, rows: float, n: int, k: int) -> str:
        """Return in words how far a shape lies beyond the measured ones, or nothing."""
        named = zip(("rows", "outputs", "inputs"), (rows, n, k), self.largest, strict=True)
        return ", ".join(
            f"{size:g} {name}, {size / largest:.2f} times the largest measured"
            for name, size, largest in named
            if size > largest
        )


def gemm_times(table: pd.DataFrame, sheet: GpuSheet, dtype: str) -> GemmTimes:
    """Return the products of one dtype from an operator table; of `CARRIED` ones by their bytes."""
    measured = CARRIED.get(dtype, dtype)
    chosen = table[
        (table["gemm_dtype"] == measured) & (table["n"] >= _LEAST_SIZE) & (table["k"] >= _LEAST_SIZE)
    ]
    if chosen.empty:
        known = ", ".join(sorted(table["gemm_dtype"].unique()))
        raise InputError(f"must be a dtype with measured products on this GPU: {known}", dtype, "--dtype")
    cube = chosen.pivot_table(index="m", columns=["n", "k"], values="latency")
    cube = cube[cube.notna().mean(axis=1) > 0.5]
    rows = cube.index.to_numpy(dtype=float)
    graphs = cube[rows <= GRAPH_TOKENS]
    cube.loc[graphs.index] = graphs[::-1].cummin()[::-1]
    cube = cube[(rows <= 8) & np.isin(rows, (1, 2, 4, 8)) | (rows > GRAPH_TOKENS) | (rows % 8 == 0)]
    m, n, k = (
        np.sort(np.asarray(each, dtype=float))
        for each in (cube.index, chosen["n"].unique(), chosen["k"].unique())
    )
    times = cube.reindex(columns=[(i, j) for i in n for j in k]).to_numpy().reshape(m.size, n.size, k.size)
    weight_bytes, bytes_per_ms = WEIGHT_BYTES[measured], sheet.bytes_per_s / 1e3
    flop_per_ms = sheet.flop_per_s / 1e3 * (1.0 if measured == "bfloat16" else 2.0)
    rows, outputs, inputs = np.meshgrid(m, n, k, indexing="ij")
    logs = np.log(times / _roofline_ms(rows, outputs, inputs, weight_bytes, bytes_per_ms, flop_per_ms))
    return GemmTimes(
        efficiency=RegularGridInterpolator((np.log(m), np.log(n), np.log(k)), _fill(logs)),
        largest=(float(m[-1]), float(n[-1]), float(k[-1])),
        weight_bytes=WEIGHT_BYTES[dtype],
        bytes_per_ms=bytes_per_ms,
        flop_per_ms=flop_per_ms,
        streaming_bytes_per_ms=_streaming(chosen, weight_bytes),
    )


def _roofline_ms(
    rows: Floats,
    n: Floats | int,
    k: Floats | int,
    weight_bytes: float,
    bytes_per_ms: float,
    flop_per_ms: float,
) -> Floats:
    moved = weight_bytes * n * k + 2.0 * rows * (n + k)
    return np.maximum(2.0 * rows * n * k / flop_per_ms, moved / bytes_per_ms)


def _fill(logs: Floats) -> Floats:
    """Return efficiencies in which shapes too large to measure have that of the nearest measured shape."""
    from scipy.ndimage import distance_transform_edt

    filled = logs.copy()
    for plane in filled:
        missing = np.isnan(plane)
        if missing.any():
            nearest = distance_transform_edt(missing, return_distances=False, return_indices=True)
            plane[...] = plane[tuple(nearest)]
    return filled


def _streaming(table: pd.DataFrame, weight_bytes: float) -> float:
    large = table[(table["m"] <= 8) & (table["n"] * table["k"] >= _STREAMING_ELEMENTS)]
    return float((weight_bytes * large["n"] * large["k"] / large["latency"]).median())


ROUTING: Final = "power_law_1.01"
"""Distribution of tokens over experts; the table also has an even one and a steeper power law."""

SPREADS: Final = {"GptOssForCausalLM": 0.45}
"""Of models whose tokens pass fewer different experts than those of the table. Fitted on rows of gpt-oss-120b
on H100s (``benchmarks.measured_check --only silicon_moe``); rows of MiniMax-M2.5 need none.
"""

EXPERTS_ERROR: Final = (
    "mean TPOT of mixtures of experts: median error 5.8 %, 90th percentile 18 %, on 202 closed loops of "
    "MiniMax-M2.5 and gpt-oss-120b under vLLM 0.11 to 0.19, of which 46 fix one number of gpt-oss"
)
"""``benchmarks.measured_check --only silicon_moe``: rows that name a version, without those of Qwen3-235B."""

_SPREAD_TOKENS: Final = (256.0, 2048.0)
"""Batches up to which the spread holds, and from which all experts are in use."""

DTYPES: Final = {"mxfp4": "w4a16_mxfp4", "mxfp4_mxfp8": FLASHINFER_EXPERTS, "int4": "int4_wo"}
"""Names of dtypes in the table, if they are others."""


@dataclass(frozen=True)
class ExpertTimes:
    """Times of the experts of one layer on one GPU."""

    log_tokens: Floats
    log_ms: Floats
    spread: float = 1.0
    """Tokens of the table that pass as many different experts, per token of a small batch; see `SPREADS`."""

    def ms(self, tokens: Floats) -> Floats:
        """Return milliseconds for `tokens`, of their shape; beyond the measured ones in proportion."""
        log = np.log(np.maximum(np.asarray(tokens, dtype=float), 1.0))
        few, many = np.log(_SPREAD_TOKENS)
        log = np.maximum(0.0, log + np.log(self.spread) * np.clip((many - log) / (many - few), 0.0, 1.0))
        beyond = np.maximum(log - self.log_tokens[-1], 0.0)
        return np.asarray(np.exp(np.interp(log, self.log_tokens, self.log_ms) + beyond))


def expert_times(
    table: pd.DataFrame,
    experts: Experts,
    hidden_size: int,
    dtype: str,
    tp: int,
    *,
    expert_parallel: bool = False,
    spread: float = 1.0,
) -> ExpertTimes:
    """Return the times of a model's experts, with weights of a dtype, from an operator table.

    The `tp` GPUs share each expert, or the experts if `expert_parallel`.
    """
    shape = {
        "hidden_size": hidden_size,
        "inter_size": experts.intermediate_size,
        "topk": experts.per_token,
        "num_experts": experts.number,
    }
    of_shape = table
    for name, value in shape.items():
        of_shape = of_shape[of_shape[name] == value]
    if of_shape.empty:
        rule = "must have experts of a shape with measured products on this GPU"
        raise InputError(rule, ", ".join(f"{name} {value}" for name, value in shape.items()), "--model")
    measured = of_shape[of_shape["moe_dtype"] == DTYPES.get(dtype, dtype)]
    if measured.empty:
        known = ", ".join(sorted(of_shape["moe_dtype"].unique()))
        raise InputError(f"must be a dtype with measured experts on this GPU: {known}", dtype, "--dtype")
    shares = (1, tp) if expert_parallel else (tp, 1)
    rows = measured[(measured["moe_tp_size"] == shares[0]) & (measured["moe_ep_size"] == shares[1])]
    fastest = rows[rows["distribution"] == ROUTING].groupby("num_tokens")["latency"].min().sort_index()
    if fastest.empty:
        raise InputError("must have experts that were measured on this GPU", tp, "--tp")
    ms = np.maximum.accumulate(fastest.to_numpy(dtype=float))
    return ExpertTimes(np.log(fastest.index.to_numpy(dtype=float)), np.log(ms), spread)


KV_BYTES: Final = {"bfloat16": 2, "fp8": 1}
"""Bytes of an element of a key or a value, by its dtype."""

_STREAMING_BYTES: Final = 2.5e8
"""KV of a measured context from which on it is read from memory: more than twice every L2 cache here."""

_PAIR_PROMPTS: Final = (256, 4096)
"""Prompt lengths, in tokens, by which the time per pair is fitted."""


@dataclass(frozen=True)
class Heads:
    """Attention heads on one GPU."""

    query: int
    kv: int
    head_dim: int
    kv_dtype: str = "bfloat16"
    """Dtype of keys and values, see `KV_BYTES`."""


@dataclass(frozen=True)
class DecodeAttention:
    """Decode attention of one layer, over requests and tokens of context of each."""

    times: RegularGridInterpolator
    """Milliseconds over the log of requests and over tokens of context, with the floor of cold memory."""
    ms_per_token: float
    """Milliseconds per KV token of large contexts, for contexts beyond the measured ones."""
    batch_scale: float = 1.0
    """Measured requests per request: KV heads beyond the measured ones count as more requests."""
    context_scale: float = 1.0
    """Measured tokens per token of context: another head size counts by its bytes."""

    def ms(self, requests: Floats, kv_tokens: Floats) -> Floats:
        """Return milliseconds for `requests` with `kv_tokens` together, of their common shape."""
        batch = np.maximum(requests, 1.0) * self.batch_scale
        context = np.maximum(kv_tokens / np.maximum(requests, 1.0), 0.0) * self.context_scale
        batches, contexts = self.times.grid
        inside_batch = np.clip(batch, np.exp(batches[0]), np.exp(batches[-1]))
        inside = np.clip(context, contexts[0], contexts[-1])
        at = self.times(np.stack([np.log(inside_batch), inside], axis=-1))
        more = batch * context - inside_batch * inside
        return np.asarray(at + self.ms_per_token * np.maximum(more, 0.0))


def decode_attention(table: pd.DataFrame, heads: Heads) -> DecodeAttention:
    """Return decode attention for some heads, from an operator table.

    Between measured numbers of query heads the logs of the times are interpolated.
    """
    at_size, kv, head_dim = _nearest(table, heads)
    batch_scale = heads.kv / kv
    query = heads.query / batch_scale
    of_kv = at_size[at_size["num_key_value_heads"] == kv]
    measured = np.sort(of_kv["num_heads"].unique()).astype(float)
    query = float(np.clip(query, measured[0], measured[-1]))
    low, high = measured[measured <= query][-1], measured[measured >= query][0]
    share = 0.0 if low == high else np.log(query / low) / np.log(high / low)
    logs = [
        np.log(
            of_kv[of_kv["num_heads"] == each].pivot_table(
                index="batch_size", columns="step", values="latency"
            )
        )
        for each in (low, high)
    ]
    times = np.exp((1.0 - share) * logs[0] + share * logs[1])
    measured_heads = replace(heads, kv=kv, head_dim=head_dim)
    return replace(
        decode_times(times, measured_heads), batch_scale=batch_scale, context_scale=heads.head_dim / head_dim
    )


def decode_times(times: pd.DataFrame, heads: Heads) -> DecodeAttention:
    """Return decode attention from milliseconds by requests (index) and tokens of context (columns)."""
    batches, contexts = times.index.to_numpy(dtype=float), times.columns.to_numpy(dtype=float)
    token_bytes = 2 * KV_BYTES[heads.kv_dtype] * heads.kv * heads.head_dim
    ms_per_token = _ms_per_token(times.to_numpy(), batches, contexts, token_bytes)
    return DecodeAttention(
        times=RegularGridInterpolator(
            (np.log(batches), contexts), _cold(times.to_numpy(), batches, contexts, ms_per_token)
        ),
        ms_per_token=ms_per_token,
    )


def prefill_ms_per_mpair(table: pd.DataFrame, heads: Heads) -> float:
    """Return the milliseconds of one layer per million (query, key) pairs of causal prefill attention."""
    at_size, kv, head_dim = _nearest(table, heads)
    chosen = at_size[(at_size["num_key_value_heads"] == kv) & (at_size["batch_size"] == 1)]
    query = np.sort(chosen["num_heads"].unique()).astype(float)
    nearest = query[np.argmin(np.abs(np.log(query / (heads.query * kv / heads.kv))))]
    rows = chosen[chosen["num_heads"] == nearest]
    work = heads.query * heads.head_dim / (nearest * head_dim)
    tokens, ms = (rows[name].to_numpy(dtype=float) for name in ("isl", "latency"))
    return float(work) * ms_per_mpair(tokens, ms)


def ms_per_mpair(tokens: Floats, ms: Floats) -> float:
    """Return the slope of prefill attention over million pairs, by prompts of `_PAIR_PROMPTS` tokens."""
    first, last = _PAIR_PROMPTS
    chosen = (tokens >= first) & (tokens <= last)
    if chosen.sum() < 2:
        raise InputError(f"must hold two prompts of {first} to {last} tokens", location="attention")
    mpairs = tokens[chosen] * (tokens[chosen] + 1.0) / 2e6
    design = np.stack([np.ones_like(mpairs), mpairs], axis=1) / ms[chosen, None]
    return float(max(0.0, np.linalg.lstsq(design, np.ones_like(mpairs))[0][1]))


def _nearest(table: pd.DataFrame, heads: Heads) -> tuple[pd.DataFrame, int, int]:
    """Return rows of the nearest head size, the most measured KV heads up to those asked, and that size."""
    table = table[table["kv_cache_dtype"] == heads.kv_dtype]
    if table.empty:
        rule = "must be that of the model: attention over others was not measured on this GPU"
        raise InputError(rule, heads.kv_dtype, "--kv-cache-dtype")
    sizes = np.sort(table["head_dim"].unique())
    head_dim = int(sizes[np.argmin(np.abs(np.log(sizes / heads.head_dim)))])
    rows = table[table["head_dim"] == head_dim]
    grouped = rows.loc[rows["num_heads"] > rows["num_key_value_heads"], "num_key_value_heads"].unique()
    fewer = [int(each) for each in grouped if each <= heads.kv]
    if not fewer:
        raise InputError(f"must hold at most {heads.kv} KV heads of size {head_dim}", location="attention")
    return rows, max(fewer), head_dim


def _ms_per_token(times: Floats, batches: Floats, contexts: Floats, token_bytes: int) -> float:
    """Return the median slope between the two longest contexts of each batch that exceed every cache."""
    slopes = []
    for batch, row in zip(batches, times, strict=True):
        last = int(np.flatnonzero(np.isfinite(row))[-1])
        if last > 0 and batch * contexts[last - 1] * token_bytes >= _STREAMING_BYTES:
            slopes.append((row[last] - row[last - 1]) / (batch * (contexts[last] - contexts[last - 1])))
    if not slopes:
        rule = f"must hold decodes of two contexts beyond {_STREAMING_BYTES / 1e6:.0f} MB of KV"
        raise InputError(rule, location="attention")
    return float(np.median(slopes))


def _cold(times: Floats, batches: Floats, contexts: Floats, ms_per_token: float) -> Floats:
    """Return times without the help of the cache, with those of unmeasured contexts extrapolated."""
    start_ms = times[0, 0]
    streamed = start_ms + ms_per_token * batches[:, None] * contexts[None, :]
    filled = times.copy()
    for column in range(1, contexts.size):
        missing = np.isnan(filled[:, column])
        step = ms_per_token * batches * (contexts[column] - contexts[column - 1])
        filled[missing, column] = (filled[:, column - 1] + step)[missing]
    return np.maximum.accumulate(np.maximum(filled, streamed), axis=1)


REFERENCE_GPU: Final = "h100_sxm"
"""GPU with operator tables whose processor is that of the measured profiles; its memory is faster."""

_RANKS: Final = (32, 64)
_WIDTHS: Final = (1024, 16384)
_ROWS: Final = (1, 64)


def small_product_ratio(tables: OperatorTables) -> float:
    """Return the time of products of LoRA's shapes on a GPU over that on an H100: their geometric mean."""
    reference = operator_tables(REFERENCE_GPU)
    ratio = _small_products(tables) / _small_products(reference)  # NaN where one is missing
    return float(np.exp(np.log(ratio).mean()))


def _small_products(tables: OperatorTables) -> pd.Series[float]:
    """Return the milliseconds of products of LoRA's shapes, by rows, outputs and inputs."""
    table = tables.gemm[tables.gemm["gemm_dtype"] == "bfloat16"]
    shrink = table["n"].isin(_RANKS) & table["k"].between(*_WIDTHS)
    expand = table["k"].isin(_RANKS) & table["n"].between(*_WIDTHS)
    return table[(shrink | expand) & table["m"].between(*_ROWS)].set_index(["m", "n", "k"])["latency"]
