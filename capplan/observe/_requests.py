"""Requests of a source: its columns; times, lengths and adapters of usable rows; the others by reason.

One pass over the source fills a table on disk; units and windows are chosen by what it holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from capplan.errors import InputError
from capplan.observe._observation import Dropped, ObserveOptions
from capplan.observe._source import Field, Kind, Source, listed, quoted
from capplan.spec import MAX_TOKENS, TimeUnit
from capplan.workload import EPOCH_S, PER_S, UNIT_WORDS, WHOLE, TimeColumn, defined_unit, time_unit_of

if TYPE_CHECKING:
    import duckdb


TIMESTAMP: Final = "timestamp"
PROMPT: Final = "prompt_tokens"
OUTPUT: Final = "output_tokens"
ADAPTER: Final = "adapter"
STATUS: Final = "status"
ERROR: Final = "error"
HASHES: Final = "hash_ids"


def _words(*lines: str) -> tuple[str, ...]:
    return tuple(" ".join(lines).split())


_NAMES: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {  # the first name that a source has; letters and digits alone count
        TIMESTAMP: _words(
            "timestamp arrival_s arrival arrived_at arrival_time arrival_timestamp timestamp_s",
            "request_start_ns request_start_time request_start start_time start_times started_at",
            "received_at created_at created event_time time datetime date ts t when msec",
            "time_iso8601 time_local start_ts start start_ns start_ms timestamp_ms timestamp_ns",
            "time_unix epoch logged_at request_time",  # nginx's request_time is a duration
        ),
        PROMPT: _words(
            "prompt_tokens input_tokens context_tokens request_tokens input_length prompt_length",
            "input_lens prompt_lens num_prompt_tokens num_input_tokens input_len prompt_len",
            "input_sequence_length.value input_sequence_length tokens_in in_tokens input_token_count",
            "prompt_token_count prompt_tokens_total isl n_prompt_tokens",
        ),
        OUTPUT: _words(
            "output_tokens completion_tokens generated_tokens response_tokens output_length",
            "output_lens num_output_tokens num_generated_tokens output_len completion_length",
            "output_sequence_length.value output_sequence_length tokens_out out_tokens",
            "output_token_count candidates_token_count completion_token_count generation_tokens osl",
        ),
        ADAPTER: _words(
            "adapter lora lora_name lora_adapter adapter_name adapter_id lora_id lora_modules",
            "lora_request model model_name model_group model_id served_model served_model_name model_path",
            "client client_id tenant tenant_id",
        ),
        STATUS: _words("status status_code http_status response_code code http_code success"),
        ERROR: _words("error errors error_message error_type exception"),
        HASHES: _words("hash_ids block_hashes prefix_hashes"),
    }
)
_PERHAPS_DURATIONS: Final = frozenset({"requesttime", "time", "t"})
"""Names of times of arrival that durations have, too."""
REQUIRED: Final = (TIMESTAMP, PROMPT, OUTPUT)
_KINDS: Final[Mapping[str, Sequence[Kind]]] = MappingProxyType(
    {
        TIMESTAMP: ("text", "number", "time"),
        PROMPT: ("text", "number"),
        OUTPUT: ("text", "number"),
        ADAPTER: ("text", "number"),
        STATUS: ("text", "number", "other"),
        ERROR: ("text", "number", "other"),
        HASHES: ("list", "object"),
    }
)


@dataclass(frozen=True)
class Column:
    """The field that was chosen for something."""

    field: Field
    stated: bool
    """Whether ``--map`` named it."""
    others: tuple[str, ...] = ()
    """Fields whose names would do as well."""


def choose_columns(
    source: Source, stated: Mapping[str, str], are_times: Callable[[Field], bool]
) -> dict[str, Column]:
    """Return the field of each of `_NAMES` that the source has; a missing or unfit one is an error.

    `stated` has fields by what they hold, as ``--map`` names them; an empty name: none. `are_times` tells
    whether the first values of a field may be times of arrival, by which it is guessed.
    """
    by_name = {each.name: each for each in source.fields}
    for what, name in stated.items():
        if what not in _NAMES:
            raise InputError(f"must be one of {', '.join(_NAMES)}", what, "map")
        if name and name not in by_name:
            raise InputError(f"must be a column of the file: {source.names}", name, f"map: {what}")
    found: dict[str, Column] = {}
    named = [name for name in stated.values() if name]
    if twice := next((name for name in named if named.count(name) > 1), None):
        raise InputError("must hold one thing alone", twice, "map")
    taken = set(named)
    for what in _NAMES:
        if what in stated:
            if stated[what]:
                found[what] = Column(_checked(by_name[stated[what]], what, source), stated=True)
            continue
        free = [each for each in source.fields if each.name not in taken and each.kind in _KINDS[what]]
        column = _guessed(what, free, are_times)
        if column is not None:
            found[what] = column
            taken.add(column.field.name)
    for what in REQUIRED:
        if what not in found:
            rule = f"no column of that name among {source.names}: name it by --map {what}=COLUMN"
            doubtful = [each.name for each in source.fields if _is_doubtful(each)]
            if what == TIMESTAMP and doubtful:
                rule = (
                    f"{listed(doubtful)} holds neither dates nor numbers that rise, so no times of arrival; "
                    f"there is {rule}"
                )
            raise InputError(rule, location=f"{source.path}: {what}")
    return found


def _guessed(what: str, free: Sequence[Field], are_times: Callable[[Field], bool]) -> Column | None:
    """Return the first of the fields with a known name."""
    matches = list(dict.fromkeys(_matches(free, _NAMES[what])))
    if what == TIMESTAMP:
        matches = [each for each in matches if not _is_doubtful(each) or are_times(each)]
    if not matches:
        return None
    repeated = re.compile(rf"{re.escape(matches[0].name)}_\d+")  # as DuckDB names columns of one name
    others = (*matches[1:4], *(each for each in free if repeated.fullmatch(each.name)))
    return Column(matches[0], stated=False, others=tuple(dict.fromkeys(each.name for each in others)))


def _is_doubtful(field: Field) -> bool:
    return _letters(field.name.rpartition(".")[2]) in _PERHAPS_DURATIONS


def _checked(field: Field, what: str, source: Source) -> Field:
    if field.kind not in _KINDS[what]:
        kinds = " or ".join(_KINDS[what])
        raise InputError(
            f"must be a column of {kinds}, not of {field.kind}", field.name, f"{source.path}: {what}"
        )
    return field


def _matches(fields: Iterable[Field], names: Sequence[str]) -> Iterable[Field]:
    """Yield the fields with one of the names, in the order of the names; within others, their last parts."""
    wanted = [_letters(name) for name in names]
    ends = [(each, _ends(each.name)) for each in fields]
    for name in wanted:
        for each, own in ends:
            if name in own:
                yield each


def _ends(name: str) -> set[str]:
    """Return the letters and digits of a name, and of its last one and two parts."""
    parts = name.split(".")
    return {_letters(".".join(parts[-n:])) for n in (1, 2, len(parts))}


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


US_PER_S: Final = 1_000_000
_US: Final = MappingProxyType({unit: US_PER_S / per_s for unit, per_s in PER_S.items()})
"""Microseconds of a unit."""
_DATES: Final = (
    *("%d/%b/%Y:%H:%M:%S %z", "%d/%b/%Y:%H:%M:%S", "%a, %d %b %Y %H:%M:%S %Z"),
    *(
        "%d.%m.%Y %H:%M:%S.%f",
        "%d.%m.%Y %H:%M:%S",
        "%d.%m.%Y %H:%M",
        "%Y%m%dT%H%M%S%z",
        "%Y-%m-%d %H:%M:%S,%g",
    ),
)
"""Dates beside ISO 8601: of web servers, mails, German ones, compact ones, and of Python's logs."""

_NAME_PATTERN: Final = r"[\pL\pN][^\s=,\x00-\x1f\x7f-\x9f]{0,255}"
"""Names of adapters, in the syntax of RE2; invisible characters are refused later."""

_PROBED_ROWS: Final = 100_000
_PROBED_TIMES: Final = 1000
_FEW_TIMES: Final = 3
_FEW_ROWS: Final = 100
_FEW_OTHERS: Final = 0.01
"""Share of times of another kind that are taken for wrong ones."""
_SLOWEST_RPS: Final = 1e-4
_FASTEST_RPS: Final = 1e4
"""Rates beyond which the unit in the name of a column is doubted."""

_FAILED_WORDS: Final = (
    "fail error timeout timed.?out cancel abort reject refus denied unavailable deadline exceeded exhausted "
    "limited throttl overload unauthori forbidden invalid not.?found too.many disconnect exception false"
).replace(" ", "|")
_FAILED_CODE: Final = "(^|[^0-9.])([45][0-9]{2}|[45]xx)([^0-9]|$)"
_SERVED: Final = (
    "(^|[^0-9.])(2[0-9]{2}|2xx)([^0-9]|$)|ok|success|succeeded|true|complete|done|finish|stop|length"
)
"""What a status says of a request, in the syntax of RE2. One of neither counts as served, and is named."""
_NULLS: Final = ("", "-", "null", "none", "(null)", "\\n")
"""Texts of a cell that holds nothing, as web servers, databases and Python write them."""
_FAR: Final = 5.0
"""Spans of the middle 98 % of all times, beyond which the clock of a row is taken for wrong."""
_COARSE: Final = 0.1
"""Moments over requests, below which the steps of a clock are worth a note."""
_RISING: Final = 0.7
"""Share of steps upwards from which numbers may be times of arrival; that of unordered ones is a half."""

REASONS: Final = (
    "usable",
    "no time of arrival that can be read",
    f"prompt tokens are no whole number from 1 to {MAX_TOKENS}",
    "failed, by its status",
    f"output tokens are no whole number from 0 to {MAX_TOKENS}",
    "no output tokens, so that it failed",
    "a name that no adapter can have",
    "a time far from those of all others",
)
_USABLE, _NO_TIME, _PROMPT, _FAILED, _OUTPUT, _EMPTY, _NAME, _FAR_TIME = range(len(REASONS))


@dataclass(frozen=True)
class Log:
    """Usable requests, as the view ``requests`` of a connection.

    The view has ``us`` (arrival in microseconds from the start), ``prompt``, ``output``, ``adapter`` (null:
    the base model) and, where the source has them, ``hashes`` (of the blocks of the prompt).
    """

    connection: duckdb.DuckDBPyConnection
    rows: int
    """Of the source, broken ones included."""
    requests: int
    dropped: tuple[Dropped, ...]
    start: datetime | None
    """Time of the start in UTC; None: the source counts from another time."""
    duration_s: float
    has_hashes: bool
    has_adapters: bool
    notes: tuple[str, ...]


def read_requests(source: Source, columns: Mapping[str, Column], options: ObserveOptions) -> Log:
    """Return the usable requests of a source.

    If none is usable, the unit of the times is not clear, or the window holds no request, that is an error.
    """
    window = options.window
    connection = source.connection
    base_names = (options.base_model, *options.base_aliases)
    _fill(source, columns, base_names, options.strip_prefix)
    usable = _count(connection, "reason = 0")
    if not usable:
        found = "; ".join(f"{each.rows:,} rows: {each.reason}{each.like}" for each in _dropped(source))
        raise InputError(
            f"must hold requests that can be used ({found or 'no rows'})", location=str(source.path)
        )
    notes = [*source.notes, *_other_statuses(connection)]
    sql, is_dated, said = _microseconds(source, columns, options.time_unit)
    notes += said
    if window is None:
        _drop_far(connection, sql)
    dropped = _dropped(source)
    usable = _count(connection, "reason = 0")
    rows = usable + sum(each.rows for each in dropped)
    ends = connection.execute(f"SELECT min({sql}), max({sql}) FROM log WHERE reason = 0").fetchall()[0]
    low, high = map(int, ends)
    first, last = _window(connection, window, low, high, is_dated)
    connection.execute(
        f"CREATE VIEW requests AS SELECT ({sql}) - {first} AS us, prompt, output, adapter"
        f"{', hashes' if HASHES in columns else ''} FROM log WHERE reason = 0 "
        f"AND ({sql}) BETWEEN {first} AND {last}"
    )
    requests, moments = map(
        int, connection.execute("SELECT count(*), approx_count_distinct(us) FROM requests").fetchall()[0]
    )
    if not requests:
        raise InputError("must hold a request", window, "window")
    if last == first:
        rule = "must have requests at several times: one moment has no rate"
        raise InputError(rule, requests, f"{source.path}: {columns[TIMESTAMP].field.name}")
    if requests < usable:
        notes.append(f"{usable - requests:,} requests are outside the window")
    step_s = (last - first) / US_PER_S / max(1, moments)
    if step_s > 1.0 and moments < _COARSE * requests:
        notes.append(f"times have steps of about {step_s:,.0f} s: bursts within them are not seen")
    start = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=first) if is_dated else None
    duration_s = (last - first) / US_PER_S
    return Log(
        connection,
        rows,
        requests,
        dropped,
        start,
        duration_s,
        HASHES in columns,
        ADAPTER in columns,
        tuple(notes),
    )


def may_be_times(source: Source, field: Field) -> bool:
    """Tell whether the first values of a field are dates, or numbers that rise: durations do not."""
    if field.kind == "time":
        return True
    try:
        dates = [*_DATES, *_slashed_dates(source, field)]
    except InputError:  # dates of an unclear order
        return True
    connection = source.connection
    connection.execute("SET preserve_insertion_order = true")
    rows = connection.execute(
        f"SELECT {_date(field, dates)}, {_stamp(field, source)} FROM "
        f"(SELECT * FROM {source.relation} LIMIT {_PROBED_TIMES})"
    ).fetchall()
    connection.execute("SET preserve_insertion_order = false")
    stamps = [stamp for date, stamp in rows if date is None and stamp is not None]
    if 2 * len(stamps) < len(rows) or len(stamps) < _FEW_TIMES:
        return True
    if min(stamps) >= EPOCH_S:
        return True
    rising = sum(later >= earlier for earlier, later in pairwise(stamps))
    return bool(rising >= _RISING * (len(stamps) - 1))


def _present(what: str) -> str:
    """Return SQL for the trimmed text of a cell; null for one that holds nothing."""
    text = f"trim({what}::VARCHAR)"
    return f"CASE WHEN lower({text}) NOT IN ({', '.join(map(quoted, _NULLS))}) THEN {text} END"


def _adapter_name(base_names: Sequence[str], strip_prefix: str) -> str:
    """Return SQL for the name of an adapter; null for the base model."""
    name = _present(ADAPTER)
    if strip_prefix:
        rest = f"substr({name}, {len(strip_prefix) + 1})"
        name = (
            f"CASE WHEN starts_with({name}, {quoted(strip_prefix)}) THEN nullif({rest}, '') ELSE {name} END"
        )
    if base_names:
        name = f"CASE WHEN {name} NOT IN ({', '.join(map(quoted, base_names))}) THEN {name} END"
    return name


def _fill(
    source: Source, columns: Mapping[str, Column], base_names: Sequence[str], strip_prefix: str
) -> None:
    """Create the table ``log`` of all rows; those of a reason above 0 have the text of their cells."""
    fields = {what: column.field for what, column in columns.items()}
    dates = [*_DATES, *_slashed_dates(source, fields[TIMESTAMP])]
    cells = ", ".join(f"{field.sql} AS {what}" for what, field in fields.items())
    typed = {what: replace(field, sql=what) for what, field in fields.items()}
    adapter = _adapter_name(base_names, strip_prefix) if ADAPTER in fields else "NULL::VARCHAR"
    failed = " OR ".join(_failures(typed)) or "false"
    status = f"lower({_present(STATUS)})" if STATUS in fields else "NULL::VARCHAR"
    shown = "concat_ws(' | ', " + ", ".join(f"{what}::VARCHAR" for what in fields if what != HASHES) + ")"
    hashes = f", list_transform({HASHES}, lambda h: hash(h)) AS hashes" if HASHES in fields else ""
    source.connection.execute(
        f"""
        CREATE TABLE log AS
        SELECT * EXCLUDE (shown, status), CASE WHEN reason > 0 THEN left(shown, 200) END AS example,
            CASE WHEN reason = 0 AND NOT regexp_matches(status, {quoted(_SERVED)}) THEN left(status, 40) END
                AS other_status
        FROM (
            SELECT stamp, date_us, adapter{", hashes" if hashes else ""}, shown, status,
                CASE
                    WHEN stamp IS NULL AND date_us IS NULL THEN {_NO_TIME}
                    WHEN failed THEN {_FAILED}
                    WHEN p IS NULL OR p < 1 OR p > {MAX_TOKENS} OR p <> floor(p) THEN {_PROMPT}
                    WHEN o IS NULL OR o < 0 OR o > {MAX_TOKENS} OR o <> floor(o) THEN {_OUTPUT}
                    WHEN o = 0 THEN {_EMPTY}
                    WHEN NOT regexp_full_match(adapter, {quoted(_NAME_PATTERN)})
                        OR contains(adapter, '{{i}}') THEN {_NAME}
                    ELSE {_USABLE}
                END::UTINYINT AS reason,
                CASE WHEN p BETWEEN 1 AND {MAX_TOKENS} THEN p::INTEGER END AS prompt,
                CASE WHEN o BETWEEN 0 AND {MAX_TOKENS} THEN o::INTEGER END AS output
            FROM (
                SELECT {_stamp(typed[TIMESTAMP], source)} AS stamp,
                    {_date(typed[TIMESTAMP], dates)} AS date_us,
                    {_number(typed[PROMPT], source)} AS p, {_number(typed[OUTPUT], source)} AS o,
                    {adapter} AS adapter, coalesce({failed}, false) AS failed, {shown} AS shown,
                    {status} AS status{hashes}
                FROM (SELECT {cells} FROM {source.relation})
            )
        )
        """
    )


def _number(field: Field, source: Source) -> str:
    """Return SQL for a number in a cell: text may have decimal commas, or commas between thousands."""
    if field.kind == "number" and not _is_text(source):
        return f"{field.sql}::DOUBLE"
    text = f"trim({field.sql}::VARCHAR)"
    if source.has_comma_cells:
        return f"coalesce(TRY_CAST({text} AS DOUBLE), TRY_CAST(replace({text}, ',', '.') AS DOUBLE))"
    thousands = f"regexp_full_match({text}, '[1-9][0-9]{{0,2}}(,[0-9]{{3}})+')"
    without = f"CASE WHEN {thousands} THEN replace({text}, ',', '')::DOUBLE END"
    return f"coalesce(TRY_CAST({text} AS DOUBLE), {without})"


def _is_text(source: Source) -> bool:
    """Return whether numbers are cells of text, as in CSV and in JSON."""
    return source.is_csv or "json" in source.relation.partition("(")[0]


def _stamp(field: Field, source: Source) -> str:
    return "NULL::DOUBLE" if field.kind == "time" else f"nullif({_number(field, source)}, 'nan'::DOUBLE)"


def _slashed_dates(source: Source, field: Field) -> tuple[str, ...]:
    """Return the formats of dates such as 05/31/2026, by the first rows: months are at most 12.

    If day and month could be either, that is an error.
    """
    if field.kind != "text":
        return ()
    text = f"regexp_extract(trim({field.sql}::VARCHAR), '^([0-9]{{1,2}})/([0-9]{{1,2}})/[0-9]{{4}}"
    numbers = ", ".join(f"max(TRY_CAST({text}', {part}) AS INTEGER))" for part in (1, 2))
    first, second, example = source.connection.execute(
        f"SELECT {numbers}, any_value({field.sql}) "
        f"FROM (SELECT * FROM {source.relation} LIMIT {_PROBED_ROWS}) WHERE {text}', 1) <> ''"
    ).fetchall()[0]
    if first is None:
        return ()
    if first <= 12 and second <= 12:
        rule = "must say which is the day and which the month; dates such as 2026-05-31 do"
        raise InputError(rule, example, f"{source.path}: {field.name}")
    day = "%d/%m/%Y" if first > 12 else "%m/%d/%Y"
    return tuple(f"{day} {time}" for time in ("%H:%M:%S.%f", "%H:%M:%S", "%H:%M", "%I:%M:%S %p"))


def _date(field: Field, formats: Sequence[str]) -> str:
    """Return SQL for the microseconds since 1970 of a date; times without a zone are of the connection's."""
    if field.kind == "time":
        return f"epoch_us({field.sql}::TIMESTAMPTZ)"
    if field.kind == "number":
        return "NULL::BIGINT"
    text = f"trim({field.sql}::VARCHAR)"
    known = ", ".join(map(quoted, formats))
    other = f"try_strptime({text}, [{known}])::TIMESTAMPTZ"
    return f"epoch_us(coalesce(TRY_CAST({text} AS TIMESTAMPTZ), {other}))"


def _failures(typed: Mapping[str, Field]) -> list[str]:
    """Return conditions of failed requests."""
    found = []
    if STATUS in typed:
        text = f"lower({_present(STATUS)})"
        found.append(f"TRY_CAST({text} AS DOUBLE) >= 400")
        found.append(f"regexp_matches({text}, {quoted(f'{_FAILED_CODE}|{_FAILED_WORDS}')})")
    if ERROR in typed:
        text = f"lower({_present(ERROR)})"
        found.append(f"({text} NOT IN ('false', '0', 'nan', '[]', '{{}}', '\"\"'))")
    return found


def _other_statuses(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Return a note on statuses that say neither of success nor of failure."""
    rows = connection.execute(
        "SELECT other_status, count(*) FROM log WHERE other_status IS NOT NULL "
        "GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 3"
    ).fetchall()
    if not rows:
        return []
    said = ", ".join(f"{text!r} ({count:,} rows)" for text, count in rows)
    return [f"a status that is not known counts as served: {said}"]


def _drop_far(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Take rows out whose times are no dates beside dates, or far from those of nearly all others."""
    count, low, high = connection.execute(
        "SELECT count(us), approx_quantile(us, 0.01), approx_quantile(us, 0.99) "
        f"FROM (SELECT ({sql}) AS us FROM log WHERE reason = 0)"
    ).fetchall()[0]
    if count < _FEW_ROWS:
        return
    span = _FAR * max(high - low, 60 * US_PER_S)
    connection.execute(
        f"UPDATE log SET reason = {_FAR_TIME}, "
        f"example = coalesce(strftime(make_timestamp(date_us), '%Y-%m-%d %H:%M:%S'), stamp::VARCHAR) "
        f"WHERE reason = 0 AND coalesce(({sql}) NOT BETWEEN {low - span} AND {high + span}, true)"
    )


def _dropped(source: Source) -> tuple[Dropped, ...]:
    rows = source.connection.execute(
        "SELECT reason, count(*), min(example) FROM log WHERE reason > 0 GROUP BY 1 ORDER BY 2 DESC"
    ).fetchall()
    broken = [Dropped(f"a broken line ({reason})", n, example) for reason, n, example in source.broken_rows()]
    return (*(Dropped(REASONS[reason], n, example or "") for reason, n, example in rows), *broken)


def _count(connection: duckdb.DuckDBPyConnection, condition: str) -> int:
    return int(connection.execute(f"SELECT count(*) FROM log WHERE {condition}").fetchall()[0][0])


def _microseconds(
    source: Source, columns: Mapping[str, Column], stated: TimeUnit | None
) -> tuple[str, bool, list[str]]:
    """Return SQL for the microseconds of a row, whether they count from 1970, and notes on their unit."""
    connection = source.connection
    units = list(TimeUnit)
    rules = ["date_us IS NOT NULL", "date_us IS NULL", *map(_is_epoch, units)]
    counts = ", ".join(f"count(*) FILTER ({rule})" for rule in rules)
    counted = connection.execute(f"SELECT {counts} FROM log WHERE reason = 0").fetchall()[0]
    dated, numbers = counted[:2]
    epochs = dict(zip(units, counted[2:], strict=True))
    others = numbers - sum(epochs.values())
    label = columns[TIMESTAMP].field.name
    if stated is not None and numbers:
        sizes = [unit for unit in units if epochs[unit]]
        if sizes and not others and stated not in sizes:
            rule = f"must be {sizes[0].value}: the times are dates in {UNIT_WORDS[sizes[0]]}, by their size"
            raise InputError(rule, stated.value, "time_unit")
        scale = _US[stated]
        sql = f"coalesce(date_us, round(stamp * {scale!r})::BIGINT)"
        return (
            sql,
            dated > 0 or (bool(sum(epochs.values())) and not others),
            [f"times are in {stated.value}, as stated"],
        )
    known = dated + sum(epochs.values())
    if others and known and others > _FEW_OTHERS * known:
        rule = "must be dates in all rows or in none"
        example = connection.execute(
            "SELECT stamp FROM log WHERE reason = 0 AND date_us IS NULL AND NOT ("
            + " OR ".join(_is_epoch(unit) for unit in TimeUnit)
            + ") LIMIT 1"
        ).fetchall()[0][0]
        raise InputError(rule, example, f"{source.path}: {label}")
    if others and not known:
        return _offsets(source, label)
    cases = " ".join(f"WHEN {_is_epoch(unit)} THEN round(stamp * {_US[unit]!r})::BIGINT" for unit in TimeUnit)
    present = [unit.value for unit in TimeUnit if epochs[unit]]
    note = []
    if present:
        words = " and ".join(f"{epochs[TimeUnit(unit)]:,} in {unit}" for unit in present)
        note = [f"times of {label} are dates by their size: {words} since 1970"]
    return f"coalesce(date_us, CASE {cases} END)", True, note


def _is_epoch(unit: TimeUnit) -> str:
    least = EPOCH_S * PER_S[unit]
    return f"(date_us IS NULL AND stamp >= {least!r} AND stamp < {10 * least!r})"


def _offsets(source: Source, label: str) -> tuple[str, bool, list[str]]:
    """Return SQL for times that count from the start, by format, name, size and rate."""
    low, high, count, fractions = source.connection.execute(
        f"SELECT min(stamp), max(stamp), count(*), count(*) FILTER (abs(stamp - round(stamp)) > {WHOLE!r}) "
        "FROM log WHERE reason = 0"
    ).fetchall()[0]
    names = [*(each.name for each in source.fields), *source.parts]
    column = TimeColumn(
        label, float(low), float(high), int(count), whole=not fractions, **defined_unit(names, label)
    )
    unit, reason = time_unit_of(column, f"{source.path}: {label}", "--time-unit")
    rate = (count - 1) / max((high - low) * _US[unit] / US_PER_S, 1e-9)
    if not reason and not _SLOWEST_RPS <= rate <= _FASTEST_RPS and count > 1:
        rule = f"unit is not clear, {rate:.3g} requests per second in {unit.value}, as its name says"
        raise InputError(f"{rule}; state --time-unit: s, ms, us or ns", location=f"{source.path}: {label}")
    said = reason or "by its name"
    note = f"times of {label} are read as {unit.value}, {said}: {rate:.3g} requests per second"
    return f"round(stamp * {_US[unit]!r})::BIGINT", False, [note]


_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)")
_SPAN_S: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def _window(
    connection: duckdb.DuckDBPyConnection, window: str | None, low: int, high: int, is_dated: bool
) -> tuple[int, int]:
    """Return the first and the last microsecond of a window: the last so many hours, or ``START..END``."""
    if window is None:
        return low, high
    span = span_s(window)
    if span is not None:
        if span <= 0.0:
            raise InputError("must be longer than 0", window, "window")
        return max(low, high - round(span * US_PER_S)), high
    ends = window.split("..")
    if len(ends) != 2:
        rule = (
            "must be the last hours, such as 24h, or START..END, such as 2026-05-10T08:00..2026-05-10T20:00"
        )
        raise InputError(rule, window, "window")
    first, last = (_instant(connection, text.strip(), low, is_dated) for text in ends)
    first, last = low if first is None else first, high if last is None else last
    if last <= first:
        raise InputError("must end after its start", window, "window")
    return first, last


def span_s(text: str) -> float | None:
    """Return the seconds of a span such as 24h or 90m; None: it is none."""
    found = _SPAN.fullmatch(text.strip())
    return None if found is None else float(found[1]) * _SPAN_S[found[2]]


def _instant(connection: duckdb.DuckDBPyConnection, text: str, low: int, is_dated: bool) -> int | None:
    """Return a date, in the connection's time zone unless it states one, or a span from the first request."""
    if not text:
        return None
    span = span_s(text)
    if span is not None:
        return low + round(span * US_PER_S)
    date = connection.execute("SELECT epoch_us(TRY_CAST(? AS TIMESTAMPTZ))", [text]).fetchall()[0][0]
    if date is None or not is_dated:
        rule = "must be a time such as 2026-05-10T08:00, or a span from the first request such as 6h"
        raise InputError(rule, text, "window")
    return int(date)


def described(columns: Mapping[str, Column]) -> Sequence[str]:
    """Return the mapping in words, one line per column."""
    lines = []
    for what, column in columns.items():
        how = "as stated" if column.stated else "by its name"
        others = f"; also possible: {', '.join(column.others)}" if column.others else ""
        lines.append(f"{what}: {column.field.name} ({how}{others})")
    return lines
