"""Tables of kernel timings: their columns, and reading them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pandas as pd

from capplan.errors import InputError

COLUMNS: Final = (
    "kernel",
    "half",
    "width",
    "case",
    "configuration",
    "grid",
    "phase",
    "requests",
    "tokens",
    "adapters",
    "max_rank",
    "rank_sum",
    "adapter_rank_sum",
    "rank_tokens",
    "median_us",
    "relative_error",
    "visits",
    "disturbed",
    "visits_us",
)
"""One row per kernel, half (``shrink`` or ``expand``), width and case. ``rank_sum`` counts an adapter's rank
once per request, ``adapter_rank_sum`` once, ``rank_tokens`` once per token. Times are in microseconds."""


def read_kernel_table(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Return a table of kernel timings.

    Raises
    ------
    InputError
        When it cannot be read, or lacks a column.
    """
    name = os.fspath(path)
    try:
        frame = pd.read_parquet(Path(path))
    except (OSError, ValueError) as error:
        raise InputError(f"must be a table of kernel timings: {error}", location=name) from None
    missing = [column for column in COLUMNS if column not in frame.columns]
    if missing:
        raise InputError(f"must have a column {missing[0]!r}", location=name)
    return frame
