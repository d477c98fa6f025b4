"""Milliseconds of a forward pass: operators of a decoder on a GPU, or its whole layers, added up.

A pass is a sequence of kernels on one stream, so their times add. The parts follow what each depends on:
tokens of the step (matrix products, norms, all-reduces), requests and KV tokens (decode attention, output
head), and pairs of query and key (prefill attention).

Latencies of whole layers are those that LLMServingSim's profiler writes for a model on a GPU: ``dense.csv``
has microseconds of each kind of layer by tokens, ``attention.csv`` of attention by prefill chunk and requests
that decode, ``per_sequence.csv`` of output head and sampler by requests. Source of the format:
github.com/casys-kaist/LLMServingSim, MIT.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import interp1d

from capplan.datasets import GpuSheet, gpu_sheet
from capplan.errors import InputError
from capplan.models.compose._decoder import Decoder
from capplan.models.compose._operators import (
    CARRIED,
    DecodeAttention,
    ExpertTimes,
    GemmTimes,
    OperatorTables,
    decode_attention,
    decode_times,
    expert_times,
    gemm_times,
    ms_per_mpair,
    prefill_ms_per_mpair,
    small_product_ratio,
)
from capplan.spec import read_columns

Floats = NDArray[np.float64]

KERNEL_MS: Final = 0.003
"""A memory-bound kernel in a CUDA graph, start to start, beside its bytes."""

ELEMENTWISE_BANDWIDTH: Final = 0.8
"""Share of the memory's peak that memory-bound kernels reach."""

_ALL_REDUCES: Final = 2
"""Of a layer: after attention and after the MLP. Another one follows the embedding."""

_AFTER_ATTENTION: Final = 1
"""Position of o in `Decoder.products`: attention does not quantize its output."""


@dataclass(frozen=True)
class ForwardPass:
    """Times by the operators of a GPU; see `forward_pass`."""

    decoder: Decoder
    tp: int
    tables: OperatorTables
    products: GemmTimes
    head: GemmTimes
    """Products of 16-bit weights: the output head is not quantized."""
    experts: ExpertTimes | None
    """Of a mixture of experts."""
    attention: DecodeAttention
    ms_per_prefill_mpair: float
    """Prefill attention of all layers, per million pairs of query and key."""
    parts: str = "operators"

    @property
    def sheet(self) -> GpuSheet:
        """Data sheet of the GPU."""
        return self.tables.system.sheet

    @property
    def source(self) -> str:
        """Source of the measurements, in words."""
        return self.tables.source

    @property
    def small_product_ratio(self) -> float:
        """Time of products of LoRA's shapes over that on an H100."""
        return small_product_ratio(self.tables)

    def tokens_ms(self, tokens: Floats) -> Floats:
        """Return the milliseconds that depend on tokens of the step, of their shape."""
        tokens = np.asarray(tokens, dtype=float)
        layer = sum(self.products.ms(tokens, n, k) for n, k in self.decoder.products(self.tp))
        layer += self._elementwise_ms(tokens) + self._quantize_ms(tokens)
        if self.experts is not None and self.decoder.router is not None:
            layer += self.head.ms(tokens, *self.decoder.router) + self.experts.ms(tokens)
        reduced = self._all_reduce_ms(tokens * self.decoder.arch.hidden_size)
        layers = self.decoder.arch.layers
        return np.asarray(layers * layer + (_ALL_REDUCES * layers + 1) * reduced)

    def requests_ms(self, requests: Floats, kv_tokens: Floats) -> Floats:
        """Return the milliseconds that depend on requests and their KV tokens, of their common shape."""
        n, k = self.decoder.head(self.tp)
        window = self.decoder.arch.sliding_window
        full = self.decoder.arch.layers - self.decoder.window_layers
        attention = full * self.attention.ms(requests, kv_tokens)
        if window is not None:
            attention = attention + self.decoder.window_layers * self.attention.ms(
                requests, np.minimum(kv_tokens, requests * float(window))
            )
        return np.asarray(attention + self.head.ms(requests, n, k))

    def beyond(self, max_tokens: int) -> tuple[str, ...]:
        """Return in words which operators lie beyond their measured range, and how far."""
        decoder = self.decoder
        found = [
            (name, self.products.beyond(max_tokens, n, k))
            for name, (n, k) in zip(("qkv", "o", "gate_up", "down"), decoder.products(self.tp), strict=False)
        ]
        if decoder.dtype in CARRIED:
            words = f"{decoder.dtype} weights have the efficiency of {CARRIED[decoder.dtype]} ones"
            found.append(("linear layers", words))
        found.append(("lm_head", self.head.beyond(1, *decoder.head(self.tp))))
        window = decoder.arch.sliding_window
        if window is not None:
            found.append(("prefill attention", f"prompts beyond the window of {window} tokens count whole"))
        if self.attention.batch_scale != 1.0:
            found.append(("attention", f"{decoder.heads(self.tp).kv} KV heads counted as more requests"))
        if self.attention.context_scale != 1.0:
            found.append(("attention", f"head size {decoder.arch.head_dim} counted by its bytes"))
        return tuple(f"{name}: {words}" for name, words in found if words)

    def _elementwise_ms(self, tokens: Floats) -> Floats:
        is_fused = self.tp > 1 and self.tables.system.fuses_all_reduce
        parts = self.decoder.elementwise_bytes(self.tp, _ALL_REDUCES if is_fused else 0)
        bytes_per_ms = ELEMENTWISE_BANDWIDTH * self.sheet.bytes_per_s / 1e3
        return np.asarray(len(parts) * KERNEL_MS + sum(parts) * tokens / bytes_per_ms)

    def _quantize_ms(self, tokens: Floats) -> Floats | float:
        """Return the milliseconds of quantizing inputs of a layer's products by kernels of their own.

        vLLM fuses the others with the kernels before them: norms, and the activation of the MLP.
        """
        if not self.decoder.dtype.startswith("fp8"):
            return 0.0
        _, k = self.decoder.products(self.tp)[_AFTER_ATTENTION]
        rows = self.tables.quantize.sort_values("m")
        sizes = np.sort(rows["k"].unique())
        nearest = rows[rows["k"] == sizes[np.argmin(np.abs(np.log(sizes / k)))]]
        return np.asarray(np.interp(tokens, nearest["m"], nearest["latency"]))

    def _all_reduce_ms(self, elements: Floats) -> Floats:
        if self.tp == 1:
            return np.zeros_like(elements)
        table = self.tables.all_reduce
        rows = table[table["num_gpus"] == self.tp].sort_values("message_size")
        size = rows["message_size"].to_numpy(dtype=float)
        ms = np.maximum.accumulate(rows["latency"].to_numpy())
        inside = np.clip(elements, size[0], size[-1])
        log_ms = np.interp(np.log(np.maximum(inside, 1.0)), np.log(size), np.log(ms))
        return np.asarray(np.exp(log_ms) * np.maximum(1.0, elements / size[-1]))


def forward_pass(
    tables: OperatorTables, decoder: Decoder, tp: int = 1, *, expert_parallel: bool = False
) -> ForwardPass:
    """Return the times of a decoder on `tp` GPUs of a type, by its measured operators.

    With `expert_parallel`, each GPU has some of the experts, and not a share of each.
    """
    _check_tp(tables, decoder, tp)
    sheet, heads, arch = tables.system.sheet, decoder.heads(tp), decoder.arch
    products = gemm_times(tables.gemm, sheet, decoder.dtype)
    experts = None
    if arch.experts is not None:
        experts = expert_times(
            tables.experts,
            arch.experts,
            arch.hidden_size,
            decoder.expert_dtype,
            tp,
            expert_parallel=expert_parallel,
            spread=decoder.expert_spread,
        )
    return ForwardPass(
        decoder=decoder,
        tp=tp,
        tables=tables,
        products=products,
        experts=experts,
        head=products if decoder.dtype == "bfloat16" else gemm_times(tables.gemm, sheet, "bfloat16"),
        attention=decode_attention(tables.decode, heads),
        ms_per_prefill_mpair=arch.layers * prefill_ms_per_mpair(tables.prefill, heads),
    )


def _check_tp(tables: OperatorTables, decoder: Decoder, tp: int) -> None:
    arch = decoder.arch
    measured = sorted({1, *(int(each) for each in tables.all_reduce["num_gpus"].unique())})
    if tp not in measured:
        known = ", ".join(map(str, measured))
        raise InputError(f"must be one of {known}, whose all-reduces were measured on this GPU", tp, "--tp")
    inner = arch.intermediate_size if arch.experts is None else arch.experts.intermediate_size
    if arch.heads % tp or inner % tp or (arch.kv_heads % tp and tp % arch.kv_heads):
        raise InputError(f"must divide the {arch.heads} heads and the MLP of {arch.name}", tp, "--tp")


_PER_LAYER: Final = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
"""Kinds of layers by how often a decoder layer has them."""

_ONCE: Final = ("embedding", "final_layernorm")
_COLUMNS: Final = {
    "dense.csv": ("layer", "tokens", "time_us"),
    "attention.csv": ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"),
    "per_sequence.csv": ("layer", "sequences", "time_us"),
}


@dataclass(frozen=True)
class LayerTimes:
    """Times by measured layers; see `layer_times`."""

    decoder: Decoder
    sheet: GpuSheet
    source: str
    dense: tuple[Floats, Floats]
    """Tokens, and milliseconds of all layers for them."""
    per_sequence: tuple[Floats, Floats]
    """Requests, and milliseconds of output head and sampler for them."""
    attention: DecodeAttention
    ms_per_prefill_mpair: float
    tp: int = 1
    parts: str = "layers"
    small_product_ratio: float = 1.0
    """Not measured: LoRA's kernels are assumed to start as fast as on an H100."""

    def tokens_ms(self, tokens: Floats) -> Floats:
        """Return the milliseconds that depend on tokens of the step, of their shape."""
        return _line(*self.dense, tokens)

    def requests_ms(self, requests: Floats, kv_tokens: Floats) -> Floats:
        """Return the milliseconds that depend on requests and their KV tokens, of their common shape."""
        attention = self.decoder.arch.layers * self.attention.ms(requests, kv_tokens)
        return np.asarray(attention + _line(*self.per_sequence, requests))

    def beyond(self, max_tokens: int) -> tuple[str, ...]:
        """Return in words what lies beyond the measured range, and how far."""
        dense = ("dense layers", self.dense[0][-1], max_tokens)
        head = ("output head", self.per_sequence[0][-1], 1024)
        return tuple(
            f"{name}: {asked} rows, {asked / measured:.2f} times the largest measured"
            for name, measured, asked in (dense, head)
            if asked > measured
        )


StepTimes: TypeAlias = ForwardPass | LayerTimes
"""Times of the forward passes of a decoder on `tp` GPUs, from measurements of its parts."""


def layer_times(folder: str | os.PathLike[str], gpu: str, decoder: Decoder) -> LayerTimes:
    """Return step times from the tables of a folder.

    Parameters
    ----------
    folder
        Folder with ``dense.csv``, ``attention.csv`` and ``per_sequence.csv``.
    gpu
        Name of the data sheet of the GPU that was measured.
    decoder
        The model that was measured, on one GPU.

    Raises
    ------
    InputError
        If a file is missing, or lacks columns, kinds of layers or contexts; if the model has other layers.
    """
    import pandas as pd

    _require_plain(decoder)
    dense, attention, sequences = (read_columns(Path(folder) / name, _COLUMNS[name]) for name in _COLUMNS)
    by_layer = dense.pivot_table(index="tokens", columns="layer", values="time_us") / 1e3
    if set(by_layer.columns) != {*_PER_LAYER, *_ONCE} or by_layer.isna().any(axis=None):
        rule = f"must have the layers {', '.join([*_PER_LAYER, *_ONCE])} at the same numbers of tokens"
        raise InputError(rule, ", ".join(map(str, by_layer.columns)), f"{folder}/dense.csv")
    often = pd.Series(
        {kind: decoder.arch.layers * count for kind, count in _PER_LAYER.items()} | dict.fromkeys(_ONCE, 1)
    )
    total_ms = by_layer[often.index] @ often
    head_ms = sequences.groupby("sequences")["time_us"].sum() / 1e3
    heads = decoder.heads(1)
    decode = attention[(attention["prefill_chunk"] == 0) & (attention["n_decode"] > 0)]
    times = decode.pivot_table(index="n_decode", columns="kv_decode", values="time_us") / 1e3
    prefill = attention[(attention["n_decode"] == 0) & (attention["kv_prefill"] == 0)]
    return LayerTimes(
        decoder=decoder,
        sheet=gpu_sheet(gpu),
        source=f"layers of {decoder.arch.name} on one GPU, measured by LLMServingSim's profiler",
        dense=(total_ms.index.to_numpy(float), total_ms.cummax().to_numpy(float)),
        per_sequence=(head_ms.index.to_numpy(float), head_ms.cummax().to_numpy(float)),
        attention=decode_times(times, heads),
        ms_per_prefill_mpair=decoder.arch.layers
        * ms_per_mpair(prefill["prefill_chunk"].to_numpy(float), prefill["time_us"].to_numpy(float) / 1e3),
    )


def _require_plain(decoder: Decoder) -> None:
    """Check that the kinds of layers of the files are all that the model has."""
    arch = decoder.arch
    if decoder.norms != 2 or arch.qk_norm or decoder.window_layers or decoder.dtype != "bfloat16":
        rule = "must be a model with two norms per layer, without QK norm, windows and quantization"
        raise InputError(rule, arch.name, "--layers")


def _line(points: Floats, ms: Floats, at: Floats) -> Floats:
    """Return values between points by lines, and beyond them along the last one."""
    inside = interp1d(points, ms, fill_value="extrapolate")(np.maximum(at, points[0]))
    return np.asarray(inside, dtype=float)
