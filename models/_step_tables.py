"""Step tables in compiled code: piecewise-linear functions in one flat array.

A table is stored by cells. The cell of a point reaches to the next point of every axis, that of a last point
to infinity, and holds the value at its lower corner and the slopes from there. The function is thus exact at
the points, continuous, and non-decreasing in every argument:

- below the first point of an axis it is constant;
- within the grid it is linear in one quantity, and bilinear in two;
- beyond the last point of an axis the last slope goes on. If these slopes fall along the other axis, the
  nearest ones that do not fall apply: otherwise more requests would take less time, far enough out.

The cell of a value is found through its binary exponent and the first bits of its mantissa. They number a
bucket of 6 to 12 % of the value, and an index holds the cell at the beginning of each bucket.
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import inner
from capplan.spec import StepTable

_MANTISSA_BITS: Final = 3
_SHIFT: Final = 52 - _MANTISSA_BITS
_FIRST_BUCKET: Final = 1023 << _MANTISSA_BITS
"""Bucket of 1. Smaller values belong to it as well."""
_BUCKETS: Final = 40 << _MANTISSA_BITS
"""Up to 2^40; larger values belong to the last one."""

# Numbers of a cell, which begins with its point. Over tokens: value and slope. Over requests: position of the
# cells over KV tokens. Over KV tokens: value, both slopes, and their common growth.
_TOKENS_CELL: Final = 3
_REQUESTS_CELL: Final = 2
_KV_CELL: Final = 5


@functools.lru_cache(maxsize=32)
def pack_tables(tokens_ms: StepTable, requests_ms: StepTable, start: int) -> NDArray[np.float64]:
    """Return the tables of a step model as one array, for `kv_line`; not to be changed.

    Parameters
    ----------
    tokens_ms, requests_ms
        The tables of `capplan.spec._profile.TABLE_AXES`.
    start
        Position of the result in the array of the step model.

    Returns
    -------
    ndarray
        The index of each axis, the cells over tokens, those over requests, and for each of the latter the
        cells over KV tokens. Axes begin at 0; a point at infinity ends every list of cells. Positions are
        those in the array of the step model; the index of KV tokens is relative to the first cell of a list.
    """
    axes = [np.array(axis.points) for axis in (*tokens_ms.axes, *requests_ms.axes)]
    line = _line_cells(axes[0], tokens_ms.grid_ms)
    plane = _plane_cells(axes[1], axes[2], requests_ms.grid_ms)
    tokens, requests, kv_tokens = map(_from_zero, axes)
    of_tokens = start + 3 * _BUCKETS
    of_requests = of_tokens + _TOKENS_CELL * (tokens.size + 1)
    of_kv_tokens = of_requests + _REQUESTS_CELL * (requests.size + 1)
    lists = of_kv_tokens + _KV_CELL * (kv_tokens.size + 1) * np.arange(requests.size)
    return np.concatenate(
        [
            of_tokens + _TOKENS_CELL * _at_buckets(tokens),
            of_requests + _REQUESTS_CELL * _at_buckets(requests),
            _KV_CELL * _at_buckets(kv_tokens),
            line.ravel(),
            np.column_stack([np.append(requests, np.inf), np.append(lists, 0.0)]).ravel(),
            plane.ravel(),
        ]
    )


def _from_zero(grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a grid that begins at 0."""
    return grid if grid[0] == 0.0 else np.concatenate([[0.0], grid])


def _at_buckets(grid: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the number of the last point at or below the beginning of each bucket; the first begins at 0."""
    beginnings = (np.arange(_FIRST_BUCKET, _FIRST_BUCKET + _BUCKETS) << _SHIFT).view(np.float64)
    beginnings[0] = 0.0
    return np.searchsorted(grid, beginnings, side="right") - 1


def _line_cells(grid: NDArray[np.float64], value_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return point, value and slope of each cell from 0 on, and of the end, shape (points + 1, 3)."""
    slopes = np.diff(value_ms) / np.diff(grid)
    cells = np.column_stack([grid, value_ms, np.append(slopes, slopes[-1])])
    below = np.array([[0.0, value_ms[0], 0.0]])[: int(grid[0] > 0.0)]
    return np.vstack([below, cells, [[np.inf, 0.0, 0.0]]])


def _plane_cells(
    rows: NDArray[np.float64], columns: NDArray[np.float64], value_ms: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the cells of each row and their ends, rows and columns from 0 on, shape (rows, columns + 1, 5).

    A cell has its column's point, value, slope over rows, slope over columns, and their common growth.
    """
    row_widths, column_widths = np.diff(rows)[:, None], np.diff(columns)
    cells = np.zeros((rows.size, columns.size + 1, _KV_CELL))
    points, value, by_row, by_column, growth = np.moveaxis(cells[:, :-1], 2, 0)
    points[:], value[:] = columns, value_ms
    by_row[:-1] = np.diff(value_ms, axis=0) / row_widths
    by_row[-1] = _not_falling(by_row[-2])
    by_column[:, :-1] = np.diff(value_ms, axis=1) / column_widths
    by_column[:, -1] = _not_falling(by_column[:, -2])
    growth[:-1] = np.diff(by_column, axis=0) / row_widths
    growth[-1, :-1] = np.diff(by_row[-1]) / column_widths
    cells[:, -1, 0] = np.inf
    if columns[0] > 0.0:
        below = cells[:, :1] * np.array([0.0, 1.0, 1.0, 0.0, 0.0])  # constant over columns
        cells = np.concatenate([below, cells], axis=1)
    if rows[0] > 0.0:
        below = np.where([True, True, False, True, False], cells[:1], 0.0)  # constant over rows
        cells = np.concatenate([below, cells])
    return cells


def _not_falling(slopes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the isotonic regression of slopes, by its max-min formula over means of neighbours.

    Source: Barlow et al., Statistical Inference under Order Restrictions (1972), theorem 1.6.
    """
    if np.all(np.diff(slopes) >= 0.0):
        return slopes
    number = np.arange(slopes.size)
    sums = np.concatenate([[0.0], slopes.cumsum()])
    lengths = number + 1 - number[:, None]  # of the neighbours from a row's number to a column's
    means = np.where(lengths > 0, (sums[1:] - sums[:-1, None]) / np.maximum(lengths, 1), np.inf)
    least = np.minimum.accumulate(means[:, ::-1], axis=1)[:, ::-1]
    regression = np.where(lengths > 0, least, -np.inf).max(axis=0)
    return np.maximum.accumulate(np.maximum(regression, 0.0))


class KvLine(NamedTuple):
    """Milliseconds of a step over KV tokens, as long as it stays in its cell of the tables."""

    constant_ms: float
    ms_per_token: float
    start: float
    """KV tokens of the constant."""
    end: float
    """KV tokens at which another cell begins."""


@inner
def no_line(end: float) -> KvLine:
    """Return a line of 0 ms."""
    return KvLine(0.0, 0.0, 0.0, end)


@inner
def kv_line(
    packed: NDArray[np.float64], start: int, tokens: float, requests: float, kv_tokens: float
) -> KvLine:
    """Return the line of a step by tables that `pack_tables` stored from `start` on."""
    at = _cell(packed, int(packed[start + _bucket(tokens)]), _TOKENS_CELL, tokens)
    row = _cell(packed, int(packed[start + _BUCKETS + _bucket(requests)]), _REQUESTS_CELL, requests)
    first = int(packed[row + 1]) + int(packed[start + 2 * _BUCKETS + _bucket(kv_tokens)])
    cell = _cell(packed, first, _KV_CELL, kv_tokens)
    tokens_ms = packed[at + 1] + packed[at + 2] * (tokens - packed[at])
    more_requests = requests - packed[row]
    return KvLine(
        constant_ms=tokens_ms + packed[cell + 1] + packed[cell + 2] * more_requests,
        ms_per_token=packed[cell + 3] + packed[cell + 4] * more_requests,
        start=packed[cell],
        end=packed[cell + _KV_CELL],
    )


@inner
def _bucket(value: float) -> int:
    """Return the number of the bucket of a value that is not negative."""
    bucket = int(np.float64(value).view(np.int64) >> _SHIFT) - _FIRST_BUCKET
    return min(max(bucket, 0), _BUCKETS - 1)


@inner
def _cell(packed: NDArray[np.float64], first: int, size: int, value: float) -> int:
    """Return the position of the last cell from `first` on whose point does not exceed a value."""
    at = first + size * int(packed[first + size] <= value)  # no branch: few buckets have several points
    while packed[at + size] <= value:
        at += size
    return at


@inner
def milliseconds_at(line: KvLine, kv_tokens: float) -> float:
    """Return the milliseconds at KV tokens before the end of the line."""
    return line.constant_ms + line.ms_per_token * (kv_tokens - line.start)
