"""Surrogates as files: arrays and a JSON header, nothing that could run on load; damaged ones are refused."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capplan.datasets import load_profile, surrogate_path
from capplan.errors import InputError
from capplan.models.surrogates.features import FEATURES
from capplan.models.surrogates.forest import Forest
from capplan.models.surrogates.surrogate import Surrogate
from capplan.spec import Profile

SURROGATE_VERSION = 2
KINDS = ("forest",)

_MAX_BYTES = 64 * 2**20
_FORESTS = ("throughput", "starvation")
_DTYPES: Final[Mapping[str, type[np.generic]]] = MappingProxyType(
    {
        "roots": np.int32,
        "feature": np.int16,
        "threshold": np.float32,
        "left": np.int32,
        "right": np.int32,
        "value": np.float32,
    }
)


def load_surrogate(profile: str | Profile, kind: str = "forest") -> Surrogate:
    """Load the surrogate shipped for a profile.

    Parameters
    ----------
    profile
        Name of a shipped profile, path of a profile JSON, or a profile.
    kind
        ``forest``.

    Raises
    ------
    InputError
        When there is none, its file is damaged, or it was trained for other numbers than the profile holds
        now.
    """
    if kind not in KINDS:
        raise InputError(f"must be one of {', '.join(KINDS)}", kind, "kind")
    loaded = load_profile(profile) if isinstance(profile, str) else profile
    return read_surrogate(surrogate_path(loaded.name, kind), loaded)


def read_surrogate(path: Path, profile: Profile) -> Surrogate:
    """Read a surrogate file and check that it belongs to `profile`.

    Raises
    ------
    InputError
        In one line, with the command that makes a new file.
    """
    advice = f"make one with: capplan train {profile.name}"
    try:
        header, columns = _unpack(path)
    except FileNotFoundError:
        raise InputError(f"no surrogate; {advice}", location=str(path)) from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error):
        raise InputError(f"damaged; {advice}", location=str(path)) from None
    for key, expected in _identity(profile).items():
        if header.get(key) != expected:
            raise InputError(f"{key} does not match; {advice}", location=str(path))
    forests = [_forest(columns, name) for name in _FORESTS]
    sound = all(map(_holds_together, forests)) and all(_is_bound(columns.get(end)) for end in ("low", "high"))
    if not sound or not _is_interval(header.get("interval")) or not isinstance(header.get("report"), dict):
        raise InputError(f"damaged; {advice}", location=str(path))
    return Surrogate(
        profile=profile,
        throughput=Forest(**forests[0]),
        starvation=Forest(**forests[1]),
        low=columns["low"],
        high=columns["high"],
        interval=(float(header["interval"][0]), float(header["interval"][1])),
        report=header["report"],
    )


def surrogate_bytes(surrogate: Surrogate) -> bytes:
    """Return the file of a surrogate."""
    header = _identity(surrogate.profile) | {
        "interval": list(surrogate.interval),
        "report": surrogate.report,
    }
    columns: dict[str, Any] = {"header": np.array(json.dumps(header, sort_keys=True))}
    for name, forest in zip(_FORESTS, (surrogate.throughput, surrogate.starvation), strict=True):
        columns |= {f"{name}_{field}": getattr(forest, field) for field in Forest._fields}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, low=surrogate.low, high=surrogate.high, **columns)
    return buffer.getvalue()


def profile_digest(profile: Profile) -> str:
    """Return a digest of everything in a profile that throughput and starvation depend on."""
    relevant = profile.model_dump(include={"gpu", "tp", "model", "engine", "length_correlation"})
    for part in ("step_latency", "memory", "loading"):
        fitted = getattr(profile, part)
        relevant[part] = [fitted.form, {name: c.value for name, c in fitted.coefficients.items()}]
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()


def _identity(profile: Profile) -> dict[str, Any]:
    """Return what a file must say of itself to be read for this profile."""
    return {
        "version": SURROGATE_VERSION,
        "profile": profile.name,
        "profile_digest": profile_digest(profile),
        "features": list(FEATURES),
    }


def _unpack(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError("too large")
    with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    header = json.loads(columns.pop("header").item())
    if not isinstance(header, dict):
        raise TypeError("the header is no mapping")
    return header, columns


def _forest(columns: Mapping[str, NDArray[Any]], name: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of one forest by field; those that lack, or are of another type, are left out."""
    found = {field: columns.get(f"{name}_{field}") for field in _DTYPES}
    return {
        field: column
        for field, column in found.items()
        if column is not None and column.ndim == 1 and column.dtype == _DTYPES[field]
    }


def _holds_together(forest: Mapping[str, NDArray[Any]]) -> bool:
    """Tell whether the compiled walk stays inside: every step must go forward, to a node that exists."""
    if set(forest) != set(_DTYPES) or forest["roots"].size == 0:
        return False
    roots, feature = forest["roots"], forest["feature"]
    nodes = np.arange(feature.size)
    if any(forest[field].size != nodes.size for field in _DTYPES if field != "roots"):
        return False
    inner = feature >= 0
    children = (forest["left"][inner], forest["right"][inner])
    return (
        bool(np.all((roots >= 0) & (roots < nodes.size)))
        and bool(np.all(feature < len(FEATURES)))
        and all(bool(np.all((child > nodes[inner]) & (child < nodes.size))) for child in children)
        and bool(np.all(np.isfinite(forest["value"])))
    )


def _is_bound(column: NDArray[Any] | None) -> bool:
    return (
        column is not None
        and column.shape == (len(FEATURES),)
        and column.dtype == np.float32
        and bool(np.all(np.isfinite(column)))
    )


def _is_interval(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, float) for v in value)
