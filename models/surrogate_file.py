"""Surrogates as files: arrays and a JSON header, nothing that could run on load; a damaged file is refused."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from capplan.datasets import load_profile, surrogate_path
from capplan.errors import InputError
from capplan.models.features import FEATURES
from capplan.models.forest import Forest
from capplan.models.surrogate import Surrogate
from capplan.spec import Profile

SURROGATE_VERSION = 2
KINDS = ("forest",)

_MAX_BYTES = 64 * 2**20
_FORESTS = ("throughput", "starvation")
_FOREST_DTYPES = Forest(
    roots=np.dtype(np.int32),
    feature=np.dtype(np.int16),
    threshold=np.dtype(np.float32),
    left=np.dtype(np.int32),
    right=np.dtype(np.int32),
    value=np.dtype(np.float32),
)  # type: ignore[arg-type]


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
    forests = [Forest(*(columns.get(f"{name}_{field}") for field in Forest._fields)) for name in _FORESTS]
    low, high, interval = columns.get("low"), columns.get("high"), header.get("interval")
    sound = all(map(_is_forest, forests)) and _is_bound(low) and _is_bound(high) and _is_interval(interval)
    if not sound or not isinstance(header.get("report"), dict):
        raise InputError(f"damaged; {advice}", location=str(path))
    return Surrogate(
        profile=profile,
        throughput=forests[0],
        starvation=forests[1],
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
    relevant = profile.model_dump(include={"gpu", "tp", "model", "engine"})
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


def _is_forest(forest: Forest) -> bool:
    """Tell whether the compiled walk stays inside: every step must go forward, to a node that exists."""
    typed = all(
        isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype == dtype
        for column, dtype in zip(forest, _FOREST_DTYPES, strict=True)
    )
    if not typed or any(column.size != forest.feature.size for column in forest[1:]) or not forest.roots.size:
        return False
    nodes = np.arange(forest.feature.size)
    inner = forest.feature >= 0
    children = (forest.left[inner], forest.right[inner])
    return (
        bool(np.all((forest.roots >= 0) & (forest.roots < nodes.size)))
        and bool(np.all(forest.feature < len(FEATURES)))
        and all(bool(np.all((child > nodes[inner]) & (child < nodes.size))) for child in children)
        and bool(np.all(np.isfinite(forest.value)))
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
