"""Reading the tables of a calibration: every number checked before anything is made of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.spec.tables import read_columns

if TYPE_CHECKING:
    import pandas as pd


def read_table(
    path: str | Path,
    required: Sequence[str],
    optional: Sequence[str] = (),
    *,
    text: Sequence[str] = (),
    blank: Sequence[str] = (),
) -> pd.DataFrame:
    """Read a CSV or Parquet table: every required column there and every number finite and not negative.

    Parameters
    ----------
    path
        A .parquet file, or a CSV file under any other name.
    required, optional
        Columns that must and that may be there; others are left alone.
    text
        Columns that are no numbers.
    blank
        Columns of numbers that may be blank, which is then NaN.

    Raises
    ------
    InputError
        Naming file, column and row (the first row after the header is 1).
    """
    path = Path(path)
    frame = read_columns(path, required, optional)
    if frame.empty:
        raise InputError("must hold at least one row", location=str(path))
    for name in frame.columns:
        if name not in text:
            frame[name] = _numbers(frame[name], f"{path}: {name}", may_be_blank=name in blank)
    return frame


def _numbers(column: pd.Series, location: str, *, may_be_blank: bool) -> NDArray[np.float64]:
    import pandas as pd

    values = pd.to_numeric(column, errors="coerce").to_numpy(np.float64)
    wrong = ~(np.isfinite(values) & (values >= 0.0))
    if may_be_blank:
        wrong &= column.notna().to_numpy(bool)
    if wrong.any():
        row = int(np.argmax(wrong))
        rule = "must be a finite number >= 0"
        raise InputError(rule, _plain(column.iloc[row]), f"{location}, row {row + 1}")
    return values


def require_positive(frame: pd.DataFrame, columns: Sequence[str], location: str) -> None:
    """Check that no value of these columns is 0; columns that are not there are fine.

    Raises
    ------
    InputError
        Naming the first row that breaks the rule.
    """
    for name in columns:
        if name in frame.columns and (frame[name] <= 0.0).any():
            row = int(np.argmax(frame[name].to_numpy() <= 0.0))
            at = f"{location}: {name}, row {row + 1}"
            raise InputError("must be above 0", _plain(frame[name].iloc[row]), at)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value
