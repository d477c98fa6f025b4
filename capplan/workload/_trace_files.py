"""Readers of recorded requests in published and measured formats.

A layout says which columns hold arrival and lengths; CSV, Parquet and JSON files may have any of them. The
unit of the times follows from the name of their column, the definition of the format, their size and rate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, TypeAlias

from capplan.errors import InputError
from capplan.spec import (
    MAX_COLUMNS,
    NS_PER_S,
    Header,
    LengthPairs,
    NamedRows,
    TimeUnit,
    Trace,
    TraceFormat,
    beyond,
    input_limits,
    lengths_column,
    open_unpacked,
    read_at_most,
    require_each,
    table_parts,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray


PER_S: Final[Mapping[TimeUnit, int]] = MappingProxyType(
    {TimeUnit.S: 1, TimeUnit.MS: 10**3, TimeUnit.US: 10**6, TimeUnit.NS: NS_PER_S}
)
UNIT_WORDS: Final[Mapping[TimeUnit, str]] = MappingProxyType(
    {
        TimeUnit.S: "seconds",
        TimeUnit.MS: "milliseconds",
        TimeUnit.US: "microseconds",
        TimeUnit.NS: "nanoseconds",
    }
)
WHOLE: Final = 1e-6  # rounding of milliseconds that were computed from seconds
EPOCH_S: Final = 1e9  # 2001; ten times as much is 2286, so the unit of a date follows from its size

_UNIT_OF_NAME: Final = re.compile(r"(?:^|[^a-z])(s|ms|us|ns)\W*$")
_LEAST_RPS: Final = 0.01  # public traces have 0.01 to 75 requests per second
_MOST_RPS: Final = 100.0


@dataclass(frozen=True)
class TimeColumn:
    """What is known of a column of times that are numbers.

    Parameters
    ----------
    label
        Its name.
    low, high
        First and last time, as they are.
    count
        Number of times.
    whole
        Whether all are whole numbers.
    format_name, defined
        Format of the file, and its unit by definition; None: it has none.
    firm
        Whether all files of the format have that unit.
    """

    label: str
    low: float
    high: float
    count: int
    whole: bool
    format_name: str = ""
    defined: TimeUnit | None = None
    firm: bool = False


def time_unit_of(column: TimeColumn, location: str, option: str) -> tuple[TimeUnit, str]:
    """Return the unit of times and the reason, which is empty if the name of the column has the unit.

    Parameters
    ----------
    location
        The column, for messages.
    option
        What states the unit otherwise.

    Raises
    ------
    InputError
        If the definition of the format and the values contradict each other, or neither implies a unit.
    """
    low, high = column.low, column.high
    word = _UNIT_OF_NAME.search(column.label.lower())
    named = None if word is None else TimeUnit(word.group(1))
    defined = named or column.defined
    rates = {unit: (column.count - 1) * per_s / (high - low) for unit, per_s in PER_S.items() if high > low}
    dated = next((u for u, per_s in PER_S.items() if EPOCH_S <= low / per_s < 10 * EPOCH_S), None)
    if dated is not None and high / PER_S[dated] >= 10 * EPOCH_S:
        rule = f"must not mix units: the first time is a date in {UNIT_WORDS[dated]}, the last one is not"
        raise InputError(rule, high, location)
    if dated is not None and named in (None, dated):
        return dated, "" if named else "since they are dates by their size"
    if dated is None and defined is not None and (named or column.firm):
        return defined, "" if named else f"the unit of format {column.format_name}"
    plausible = [unit for unit, rate in rates.items() if _LEAST_RPS <= rate <= _MOST_RPS]
    # Published traces in seconds have fractions, those in milliseconds have none.
    contradicted = column.whole is (defined is TimeUnit.S)
    if dated is None and defined is not None:
        agrees = defined in plausible or not plausible
        if agrees and (not contradicted or defined is TimeUnit.S or plausible == [defined]):
            return defined, f"the unit of format {column.format_name}"
        other = TimeUnit.MS if defined is TimeUnit.S else TimeUnit.S
        if contradicted and not agrees and other in plausible:
            numbers = "whole numbers" if column.whole else "fractions"
            reason = f"other than in format {column.format_name}, by their rate and since they are {numbers}"
            return other, reason
    elif dated is None and len(plausible) == 1 and (column.whole or plausible == [TimeUnit.S]):
        return plausible[0], "by their rate"
    said = " or ".join(
        f"{rates[unit]:.3g} requests per second in {UNIT_WORDS[unit]}"
        for unit in (TimeUnit.S, TimeUnit.MS)
        if rates
    )
    rule = f"unit is not clear{f', {said}' if said else ''}; state {option}: s, ms, us or ns"
    raise InputError(rule, location=location)


AssignAdapters: TypeAlias = Callable[[int], Sequence[str]]
"""Names the adapters of a number of requests, for a file without them."""

_MAX_BYTES: Final = 2**30  # of a result of vllm bench serve
_MAX_JSON_BYTES: Final = 2**28  # of records that are not one per line, whose text is kept whole
_MAX_LINE: Final = 2**24  # bytes; a record of Mooncake lists the hashes of its blocks
_JSON_PART_ROWS: Final = 100_000
_LENGTHS: Final = ("prompt_tokens", "output_tokens")


class _Layout(NamedTuple):
    arrival: str
    prompt: str
    output: str
    unit: TimeUnit | None = None
    """Unit of the times by the definition of the format."""
    marks: tuple[str, ...] = ()
    """Columns of which one tells the format from others with the same names."""
    adapter: str = "adapter"

    def labels(self) -> dict[str, str]:
        """Return the columns of the file by our names."""
        names = ("arrival_s", "prompt_tokens", "output_tokens", "adapter")
        return dict(zip(names, (self.arrival, self.prompt, self.output, self.adapter), strict=True))


_MOONCAKE: Final = ("timestamp", "input_length", "output_length")
_LAYOUTS: Final[Mapping[TraceFormat, _Layout]] = MappingProxyType(
    {  # in the order in which a file is compared with them
        TraceFormat.TABLE: _Layout("arrival_s", "prompt_tokens", "output_tokens", TimeUnit.S),
        TraceFormat.AZURE: _Layout("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        TraceFormat.BURSTGPT: _Layout("Timestamp", "Request tokens", "Response tokens", TimeUnit.S),
        TraceFormat.RAGPULSE: _Layout(*_MOONCAKE, TimeUnit.S, ("hash_ids.sys_prompt", "hash_ids.user_input")),
        TraceFormat.BAILIAN: _Layout(*_MOONCAKE, TimeUnit.S, ("chat_id", "parent_chat_id", "turn", "type")),
        TraceFormat.MOONCAKE: _Layout(*_MOONCAKE, TimeUnit.MS),
        TraceFormat.VLLM: _Layout(
            "start_times", "input_lens", "output_lens", TimeUnit.S, adapter="lora_modules"
        ),
    }
)
_VLLM_KEYS: Final = ("input_lens", "total_input_tokens", "request_throughput")
_FIRM: Final = (TraceFormat.BURSTGPT, TraceFormat.RAGPULSE, TraceFormat.VLLM)
"""Formats whose files are all in the same unit."""
_LONG_AGO_S: Final = 1e8  # three years; a trace that begins later counts from another time
_LATE_START: Final = 0.1  # of the recording
_LATE_S: Final = 60.0
_MAX_BITS: Final = 1000  # of whole numbers


@dataclass
class _Requests:
    """Columns of a file, and what its reader assumed."""

    path: Path
    stated: TraceFormat | None
    columns: dict[str, str]
    kind: TraceFormat = TraceFormat.TABLE
    labels: Mapping[str, str] = field(default_factory=dict)
    header: Header = field(default_factory=lambda: Header(Path(), ()))
    by_name: dict[str, Any] = field(default_factory=dict)
    rows: int = 0

    def choose(self, header: Header, names: Sequence[str]) -> dict[str, int]:
        """Choose the layout, and return the positions of its columns."""
        required = [*names, *(name for name in self.columns if name not in names)]
        self.header = header
        self.kind = self._kind(header, required)
        self.labels = _LAYOUTS[self.kind].labels() | self.columns
        ours = ", ".join(("arrival_s", *_LENGTHS, "adapter"))
        hint = f"; formats are {', '.join(TraceFormat)}, and columns: {{OURS: THEIRS}} names others ({ours})"
        found = {name: header.require(self.labels[name], hint) for name in required}
        adapter = header.find(self.labels["adapter"]) if "arrival_s" in names else None
        return found | ({} if adapter is None else {"adapter": adapter})

    def _kind(self, header: Header, names: Sequence[str]) -> TraceFormat:
        """Return the stated layout, the first whose columns are all there, or else the nearest."""
        if self.stated is not None:
            return self.stated

        def present(kind: TraceFormat) -> tuple[int, int]:
            labels = [(_LAYOUTS[kind].labels() | self.columns)[name] for name in names]
            marks = _LAYOUTS[kind].marks
            if marks and not any(header.find(mark) is not None for mark in marks):
                return 0, 0
            found = sum(header.find(label) is not None for label in labels)
            return found, len({*labels} & {*header.names})

        return max(_LAYOUTS, key=present)

    def unused(self) -> list[str]:
        """Return the columns of the file that are not read."""
        used = {label.casefold() for label in self.labels.values()}
        whole = set(self.header.names)
        return [
            name
            for name in self.header.names
            if name and name.casefold() not in used and not ("." in name and name.split(".")[0] in whole)
        ]

    def relabelled(self, error: InputError) -> InputError:
        """Return an error with the file and its name of the column."""
        label = self.labels.get(error.location, error.location)
        return InputError(error.rule, error.value, f"{self.path}: {label}" if label else str(self.path))


def read_trace(
    path: Path,
    duration_s: float | None = None,
    trace_format: TraceFormat | None = None,
    rate_rps: float | None = None,
    deal: AssignAdapters | None = None,
    base_model: str | None = None,
    *,
    time_unit: TimeUnit | None = None,
    columns: Mapping[str, str] | None = None,
) -> Trace:
    """Read recorded requests; those without output tokens, which failed, are left out.

    Parameters
    ----------
    path : Path
        Requests in a layout of `TraceFormat`: a CSV or Parquet file, JSON records, or the result of ``vllm
        bench serve``.
    duration_s : float, optional
        Length of the recording; the last arrival by default.
    trace_format : TraceFormat, optional
        By default the one whose columns the file has.
    rate_rps : float, optional
        Mean rate to replay at: all times are scaled in proportion.
    deal : callable, optional
        Names the adapters where the file does not.
    base_model : str, optional
        Name that stands for an empty adapter name: a request of the base model.
    time_unit : TimeUnit, optional
        By default that of the format, checked against the values and the rate.
    columns : mapping, optional
        Columns of the file by our names: arrival_s, prompt_tokens, output_tokens, adapter.

    Returns
    -------
    Trace
        Its notes say what was guessed and left out.

    Raises
    ------
    InputError
        For an unreadable file, a missing column, a unit that the file leaves open, or the first row that
        breaks a rule, with file and column.
    """
    requests = _read(path, trace_format, columns, ("arrival_s", *_LENGTHS))
    values = requests.by_name
    if "adapter" not in values:
        if deal is None:
            rule = "column is missing; give adapters beside trace to deal the requests out to"
            raise InputError(rule, location=f"{path}: {requests.labels['adapter']}")
        values["adapter"] = deal(len(values["arrival_s"]))
    if base_model is not None:
        values["adapter"] = _with_base(values["adapter"], base_model)
    arrivals_s, notes = _arrivals_s(requests, time_unit)
    prompts, outputs = (values[name] for name in _LENGTHS)
    try:
        trace = Trace.from_arrays(arrivals_s, values["adapter"], prompts, outputs, duration_s)
        trace = replace(trace, notes=(*notes, *_left_out(requests)))
        return trace if rate_rps is None else trace.at_rate(rate_rps)
    except InputError as error:
        raise requests.relabelled(error) from None


def _with_base(column: Sequence[Any] | NamedRows, base_model: str) -> Sequence[Any] | NamedRows:
    """Return the names of a column with that of the base model in place of empty ones."""

    def named(name: Any) -> Any:
        return base_model if _is_empty(name) else name

    return column.renamed(named) if isinstance(column, NamedRows) else list(map(named, column))


def _is_empty(name: object) -> bool:
    """Return whether a cell is empty text, null, or the NaN that pandas reads from an empty cell."""
    return name is None or name == "" or name != name


def _left_out(requests: _Requests) -> Iterator[str]:
    """Yield notes on requests and columns that are not used."""
    failed = requests.rows - len(requests.by_name["output_tokens"])
    if failed:
        yield f"{failed:,} of {requests.rows:,} requests without output tokens failed and are left out"
    unused = [] if requests.kind is TraceFormat.VLLM else requests.unused()
    if any(name.startswith("hash_ids") for name in unused):
        yield "hash_ids are not used yet: prompts are simulated without the prefix hits that they stand for"
    others = [name for name in unused if not name.startswith("hash_ids")]
    if others:
        more = f" and {len(others) - 8:,} more" if len(others) > 8 else ""
        yield f"columns not used: {', '.join(others[:8])}{more}"


def read_length_pairs(
    path: Path, trace_format: TraceFormat | None = None, columns: Mapping[str, str] | None = None
) -> LengthPairs:
    """Read prompt and output length of each request of a file that :func:`read_trace` reads.

    A table needs no other columns than these two.

    Raises
    ------
    InputError
        As :func:`read_trace`.
    """
    requests = _read(path, trace_format, columns, _LENGTHS)
    try:
        return LengthPairs.from_arrays(*(requests.by_name[name] for name in _LENGTHS))
    except InputError as error:
        raise requests.relabelled(error) from None


def _read(
    path: Path, stated: TraceFormat | None, columns: Mapping[str, str] | None, names: Sequence[str]
) -> _Requests:
    import numpy as np

    requests = _Requests(path, stated, dict(columns or {}))
    kept: dict[str, list[NDArray[Any]]] = {}
    adapters: dict[Any, int] = {}
    last: NDArray[Any] | None = None
    for part in _parts(requests, names):
        rows = part.index.to_numpy()
        requests.rows += len(rows)
        values = {}
        try:
            if "arrival_s" in part:
                values["arrival_s"] = _times(part["arrival_s"], last)
                last = values["arrival_s"][-1:] if len(rows) else last
            for name in _LENGTHS:
                column = _numbers(part[name], name)
                values[name] = lengths_column(name, column, int(name == "prompt_tokens"), rows)
        except InputError as error:
            raise requests.relabelled(error) from None
        if "adapter" in part:
            values["adapter"] = _positions(part["adapter"], adapters)
        answered = values["output_tokens"] > 0
        for name, column in values.items():
            kept.setdefault(name, []).append(column[answered])
    requests.by_name = {name: np.concatenate(kept.pop(name)) for name in list(kept)}
    if "adapter" in requests.by_name:
        requests.by_name["adapter"] = NamedRows(tuple(adapters), requests.by_name["adapter"])
    if requests.rows and not len(requests.by_name["output_tokens"]):
        label = f"{path}: {requests.labels['output_tokens']}"
        raise InputError("must be above 0 for at least one request", location=label)
    return requests


def _parts(requests: _Requests, names: Sequence[str]) -> Iterator[pd.DataFrame]:
    """Yield the columns of the file in parts; the index is the row in the file."""
    path, most = requests.path, input_limits().max_trace_rows
    limit = most, beyond(most, "requests", "--max-trace-rows")
    known = [label for layout in _LAYOUTS.values() for label in layout.labels().values()]

    def choose(header: Header) -> dict[str, int]:
        return requests.choose(header, names)

    with open_unpacked(path) as file:
        start = file.peek(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        if start not in (b"{", b"[") and requests.stated is not TraceFormat.VLLM:
            yield from table_parts(path, file, choose, limit, [*known, *requests.columns.values()])
            return
        line = file.readline(_MAX_LINE + 1)
        is_result = (
            any(f'"{key}"'.encode() in line for key in _VLLM_KEYS) or requests.stated is TraceFormat.VLLM
        )
        if not is_result:
            records = _json_records(path, line, file)
            first = next(records, None)
            is_result = first is not None and any(key in first[1] for key in _VLLM_KEYS)
            if not is_result:
                yield from _record_parts(requests, first, records, choose, limit)
    if is_result:
        yield _vllm_part(requests, names)


def _positions(column: pd.Series, known: dict[Any, int]) -> NDArray[np.int32]:
    """Return the position of each row's name among the known ones, which grow by new ones."""
    import numpy as np
    import pandas as pd

    codes, distinct = pd.factorize(column.astype(object), use_na_sentinel=False)
    names = (None if _is_empty(name) else name for name in distinct.tolist())
    place = np.array([known.setdefault(name, len(known)) for name in names], np.int32)
    return place[codes]


def _numbers(column: pd.Series, name: str) -> NDArray[Any]:
    """Return a column of numbers; one of text has the first cell that is none."""
    import pandas as pd

    if column.dtype.kind in "iuf":
        return column.to_numpy()
    numbers = pd.to_numeric(column.astype(object).where(column.map(_is_number_like)), errors="coerce")
    wrong = numbers.isna() & column.notna()
    if wrong.any() or column.dtype.kind == "b":
        row = int(wrong.to_numpy().argmax())
        raise InputError(f"must be a number (row {column.index[row] + 1})", _plain(column.iloc[row]), name)
    return numbers.to_numpy(float)


def _is_number_like(value: object) -> bool:
    """Return whether a cell may be a number: text, or a number that a float can hold."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= _MAX_BITS
    return whole or isinstance(value, str | float)


def _plain(value: Any) -> object:
    return value.item() if hasattr(value, "item") else value


def _times(column: pd.Series, last: NDArray[Any] | None) -> NDArray[Any]:
    """Return times as numbers, or dates as datetime64[ns] of UTC, in order from `last` on.

    Cells that are neither, and times that are negative, not finite, or before the previous one, are errors.
    """
    import numpy as np
    import pandas as pd

    rows = column.index.to_numpy()
    if column.dtype.kind not in "iuf":
        texts = column.astype(object)
        numbers = pd.to_numeric(texts.where(texts.map(_is_number_like)), errors="coerce")
        other = (numbers.isna() & texts.notna()).to_numpy()
        if pd.api.types.is_datetime64_any_dtype(column) or other[:1].any():
            return _dates(column, rows, last)
        if other.any():
            row = int(other.argmax())
            raise InputError(f"must be a number (row {rows[row] + 1})", _plain(texts.iloc[row]), "arrival_s")
        column = numbers
    times = column.to_numpy(np.float64) if column.dtype.kind == "f" else column.to_numpy()
    if last is not None and last.dtype.kind == "M":
        rule = f"must be a time with a date, as before (row {rows[0] + 1})"
        raise InputError(rule, _plain(times[0]), "arrival_s")
    holds = np.isfinite(times) & (times >= 0)
    require_each("arrival_s", times, holds, "must be a finite number >= 0", rows)
    before = np.concatenate([times[:1] if last is None else last, times[:-1]])
    require_each("arrival_s", times, times >= before[: len(times)], "must be sorted by arrival", rows)
    return times


def _dates(column: pd.Series, rows: NDArray[Any], last: NDArray[Any] | None) -> NDArray[np.datetime64]:
    import numpy as np
    import pandas as pd

    dates = column
    if not pd.api.types.is_datetime64_any_dtype(column):
        texts = column.astype(object)
        dates = texts.where(texts.map(lambda cell: isinstance(cell, str)))
        zoned = dates.dropna().str.contains(r"(?:Z|[+-]\d\d:?\d\d)\s*$", regex=True)
        other = zoned.index[zoned != zoned.iloc[:1].any()]
        if len(other):
            rule = f"must have a time zone in all rows or in none (row {other[0] + 1})"
            raise InputError(rule, column[other[0]], "arrival_s")
    times = pd.to_datetime(dates, errors="coerce", format="ISO8601", utc=True)
    absent = times.isna().to_numpy()
    if absent.any() or (last is not None and last.dtype.kind != "M"):
        row = int(absent.argmax())
        rule = f"must be a time such as 2023-11-16 18:15:46.6805900, or all numbers (row {rows[row] + 1})"
        raise InputError(rule, _plain(column.iloc[row]), "arrival_s")
    try:
        values = times.dt.tz_localize(None).dt.as_unit("ns").to_numpy()
    except ValueError:
        raise InputError("must be times from 1678 to 2262", location="arrival_s") from None
    before = np.concatenate([values[:1] if last is None else last, values[:-1]])
    back = np.flatnonzero(values < before[: len(values)])
    if len(back):
        row = int(back[0])
        raise InputError(f"must be sorted by arrival (row {rows[row] + 1})", str(values[row]), "arrival_s")
    return values


def _arrivals_s(requests: _Requests, stated: TimeUnit | None) -> tuple[NDArray[np.float64], list[str]]:
    """Return the arrivals in seconds, and notes on their unit."""
    import numpy as np

    times = requests.by_name["arrival_s"]
    label = requests.labels["arrival_s"]
    if times.dtype.kind == "M":
        if stated is not None:
            rule = "does not go with dates, which have no unit; leave out trace.time_unit"
            raise InputError(rule, stated.value, f"{requests.path}: {label}")
        return (times - times[:1]).astype(np.int64) / NS_PER_S, []
    if not len(times):
        return times.astype(float), []
    unit, reason = (stated, "") if stated is not None else _guessed_unit(requests, times)
    first_s, last_s = (float(times[place]) / PER_S[unit] for place in (0, -1))
    is_result = requests.kind is TraceFormat.VLLM
    counted = first_s >= _LONG_AGO_S or is_result
    arrivals_s = ((times - times[0]) if counted else times) / PER_S[unit]
    notes = []
    if reason and not is_result:
        span_s = last_s - first_s
        rate = f", {len(times) / span_s:.3g} per second" if span_s > 0 else ""
        notes.append(
            f"times are read as {UNIT_WORDS[unit]}, {reason}: {len(times):,} requests in {span_s:,.4g} s"
            f"{rate}; trace.time_unit states the unit"
        )
    if counted and not is_result:
        date = (
            datetime.fromtimestamp(first_s, UTC).isoformat(sep=" ", timespec="seconds")
            if first_s < 1e11
            else ""
        )
        notes.append(f"times are counted from the first request, at {date or f'{first_s:g} s'}")
    elif not counted and len(times) > 1 and first_s > max(_LATE_S, _LATE_START * last_s):
        notes.append(f"the first request is at {first_s:,.6g} s: the time before it counts as idle")
    return arrivals_s, notes


def _guessed_unit(requests: _Requests, times: NDArray[Any]) -> tuple[TimeUnit, str]:
    """Return the unit of times and the reason; see `time_unit_of`."""
    import numpy as np

    label = requests.labels["arrival_s"]
    whole = times.dtype.kind != "f" or bool((np.abs(times - np.rint(times)) <= WHOLE).all())
    column = TimeColumn(
        label, float(times[0]), float(times[-1]), len(times), whole, **_definition(requests.kind, label)
    )
    return time_unit_of(column, f"{requests.path}: {label}", "trace.time_unit")


def defined_unit(names: Sequence[str], label: str) -> dict[str, Any]:
    """Return what `TimeColumn` says of the published format that a file's columns are of, if they are."""
    folded = {name.casefold() for name in names}
    for kind, layout in _LAYOUTS.items():
        of_format = {layout.arrival, layout.prompt, layout.output}
        marked = not layout.marks or any(mark.casefold() in folded for mark in layout.marks)
        if marked and {name.casefold() for name in of_format} <= folded:
            return _definition(kind, label)
    return {}


def _definition(kind: TraceFormat, label: str) -> dict[str, Any]:
    layout = _LAYOUTS[kind]
    defined = layout.unit if label.casefold() == layout.arrival.casefold() else None
    return {"format_name": kind.value, "defined": defined, "firm": kind in _FIRM}


def _record_parts(
    requests: _Requests,
    first: tuple[str, dict[str, Any]] | None,
    others: Iterator[tuple[str, dict[str, Any]]],
    choose: Callable[[Header], Mapping[str, int]],
    limit: tuple[int, str],
) -> Iterator[pd.DataFrame]:
    """Yield the chosen fields of JSON records in parts."""
    import pandas as pd

    path = requests.path
    if first is None:
        raise InputError("must hold at least one request", location=str(path))
    nested = {
        f"{key}.{inner}" for key, value in first[1].items() if isinstance(value, dict) for inner in value
    }
    header = Header(path, (*first[1], *sorted(nested)))
    if len(header.names) > MAX_COLUMNS:
        raise InputError(f"a record must not have over {MAX_COLUMNS:,} fields", location=first[0])
    keys = {name: header.names[at] for name, at in choose(header).items()}
    part: dict[str, list[Any]] = {name: [] for name in keys}
    rows = 0

    def frame(count: int) -> pd.DataFrame:
        return pd.DataFrame(part, index=pd.RangeIndex(rows - count, rows))

    for location, record in chain([first], others):
        if "adapter" not in keys and requests.labels["adapter"] in record:
            rule = "must be in the first record too, null for the base model"
            raise InputError(rule, location=f"{location}: {requests.labels['adapter']}")
        for name, key in keys.items():
            part[name].append(_field(record, name, key, location))
        rows += 1
        if rows > limit[0]:
            raise InputError(limit[1], location=str(path))
        if rows % _JSON_PART_ROWS == 0:
            yield frame(_JSON_PART_ROWS)
            part = {name: [] for name in keys}
    yield frame(rows % _JSON_PART_ROWS)


def _field(record: Mapping[str, Any], name: str, key: str, location: str) -> Any:
    """Return a field of a record, of the type that it must have."""
    value = record.get(key)
    if name == "adapter":
        if value is not None and not isinstance(value, str):
            raise InputError("must be text", value, f"{location}: {key}")
        return value
    if key not in record:
        raise InputError("is required", location=f"{location}: {key}")
    if isinstance(value, str) and name == "arrival_s":
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError("must be a number", value, f"{location}: {key}")
    if not _is_number_like(value):
        raise InputError("must be a finite number", value, f"{location}: {key}")
    return value if isinstance(value, float) or abs(value) < 2**63 else float(value)


def _json_records(path: Path, start: bytes, file: BinaryIO) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file with their places: one per line, or the items of an array."""
    lines = _lines(path, chain([start], iter(lambda: file.readline(_MAX_LINE + 1), b"")))
    number, text = next(lines, (1, ""))
    if not text:
        return
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        yield f"{path}:{number}", record
        for number, text in lines:
            yield f"{path}:{number}", _mapping(_parsed(text, f"{path}:{number}"), f"{path}:{number}")
        return
    rest = [text]
    size = len(text)
    for _, more in lines:
        size += len(more)
        if size > _MAX_JSON_BYTES:
            rule = f"must not be larger than {_MAX_JSON_BYTES >> 20} MiB, unless each line is one request"
            raise InputError(rule, location=str(path))
        rest.append(more)
    for location, value in _json_values("\n".join(rest), path):
        yield location, _mapping(value, location)


def _lines(path: Path, raws: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file that are not empty, with their numbers."""
    for line, raw in enumerate(raws, start=1):
        if len(raw) > _MAX_LINE:
            rule = f"a line must not be longer than {_MAX_LINE >> 20} MiB"
            raise InputError(rule, location=f"{path}:{line}")
        try:
            text = raw.decode("utf-8-sig" if line == 1 else "utf-8").strip()
        except UnicodeDecodeError:
            raise InputError("must be UTF-8 text", location=f"{path}:{line}") from None
        if text:
            yield line, text


def _json_values(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the items of an array, or values that follow each other, one at a time."""
    decode, blank = json.JSONDecoder().raw_decode, re.compile(r"\s*")

    def skip(at: int) -> int:
        return blank.match(text, at).end()  # type: ignore[union-attr]

    def broken(words: str, at: int) -> InputError:
        return InputError(f"must be JSON: {words}", location=f"{path}:{text.count(chr(10), 0, at) + 1}")

    at = skip(0)
    is_array = text.startswith("[", at)
    at = skip(at + is_array)
    number = 0
    while not text.startswith("]", at) if is_array else at < len(text):
        try:
            value, at = decode(text, at)
        except json.JSONDecodeError as error:
            raise broken(error.msg, error.pos) from None
        except (ValueError, RecursionError):
            raise broken("nested too deep, or a number too long", at) from None
        number += 1
        yield f"{path}: item {number}", value
        at = skip(at)
        if is_array and text.startswith(",", at):
            at = skip(at + 1)
        elif is_array and not text.startswith("]", at):
            raise broken("expecting ',' or ']'", at)
    if is_array and skip(at + 1) < len(text):
        raise broken("text after the array", at + 1)


def read_vllm_result(path: Path) -> dict[str, Any]:
    """Read the only run in a result of ``vllm bench serve``; numbers may be infinite or none, as it writes.

    Raises
    ------
    InputError
        For a file that is none, or holds several runs.
    """
    with open_unpacked(path) as file:
        is_larger = path.stat().st_size > _MAX_BYTES
        content = b"" if is_larger else read_at_most(file, _MAX_BYTES)
    if is_larger or len(content) > _MAX_BYTES:
        raise InputError(f"must not be larger than {_MAX_BYTES >> 20} MiB", location=str(path))
    try:
        values = _json_values(content.decode("utf-8-sig"), path)
    except UnicodeDecodeError:
        raise InputError("must be UTF-8 text", location=str(path)) from None
    _, run = next(values, ("", None))
    record = _mapping(run, str(path))
    if next(values, None) is not None:
        rule = (
            "must be one run, but holds several, as vllm bench serve --append-result writes them: copy the "
            "line of one run to a file, as by sed -n 1p"
        )
        raise InputError(rule, location=str(path))
    return record


def _vllm_part(requests: _Requests, names: Sequence[str]) -> pd.DataFrame:
    """Return columns of ``vllm bench serve --save-result --save-detailed``, by start, without failures."""
    import pandas as pd

    path = requests.path
    record = read_vllm_result(path)
    requests.kind = TraceFormat.VLLM
    requests.labels = _LAYOUTS[TraceFormat.VLLM].labels() | requests.columns
    wanted = {name: requests.labels[name] for name in names}
    for label in wanted.values():
        if label not in record:
            rule = "is required: run vllm bench serve with --save-result --save-detailed"
            if label == "start_times" and "input_lens" in record:
                rule = (
                    "is missing: vllm bench serve writes it since vLLM 0.15 (January 2026); measure with "
                    "that version or a later one, or take only the lengths by requests.lengths_from"
                )
            raise InputError(rule, location=f"{path}: {label}")
    adapter = requests.labels["adapter"]
    if "arrival_s" in names and isinstance(record.get(adapter), list):
        wanted["adapter"] = adapter
    columns = {name: record[label] for name, label in wanted.items()}
    count: int | None = None
    for name, column in columns.items():
        if not isinstance(column, list) or count not in (None, len(column)):
            rule = f"must be a list as long as {next(iter(wanted.values()))}"
            raise InputError(rule, location=f"{path}: {wanted[name]}")
        count = len(column)
    errors = record.get("errors") or []
    if not isinstance(errors, list):
        raise InputError("must be a list", errors, f"{path}: errors")
    kept = [row for row in range(count or 0) if row >= len(errors) or not errors[row]]
    requests.rows += (count or 0) - len(kept)
    for name, kinds, words in (("arrival_s", int | float, "a number"), ("adapter", str | None, "text")):
        for row in kept if name in columns else ():
            value = columns[name][row]
            if isinstance(value, bool) or not isinstance(value, kinds):
                location = f"{path}: {wanted[name]}"
                raise InputError(f"must be {words} (row {row + 1})", value, location)
    if "arrival_s" in columns:
        kept.sort(key=columns["arrival_s"].__getitem__)
    return pd.DataFrame({name: [column[row] for row in kept] for name, column in columns.items()}, index=kept)


def _parsed(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"must be JSON: {error}", location=location) from None


def _mapping(value: Any, location: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError("must be a mapping of keys to values", location=location)
    return value
