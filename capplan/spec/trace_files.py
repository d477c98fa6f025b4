"""Readers of recorded requests in published and measured formats."""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from capplan.errors import InputError
from capplan.spec.files import error_reason, open_stream, read_text
from capplan.spec.lengths import LengthPairs
from capplan.spec.limits import beyond, input_limits
from capplan.spec.table_files import column_parts
from capplan.spec.trace import NS_PER_S, NamedRows, Trace

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

AssignAdapters: TypeAlias = Callable[[int], Sequence[str]]
"""Names the adapters of a number of requests, for a file without them."""

_MAX_BYTES: Final = 2**30
_MAX_HEADER: Final = 65_536
_MAX_LINE: Final = 2**24  # bytes; a record of Mooncake lists the hashes of its blocks
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
    by_name: dict[str, Any]
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
    values = columns.by_name
    if "adapter" not in values:
        if deal is None:
            rule = "column is missing; give adapters beside trace to deal the requests out to"
            raise InputError(rule, location=f"{path}: {columns.labels.get('adapter', 'adapter')}")
        values["adapter"] = deal(len(values["arrival_s"]))
    if base_model is not None:
        values["adapter"] = _with_base(values["adapter"], base_model)
    prompts, outputs = (values[name] for name in _LENGTHS)
    try:
        trace = Trace.from_arrays(values["arrival_s"], values["adapter"], prompts, outputs, duration_s)
        return trace if rate_rps is None else trace.at_rate(rate_rps)
    except InputError as error:
        raise _relabelled(error, path, columns.labels) from None


def _with_base(column: Sequence[Any] | NamedRows, base_model: str) -> Sequence[Any] | NamedRows:
    """Return the names of a column with that of the base model in place of empty ones."""

    def named(name: Any) -> Any:
        return base_model if _is_empty(name) else name

    return column.renamed(named) if isinstance(column, NamedRows) else list(map(named, column))


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
        return LengthPairs.from_arrays(*(columns.by_name[name] for name in _LENGTHS))
    except InputError as error:
        raise _relabelled(error, path, columns.labels) from None


def _relabelled(error: InputError, path: Path, labels: Mapping[str, str]) -> InputError:
    label = labels.get(error.location, error.location)
    return InputError(error.rule, error.value, f"{path}: {label}" if label else str(path))


def _read(
    path: Path, trace_format: TraceFormat | None, names: Sequence[str], optional: Sequence[str]
) -> _TraceColumns:
    import numpy as np

    kind = trace_format or _format_of(path)
    labels = _LABELS[kind]
    wanted = {name: labels[name] for name in names}
    extra = {name: labels[name] for name in optional if name in labels}
    match kind:
        case TraceFormat.TABLE | TraceFormat.AZURE:
            values = _table(path, wanted, extra, dated=kind is TraceFormat.AZURE)
        case TraceFormat.MOONCAKE:
            values = _json_lines(path, wanted)
            if "arrival_s" in values:
                values["arrival_s"] = np.asarray(values["arrival_s"]) / 1000
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


def _table(path: Path, wanted: Mapping[str, str], extra: Mapping[str, str], *, dated: bool) -> dict[str, Any]:
    """Return the columns of a table; with ``dated``, arrivals are dates with times."""
    import numpy as np

    columns: dict[str, list[NDArray[Any]]] = {}
    adapters: dict[Any, int] = {}
    rows = 0
    for part in column_parts(path, tuple(wanted.values()), tuple(extra.values()), _row_limit()):
        for name, label in {**wanted, **extra}.items():
            values: NDArray[Any]
            if label not in part.columns:
                continue
            if name == "adapter":
                values = _positions(part[label], adapters)
            elif name == "arrival_s" and dated:
                values = _nanoseconds(part[label], rows, path)
            else:
                values = part[label].to_numpy()
            columns.setdefault(name, []).append(values)
        rows += len(part)
    whole: dict[str, Any] = {name: np.concatenate(columns.pop(name)) for name in list(columns)}
    if "adapter" in whole:
        whole["adapter"] = NamedRows(tuple(adapters), whole["adapter"])
    if dated and "arrival_s" in whole:
        whole["arrival_s"] = _seconds_since_first(whole["arrival_s"], f"{path}: {wanted['arrival_s']}")
    return whole


def _row_limit() -> tuple[int, str]:
    most = input_limits().max_trace_rows
    return most, beyond(most, "requests", "--max-trace-rows")


def _positions(column: pd.Series, known: dict[Any, int]) -> NDArray[np.int32]:
    """Return the position of each row's name among the known ones, which grow by new ones."""
    import numpy as np
    import pandas as pd

    codes, distinct = pd.factorize(column.astype(object), use_na_sentinel=False)
    names = (None if _is_empty(name) else name for name in distinct.tolist())
    place = np.array([known.setdefault(name, len(known)) for name in names], np.int32)
    return place[codes]


def _nanoseconds(column: pd.Series, before: int, path: Path) -> NDArray[np.int64]:
    """Return a column of dates with times in nanoseconds; ``before`` it come so many rows."""
    import numpy as np
    import pandas as pd

    times = pd.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
    absent = times.isna().to_numpy()
    if absent.any():
        row = int(absent.argmax())
        rule = f"must be a time such as 2023-11-16 18:15:46.6805900 (row {before + row + 1})"
        raise InputError(rule, column.iloc[row], f"{path}: {column.name}")
    return times.dt.tz_localize(None).to_numpy("datetime64[ns]").astype(np.int64)


def _seconds_since_first(times_ns: NDArray[np.int64], location: str) -> NDArray[np.float64]:
    import numpy as np

    back = np.flatnonzero(np.diff(times_ns) < 0)
    if len(back):
        row = int(back[0]) + 1
        at = str(times_ns[row].astype("datetime64[ns]"))
        raise InputError(f"must be sorted by arrival (row {row + 1})", at, location)
    return (times_ns - times_ns[:1]) / NS_PER_S


def _json_lines(path: Path, wanted: Mapping[str, str]) -> dict[str, Any]:
    """Return the wanted fields of a file with one JSON object per line."""
    values = {name: array("d") for name in wanted}
    most, rule = _row_limit()
    for rows, (line, text) in enumerate(_lines(path), start=1):
        if rows > most:
            raise InputError(rule, location=str(path))
        record = _parsed(text, f"{path}:{line}")
        for name, label in wanted.items():
            if label not in record:
                raise InputError("is required", location=f"{path}:{line}: {label}")
            value = record[label]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError("must be a number", value, f"{path}:{line}: {label}")
            try:
                values[name].append(value)
            except OverflowError:
                raise InputError("must be a finite number", value, f"{path}:{line}: {label}") from None
    return dict(values)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file that are not empty, with their numbers."""
    try:
        with open_stream(path) as file:
            for line, raw in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), start=1):
                if len(raw) > _MAX_LINE:
                    rule = f"a line must not be longer than {_MAX_LINE >> 20} MiB"
                    raise InputError(rule, location=f"{path}:{line}")
                text = raw.decode("utf-8-sig" if line == 1 else "utf-8").strip()
                if text:
                    yield line, text
    except InputError:
        raise
    except UnicodeDecodeError:
        raise InputError("must be UTF-8 text", location=f"{path}:{line}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read: {error_reason(error)}", location=str(path)) from None


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
    if not isinstance(errors, list):
        raise InputError("must be a list", errors, f"{path}: errors")
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
