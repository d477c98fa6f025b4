"""Datasets in folders: generated in parallel, resumable after a kill, byte-identical for equal arguments.

The manifest is written first with the request, then shards of a fixed number of scenarios in order, and last
the list of shards. A shard stores digests of its request and rows: a resumed run keeps valid shards and
writes all others again.

Simulations of the scenarios of a design, in parallel.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from capplan.errors import InfeasibleError, InputError
from capplan.models.surrogates import FEATURES, feature_probe, profile_digest
from capplan.models.training import (
    MANIFEST,
    OUTCOMES,
    DatasetRequest,
    DatasetResult,
    Manifest,
    Shard,
    content_digest,
    read_manifest,
    require_columns,
    schema,
)
from capplan.spec import (
    Profile,
    error_reason,
    read_bytes,
    require_duration,
    write_bytes_atomic,
    write_text_atomic,
)
from capplan.twin._sweep import OnProgress, imported_ray, in_parallel, require_workers
from capplan.twin.dataset._designs import DESIGNS, Sample, draw
from capplan.twin.instance._metrics import SimulationResult
from capplan.twin.instance._simulate import SimulateSettings, simulate
from capplan.version import installed_version

_MS_PER_S: Final = 1e3
_GROUPS_OF_A_DESIGN: Final = 2**40


class NoRow(Enum):
    """Reason why a scenario has no row."""

    REFUSED_FOR_MEMORY = "the engine would not start"
    WITHOUT_REQUESTS = "no request arrived"


@dataclass(frozen=True, eq=False)
class ScenarioRow:
    """Features and outcomes of one scenario."""

    number: int
    group: int
    """Unique over designs."""
    features: NDArray[np.float32]
    """Shape (features,), in the order of `capplan.models.surrogates._features.FEATURES`."""
    outcomes: tuple[float, ...]
    """In the order of `capplan.models.training._data.OUTCOMES`."""


def simulate_span(
    design: str, profile: Profile, seed: int, duration_s: float, start: int, stop: int
) -> list[ScenarioRow | NoRow]:
    """Draw and simulate the scenarios numbered from `start` to before `stop`.

    The seed determines the design and, with its number, the simulation of each scenario.
    """
    samples = draw(design, profile, seed, start, stop)
    return [
        simulate_sample(sample, profile, design, seed, duration_s, number)
        for number, sample in enumerate(samples, start=start)
    ]


def simulate_sample(
    sample: Sample, profile: Profile, design: str, seed: int, duration_s: float, number: int
) -> ScenarioRow | NoRow:
    """Simulate one scenario; an `InfeasibleError` for another reason than memory is raised."""
    settings: SimulateSettings = {
        **sample.settings,
        "duration_s": duration_s,
        "seed": simulation_seed(seed, number),
    }
    try:
        result = simulate(sample.workload, profile, **settings)
    except InfeasibleError as error:
        if error.reason != "memory":
            raise
        return NoRow.REFUSED_FOR_MEMORY
    if result.submitted == 0:
        return NoRow.WITHOUT_REQUESTS
    group = tuple(DESIGNS).index(design) * _GROUPS_OF_A_DESIGN + sample.group
    return ScenarioRow(number, group, sample.features(profile), outcomes(result))


def simulation_seed(seed: int, number: int) -> int:
    """Return the seed of one simulation, different from those of other scenarios and of the designs."""
    words = np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1, np.uint64)
    return int(words[0]) >> 1


def outcomes(result: SimulationResult) -> tuple[float, ...]:
    """Return the outcomes of a simulation in the order of `OUTCOMES`."""
    busy_ms = result.busy_fraction * result.duration_s * _MS_PER_S
    computed = {
        "offered_drawn_tok_s": result.offered_tok_s,
        "step_ms_mean": busy_ms / result.steps if result.steps else 0.0,
    }
    return tuple(float(computed[n] if n in computed else getattr(result, n)) for n in OUTCOMES)


_SCENARIOS_PER_PART: Final = 8

Span = tuple[int, int]
"""Numbers of the first scenario and of the one after the last."""


def parts_of(span: Span) -> list[Span]:
    """Return the parts of a span, small enough that workers finish at about the same time."""
    starts = range(span[0], span[1], _SCENARIOS_PER_PART)
    return [(start, min(start + _SCENARIOS_PER_PART, span[1])) for start in starts]


def simulate_spans(
    spans: Sequence[Span],
    profile: Profile,
    asked: DatasetRequest,
    workers: int | None,
    ray_address: str | None,
) -> Generator[list[ScenarioRow | NoRow], None, None]:
    """Yield the rows of every part of all spans in order; workers as for `in_parallel`."""
    parts = [part for span in spans for part in parts_of(span)]
    simulate_part = partial(_simulate_part, profile, asked.design, asked.seed, asked.duration_s)
    return in_parallel(simulate_part, parts, workers=workers, ray_address=ray_address, chunk=1)


def _simulate_part(
    profile: Profile, design: str, seed: int, duration_s: float, span: Span
) -> list[ScenarioRow | NoRow]:
    _end_with_parent(os.getpid())
    return simulate_span(design, profile, seed, duration_s, *span)


@functools.cache
def _end_with_parent(pid: int) -> None:
    """End this process when its parent is killed: it would wait for work forever.

    A forked process inherits this cache, but its entries are of another `pid`.
    """
    del pid
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


SCENARIOS_PER_SHARD: Final = 128
MAX_SCENARIOS: Final = 100_000_000  # years of simulation
_KEY: Final = b"capplan.shard"
_TEMPORARY: Final = (".part-*.parquet.*.tmp", f".{MANIFEST}.*.tmp")


@dataclass(frozen=True)
class _Label:
    """Metadata of a shard's file."""

    asked: str
    """Digest of the request."""
    start: int
    stop: int
    refused_for_memory: int
    without_requests: int
    content: str
    """Digest of the rows."""

    @property
    def rows(self) -> int:
        return self.stop - self.start - self.refused_for_memory - self.without_requests


def generate_dataset(
    folder: str | os.PathLike[str],
    profile: Profile,
    *,
    design: str,
    scenarios: int,
    seed: int = 0,
    duration_s: float = 3600.0,
    workers: int | None = None,
    ray_address: str | None = None,
    progress: OnProgress | None = None,
) -> Manifest:
    """Simulate scenarios of one GPU, and write features and outcomes into a folder.

    The folder of an interrupted call is continued, a complete one is checked and repaired, and one with fewer
    scenarios is extended. Concurrent calls must not share a folder.

    Parameters
    ----------
    folder
        A new or empty folder, or one of a call with the same arguments.
    profile
        Profile of the GPU.
    design
        One of `capplan.twin.dataset._designs.DESIGNS`.
    scenarios
        Number of scenarios. One that exceeds memory or has no request has no row.
    seed
        Same seed, same bytes.
    duration_s
        Horizon of each simulation.
    workers, ray_address
        As for `capplan.twin._sweep.in_parallel`.
    progress
        Called with (done, total) scenarios; those of existing shards count as done.

    Raises
    ------
    InputError
        For an invalid argument, or a folder with other files or data of other arguments.
    """
    asked = _request(profile, design, scenarios, seed, duration_s)
    require_workers(workers)
    if ray_address is not None:
        imported_ray()  # raise before anything is written
    target = Path(folder)
    _open(target, asked)
    missing = [span for span in _shards(asked) if not _is_there(_path(target, span), asked, span)]
    done = scenarios - sum(stop - start for start, stop in missing)
    if progress is not None:
        progress(done, scenarios)
    with closing(simulate_spans(missing, profile, asked, workers, ray_address)) as answered:
        for span in missing:
            rows: list[ScenarioRow | NoRow] = []
            for part in islice(answered, len(parts_of(span))):
                rows += part
                done += len(part)
                if progress is not None:
                    progress(done, scenarios)
            write_bytes_atomic(_path(target, span), shard_bytes(rows, asked, span))
    return _close(target, asked)


def _request(profile: Profile, design: str, scenarios: int, seed: int, duration_s: float) -> DatasetRequest:
    """Return the checked request of a dataset."""
    if design not in DESIGNS:
        raise InputError(f"must be one of {', '.join(DESIGNS)}", design, "design")
    _require_whole("scenarios", scenarios, 1, MAX_SCENARIOS)
    _require_whole("seed", seed, 0)
    require_duration(duration_s)
    return DatasetRequest(
        design=design,
        seed=seed,
        scenarios=scenarios,
        duration_s=float(duration_s),
        profile=profile.name,
        profile_digest=profile_digest(profile),
        features=FEATURES,
        probe=tuple(feature_probe(profile)),
        capplan=installed_version(),
    )


def _require_whole(name: str, value: int, least: int, most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"must be a whole number >= {least}", value, name)
    if most is not None and value > most:
        raise InputError(f"must be a whole number from {least} to {most}", value, name)


def shard_bytes(answers: Sequence[ScenarioRow | NoRow], asked: DatasetRequest, span: Span) -> bytes:
    """Return the file of the rows of a span."""
    rows = [answer for answer in answers if isinstance(answer, ScenarioRow)]
    features = np.array([row.features for row in rows], np.float32).reshape(len(rows), len(FEATURES))
    outcomes = np.array([row.outcomes for row in rows], np.float64).reshape(len(rows), len(OUTCOMES))
    columns = [
        pa.array([row.number for row in rows], pa.int64()),
        pa.array([row.group for row in rows], pa.int64()),
        pa.array([asked.design] * len(rows), pa.string()),
        *(pa.array(column) for column in (*features.T, *outcomes.T)),
    ]
    table = pa.table(columns, schema=schema())
    label = _Label(
        asked=_request_digest(asked),
        start=span[0],
        stop=span[1],
        refused_for_memory=answers.count(NoRow.REFUSED_FOR_MEMORY),
        without_requests=answers.count(NoRow.WITHOUT_REQUESTS),
        content=content_digest(table),
    )
    return _encoded(table, label)


def _encoded(table: pa.Table, label: _Label) -> bytes:
    buffer = BytesIO()
    labelled = table.replace_schema_metadata({_KEY: json.dumps(asdict(label)).encode()})
    pq.write_table(labelled, buffer, compression="zstd", use_dictionary=["design"])
    return buffer.getvalue()


def _open(folder: Path, asked: DatasetRequest) -> None:
    """Prepare the folder: remove partial files, check or write the manifest."""
    try:
        folder.mkdir(exist_ok=True)
        for path in [path for pattern in _TEMPORARY for path in folder.glob(pattern)]:
            path.unlink()
        is_empty = next(folder.iterdir(), None) is None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputError(f"cannot be written: {error_reason(error)}", location=str(folder)) from None
    found = read_manifest(folder)
    if found is None and not is_empty:
        raise InputError(f"holds files but no {MANIFEST}; give a new or empty folder", location=str(folder))
    if found is not None:
        _require_same(found.asked, asked, str(folder / MANIFEST))
    if found is None or found.asked != asked:
        write_text_atomic(folder / MANIFEST, Manifest(asked=asked).to_json())


def _require_same(then: DatasetRequest, now: DatasetRequest, location: str) -> None:
    """Check that two requests are equal, or that the second one only has more scenarios."""
    for name in DatasetRequest.model_fields:
        before, wanted = getattr(then, name), getattr(now, name)
        if name in ("features", "probe") and before != wanted:
            raise InputError("features are not those of this version; give a new folder", location=location)
        if name == "scenarios" and wanted < before:
            raise InputError(f"scenarios is {before} there, and cannot fall", wanted, location)
        if name != "scenarios" and before != wanted:
            raise InputError(f"{name} is {before!r} there; give the same, or a new folder", wanted, location)


def _close(folder: Path, asked: DatasetRequest) -> Manifest:
    """Write the list of shards into the manifest of a complete folder."""
    labels, shards = [], []
    for span in _shards(asked):
        path = _path(folder, span)
        found = _read(path, asked, span)
        if found is None:
            raise InputError("was changed while the dataset was generated", location=str(path))
        digest = hashlib.sha256(_encoded(*found)).hexdigest()
        labels.append(found[1])
        shards.append(Shard(file=path.name, rows=found[1].rows, sha256=digest))
    manifest = Manifest(
        asked=asked,
        answered=DatasetResult(
            rows=sum(shard.rows for shard in shards),
            refused_for_memory=sum(label.refused_for_memory for label in labels),
            without_requests=sum(label.without_requests for label in labels),
            shards=tuple(shards),
        ),
    )
    if read_manifest(folder) != manifest:
        write_text_atomic(folder / MANIFEST, manifest.to_json())
    return manifest


def _is_there(path: Path, asked: DatasetRequest, span: Span) -> bool:
    """Return whether a valid shard exists; valid rows in another encoding are rewritten."""
    found = _read(path, asked, span)
    if found is None:
        return False
    right = _encoded(*found)
    if read_bytes(path) != right:
        write_bytes_atomic(path, right)
    return True


def _read(path: Path, asked: DatasetRequest, span: Span) -> tuple[pa.Table, _Label] | None:
    """Return a shard and its label; None if it is missing, damaged or of another request."""
    try:
        table = pq.read_table(pa.BufferReader(read_bytes(path)), use_threads=False)
        label = _Label(**json.loads((table.schema.metadata or {})[_KEY]))
        require_columns(table, str(path))
        is_valid = (label.asked, label.start, label.stop) == (_request_digest(asked), *span)
        is_valid &= len(table) == label.rows and label.content == content_digest(table)
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError):  # InputError is a ValueError
        return None
    return (table, label) if is_valid else None


def _request_digest(asked: DatasetRequest) -> str:
    """Return the digest of everything that determines the rows of a scenario."""
    return hashlib.sha256(asked.model_dump_json(exclude={"scenarios"}).encode()).hexdigest()


def _shards(asked: DatasetRequest) -> list[Span]:
    starts = range(0, asked.scenarios, SCENARIOS_PER_SHARD)
    return [(start, min(start + SCENARIOS_PER_SHARD, asked.scenarios)) for start in starts]


def _path(folder: Path, span: Span) -> Path:
    return folder / f"part-{span[0] // SCENARIOS_PER_SHARD:05d}.parquet"
