"""Tensors of safetensors files.

The bytes are read, not mapped: a file that is truncated while it is mapped kills the process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any, BinaryIO, Final, NamedTuple

from capplan.errors import InputError
from capplan.spec.files import error_reason, parse_json

_MAX_HEADER_BYTES: Final = 4 * 2**20
"""Names and shapes of the 14 matrices of each of 126 layers take 0.3 MiB."""
_MAX_SIZE: Final = 2**32
"""Of one dimension; products of a few remain small integers."""
_TYPE_BYTES: Final = MappingProxyType({"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1})


def read_whole(file: BinaryIO, size_bytes: int, location: str) -> bytearray:
    """Return the next bytes of a file.

    Raises
    ------
    InputError
        If it has fewer, or cannot be read.
    """
    data = bytearray(size_bytes)
    view, at = memoryview(data), 0
    while at < size_bytes:
        try:
            n = file.readinto(view[at:])  # type: ignore[attr-defined]
        except OSError as error:
            raise InputError(f"cannot be read: {error_reason(error)}", location=location) from None
        if not n:
            raise InputError("cannot be read: it is truncated", location=location)
        at += n
    return data


class TensorEntry(NamedTuple):
    """Entry of a tensor in the header of a safetensors file; `start` is within the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """Tensors of an open safetensors file.

    The format is an eight-byte length, a JSON header with type, shape and place of every tensor, and the data
    of the tensors without gaps (https://github.com/huggingface/safetensors#format).

    Attributes
    ----------
    entries
        In the order of the data.

    Raises
    ------
    InputError
        If the header is larger than 4 MiB or broken, or does not cover the file.
    """

    def __init__(self, file: BinaryIO, location: str) -> None:
        self._file = file
        self._location = location
        size_bytes = os.fstat(file.fileno()).st_size
        header_bytes = int.from_bytes(read_whole(file, 8, location), "little") if size_bytes >= 8 else 0
        if not 2 <= header_bytes <= size_bytes - 8:
            raise self._broken("it has no header of its length")
        if header_bytes > _MAX_HEADER_BYTES:
            raise InputError(
                f"must have a header of at most {_MAX_HEADER_BYTES} bytes", header_bytes, location
            )
        self._data_at = 8 + header_bytes
        self.entries = self._entries(read_whole(file, header_bytes, location))
        end = self.entries[-1].stop if self.entries else 0
        if end != size_bytes - self._data_at:
            raise self._broken(f"its tensors take {end} bytes of {size_bytes - self._data_at}")

    def read(self, entries: Iterable[TensorEntry]) -> Iterator[tuple[TensorEntry, bytearray]]:
        """Yield tensors with their bytes."""
        for entry in entries:
            self._file.seek(self._data_at + entry.start)
            yield entry, read_whole(self._file, entry.stop - entry.start, self._location)

    def _entries(self, header: bytearray) -> list[TensorEntry]:
        try:
            fields = parse_json(header.decode(), self._location)
        except UnicodeDecodeError:
            raise self._broken("the header is not UTF-8") from None
        if not isinstance(fields, dict):
            raise self._broken("the header is no JSON object")
        fields.pop("__metadata__", None)
        entries = sorted((self._entry(name, each) for name, each in fields.items()), key=lambda e: e.start)
        at = 0
        for entry in entries:
            if entry.start != at:
                raise self._broken(f"{entry.name} starts at byte {entry.start} and not at {at}")
            at = entry.stop
        return entries

    def _entry(self, name: str, fields: Any) -> TensorEntry:
        try:
            dtype, shape = fields["dtype"], tuple(fields["shape"])
            type_bytes = _TYPE_BYTES[dtype]
            start, stop = fields["data_offsets"]
        except (KeyError, TypeError, ValueError):
            rule = f"must have a shape, data_offsets and a dtype of {', '.join(_TYPE_BYTES)}"
            raise InputError(rule, name, self._location) from None
        where = f"{self._location}: {name}"
        if len(shape) != 2 or not all(type(n) is int and 0 < n < _MAX_SIZE for n in shape):
            raise InputError("must be a matrix", shape, where)
        if type(start) is not int or stop != start + math.prod(shape) * type_bytes:
            raise InputError("must have the bytes of its shape", (shape, start, stop), where)
        return TensorEntry(name, dtype, shape, start, stop)

    def _broken(self, reason: str) -> InputError:
        return InputError(f"cannot be read: {reason}", location=self._location)
