"""Milliseconds of dense matrix products between and beyond the measured shapes.

What is interpolated is the efficiency: measured time over the roofline of the data sheet, which varies slowly
over shapes where the time itself varies by orders of magnitude. Single times scatter; at the sizes of
CUDA graphs no product takes longer than one of more rows, which could be computed in its place. Products were
measured in a loop, so small weights stay in the L2 cache; in a serving engine the layers in between replace
them. No product is therefore faster than reading its weights at the rate of the largest measured product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from capplan.errors import InputError
from capplan.models._step_latency import GRAPH_TOKENS

if TYPE_CHECKING:
    import pandas as pd

    from capplan.datasets import GpuSheet

Floats = NDArray[np.float64]

_STREAMING_ELEMENTS: Final = 5e8
"""Weights from which on a product of few rows is the reading of them: 1 GB of 16-bit floats,
beyond any cache.
"""

_LEAST_SIZE: Final = 128
"""Smallest input and output of the products of a decoder; smaller ones are LoRA's, see `lora`."""

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
    """Return the products of one dtype from an operator table; of `CARRIED` ones by their bytes.

    Raises
    ------
    InputError
        If no product of that dtype was measured; the message lists those that were.
    """
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
    weight_bytes, bytes_per_ms, flop_per_ms = (
        WEIGHT_BYTES[measured],
        sheet.bytes_per_s / 1e3,
        sheet.flop_per_s / 1e3 * (1.0 if measured == "bfloat16" else 2.0),
    )
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
