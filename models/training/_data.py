"""Training data: manifest of a dataset folder, its columns, and the table for training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from capplan.errors import InputError
from capplan.models.surrogates._features import FEATURES, feature_of
from capplan.spec import STARVED_BELOW, read_bytes, read_text

MANIFEST: Final = "manifest.json"


class _ManifestPart(BaseModel, frozen=True, strict=True, extra="forbid"):
    pass


class DatasetRequest(_ManifestPart):
    """Inputs of a dataset, which determine all of its data."""

    design: str
    seed: int = Field(ge=0)
    scenarios: int = Field(ge=1)
    duration_s: float = Field(gt=0, allow_inf_nan=False)
    """Horizon of each simulation in seconds."""
    profile: str
    profile_digest: str
    """Digest of all values that throughput and starvation depend on."""
    features: tuple[str, ...]
    probe: tuple[str, ...]
    """Features of fixed scenarios, by `capplan.models.surrogates._features.feature_probe`."""
    capplan: str
    """Version of the package."""


class Shard(_ManifestPart):
    """One file of rows."""

    file: str = Field(pattern=r"^part-\d{5,}\.parquet$")
    rows: int = Field(ge=0)
    sha256: str


class DatasetResult(_ManifestPart):
    """Contents of a finished dataset."""

    rows: int = Field(ge=0)
    refused_for_memory: int = Field(ge=0)
    """Scenarios without a row because the engine would not start."""
    without_requests: int = Field(ge=0)
    """Scenarios without a row because no request arrived."""
    shards: tuple[Shard, ...]


class Manifest(_ManifestPart):
    """Document of ``manifest.json``."""

    format: Literal[1] = 1
    asked: DatasetRequest
    answered: DatasetResult | None = None
    """None until the dataset is finished."""

    def to_json(self) -> str:
        """Return the text of the file."""
        return self.model_dump_json(indent=2) + "\n"


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder; None without one.

    Raises
    ------
    InputError
        For an unreadable or invalid file.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return Manifest.model_validate_json(read_text(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = f"{where}: {first['msg']}" if where else first["msg"]
        raise InputError(f"is no manifest of a dataset, or damaged: {reason}", location=str(path)) from None


LATENCIES: Final = ("itl_ms_mean", "ttft_s_p50", "ttft_s_p99")
"""Columns that are NaN if no request was completed."""

OUTCOMES: Final = (
    "throughput_tok_s",
    "offered_drawn_tok_s",
    "served_fraction",
    "step_ms_mean",
    "running_mean",
    "waiting_mean",
    "kv_tokens_mean",
    "adapters_mean",
    *LATENCIES,
    "preemptions",
    "adapter_loads",
    "completed",
    "submitted",
    "rejected",
)
"""Results of the twin, as in `capplan.twin.SimulationResult`; ``offered_drawn_tok_s`` is the load of the
requests that were drawn, ``step_ms_mean`` the busy time over the number of steps (0 without a step)."""

MIN_ROWS: Final = 200
_MAKE: Final = "make one with: capplan dataset generate"


@dataclass(frozen=True, eq=False)
class TrainingTable:
    """Rows of one or several datasets, in the order of folders and numbers; every array has n rows."""

    features: NDArray[np.float32]
    """Shape (n, features), in the order of `FEATURES`."""
    throughput_tok_s: NDArray[np.float64]
    """Input and output tokens of completed requests per second."""
    offered_drawn_tok_s: NDArray[np.float64]
    """Load of the requests that were drawn; the declared load is a feature."""
    served_fraction: NDArray[np.float64]
    step_ms: NDArray[np.float64]
    """Mean time of a step."""
    group: NDArray[np.int64]
    """Near-duplicate scenarios share a group; no two designs do."""
    design: NDArray[np.str_]
    number: NDArray[np.int64]
    """Of the scenario within its dataset."""

    def __len__(self) -> int:
        return self.number.size

    @property
    def starved(self) -> NDArray[np.bool_]:
        """Whether the GPU starves requests."""
        return np.asarray(self.served_fraction < STARVED_BELOW)

    @property
    def share_tok_s(self) -> NDArray[np.float64]:
        """Throughput per load drawn, times the declared load: tokens per second without sampling noise."""
        share: NDArray[np.float64] = (
            self.throughput_tok_s / self.offered_drawn_tok_s * feature_of(self.features, "offered_tok_s")
        )
        return share


def schema() -> pa.Schema:
    """Return names and types of the columns."""
    return pa.schema(
        [
            ("number", pa.int64()),
            ("group", pa.int64()),
            ("design", pa.string()),
            *((name, pa.float32()) for name in FEATURES),
            *((name, pa.float64()) for name in OUTCOMES),
        ]
    )


def content_digest(table: pa.Table) -> str:
    """Return a SHA-256 of the values of a table, however they are stored."""
    digest = hashlib.sha256()
    for name, column in zip(table.column_names, table.columns, strict=True):
        digest.update(f"{name}:{column.type}:{len(column)}\0".encode())
        if pa.types.is_string(column.type):
            digest.update("\0".join(column.to_pylist()).encode())
        else:
            digest.update(np.ascontiguousarray(column.to_numpy()).tobytes())
    return digest.hexdigest()


def read_tables(
    folders: Iterable[str | os.PathLike[str]], *, profile_digest: str | None = None
) -> TrainingTable:
    """Read datasets of one profile for training.

    Parameters
    ----------
    folders
        Datasets of `capplan dataset generate`.
    profile_digest
        Required digest of the profile, by `capplan.models.surrogates._files.profile_digest`.

    Raises
    ------
    InputError
        For no or an unfinished dataset, other features or another profile, changed files, values that are not
        finite, fewer than `MIN_ROWS` rows, or only one class.
    """
    named = [Path(folder) for folder in folders]
    if not named:
        raise InputError("at least one dataset is required", location="folders")
    tables = []
    for folder in named:
        asked, found = _read_folder(folder)
        if profile_digest is None:
            profile_digest = asked.profile_digest
        elif asked.profile_digest != profile_digest:
            raise InputError(
                f"was made with another profile, or other numbers of it; {_MAKE} again",
                asked.profile,
                str(folder / MANIFEST),
            )
        tables += found
    table = training_table(pa.concat_tables(tables))
    _require_enough(table, ", ".join(map(str, named)))
    return table


def training_table(table: pa.Table) -> TrainingTable:
    """Return the training columns of a table of `schema`."""

    def column(name: str) -> NDArray[np.float64]:
        return np.asarray(table.column(name).to_numpy())

    return TrainingTable(
        features=np.column_stack([table.column(name).to_numpy() for name in FEATURES]),
        throughput_tok_s=column("throughput_tok_s"),
        offered_drawn_tok_s=column("offered_drawn_tok_s"),
        served_fraction=column("served_fraction"),
        step_ms=column("step_ms_mean"),
        group=table.column("group").to_numpy(),
        design=np.array(table.column("design").to_pylist(), np.str_),
        number=table.column("number").to_numpy(),
    )


def require_columns(table: pa.Table, location: str) -> None:
    """Check that a table has the columns of `schema` and no invalid value.

    Raises
    ------
    InputError
        Naming the column, and the row counted from 0.
    """
    required, present = schema().names, table.column_names
    for name in required:
        if name not in present:
            raise InputError(f"has no column {name}", location=location)
    for name in present:
        if name not in required:
            raise InputError(f"has a column {name}, which is none of a dataset's", location=location)
    for field in schema():
        column = table.column(field.name)
        if column.type != field.type:
            raise InputError(f"column {field.name} must be {field.type}", str(column.type), location)
        wrong = _wrong_rows(column, may_be_nan=field.name in LATENCIES)
        if wrong.size:
            row = int(wrong[0])
            value = column[row].as_py()
            raise InputError(f"column {field.name}, row {row}: must be a finite number", value, location)


def _wrong_rows(column: pa.ChunkedArray, *, may_be_nan: bool) -> NDArray[np.intp]:
    """Return the rows that are null, infinite, or NaN where that is invalid."""
    if column.null_count:
        return np.flatnonzero(column.is_null().to_numpy())
    if not pa.types.is_floating(column.type):
        return np.empty(0, np.intp)
    values = column.to_numpy()
    return np.flatnonzero(np.isinf(values) if may_be_nan else ~np.isfinite(values))


def _read_folder(folder: Path) -> tuple[DatasetRequest, list[pa.Table]]:
    if not folder.is_dir():
        raise InputError(f"no such folder; {_MAKE}", location=str(folder))
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(f"holds no dataset; {_MAKE}", location=str(folder))
    if manifest.asked.features != FEATURES:  # their values are checked with the profile, by training
        raise InputError(
            f"was made with other features than this version has; {_MAKE} again", location=str(folder)
        )
    if manifest.answered is None:
        raise InputError("is not finished; run the command that began it again", location=str(folder))
    return manifest.asked, [
        _read_shard(folder / shard.file, shard, manifest.asked) for shard in manifest.answered.shards
    ]


def _read_shard(path: Path, shard: Shard, asked: DatasetRequest) -> pa.Table:
    raw = read_bytes(path)
    try:
        table = pq.read_table(pa.BufferReader(raw), use_threads=False)
        require_columns(table, str(path))
    except (pa.ArrowException, OSError, UnicodeDecodeError):  # the last of names of columns
        raise InputError("damaged; run the command that made it again", location=str(path)) from None
    as_listed = len(table) == shard.rows and hashlib.sha256(raw).hexdigest() == shard.sha256
    if not as_listed or set(table.column("design").to_pylist()) - {asked.design}:
        raise InputError(
            f"is not the file that {MANIFEST} lists; run the command that made it again", location=str(path)
        )
    return table.select(schema().names).replace_schema_metadata(None)


def _require_enough(table: TrainingTable, location: str) -> None:
    if len(table) < MIN_ROWS:
        raise InputError(f"at least {MIN_ROWS} rows are needed to train", len(table), location)
    starved = int(table.starved.sum())
    if starved in (0, len(table)):
        which = "no scenario starves" if starved == 0 else "every scenario starves"
        raise InputError(f"{which}: one class alone teaches nothing of the other", location=location)
