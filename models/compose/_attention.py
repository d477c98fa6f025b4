"""Milliseconds of attention of one layer on one GPU: decode by requests and KV tokens, prefill by pairs.

Attention was measured in a loop over the same keys and values, so contexts that fit the L2 cache were read
from it. In a serving engine the weights of a layer replace them between two steps. Decode is therefore not
faster than a kernel's start and reading keys and values at the rate of the largest measured contexts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from capplan.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

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
    return float(work) * ms_per_mpair(
        rows["isl"].to_numpy(dtype=float), rows["latency"].to_numpy(dtype=float)
    )


def ms_per_mpair(tokens: Floats, ms: Floats) -> float:
    """Return the slope of prefill attention over million pairs, by prompts of `_PAIR_PROMPTS` tokens.

    Raises
    ------
    InputError
        If fewer than two prompts are that long.
    """
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
    """Return the median slope between the two longest contexts of each batch that exceed every cache.

    Raises
    ------
    InputError
        If no batch has such contexts.
    """
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
