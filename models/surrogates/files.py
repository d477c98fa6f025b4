"""Surrogates as files of numbers and text, with nothing that could run on load; damaged ones are refused.

Kinds of many trees are compressed arrays beside a JSON header (``.npz``, read without pickle), the small tree
is JSON alone, to be read by people, too.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capplan.datasets import load_profile, surrogate_path
from capplan.errors import InputError
from capplan.models.surrogates.documents import KINDS, arrays_of, document_of, identity, surrogate_of
from capplan.models.surrogates.surrogate import Surrogate
from capplan.spec import Profile

_MAX_BYTES: Final = 64 * 2**20
_MAX_EXPANDED_BYTES: Final = 512 * 2**20
_HEADER: Final = "header"
_SEAL: Final = "sha256"
_PACKINGS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def load_surrogate(profile: str | Profile, kind: str = "best") -> Surrogate:
    """Load the surrogate shipped for a profile.

    Parameters
    ----------
    profile
        Name of a shipped profile, path of a profile JSON, or a profile.
    kind
        ``best``: what did best in training. ``forest``: random forests, as the paper's. ``tree``: one small
        tree each, which answers in nanoseconds and can be read.

    Raises
    ------
    InputError
        When there is none, its file is damaged, or it was trained for other numbers than the profile holds
        now.
    """
    if kind not in KINDS:
        raise InputError(f"must be one of {', '.join(KINDS)}", kind, "kind")
    loaded = load_profile(profile) if isinstance(profile, str) else profile
    return read_surrogate(surrogate_path(loaded.name, kind), loaded, kind)


def read_surrogate(path: Path, profile: Profile, kind: str = "best") -> Surrogate:
    """Read a surrogate file and check that it belongs to `profile` and is of that kind.

    Raises
    ------
    InputError
        In one line, with the command that makes a new file.
    """
    advice = f"make one with: capplan train {profile.name}"
    damaged = InputError(f"damaged; {advice}", location=str(path))
    try:
        document, arrays = _unpack(path)
    except FileNotFoundError:
        raise InputError(f"no surrogate; {advice}", location=str(path)) from None
    except _DAMAGE:
        raise damaged from None
    for key, expected in identity(profile, kind).items():
        if document.get(key) != expected:
            raise InputError(f"{key} does not match; {advice}", location=str(path))
    try:
        if document.pop(_SEAL, None) != _digest(document, arrays):
            raise damaged
        return surrogate_of(document, arrays, profile)
    except _DAMAGE:
        raise damaged from None


_DAMAGE: Final = (
    # What the parsers of zip, npy and JSON, and the checks of what they give, make of files gone astray.
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,  # also RecursionError, and NotImplementedError of zip features that nobody asked for
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


def surrogate_bytes(surrogate: Surrogate) -> bytes:
    """Return the file of a surrogate; the same bytes for the same surrogate."""
    is_json = surrogate_path(surrogate.profile.name, surrogate.kind).suffix == ".json"
    document, arrays = document_of(surrogate), arrays_of(surrogate)
    document[_SEAL] = _digest(document, {} if is_json else arrays)
    header = json.dumps(document, sort_keys=True, indent=1 if is_json else None)
    if is_json:
        return (header + "\n").encode()
    buffer = io.BytesIO()
    columns = {_HEADER: np.array(header), **arrays}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, column in columns.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, column, allow_pickle=False)
            # The date is part of the format and would make every file another one.
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, member.getvalue())
    return buffer.getvalue()


def _digest(document: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return a SHA-256 of the content: a digit that went wrong in a text would not be noticed without."""
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].dtype.str}:{arrays[name].shape}\0".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def _unpack(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError("too large")
    content = path.read_bytes()
    arrays: dict[str, NDArray[Any]] = {}
    if path.suffix == ".json":
        document = json.loads(content)
    else:
        arrays = _columns(content)
        document = json.loads(arrays.pop(_HEADER).item())
    if not isinstance(document, dict):
        raise TypeError("the header is no mapping")
    return document, arrays


def _columns(content: bytes) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > _MAX_EXPANDED_BYTES:
            raise ValueError("too large")
        if any(entry.compress_type not in _PACKINGS for entry in entries):
            raise ValueError("another compression")
        return {entry.filename.removesuffix(".npy"): _column(archive.read(entry)) for entry in entries}


def _column(member: bytes) -> NDArray[Any]:
    """Return the array of an npy file; what it declares of its size is believed as far as there are bytes."""
    stream = io.BytesIO(member)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("another version of npy")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    return np.frombuffer(member, dtype, offset=stream.tell()).reshape(shape).copy()
