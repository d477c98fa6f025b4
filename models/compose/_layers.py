"""Step times from latencies of whole layers, as LLMServingSim's profiler writes them for a model on a GPU.

``dense.csv`` has microseconds of each kind of layer by tokens, ``attention.csv`` of attention by prefill
chunk and requests that decode, ``per_sequence.csv`` of output head and sampler by requests. Source of the
format: github.com/casys-kaist/LLMServingSim, MIT.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import interp1d

from capplan.datasets import GpuSheet, gpu_sheet
from capplan.errors import InputError
from capplan.models.compose._attention import DecodeAttention, decode_times, ms_per_mpair
from capplan.models.compose._decoder import Decoder
from capplan.spec import read_columns

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

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
        found = []
        for name, measured, asked in (
            ("dense layers", self.dense[0][-1], max_tokens),
            ("output head", self.per_sequence[0][-1], 1024),
        ):
            if asked > measured:
                found.append(f"{name}: {asked} rows, {asked / measured:.2f} times the largest measured")
        return tuple(found)


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
    dense, attention, sequences = (_read(Path(folder), name) for name in _COLUMNS)
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


def _read(folder: Path, name: str) -> pd.DataFrame:
    return read_columns(folder / name, _COLUMNS[name])
