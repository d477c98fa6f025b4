"""Surrogates as files of numbers and text, with nothing that could run on load; damaged ones are refused.

Kinds of many trees are compressed arrays beside a JSON header (``.npz``, read without pickle), the small tree
is JSON alone, to be read by people, too.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
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
    try:
        document, arrays = _unpack(path)
        for key, expected in identity(profile, kind).items():
            if document.get(key) != expected:
                raise InputError(f"{key} does not match; {advice}", location=str(path))
    except FileNotFoundError:
        raise InputError(f"no surrogate; {advice}", location=str(path)) from None
    except _DAMAGE:
        raise InputError(f"damaged; {advice}", location=str(path)) from None
    try:
        return surrogate_of(document, arrays, profile)
    except (InputError, *_DAMAGE):
        raise InputError(f"damaged; {advice}", location=str(path)) from None


_DAMAGE: Final = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RecursionError,
    zipfile.BadZipFile,
    zlib.error,
)


def surrogate_bytes(surrogate: Surrogate) -> bytes:
    """Return the file of a surrogate; the same bytes for the same surrogate."""
    is_json = surrogate_path(surrogate.profile.name, surrogate.kind).suffix == ".json"
    header = json.dumps(document_of(surrogate), sort_keys=True, indent=1 if is_json else None)
    if is_json:
        return (header + "\n").encode()
    buffer = io.BytesIO()
    columns = {_HEADER: np.array(header), **arrays_of(surrogate)}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, column in columns.items():
            member = io.BytesIO()
            np.lib.format.write_array(member, column, allow_pickle=False)
            # The date is part of the format and would make every file another one.
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, member.getvalue())
    return buffer.getvalue()


def _unpack(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError("too large")
    content = path.read_bytes()
    arrays: dict[str, NDArray[Any]] = {}
    if path.suffix == ".json":
        document = json.loads(content)
    else:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MAX_EXPANDED_BYTES:
                raise ValueError("too large")
        with np.load(io.BytesIO(content), allow_pickle=False) as columns:
            arrays = {name: columns[name] for name in columns.files}
        document = json.loads(arrays.pop(_HEADER).item())
    if not isinstance(document, dict):
        raise TypeError("the header is no mapping")
    return document, arrays
