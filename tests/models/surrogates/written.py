"""Files of surrogates, taken apart and put together again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from capplan import Profile, errors
from capplan.models.surrogates import _files as files
from capplan.models.surrogates._files import read_surrogate
from tests.models.surrogates.making import profile

Columns: TypeAlias = dict[str, np.ndarray]


def kind_of(path: Path) -> str:
    return path.name.split(".")[1]


def refused(path: Path, *, owner: Profile | None = None, kind: str | None = None) -> str:
    with pytest.raises(errors.InputError) as caught:
        read_surrogate(path, owner or profile(), kind or kind_of(path))
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    assert f"capplan train {(owner or profile()).name}" in text
    return text


def contents(file: Path) -> tuple[dict[str, Any], Columns]:
    if file.suffix == ".json":
        return json.loads(file.read_text()), {}
    with np.load(file, allow_pickle=False) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    return json.loads(columns.pop("header").item()), columns


def write(file: Path, document: Any, columns: Columns) -> None:
    """Write a file with a valid digest, as a forger can."""
    if isinstance(document, dict):
        document.pop("sha256", None)
        document["sha256"] = files._digest(
            document, {n: c for n, c in columns.items() if c.dtype != np.dtype(object)}
        )
    text = document if isinstance(document, str) else json.dumps(document)
    if file.suffix == ".json":
        file.write_text(text)
        return
    buffer = io.BytesIO()
    np.savez_compressed(buffer, header=np.array(text), **columns)
    file.write_bytes(buffer.getvalue())
