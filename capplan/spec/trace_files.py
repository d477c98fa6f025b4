"""Readers of recorded requests in published and measured formats."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from capplan.errors import InputError
from capplan.spec.files import read_columns, read_text
from capplan.spec.lengths import LengthPairs
from capplan.spec.trace import Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

AssignAdapters: TypeAlias = Callable[[int], Sequence[str]]
"""Names the adapters of a number of requests, for a file without them."""

_MAX_BYTES: Final = 2**30
_MAX_HEADER: Final = 65_536
_LENGTHS: Final = ("prompt_tokens", "output_tokens")


class TraceFormat(StrEnum):
    """Layout of a file of requests."""

    TABLE = "table"
    AZURE = "azure"
    MOONCAKE = "mooncake"
    VLLM = "vllm"


_LABELS: Final[Mapping[TraceFormat, Mapping[str, str]]] = MappingProxyType(
    {
        TraceFormat.TABLE: {name: name for name in ("arrival_s", "adapter", *_LENGTHS)},
        TraceFormat.AZURE: {
            "arrival_s": "TIMESTAMP",
            "prompt_tokens": "ContextTokens",
            "output_tokens": "GeneratedTokens",
        },
        TraceFormat.MOONCAKE: {
            "arrival_s": "timestamp",
            "prompt_tokens": "input_length",
            "output_tokens": "output_length",
        },
        TraceFormat.VLLM: {
            "arrival_s": "start_times",
            "adapter": "lora_modules",
            "prompt_tokens": "input_lens",
            "output_tokens": "output_lens",
        },
    }
)


class _TraceColumns(NamedTuple):
    values: dict[str, Any]
    labels: Mapping[str, str]


def read_trace(
    path: Path,
    duration_s: float | None = None,
    trace_format: TraceFormat | None = None,
    rate_rps: float | None = None,
    deal: AssignAdapters | None = None,
    base_model: str | None = None,
) -> Trace:
    """Read recorded requests.

    Parameters
    ----------
    path : Path
        A table (Parquet or CSV) with columns arrival_s, prompt_tokens, output_tokens and, if known, adapter;
        the CSV of the Azure LLM inference traces; Mooncake's JSONL; the result JSON of ``vllm bench serve``.
    duration_s : float, optional
        Length of the recording; the last arrival by default.
    trace_format : TraceFormat, optional
        By default .jsonl is Mooncake's, .json vLLM's, a CSV file with a column ContextTokens Azure's.
    rate_rps : float, optional
        Mean rate to replay at: all times are scaled in proportion.
    deal : callable, optional
        Names the adapters where the file does not.
    base_model : str, optional
        Name that stands for an empty adapter name: a request of the base model.

    Raises
    ------
    InputError
        For an unreadable file, a missing column, or the first row that breaks a rule, with file and column.
    """
    columns = _read(path, trace_format, ("arrival_s", *_LENGTHS), ("adapter",))
    values = columns.values
    if "adapter" not in values:
        if deal is None:
            rule = "column is missing; give adapters beside trace to deal the requests out to"
            raise InputError(rule, location=f"{path}: {columns.labels.get('adapter', 'adapter')}")
        values["adapter"] = deal(len(values["arrival_s"]))
    if base_model is not None:
        values["adapter"] = [base_model if _is_empty(name) else name for name in values["adapter"]]
    prompts, outputs = (values[name] for name in _LENGTHS)
    try:
        trace = Trace.from_arrays(values["arrival_s"], values["adapter"], prompts, outputs, duration_s)
        return trace if rate_rps is None else trace.at_rate(rate_rps)
    except InputError as error:
        raise _relabelled(error, path, columns.labels) from None


def _is_empty(name: object) -> bool:
    """Return whether a cell is empty text, null, or the NaN that pandas reads from an empty cell."""
    return name is None or name == "" or name != name


def read_length_pairs(path: Path, trace_format: TraceFormat | None = None) -> LengthPairs:
    """Read prompt and output length of each request of a file that :func:`read_trace` reads.

    A table needs no other columns than these two.

    Raises
    ------
    InputError
        As :func:`read_trace`.
    """
    columns = _read(path, trace_format, _LENGTHS, ())
    try:
        return LengthPairs.from_arrays(*(columns.values[name] for name in _LENGTHS))
    except InputError as error:
        raise _relabelled(error, path, columns.labels) from None


def _relabelled(error: InputError, path: Path, labels: Mapping[str, str]) -> InputError:
    label = labels.get(error.location, error.location)
    return InputError(error.rule, error.value, f"{path}: {label}" if label else str(path))


def _read(
    path: Path, trace_format: TraceFormat | None, names: Sequence[str], optional: Sequence[str]
) -> _TraceColumns:
    kind = trace_format or _format_of(path)
    labels = _LABELS[kind]
    wanted = {name: labels[name] for name in names}
    extra = {name: labels[name] for name in optional if name in labels}
    match kind:
        case TraceFormat.TABLE | TraceFormat.AZURE:
            table = read_columns(path, tuple(wanted.values()), tuple(extra.values()))
            seen = {name: label for name, label in (wanted | extra).items() if label in table.columns}
            values: dict[str, Any] = {name: table[label].to_numpy() for name, label in seen.items()}
            if "adapter" in values:
                values["adapter"] = values["adapter"].astype(object).tolist()
            if kind is TraceFormat.AZURE and "arrival_s" in values:
                values["arrival_s"] = _seconds_of_timestamps(table[labels["arrival_s"]], path)
        case TraceFormat.MOONCAKE:
            values = _json_lines(path, wanted)
            if "arrival_s" in values:
                values["arrival_s"] = [time_ms / 1000 for time_ms in values["arrival_s"]]
        case TraceFormat.VLLM:
            values = _vllm_result(path, wanted, extra)
    return _TraceColumns(values, labels)


def _format_of(path: Path) -> TraceFormat:
    match path.suffix:
        case ".jsonl":
            return TraceFormat.MOONCAKE
        case ".json":
            return TraceFormat.VLLM
        case ".csv":
            header = _first_line(path)
            is_azure = b"TIMESTAMP" in header or b"ContextTokens" in header
            return TraceFormat.AZURE if is_azure else TraceFormat.TABLE
        case _:
            return TraceFormat.TABLE


def _first_line(path: Path) -> bytes:
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        return file.readline(_MAX_HEADER)
    return b""  # the reader of the whole file reports the error


def _seconds_of_timestamps(column: Any, path: Path) -> NDArray[np.float64]:
    """Return seconds since the first of a column of dates with times."""
    import numpy as np
    import pandas as pd

    times = pd.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
    absent = times.isna().to_numpy()
    if absent.any():
        row = int(absent.argmax())
        rule = f"must be a time such as 2023-11-16 18:15:46.6805900 (row {row + 1})"
        raise InputError(rule, column.iloc[row], f"{path}: {column.name}")
    since = (times - times.iloc[0]).dt.total_seconds().to_numpy(dtype=np.float64) if len(times) else times
    back = np.flatnonzero(np.diff(since) < 0)
    if len(back):
        row = int(back[0]) + 1
        raise InputError(
            f"must be sorted by arrival (row {row + 1})", column.iloc[row], f"{path}: {column.name}"
        )
    return np.asarray(since, dtype=np.float64)


def _json_lines(path: Path, wanted: Mapping[str, str]) -> dict[str, Any]:
    """Return the wanted fields of a file with one JSON object per line."""
    values: dict[str, list[float]] = {name: [] for name in wanted}
    for line, text in enumerate(read_text(path, _MAX_BYTES).splitlines(), start=1):
        if not text.strip():
            continue
        record = _parsed(text, f"{path}:{line}")
        for name, label in wanted.items():
            if label not in record:
                raise InputError("is required", location=f"{path}:{line}: {label}")
            value = record[label]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError("must be a number", value, f"{path}:{line}: {label}")
            values[name].append(value)
    return dict(values)


def _vllm_result(path: Path, wanted: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, Any]:
    """Return columns of ``vllm bench serve --save-result --save-detailed``, by start, without failures."""
    record = _parsed(read_text(path, _MAX_BYTES), str(path))
    for label in wanted.values():
        if label not in record:
            rule = "is required: run vllm bench serve with --save-result --save-detailed"
            raise InputError(rule, location=f"{path}: {label}")
    labels = dict(wanted) | {
        name: label for name, label in extra.items() if isinstance(record.get(label), list)
    }
    columns = {name: record[label] for name, label in labels.items()}
    requests: int | None = None
    for name, column in columns.items():
        if not isinstance(column, list) or requests not in (None, len(column)):
            rule = f"must be a list as long as {next(iter(wanted.values()))}"
            raise InputError(rule, location=f"{path}: {labels[name]}")
        requests = len(column)
    errors = record.get("errors") or []
    kept = [row for row in range(requests or 0) if row >= len(errors) or not errors[row]]
    starts = columns.get("arrival_s")
    if starts is None:
        return {name: [column[row] for row in kept] for name, column in columns.items()}
    for row in kept:
        if isinstance(starts[row], bool) or not isinstance(starts[row], int | float):
            location = f"{path}: {labels['arrival_s']}"
            raise InputError(f"must be a number (row {row + 1})", starts[row], location)
    kept.sort(key=starts.__getitem__)
    values: dict[str, Any] = {name: [column[row] for row in kept] for name, column in columns.items()}
    values["arrival_s"] = [start - values["arrival_s"][0] for start in values["arrival_s"]]
    return values


def _parsed(text: str, location: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"must be JSON: {error}", location=location) from None
    if not isinstance(record, dict):
        raise InputError("must be a mapping of keys to values", location=location)
    return record
