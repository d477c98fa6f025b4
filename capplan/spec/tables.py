"""Columns of CSV and Parquet files that a workload file refers to."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capplan.errors import InputError
from capplan.spec.base import Key, checked, unknown_key
from capplan.spec.files import read_text, reason
from capplan.spec.lengths import Lengths
from capplan.spec.workload import AdapterFields
from capplan.spec.yaml_source import parse_scalar

if TYPE_CHECKING:
    import pandas as pd


def read_adapters(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> list[AdapterFields]:
    """Read a CSV file of adapters, one per line; a rate that is not among ``columns`` is 0.

    Raises
    ------
    InputError
        For a missing or unknown column, or the first value that breaks a rule, with file and line.
    """
    rows = csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header = list(rows.fieldnames or ())
        for name in columns:
            if name not in header:
                raise InputError("column is missing", location=f"{path}: {name}")
        for name in header:
            if name not in (*columns, *optional) or header.count(name) > 1:
                rule = (
                    "column must not repeat" if name in columns else unknown_key(name, (*columns, *optional))
                )
                raise InputError(rule.replace("key", "column"), location=f"{path}:1: {name}")
        adapters: dict[str, AdapterFields] = {}
        for row in rows:
            adapter = _adapter_of(row, path, rows.line_num)
            if adapter.name in adapters:
                raise InputError("must be unique", adapter.name, f"{path}:{rows.line_num}: name")
            adapters[adapter.name] = adapter
    except csv.Error as error:
        raise InputError(f"must be CSV: {error}", location=f"{path}:{rows.reader.line_num}") from None
    if not adapters:
        raise InputError("must hold at least one adapter", location=str(path))
    return list(adapters.values())


def _adapter_of(row: dict[str | Any, str | Any], path: Path, line: int) -> AdapterFields:
    if None in row or None in row.values():
        raise InputError("must have as many fields as the header", location=f"{path}:{line}")
    cells = {name: text.strip() for name, text in row.items()}
    data: dict[str, Any] = {"rate_rps": 0.0}
    for name, text in cells.items():
        data[name] = parse_scalar(text) if name in ("rank", "rate_rps") else text
    if not data.get("path"):
        data.pop("path", None)

    def locate(key: Key) -> str:
        return f"{path}:{line}: {key[0]}" if key else f"{path}:{line}"

    return checked(AdapterFields, data, locate)


def read_lengths(path: Path, column: str) -> Lengths:
    """Read one column of lengths as a histogram of exact values.

    Raises
    ------
    InputError
        For an unreadable file, a missing column, or a value that is not a length.
    """
    tokens = read_columns(path, (column,))[column].to_numpy()
    try:
        return Lengths.of(tokens)
    except InputError as error:
        raise InputError(error.rule, error.value, f"{path}: {column}") from None


def read_columns(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> pd.DataFrame:
    """Read columns of a .parquet file, or of a CSV file under any other name; ``optional`` ones if there.

    Raises
    ------
    InputError
        For an unreadable file or a missing column.
    """
    import pandas as pd
    import pyarrow as pa

    try:
        if path.suffix == ".parquet":
            table = pd.read_parquet(path)
        else:
            keep_text = {"adapter": str} if "adapter" in (*columns, *optional) else None
            table = pd.read_csv(path, dtype=keep_text, keep_default_na=False, na_values=[""])
    except (
        OSError,
        ValueError,
        pa.ArrowException,
    ) as error:  # ValueError: what pandas raises for broken text
        raise InputError(f"cannot be read: {reason(error)}", location=str(path)) from None
    for name in columns:
        if name not in table.columns:
            raise InputError("column is missing", location=f"{path}: {name}")
    return table[[*columns, *(name for name in optional if name in table.columns)]]
