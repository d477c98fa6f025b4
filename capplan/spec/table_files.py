"""Columns of Parquet and CSV files, read in parts of bounded size."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from capplan.errors import InputError
from capplan.spec.files import error_reason, open_stream

if TYPE_CHECKING:
    import pandas as pd

_PART_ROWS: Final = 500_000
_MAX_ROWS: Final = 10_000_000  # of a table of measurements, which is kept whole
_MAX_LINE_BYTES: Final = 2**20  # a longer line is no row of numbers and names
_MAX_COLUMNS: Final = 10_000
_BUFFER_BYTES: Final = 2**18
_UNPACK: Final[Mapping[str, Callable[[BinaryIO], Any]]] = MappingProxyType(
    {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
)


def read_columns(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> pd.DataFrame:
    """Read columns of a .parquet file, or of a CSV file under any other name; ``optional`` ones if there.

    Raises
    ------
    InputError
        For an unreadable file, a missing column, or over 10 million rows.
    """
    import pandas as pd

    rule = f"must hold at most {_MAX_ROWS:,} rows"
    return pd.concat(column_parts(path, columns, optional, (_MAX_ROWS, rule)), ignore_index=True)


def column_parts(
    path: Path, columns: Sequence[str], optional: Sequence[str], limit: tuple[int, str]
) -> Iterator[pd.DataFrame]:
    """Yield the rows of a table in parts, at least one; an empty table gives an empty part.

    Parameters
    ----------
    path, columns, optional
        As for :func:`read_columns`.
    limit
        The number of rows, and the rule that more of them break.

    Raises
    ------
    InputError
        For an unreadable file, a missing column, a row too many.
    """
    import pyarrow as pa

    most, rule = limit
    rows = 0
    try:
        wanted = (*columns, *optional)
        for part in _parquet(path, wanted, limit) if path.suffix == ".parquet" else _csv(path, wanted):
            for name in columns:
                if name not in part.columns:
                    raise InputError("column is missing", location=f"{path}: {name}")
            rows += len(part)
            if rows > most:
                raise InputError(rule, location=str(path))
            yield part[[*columns, *(name for name in optional if name in part.columns)]]
    except InputError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: pandas, for broken text
        raise InputError(f"cannot be read: {error_reason(error)}", location=str(path)) from None


def _parquet(path: Path, wanted: Sequence[str], limit: tuple[int, str]) -> Iterator[pd.DataFrame]:
    import pyarrow.parquet as pq

    if path.is_dir():
        raise InputError("must be a file", location=str(path))
    with pq.ParquetFile(path) as file:
        if file.metadata.num_rows > limit[0]:
            raise InputError(limit[1], file.metadata.num_rows, str(path))
        columns = [name for name in file.schema_arrow.names if name in wanted]
        if file.metadata.num_rows == 0:
            yield file.schema_arrow.empty_table().to_pandas()
        for batch in file.iter_batches(_PART_ROWS, columns=columns):
            yield batch.to_pandas()


def _csv(path: Path, wanted: Sequence[str]) -> Iterator[pd.DataFrame]:
    import pandas as pd

    keep_text = {"adapter": str} if "adapter" in wanted else None
    unpack = _UNPACK.get(path.suffix, nullcontext)
    with (
        open_stream(path) as file,
        unpack(file) as text,
        io.BufferedReader(_Lines(text), _BUFFER_BYTES) as lines,
    ):
        header = lines.peek(_MAX_LINE_BYTES).partition(b"\n")[0]
        if header.count(b",") >= _MAX_COLUMNS:
            raise ValueError(f"a table must not have over {_MAX_COLUMNS:,} columns")
        options: Any = {"dtype": keep_text, "keep_default_na": False, "na_values": [""]}
        yield from pd.read_csv(lines, chunksize=_PART_ROWS, **options)


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
