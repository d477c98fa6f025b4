"""Step tables in compiled code: piecewise-linear functions in one flat array.

A table is stored by cells. The cell of a point reaches to the next point of every axis, that of a last point
to infinity, and holds the value at its lower corner and the slopes from there. The function is thus exact at
the points, continuous, and non-decreasing in every argument:

- below the first point of an axis it is constant;
- within the grid it is linear in one quantity, and bilinear in two;
- beyond the last point of an axis the last slope goes on. If these slopes fall along the other axis, the
  nearest ones that do not fall apply: otherwise more requests would take less time, far enough out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.compile import inner
from capplan.spec import StepTable

SIZES: Final = 3
"""Numbers at the beginning of a packed array: points over tokens, over requests, and over KV tokens."""
_LINE: Final = 2  # numbers of a cell over one quantity: value and slope
_PLANE: Final = 4  # of a cell over two: value, slopes, and their common growth


def pack_tables(tables: Mapping[str, StepTable]) -> NDArray[np.float64]:
    """Return the tables of a step model as one array, for `tables_ms`.

    Parameters
    ----------
    tables
        The tables of `capplan.spec.step_tables.TABLE_AXES`.

    Returns
    -------
    ndarray
        Sizes, grid over tokens and its cells, grids over requests and KV tokens and their cells.
    """
    tokens, requests = tables["tokens_ms"], tables["requests_ms"]
    sizes = np.array([*tokens.shape, *requests.shape], float)
    grids = [np.array(axis.points) for table in (tokens, requests) for axis in table.axes]
    line = _line_cells(grids[0], tokens.grid_ms)
    plane = _plane_cells(grids[1], grids[2], requests.grid_ms)
    return np.concatenate([sizes, grids[0], line.ravel(), grids[1], grids[2], plane.ravel()])


def _line_cells(grid: NDArray[np.float64], value_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return value and slope of each cell, shape (points, 2)."""
    slopes = np.diff(value_ms) / np.diff(grid)
    return np.column_stack([value_ms, np.append(slopes, slopes[-1])])


def _plane_cells(
    rows: NDArray[np.float64], columns: NDArray[np.float64], value_ms: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return value, slope over rows, slope over columns, and common growth, shape (rows, columns, 4)."""
    row_widths, column_widths = np.diff(rows)[:, None], np.diff(columns)
    by_row = np.diff(value_ms, axis=0) / row_widths
    by_row = np.concatenate([by_row, _not_falling(by_row[-1])[None]])
    by_column = np.diff(value_ms, axis=1) / column_widths
    by_column = np.column_stack([by_column, _not_falling(by_column[:, -1])])
    growth = np.zeros_like(value_ms)
    growth[:-1] = np.diff(by_column, axis=0) / row_widths
    growth[-1, :-1] = np.diff(by_row[-1]) / column_widths
    return np.stack([value_ms, by_row, by_column, growth], axis=2)


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


@inner
def tables_ms(
    packed: NDArray[np.float64], start: int, tokens: float, requests: float, kv_tokens: float
) -> float:
    """Return the milliseconds of a step by tables that `pack_tables` stored from `start` on."""
    token_points, rows, columns = int(packed[start]), int(packed[start + 1]), int(packed[start + 2])
    grid = start + SIZES
    at = _cell(packed, grid, token_points, tokens)
    cell = grid + token_points + _LINE * at
    milliseconds = packed[cell] + packed[cell + 1] * max(0.0, tokens - packed[grid + at])
    grid += (1 + _LINE) * token_points
    row = _cell(packed, grid, rows, requests)
    column = _cell(packed, grid + rows, columns, kv_tokens)
    more_requests = max(0.0, requests - packed[grid + row])
    more_kv_tokens = max(0.0, kv_tokens - packed[grid + rows + column])
    cell = grid + rows + columns + _PLANE * (row * columns + column)
    return float(
        milliseconds
        + packed[cell]
        + packed[cell + 1] * more_requests
        + (packed[cell + 2] + packed[cell + 3] * more_requests) * more_kv_tokens
    )


@inner
def _cell(packed: NDArray[np.float64], grid: int, points: int, value: float) -> int:
    """Return the number of the last point of a grid that does not exceed a value; 0 if all do."""
    low, high = 0, points
    while high - low > 1:
        middle = (low + high) // 2
        if packed[grid + middle] <= value:
            low = middle
        else:
            high = middle
    return low
