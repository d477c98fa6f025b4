"""Files of requests as relations of DuckDB: CSV, JSON and Parquet, packed or not, of any size.

Nothing is converted here: a field is text, a number, a time or a list, and `capplan.observe._requests` makes
requests of the chosen ones. DuckDB reads in parallel, keeps within a limit of memory, and counts broken rows.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Final, Literal

import duckdb

from capplan.errors import InputError
from capplan.spec import MAX_COLUMNS, open_stream, open_unpacked

Kind = Literal["text", "number", "time", "list", "object", "other"]

_MAGIC: Final[Mapping[bytes, str]] = MappingProxyType(
    {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ": "xz"}
)
_READ_PACKED: Final = ("none", "gzip", "zstd")
"""Compressions that DuckDB reads."""

_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d")
_LONGEST_LINE: Final = 2**22  # DuckDB has buffers of sixteen times as much
_SAMPLE_ROWS: Final = 1000
_SNIFF_BYTES: Final = 2**20
_MAX_OBJECT_BYTES: Final = 2**26  # a record with the hashes of its blocks has some hundred KiB
_MAX_DOCUMENT_BYTES: Final = 2**30


@dataclass(frozen=True)
class Field:
    """A field of the rows of a source."""

    name: str
    """As shown and given by ``--map``; fields within others have dots."""
    sql: str
    kind: Kind


@dataclass
class Source:
    """An open source of requests."""

    path: Path
    connection: duckdb.DuckDBPyConnection
    relation: str
    fields: tuple[Field, ...]
    is_csv: bool = False
    has_comma_cells: bool = False
    """Whether a comma is no separator, and may be a decimal point."""
    notes: list[str] = field(default_factory=list)
    parts: tuple[str, ...] = ()
    """Names of the parts of fields that are objects of lists, which tell a format."""

    @property
    def names(self) -> str:
        """The fields in words, for messages."""
        return listed([each.name for each in self.fields])

    def broken_rows(self) -> list[tuple[str, int, str]]:
        """Return (reason, rows, example) of the rows of a CSV file that were skipped, after it was read."""
        if not self.is_csv:
            return []
        rows = self.connection.execute(
            "SELECT lower(error_type::VARCHAR), count(DISTINCT line), arg_min(csv_line, line) "
            "FROM reject_errors GROUP BY 1 ORDER BY 2 DESC"
        ).fetchall()
        return [(str(reason), int(count), str(example)[:200]) for reason, count, example in rows]


def listed(names: list[str], most: int = 20) -> str:
    """Return names separated by commas, the first of them and the number of others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def quoted(text: str) -> str:
    """Return a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def identifier(name: str) -> str:
    """Return a name of SQL."""
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def open_source(path: Path, memory_bytes: int, timezone: str) -> Iterator[Source]:
    """Open a file of requests; temporary files are removed at the end.

    DuckDB may take `memory_bytes`; `timezone` is that of times that do not state one.
    """
    with TemporaryDirectory(prefix="capplan-observe-") as folder:
        connection = duckdb.connect(str(Path(folder, "requests.duckdb")))
        try:
            connection.execute(f"SET memory_limit = '{memory_bytes // 2**20}MiB'")
            connection.execute(f"SET temp_directory = {quoted(str(Path(folder, 'spilled')))}")
            connection.execute("SET preserve_insertion_order = false")
            with suppress(duckdb.Error):  # in a notebook without ipywidgets there is none to turn off
                connection.execute("SET enable_progress_bar = false")  # it is written to the standard output
            try:
                connection.execute(f"SET TimeZone = {quoted(timezone)}")
            except duckdb.Error:
                raise InputError("must be a time zone, such as Europe/Berlin", timezone, "timezone") from None
            yield _opened(connection, path, Path(folder))
        except duckdb.Error as error:
            raise InputError(f"cannot be read: {_first_line(error)}", location=str(path)) from None
        finally:
            connection.close()


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    if "Maximum line size" in text:
        return f"a line is longer than {_LONGEST_LINE >> 20} MiB"
    return text.partition("\n")[0][:300]


def _opened(connection: duckdb.DuckDBPyConnection, path: Path, folder: Path) -> Source:
    with open_stream(path) as opened:
        start = opened.read(8)
    if not start:
        raise InputError("must not be empty", location=str(path))
    if start[:4] == b"PAR1":
        return _parquet(connection, path)
    if start[:4] == b"PK\x03\x04":
        raise InputError("must be unpacked: it is a ZIP archive, or a spreadsheet", location=str(path))
    packing = next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "none")
    with open_unpacked(path) as file:
        head = file.read(_SNIFF_BYTES)
        readable = path
        if packing not in _READ_PACKED:
            readable, packing = folder / "unpacked", "none"
            with readable.open("wb") as plain:
                plain.write(head)
                shutil.copyfileobj(file, plain, 2**20)
    encoding = _encoding(head, path)
    first = head.decode(encoding, errors="replace").lstrip("\ufeff").lstrip()[:1]
    if first in ("{", "["):
        return _json(connection, path, readable, packing, folder)
    return _csv(connection, path, readable, _csv_options(head, packing, encoding))


def _encoding(head: bytes, path: Path) -> str:
    """Return the encoding of a text by its beginning."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    if b"\0" in head:
        rule = (
            "must be text in UTF-8, in UTF-16 with its mark at the start, or in Latin-1, and holds zero bytes"
        )
        raise InputError(rule, location=str(path))
    try:
        head[: len(head) - 3].decode("utf-8")  # the last character may be cut
    except UnicodeDecodeError as error:
        if error.start < len(head) - 8:
            return "latin-1"
    return "utf-8"


def _parquet(connection: duckdb.DuckDBPyConnection, path: Path) -> Source:
    relation = f"read_parquet({quoted(str(path))})"
    fields = tuple(_leaves(connection, relation))
    return Source(path, connection, relation, fields)


def _leaves(connection: duckdb.DuckDBPyConnection, relation: str) -> Iterator[Field]:
    """Yield the fields of typed columns, those of structures by their path."""
    for column, described in _described(connection, relation):
        yield from _leaf(connection, relation, column, identifier(column), described)


def _described(connection: duckdb.DuckDBPyConnection, relation: str) -> list[tuple[str, str]]:
    rows = connection.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()
    return [(str(row[0]), str(row[1])) for row in rows]


def _leaf(
    connection: duckdb.DuckDBPyConnection, relation: str, name: str, sql: str, described: str
) -> Iterator[Field]:
    if not described.startswith("STRUCT("):
        yield Field(name, sql, _kind(described))
        return
    for key, of_key in _described(connection, f"(SELECT unnest({sql}) FROM {relation})"):
        yield from _leaf(connection, relation, f"{name}.{key}", f"{sql}.{identifier(key)}", of_key)


def _kind(described: str) -> Kind:
    if described.endswith("[]"):
        return "list"
    if described.startswith(("TIMESTAMP", "DATE")):
        return "time"
    if described in ("VARCHAR", "UUID") or described.startswith("ENUM"):
        return "text"
    numbers = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER")
    if described in (*numbers, "UBIGINT", "FLOAT", "DOUBLE") or described.startswith("DECIMAL"):
        return "number"
    return "other"


def _csv_options(head: bytes, packing: str, encoding: str) -> str:
    """Return options of DuckDB's reader, by which every cell is text.

    The first line may state the separator, which Excel writes as ``sep=;``; otherwise DuckDB finds it.
    """
    found = re.match(r'"?sep=(.)"?\s*[\r\n]', head.decode(encoding, errors="replace").lstrip("\ufeff"))
    stated = f", skip = 1, delim = {quoted(found[1])}" if found else ""
    return (
        f"all_varchar = true, header = true, compression = '{packing}', encoding = '{encoding}', "
        f"ignore_errors = true, max_line_size = {_LONGEST_LINE}{stated}"
    )


def _csv(connection: duckdb.DuckDBPyConnection, path: Path, readable: Path, options: str) -> Source:
    rejects = "store_rejects = true, rejects_limit = 1000000"
    relation = f"read_csv({quoted(str(readable))}, {options}, {rejects})"
    columns = [name for name, _ in _described(connection, relation)]
    if len(columns) > MAX_COLUMNS:
        raise InputError(f"must not have over {MAX_COLUMNS:,} columns", len(columns), str(path))
    if len(columns) < 2:
        rule = (
            "must have several columns, separated by commas, semicolons, tabs or bars, and their names first"
        )
        raise InputError(rule, columns[0][:80] if columns else "", str(path))
    if any(_is_number(name) or _DATE.match(name) for name in columns):
        rule = "must name its columns in the first line, which holds values"
        raise InputError(rule, listed(columns, 5), str(path))
    sniffed = connection.execute(
        f"SELECT Delimiter FROM sniff_csv({quoted(str(readable))}, {options})"
    ).fetchone()
    fields = tuple(Field(name, identifier(name), "text") for name in columns)
    comma_cells = sniffed is not None and sniffed[0] != ","
    return Source(path, connection, relation, fields, is_csv=True, has_comma_cells=comma_cells)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _json(
    connection: duckdb.DuckDBPyConnection, path: Path, readable: Path, packing: str, folder: Path
) -> Source:
    notes: list[str] = []
    relation = _json_relation(readable, packing)
    sample = _json_sample(connection, relation)
    if len(sample) < 2 or not all(isinstance(each, dict) for each in sample):
        records, note = records_of(_document(path), path)
        notes += [note] if note else []
        readable, packing = folder / "records.jsonl", "none"
        with readable.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        relation = _json_relation(readable, packing)
        sample = _json_sample(connection, relation)
    else:
        _require_one_run(sample, path)
    kinds: dict[str, Kind] = {}
    for record in sample:
        _add_fields(record, "", kinds)
    if not kinds:
        raise InputError("must hold records of requests", location=str(path))
    if len(kinds) > MAX_COLUMNS:
        raise InputError(f"a record must not have over {MAX_COLUMNS:,} fields", len(kinds), str(path))
    fields = tuple(Field(name, _json_sql(name, kind), kind) for name, kind in kinds.items())
    parts = tuple(
        f"{each.name}.{part}"
        for each in fields
        if each.kind == "object"
        for part in _at(sample[0], each.name)
    )
    return Source(path, connection, relation, fields, notes=notes, parts=parts)


def _json_relation(readable: Path, packing: str) -> str:
    return (
        f"read_json_objects({quoted(str(readable))}, compression = '{packing}', ignore_errors = true, "
        f"maximum_object_size = {_MAX_OBJECT_BYTES})"
    )


def _json_sample(connection: duckdb.DuckDBPyConnection, relation: str) -> list[Any]:
    """Return the first objects; none of a file that is no sequence of objects."""
    try:
        rows = connection.execute(f"SELECT json FROM {relation} LIMIT {_SAMPLE_ROWS}").fetchall()
    except duckdb.Error:
        return []
    return [json.loads(row[0]) for row in rows if row[0] is not None]


def _document(path: Path) -> Any:
    """Return the content of a file that is one JSON value."""
    with open_unpacked(path) as file:
        content = file.read(_MAX_DOCUMENT_BYTES + 1)
    if len(content) > _MAX_DOCUMENT_BYTES:
        rule = f"must not be larger than {_MAX_DOCUMENT_BYTES >> 20} MiB, unless each line is one request"
        raise InputError(rule, location=str(path))
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"must be JSON: {_first_line(error)}", location=str(path)) from None


def _add_fields(record: Mapping[str, Any], prefix: str, kinds: dict[str, Kind]) -> None:
    """Add the fields of a record to those known, by their path."""
    for key, value in record.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and not _is_hashes(name, value):
            _add_fields(value, f"{name}.", kinds)
        elif value is not None or name not in kinds:
            kinds[name] = _json_kind(value)


def _at(record: Any, name: str) -> Mapping[str, Any]:
    """Return the object at a path of a record; empty if it is not there."""
    for key in name.split("."):
        record = record.get(key) if isinstance(record, dict) else None
    return record if isinstance(record, dict) else {}


def _require_one_run(sample: Sequence[Any], path: Path) -> None:
    if any(isinstance(each, dict) and isinstance(each.get("input_lens"), list) for each in sample):
        rule = (
            "must be one run, but holds several, as vllm bench serve --append-result writes them: copy the "
            "line of one run to a file, as by sed -n 1p"
        )
        raise InputError(rule, location=str(path))


def _is_hashes(name: str, value: Mapping[str, Any]) -> bool:
    """Return whether an object holds the block hashes of the parts of a prompt, as RAGPulse has them."""
    return name.rpartition(".")[2] == "hash_ids" and all(isinstance(each, list) for each in value.values())


def _json_kind(value: Any) -> Kind:
    if isinstance(value, list):
        return "list"
    if isinstance(value, dict):
        return "object"
    if isinstance(value, bool):
        return "other"
    return "number" if isinstance(value, int | float) else "text"


def _json_sql(name: str, kind: Kind) -> str:
    keys = "".join("." + json.dumps(key) for key in name.split("."))
    if kind == "list":
        return f"json_extract(json, {quoted('$' + keys)})::VARCHAR[]"
    if kind == "object":  # of lists, joined in their order
        lists = f"json_extract(json, {quoted('$' + keys + '.*')})"
        return f"flatten(list_transform({lists}, lambda part: part::VARCHAR[]))"
    return f"json_extract_string(json, {quoted('$' + keys)})"


_COLUMNS: Final = ("start_times", "input_lens", "output_lens")
"""Lists of ``vllm bench serve --save-result --save-detailed``, one item per request."""


def records_of(document: Any, path: Path) -> tuple[list[Mapping[str, Any]], str]:
    """Return the requests of a document, and a note on where they are.

    They are the items of the document itself, its columns (``vllm bench serve``), or its longest list of
    objects, joined over lists of the same path, such as GuideLLM's ``benchmarks.requests.successful``.
    """
    if isinstance(document, dict) and any(isinstance(document.get(name), list) for name in _COLUMNS):
        return _of_columns(document, path), ""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for where, records in _lists(document, ""):
        found.setdefault(where, []).extend(records)
    if not found:
        if isinstance(document, dict):
            return [document], ""
        raise InputError("must hold records of requests", location=str(path))
    where = max(found, key=lambda name: len(found[name]))
    return found[where], f"requests are those of {where}" if where else ""


def _of_columns(document: Mapping[str, Any], path: Path) -> list[Mapping[str, Any]]:
    for name in _COLUMNS:
        if not isinstance(document.get(name), list):
            rule = (
                "is required: run vllm bench serve of vLLM 0.15 or later with --save-result --save-detailed"
            )
            raise InputError(rule, location=f"{path}: {name}")
    count = len(document["start_times"])
    columns = {
        name: values for name, values in document.items() if isinstance(values, list) and len(values) == count
    }
    keys = [name for name in columns if name in (*_COLUMNS, "lora_modules", "errors")]
    return [{name: columns[name][row] for name in keys} for row in range(count)]


def _lists(value: Any, where: str) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """Yield every list of objects with its path, positions left out."""
    if isinstance(value, list):
        records: list[Mapping[str, Any]] = [each for each in value if isinstance(each, dict)]
        if records and len(records) == len(value):
            yield where, records
        for each in value:
            yield from _lists(each, where)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _lists(each, f"{where}.{key}".lstrip("."))
