"""Surrogate files: data without code; damaged files are refused.

Kinds of many trees are compressed arrays beside a JSON header (``.npz``, read without pickle). The small tree
is JSON alone.
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
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from capplan.datasets import load_profile, surrogate_path
from capplan.errors import InputError
from capplan.models.surrogates._features import FEATURES, feature_probe
from capplan.models.surrogates._outputs import (
    OVER_EXPECTED,
    PROBABILITY,
    STARVATION,
    THROUGHPUT,
    EnsembleOutput,
    Forest,
)
from capplan.models.surrogates._surrogate import Domain, Intervals, SigmoidCalibration, Surrogate
from capplan.models.surrogates._tree import LOG_OVER_EXPECTED, Tree
from capplan.models.surrogates._tree import PROBABILITY as CHANCE
from capplan.spec import Profile, read_bytes

SURROGATE_VERSION: Final = 3

KINDS: Final = ("best", "forest", "tree")

Arrays: TypeAlias = Mapping[str, NDArray[Any]]

_FORMS: Final = MappingProxyType({"throughput": THROUGHPUT, "starvation": STARVATION})
_TREE_FORMS: Final = MappingProxyType({"throughput": OVER_EXPECTED, "starvation": PROBABILITY})
_TREE_ANSWERS: Final = MappingProxyType({"throughput": LOG_OVER_EXPECTED, "starvation": CHANCE})

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


_DETERMINING: Final[Any] = {
    "gpu": True,
    "tp": True,
    "model": {
        *("name", "hf_ids", "layers", "hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size"),
        *("vocab_size", "tied_embeddings", "dtype_bytes", "linear_dtype_bytes", "lora_on_embeddings"),
        "experts",
        "fused_layers",
        "kv_dtype_bytes",
        "other_weight_bytes",
        "window_layers",
    },
    "engine": True,
    "length_correlation": True,
}
"""Fields of a profile that the results of its simulations depend on, beside the coefficients."""

_LATER_FIELDS: Final = (
    ("engine", "target_modules"),
    ("engine", "fully_sharded_loras"),
    ("model", "linear_dtype_bytes"),
    ("model", "experts"),
    ("model", "fused_layers"),
    ("model", "kv_dtype_bytes"),
    ("model", "other_weight_bytes"),
    ("model", "window_layers"),
)
"""Fields that count when they are set: digests of before stay the same."""


def profile_digest(profile: Profile) -> str:
    """Return a digest of everything in a profile that throughput and starvation depend on."""
    relevant = profile.model_dump(include=_DETERMINING)
    for part, name in _LATER_FIELDS:
        if not relevant[part][name]:
            del relevant[part][name]
    relevant["engine"].pop("sgmv_from_tokens", None)  # within measured steps
    for part in ("step_latency", "memory", "loading"):
        fitted = getattr(profile, part)
        relevant[part] = [fitted.form, {name: c.value for name, c in fitted.coefficients.items()}]
        if fitted.tables:
            relevant[part].append({name: table.model_dump() for name, table in fitted.tables.items()})
    return hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode()).hexdigest()


def identity(profile: Profile, kind: str) -> dict[str, Any]:
    """Return the fields of a document that must match its profile and kind."""
    return {
        "version": SURROGATE_VERSION,
        "kind": kind,
        "profile": profile.name,
        "profile_digest": profile_digest(profile),
        "features": list(FEATURES),
        "probe": feature_probe(profile),
    }


def document_of(surrogate: Surrogate) -> dict[str, Any]:
    """Return everything of a surrogate but its forests."""
    domain = surrogate.domain
    document = identity(surrogate.profile, surrogate.kind) | {
        "calibration": vars(surrogate.calibration),
        "intervals": {end: tree.to_document() for end, tree in vars(surrogate.intervals).items()},
        "domain": {
            "low": domain.low.tolist(),
            "high": domain.high.tolist(),
            "centre": [float(f"{x:.9g}") for x in domain.centre],
            "whitening": [[float(f"{x:.6g}") for x in row] for row in domain.whitening],
            "farthest": domain.farthest,
        },
        "report": surrogate.report,
    }
    if surrogate.throughput_tree and surrogate.starvation_tree:
        trees = {"throughput": surrogate.throughput_tree, "starvation": surrogate.starvation_tree}
        return document | {"trees": {name: tree.to_document() for name, tree in trees.items()}}
    return document | {"forms": {name: getattr(surrogate, name).form for name in _FORMS}}


def arrays_of(surrogate: Surrogate) -> dict[str, NDArray[Any]]:
    """Return the forests of a surrogate by names of their arrays."""
    return {
        f"{name}_{number}_{field}": getattr(forest, field)
        for name in _FORMS
        for number, forest in enumerate(getattr(surrogate, name).forests)
        for field in Forest._fields
    }


def surrogate_of(document: Mapping[str, Any], arrays: Arrays, profile: Profile) -> Surrogate:
    """Return the surrogate of a document whose `identity` was checked, and of the arrays beside it.

    Whatever is missing, of another type, or would lead a tree walk out of bounds is one of `_DAMAGE`.
    """
    report, intervals = document["report"], document["intervals"]
    if not isinstance(report, dict):
        raise TypeError("report")
    trees = {name: _tree(tree, _TREE_ANSWERS[name]) for name, tree in document.get("trees", {}).items()}
    if trees:
        outputs = {
            name: EnsembleOutput(form, (tree_forest(trees[name]),)) for name, form in _TREE_FORMS.items()
        }
    else:
        outputs = {name: _output(name, document["forms"][name], arrays) for name in _FORMS}
    return Surrogate(
        profile=profile,
        kind=document["kind"],
        **outputs,
        calibration=SigmoidCalibration(*(_finite(document["calibration"][n]) for n in ("slope", "offset"))),
        intervals=Intervals(*(_tree(intervals[end], LOG_OVER_EXPECTED) for end in ("low", "high"))),
        domain=_domain(document["domain"]),
        report=report,
        throughput_tree=trees.get("throughput"),
        starvation_tree=trees.get("starvation"),
    )


def tree_forest(tree: Tree) -> Forest:
    """Return a small tree as a forest of one, with float32 values as in files."""
    return tree.forest._replace(value=tree.forest.value.astype(np.float32))


def _tree(document: object, answer: str) -> Tree:
    tree = Tree.from_document(document)
    if tree.answer != answer:
        raise InputError(f"must answer {answer}", tree.answer, "tree")
    return tree


def _output(name: str, form: str, arrays: Arrays) -> EnsembleOutput:
    forests = range(_FORMS[name][form].forests)
    return EnsembleOutput(form, tuple(_forest(arrays, f"{name}_{number}") for number in forests))


def _forest(arrays: Arrays, name: str) -> Forest:
    forest = Forest(**{field: arrays[f"{name}_{field}"] for field in _DTYPES})
    for field, dtype in _DTYPES.items():
        column = getattr(forest, field)
        if column.ndim != 1 or column.dtype != dtype:
            raise TypeError(f"{name}_{field}")
    if not _is_valid(forest):
        raise ValueError(name)
    return forest


def _is_valid(forest: Forest) -> bool:
    """Return whether every step of the compiled walk goes forward, to a node that exists."""
    roots, nodes = forest.roots, np.arange(forest.feature.size)
    if roots.size == 0 or any(getattr(forest, name).size != nodes.size for name in Forest._fields[1:]):
        return False
    inner = forest.feature >= 0
    children = np.stack([forest.left[inner], forest.right[inner]])
    return bool(
        np.all((roots >= 0) & (roots < nodes.size))
        and np.all(forest.feature < len(FEATURES))
        and np.all((children > nodes[inner]) & (children < nodes.size))
        and np.all(np.isfinite(forest.threshold))
        and np.all(np.isfinite(forest.value))
    )


def _domain(document: Mapping[str, Any]) -> Domain:
    features = len(FEATURES)
    farthest = _finite(document["farthest"])
    if farthest <= 0.0:
        raise InputError("must be above 0", farthest, "domain")
    return Domain(
        low=_numbers(document["low"], (features,)).astype(np.float32),
        high=_numbers(document["high"], (features,)).astype(np.float32),
        centre=_numbers(document["centre"], (features,)),
        whitening=_numbers(document["whitening"], (features, features)),
        farthest=farthest,
    )


def _numbers(values: object, shape: tuple[int, ...]) -> NDArray[np.float64]:
    numbers = np.array(values, float)
    if numbers.shape != shape or not np.all(np.abs(numbers) <= np.finfo(np.float32).max):
        raise InputError("must be finite numbers", location="domain")
    return numbers


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise TypeError("must be a finite number")
    return float(value)


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
        ``best``: the model of least error in training. ``forest``: random forests, as the paper's. ``tree``:
        one small, readable tree each, which predicts in nanoseconds.

    Raises
    ------
    InputError
        When there is none, its file is damaged, or it was trained on other values of the profile.
    """
    if kind not in KINDS:
        raise InputError(f"must be one of {', '.join(KINDS)}", kind, "kind")
    loaded = load_profile(profile) if isinstance(profile, str) else profile
    path = surrogate_path(loaded.name, kind)
    if not path.is_file():
        rule = f"has no surrogate of kind {kind}; make one with: capplan train {loaded.name}"
        raise InputError(rule, loaded.name, "profile")
    return read_surrogate(path, loaded, kind)


def read_surrogate(path: Path, profile: Profile, kind: str = "best") -> Surrogate:
    """Read a surrogate file and check that it belongs to `profile` and is of that kind."""
    advice = f"make one with: capplan train {profile.name}"
    damaged = InputError(f"damaged; {advice}", location=str(path))
    if not path.exists():
        raise InputError(f"no surrogate; {advice}", location=str(path))
    try:
        document, arrays = _unpack(path)
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
    # Exceptions of the zip, npy and JSON parsers, and of the checks above, for damaged files.
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,  # also RecursionError, and NotImplementedError for other zip features
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
            # The date is part of the format; a fixed one keeps the bytes equal.
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, member.getvalue())
    return buffer.getvalue()


def _digest(document: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return a SHA-256 of the content, which detects changed digits."""
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].dtype.str}:{arrays[name].shape}\0".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def _unpack(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    content = read_bytes(path, _MAX_BYTES)
    arrays = {} if path.suffix == ".json" else _columns(content)
    document = json.loads(arrays.pop(_HEADER).item() if arrays else content)
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
    """Return the array of an npy file; a declared size beyond its bytes is an error."""
    stream = io.BytesIO(member)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("another version of npy")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    return np.frombuffer(member, dtype, offset=stream.tell()).reshape(shape).copy()
