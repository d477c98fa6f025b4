"""Columns of Parquet and CSV files, read in parts of bounded size."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import re
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeAlias, cast

from capplan.errors import InputError
from capplan.spec._files import error_reason, open_stream

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_PART_ROWS: Final = 500_000
_MAX_ROWS: Final = 10_000_000  # of a table of measurements, which is kept whole
_MAX_LINE_BYTES: Final = 2**20  # a longer line is no row of numbers and names
MAX_COLUMNS: Final = 10_000
_BUFFER_BYTES: Final = 2**18


def _open_zstd(file: BinaryIO) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(file, "zstd")


_UNPACK: Final[Mapping[bytes, Callable[[BinaryIO], Any]]] = MappingProxyType(
    {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open, b"\x28\xb5\x2f\xfd": _open_zstd}
)
_PARQUET: Final = b"PAR1"
_SEPARATORS: Final = (",", ";", "\t", "|")
_SEPARATOR_LINE: Final = re.compile(r'"?sep=(.)"?\s*\Z')  # Excel writes it before the header
_DECIMAL_COMMA: Final = r"[+-]?\d*(?:,\d+)?(?:[eE][+-]?\d+)?"
_THOUSANDS: Final = r"[+-]?[1-9]\d{0,2}(?:,\d{3})+"
_SHOWN: Final = 20  # columns in a message


@dataclass(frozen=True)
class Header:
    """Columns of a file.

    Attributes
    ----------
    path : Path
        The file.
    names : tuple of str
        Names as the file writes them, without surrounding blanks.
    separator : str
        Between the cells of a CSV file; empty for other files.
    line : int
        Where the header is in a CSV file.
    """

    path: Path
    names: tuple[str, ...]
    separator: str = ""
    line: int = 1

    def find(self, name: str) -> int | None:
        """Return the position of a column, whatever the case of its letters; None if it is missing.

        Raises
        ------
        InputError
            If there are several.
        """
        exact = [position for position, each in enumerate(self.names) if each == name]
        found = exact or [at for at, each in enumerate(self.names) if each.casefold() == name.casefold()]
        if len(found) > 1:
            raise InputError("column must not repeat", location=f"{self.path}: {name}")
        return found[0] if found else None

    def choose(self, columns: Sequence[str], optional: Sequence[str] = ()) -> dict[str, int]:
        """Return the positions of columns; `optional` ones if there."""
        found = {name: self.require(name) for name in columns}
        return found | {name: at for name in optional if (at := self.find(name)) is not None}

    def require(self, name: str, hint: str = "") -> int:
        """Return the position of a column.

        Raises
        ------
        InputError
            If it is missing, with the columns found, their separator and `hint`.
        """
        position = self.find(name)
        if position is None:
            shown = [each or "(no name)" for each in self.names[:_SHOWN]]
            more = [] if len(self.names) <= _SHOWN else [f"{len(self.names) - _SHOWN:,} more"]
            between = {"": "", "\t": ", separated by tabs"}.get(
                self.separator, f", separated by {self.separator!r}"
            )
            rule = f"column is missing; columns found: {', '.join([*shown, *more])}{between}{hint}"
            raise InputError(rule, location=f"{self.path}: {name}")
        return position


Choose: TypeAlias = Callable[[Header], Mapping[str, int]]
"""Chooses the columns to read by their positions, and names them."""


def read_columns(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> pd.DataFrame:
    """Read columns of a Parquet or CSV file; `optional` ones if there.

    Raises
    ------
    InputError
        For an unreadable file, a missing column, or over 10 million rows.
    """
    import pandas as pd

    def choose(header: Header) -> Mapping[str, int]:
        return header.choose(columns, optional)

    limit = (_MAX_ROWS, f"must hold at most {_MAX_ROWS:,} rows")
    with open_unpacked(path) as file:
        return pd.concat(table_parts(path, file, choose, limit, (*columns, *optional)), ignore_index=True)


def table_parts(
    path: Path,
    file: io.BufferedReader,
    choose: Choose,
    limit: tuple[int, str],
    known: Collection[str] = (),
    text: Collection[str] = ("adapter",),
) -> Iterator[pd.DataFrame]:
    """Yield the rows of a table in parts, at least one; an empty table gives an empty part.

    The index of the parts counts the rows below the header from 0, blank ones too, which are left out.

    Parameters
    ----------
    path, file
        A Parquet or CSV file, as its first bytes say, from `open_unpacked`; CSV with any common separator.
    choose
        Columns to read.
    limit
        The number of rows, and the rule that more of them break.
    known
        Names of columns by which the separator of a CSV file is recognized.
    text
        Chosen columns whose numbers are names.

    Raises
    ------
    InputError
        For an unreadable file, a missing column, a row too many.
    """
    most, rule = limit
    rows = 0
    is_parquet = file.peek(len(_PARQUET)).startswith(_PARQUET)
    for part in _parquet(path, choose, limit, text) if is_parquet else _csv(path, file, choose, known, text):
        rows += len(part)
        if rows > most:
            raise InputError(rule, location=str(path))
        yield part


@contextmanager
def open_unpacked(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading, unpacked if its first bytes are those of gzip, bzip2, xz or zstd.

    Raises
    ------
    InputError
        If it cannot be opened, or an error of reading it leaves the block.
    """
    import pyarrow as pa

    try:
        with ExitStack() as files:
            file = cast(io.BufferedReader, files.enter_context(open_stream(path)))
            start = file.peek(8)
            for magic, unpack in _UNPACK.items():
                if start.startswith(magic):
                    unpacked = files.enter_context(unpack(file))
                    file = files.enter_context(io.BufferedReader(unpacked, _BUFFER_BYTES))
            yield file
    except InputError:
        raise
    except UnicodeDecodeError:
        raise InputError("must be UTF-8 text", location=str(path)) from None
    except (OSError, ValueError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowException) as error:
        raise InputError(f"cannot be read: {error_reason(error)}", location=str(path)) from None


def _parquet(
    path: Path, choose: Choose, limit: tuple[int, str], text: Collection[str]
) -> Iterator[pd.DataFrame]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open_stream(path) as opened, pq.ParquetFile(opened) as file:
        if file.metadata.num_rows > limit[0]:
            raise InputError(limit[1], file.metadata.num_rows, str(path))
        schema = file.schema_arrow
        chosen = choose(Header(path, tuple(schema.names)))
        target = pa.schema(
            [
                pa.field(name, _column_type(schema.field(at), f"{path}: {schema.names[at]}", name in text))
                for name, at in chosen.items()
            ]
        )
        if file.metadata.num_rows == 0:
            yield target.empty_table().to_pandas()
        start = 0
        for batch in file.iter_batches(_PART_ROWS, columns=[schema.names[at] for at in chosen.values()]):
            columns = [batch.column(batch.schema.get_field_index(schema.names[at])) for at in chosen.values()]
            cast_columns = [each.cast(field.type) for each, field in zip(columns, target, strict=True)]
            part = pa.RecordBatch.from_arrays(cast_columns, schema=target).to_pandas(ignore_metadata=True)
            part.index += start
            start += len(part)
            yield part


def _column_type(field: pa.Field, location: str, is_text: bool) -> pa.DataType:
    """Return the type in which a column of a Parquet file is read: numbers, text or times, or only text."""
    import pyarrow.types as kinds
    from pyarrow import float64, string

    kind = field.type
    value = kind.value_type if kinds.is_dictionary(kind) else kind
    is_string = any(test(value) for test in (kinds.is_string, kinds.is_large_string, kinds.is_string_view))
    if is_text and (is_string or kinds.is_integer(value) or kinds.is_null(value)):
        return string()
    if is_text:
        raise InputError(f"column must hold text, not {_short(kind)}", location=location)
    if kinds.is_decimal(value):
        return float64()
    allowed = (kinds.is_integer, kinds.is_floating, kinds.is_boolean, kinds.is_timestamp, kinds.is_null)
    if not is_string and not any(test(value) for test in allowed):
        raise InputError(f"column must hold numbers or text, not {_short(kind)}", location=location)
    return value


def _short(kind: pa.DataType) -> str:
    words = ascii(str(kind))[1:-1]
    return words if len(words) <= 80 else f"{words[:80]}..."


def _csv(
    path: Path, file: io.BufferedReader, choose: Choose, known: Collection[str], text: Collection[str]
) -> Iterator[pd.DataFrame]:
    import pandas as pd

    with io.BufferedReader(_Lines(file), _BUFFER_BYTES) as lines:
        header = _header(path, lines, known)
        chosen = choose(header)
        width = len(header.names)
        plain = header.separator == ","
        strings: Any = {at: str for name, at in chosen.items() if name in text or not plain}
        # A column beyond the header shows rows that are too long: pandas would take their first cells for an
        # index, or cut them.
        names = range(width + 1)
        cells: Any = {
            "dtype": strings,
            "keep_default_na": False,
            "na_values": [""],
            "skip_blank_lines": False,
        }
        form: Any = {
            "sep": header.separator,
            "skipinitialspace": header.separator != "\t",
            "index_col": False,
        }
        if not lines.peek(1):
            yield pd.DataFrame({name: pd.Series(dtype=object) for name in chosen})
            return

        def parsed() -> Iterator[pd.DataFrame]:
            yield from pd.read_csv(
                lines, header=None, names=names, chunksize=_PART_ROWS, low_memory=False, **form, **cells
            )

        parts = parsed()
        while True:
            with warnings.catch_warnings():  # pandas only warns of a first row that it cuts
                warnings.simplefilter("error", pd.errors.ParserWarning)
                try:
                    part = next(parts)
                except StopIteration:
                    return
                except pd.errors.ParserWarning:
                    raise _too_long(path, header.line + 1, header) from None
                except pd.errors.ParserError as error:
                    raise _parser_error(error, header) from None
            yield _chosen_cells(part, header, chosen, text)


def _parser_error(error: Exception, header: Header) -> InputError:
    wide = re.search(r"in line (\d+), saw", str(error))
    if wide is not None:
        return _too_long(header.path, int(wide.group(1)) + header.line, header)
    words = " ".join(str(error).split()).removeprefix("Error tokenizing data. C error: ")
    return InputError(f"must be CSV: {words}", location=str(header.path))


def _header(path: Path, lines: io.BufferedReader[Any], known: Collection[str]) -> Header:
    """Read the header of a CSV file, and the lines before it."""
    separators: Sequence[str] = _SEPARATORS
    for number in range(1, 1000):
        raw = lines.readline()
        if not raw:
            raise InputError("must not be empty: it has no header", location=str(path))
        if raw.count(b"\n") + raw.count(b"\r") > 1 + raw.endswith(b"\r\n"):
            raise InputError("must have lines that end with a line feed", location=str(path))
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip("\r\n")
        except UnicodeDecodeError:
            raise InputError("must be UTF-8 text", location=f"{path}:{number}") from None
        given = _SEPARATOR_LINE.match(text)
        if given is not None and separators is _SEPARATORS:
            separators = (given.group(1),)
        elif text.strip():
            break
    if max(map(text.count, separators)) >= MAX_COLUMNS:
        raise InputError(f"must not have over {MAX_COLUMNS:,} columns", location=str(path))
    if "\0" in text:
        raise InputError("must be text, without null bytes", location=f"{path}:{number}")
    names = {name.casefold() for name in known}

    def split(separator: str) -> list[str]:
        try:
            cells = next(csv.reader([text], delimiter=separator, skipinitialspace=True, strict=True))
        except csv.Error as error:
            raise InputError(f"must be CSV: {error}", location=f"{path}:{number}") from None
        return [cell.strip() for cell in cells]

    def matches(separator: str) -> tuple[int, int]:
        cells = split(separator)
        return sum(cell.casefold() in names for cell in cells), len(cells)

    separator = max(separators, key=matches)  # the first of the best
    return Header(path, tuple(split(separator)), separator, number)


def _chosen_cells(
    part: pd.DataFrame, header: Header, chosen: Mapping[str, int], text: Collection[str]
) -> pd.DataFrame:
    """Return the chosen columns of the rows of a CSV file that are not blank, with numbers parsed."""
    import pandas as pd

    part = part.dropna(how="all")
    unnamed = [at for at, name in enumerate((*header.names, "")) if not name and at not in chosen.values()]
    beyond = part[unnamed].notna().any(axis=1)
    if beyond.any():
        raise _too_long(
            header.path, int(part.index[int(beyond.to_numpy().argmax())]) + 1 + header.line, header
        )
    columns = {
        name: part[at] if part[at].dtype.kind in "iufb" else _stripped(part[at])
        for name, at in chosen.items()
    }
    numbers = [name for name in columns if name not in text and columns[name].dtype.kind not in "iufb"]
    pointed = {name: with_decimal_points(columns[name], header, name) for name in numbers}
    has_commas = any(pointed[name] is not columns[name] for name in numbers)
    for name in numbers:
        parsed = _parsed_numbers(pointed[name])
        if has_commas and pointed[name] is columns[name] and parsed.dtype.kind in "iuf":
            points = columns[name].dropna().str.contains(".", regex=False)
            if points.any():  # beside decimal commas, a point may separate thousands
                place = int(points.to_numpy().argmax())
                rule = f"must have decimal commas, as other columns (row {points.index[place] + 1})"
                raise InputError(
                    rule, columns[name].dropna().iloc[place], f"{header.path}: {header.names[chosen[name]]}"
                )
        columns[name] = parsed
    return pd.DataFrame(columns, index=part.index)


def _stripped(column: pd.Series) -> pd.Series:
    """Return a column of text without blanks around the cells; empty ones are missing."""
    import pandas as pd

    if (
        pd.api.types.infer_dtype(column, skipna=True) != "string"
    ):  # all missing, or whole numbers of 400 digits
        return column
    cells = column.str.strip()
    return cells.mask(cells == "")


def _parsed_numbers(cells: pd.Series) -> pd.Series:
    """Return a column of text as numbers if all are; their readers name the cell that is none."""
    import pandas as pd

    try:
        numbers = pd.to_numeric(cells, errors="coerce")
    except OverflowError:  # whole numbers of hundreds of digits
        return cells
    return numbers if (numbers.isna() == cells.isna()).all() else cells


def _too_long(path: Path, line: int, header: Header) -> InputError:
    separator = "tabs" if header.separator == "\t" else repr(header.separator)
    rule = f"must have as many cells as the header, {len(header.names)}, separated by {separator}"
    return InputError(rule, location=f"{path}:{line}")


def with_decimal_points(column: pd.Series, header: Header, name: str) -> pd.Series:
    """Return a column of text with decimal points in place of decimal commas.

    A column of a file that is separated by commas, or with points too, remains as it is.

    Raises
    ------
    InputError
        If all commas may separate thousands.
    """
    if header.separator == ",":
        return column
    cells = column.dropna().astype(str)
    commas = cells[cells.str.contains(",", regex=False)]
    if commas.empty or not cells.str.fullmatch(_DECIMAL_COMMA).all():
        return column
    if commas.str.fullmatch(_THOUSANDS).all():
        rule = f"commas may be decimal or separate thousands (row {commas.index[0] + 1}); write points"
        raise InputError(rule, commas.iloc[0], f"{header.path}: {name}")
    return cells.str.replace(",", ".", regex=False).reindex(column.index)


class _Lines(io.RawIOBase):
    """Bytes of a file whose lines have bounded lengths: a parser keeps a whole line in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._line_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._file.readinto(buffer)  # type: ignore[attr-defined]
        data = bytes(buffer[:count])
        last = data.rfind(b"\n")
        self._line_bytes = self._line_bytes + count if last < 0 else count - last - 1
        if self._line_bytes > _MAX_LINE_BYTES:
            raise ValueError(f"a line must not be longer than {_MAX_LINE_BYTES >> 20} MiB")
        return int(count)
