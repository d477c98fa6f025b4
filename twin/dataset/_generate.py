"""Datasets in folders: generated in parallel, resumable after a kill, byte-identical for equal arguments.

The experimental designs are the grid of the adapter-caching paper, and two space-filling ones. A scenario is
a pure function of (design, profile, seed, number): any part of a dataset can be drawn alone. Its scenarios
are simulated in parallel.

The manifest is written first with the request, then shards of a fixed number of scenarios in order, and last
the list of shards. A shard stores digests of its request and rows: a resumed run keeps valid shards and
writes all others again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from io import BytesIO
from itertools import combinations, combinations_with_replacement, islice
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.stats import qmc

from capplan.errors import InfeasibleError, InputError
from capplan.models import kv_budget
from capplan.models.surrogates import (
    FEATURES,
    MAX_IN_FLIGHT,
    common_inputs,
    feature_of,
    feature_probe,
    feature_vector,
    feature_vectors,
    gpu_limits,
    profile_digest,
    steady_share,
)
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
    STARVED_BELOW,
    Adapter,
    ArrivalProcess,
    Arrivals,
    EngineConfig,
    Lengths,
    Profile,
    Renewal,
    Workload,
    allowed_lora_rank,
    error_reason,
    read_bytes,
    require_duration,
    write_bytes_atomic,
    write_text_atomic,
    zipf,
)
from capplan.twin._sweep import OnProgress, imported_ray, in_parallel, require_workers
from capplan.twin.instance._metrics import SimulationResult
from capplan.twin.instance._simulate import SimulateSettings, engine_args, simulate
from capplan.version import installed_version

GRID_COUNTS: Final = (8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384)
GRID_RATES_RPS: Final = (3.2, 1.6, 0.8, 0.4, 0.1, 0.05, 0.025, 0.0125, 0.00625, 0.003125)
GRID_RANKS: Final = (8, 16, 32)
GRID_LENGTHS: Final = ((223.0, 245.0), (194.0, 206.0))
"""Mean and standard deviation of prompts and outputs of the paper's requests (ShareGPT)."""

_RANK_SETS: Final = (
    *((8,), (16,), (32,), (64,), (8, 16), (8, 32), (16, 32), (8, 16, 32)),
    *((128,), (4, 8), (8, 16, 32, 64), (8, 16, 32, 64, 128)),
)
_MOST_RPS: Final = 1_000.0
_TWINS: Final = 2
_SHARED: Final = 10
_OWN: Final = 5
_NEAR: Final = 1.5
_EDGE_RPS: Final = (1e-3, _MOST_RPS)
_BISECTIONS: Final = 24

_Point = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One scenario of one GPU, as arguments of `capplan.simulate`."""

    group: int
    """Scenarios of one group share adapters and lengths, and belong to the same part of a data split."""
    workload: Workload
    settings: SimulateSettings

    def features(self, profile: Profile) -> NDArray[np.float32]:
        """Return the features in the order of `FEATURES`."""
        return feature_vector(self.workload, profile, engine_args(self.workload, self.settings, profile))


def draw(design: str, profile: Profile, seed: int, start: int, stop: int) -> list[Sample]:
    """Return the scenarios of a design numbered from `start` to before `stop`.

    Parameters
    ----------
    design
        One of `DESIGNS`.
    profile
        Loads of space-filling scenarios are relative to its capacity.
    seed
        Seed of the whole design.

    Raises
    ------
    InputError
        For an unknown design.
    """
    if design not in DESIGNS:
        raise InputError(f"must be one of {', '.join(DESIGNS)}", design, "design")
    return DESIGNS[design](profile, seed, start, stop)


def paper_grid(profile: Profile, seed: int, start: int, stop: int) -> list[Sample]:
    """Return cells of the grid of section 8.3 in random order, without repetition until all were drawn.

    Three different rates of ten; three sizes of {8, 16, 32} with at most one 32, as in the published
    launcher; adapters and A_max from 8 to 384, A_max <= adapters. Sizes and rates are assigned to adapters at
    random. Request lengths are constant or spread as in ShareGPT, at random.
    """
    del profile
    rates = list(combinations(GRID_RATES_RPS, 3))
    sizes = [s for s in combinations_with_replacement(GRID_RANKS, 3) if s.count(32) <= 1]
    pairs = [(count, a_max) for count in GRID_COUNTS for a_max in GRID_COUNTS if a_max <= count]
    cells = len(rates) * len(sizes) * len(pairs)
    samples = []
    for number in range(start, stop):
        turn, place = divmod(number, cells)
        order = np.random.default_rng([seed, turn]).permutation(cells)
        set_number, pair_number = divmod(int(order[place]), len(pairs))
        count, a_max = pairs[pair_number]
        rng = np.random.default_rng([seed, 1, number])
        workload = _workload(
            ranks=rng.choice(sizes[set_number % len(sizes)], count),
            rates_rps=rng.choice(rates[set_number // len(sizes)], count),
            prompt=GRID_LENGTHS[0],
            output=GRID_LENGTHS[1],
            spread=bool(rng.random() < 0.5),
        )
        max_num_seqs = int(rng.choice((256, 512, 1024, 2048), p=(0.45, 0.05, 0.05, 0.45)))
        engine = EngineConfig(max_loras=a_max, max_num_seqs=max_num_seqs)
        samples.append(Sample(set_number, workload, _settings(workload, engine)))
    return samples


def space_filling(profile: Profile, seed: int, start: int, stop: int) -> list[Sample]:
    """Return points of a scrambled Sobol sequence over workloads and engine settings.

    Dimensions beyond the grid: lengths, their spread and correlation, burstiness of arrivals, popularity,
    engine limits and memory. Loads lie around the profile's estimated capacity, where planners query. A pair
    of scenarios has one workload at two loads, with different A_max and engine settings.
    """
    return [
        replace(sample, workload=sample.workload.at_rates_times(load_rps))
        for sample, at in _unit_samples((seed,), (seed, 2), start, stop)
        for load_rps in [min(_MOST_RPS, _load(at) * _saturation_rps(sample, profile))]
    ]


def near_starvation(profile: Profile, seed: int, start: int, stop: int) -> list[Sample]:
    """Return scenarios as of `space_filling` whose loads lie around the edge of starvation.

    The edge is the load at which the fluid model serves `STARVED_BELOW`, be it for want of slots or of
    capacity. Loads are within a factor `_NEAR` of it, evenly on a logarithmic scale.
    """
    return [
        replace(sample, workload=sample.workload.at_rates_times(load_rps))
        for sample, at in _unit_samples((seed, 3), (seed, 4), start, stop)
        for load_rps in [min(_MOST_RPS, _between(at, 1.0 / _NEAR, _NEAR) * _edge_rps(sample, profile))]
    ]


def _unit_samples(
    sequence: tuple[int, ...], shares: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[Sample, float]]:
    """Yield samples `start` to before `stop` that offer 1 req/s, each with the place of its load in [0, 1).

    `sequence` seeds the Sobol sequence, `shares` ranks and popularity.
    """
    first = start // _TWINS
    points = _sobol(sequence, first, -(-stop // _TWINS))
    for number in range(start, stop):
        group, twin = divmod(number, _TWINS)
        point = points[group - first]
        own = point[_SHARED + twin * _OWN :][:_OWN]
        rng = np.random.default_rng([*shares, group])
        yield _unit_sample(rng, group, point[:_SHARED], own), own[-1]


def _sobol(seed: tuple[int, ...], start: int, stop: int) -> NDArray[np.float64]:
    """Return a section of a scrambled Sobol sequence, shape (stop - start, dimensions).

    A point holds the settings of a whole pair: two scrambled sequences would be correlated.
    """
    sequence = qmc.Sobol(_SHARED + _TWINS * _OWN, rng=np.random.default_rng(seed))
    if start:
        sequence.fast_forward(start)
    with warnings.catch_warnings():
        # Only the whole sequence is balanced at powers of two.
        warnings.filterwarnings("ignore", message="The balance properties")
        points: NDArray[np.float64] = sequence.random(stop - start)
    return points


Design = Callable[[Profile, int, int, int], list[Sample]]
DESIGNS: Final[Mapping[str, Design]] = MappingProxyType(
    {"paper-grid": paper_grid, "space-filling": space_filling, "near-starvation": near_starvation}
)


def _unit_sample(rng: np.random.Generator, group: int, base: _Point, own: _Point) -> Sample:
    """Return the sample of a point: `base` is shared by its group, `own` holds its engine settings."""
    count = round(_between(base[0] ** 0.75, 1, 512))
    prompt_mean, output_mean = _between(base[1], 16, 4000), _between(base[2], 8, 1000)
    a_max = min(384, max(1, round(_between(own[0], count / 32, count))))
    max_num_seqs = round(_between(own[1], 16, 2048))
    workload = _workload(
        ranks=rng.choice(_RANK_SETS[int(base[3] * len(_RANK_SETS))], count),
        rates_rps=_popularity(rng, count, base[4], base[5]),
        prompt=(prompt_mean, _spread(base[6]) * prompt_mean),
        output=(output_mean, _spread(base[7]) * output_mean),
        spread=True,
        arrivals=_arrivals(base[8]),
        length_correlation=None if base[9] < 0.8 else -0.6 + 1.2 * (base[9] - 0.8) / 0.2,
    )
    engine = EngineConfig(
        max_loras=a_max,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, round(_between(own[2], 256, 8192))),
        gpu_memory_utilization=0.9 if own[3] < 0.4 else 0.5 + 0.46 * (own[3] - 0.4) / 0.6,
    )
    return Sample(group, workload, _settings(workload, engine))


def _workload(
    ranks: NDArray[np.int64],
    rates_rps: NDArray[np.float64],
    prompt: tuple[float, float],
    output: tuple[float, float],
    spread: bool,
    arrivals: ArrivalProcess = Arrivals.POISSON,
    length_correlation: float | None = None,
) -> Workload:
    return Workload(
        base_model="any",
        adapters=tuple(
            Adapter(name=str(i), rank=int(rank), rate_rps=float(rate))
            for i, (rank, rate) in enumerate(zip(ranks, rates_rps, strict=True))
        ),
        prompt_tokens=Lengths(mean=prompt[0], std=prompt[1] if spread else None),
        output_tokens=Lengths(mean=output[0], std=output[1] if spread else None),
        arrivals=arrivals,
        length_correlation=length_correlation,
    )


def _settings(workload: Workload, engine: EngineConfig) -> SimulateSettings:
    rank = allowed_lora_rank(max(adapter.rank for adapter in workload.adapters))
    args = engine.complete(max_lora_rank=rank)
    return SimulateSettings(
        a_max=args.max_loras,
        s_max=rank,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        gpu_memory_utilization=args.gpu_memory_utilization,
        max_in_flight=MAX_IN_FLIGHT,
    )


def _saturation_rps(sample: Sample, profile: Profile) -> float:
    """Return the load at the capacity of the fluid model; the sample offers 1 req/s."""
    features = sample.features(profile)
    return 1.0 / float(feature_of(features, "load_over_capacity"))


def _edge_rps(sample: Sample, profile: Profile) -> float:
    """Return the load at which the fluid model serves `STARVED_BELOW`; the sample offers 1 req/s."""
    workload, args = sample.workload, engine_args(sample.workload, sample.settings, profile)
    common = common_inputs(workload, profile)
    limits = gpu_limits(kv_budget(profile, args.gpu_memory_utilization), args)
    rates_rps = np.array([adapter.rate_rps for adapter in workload.adapters])
    ranks = np.array([adapter.rank for adapter in workload.adapters], float)

    def serves(load_rps: float) -> bool:
        features = feature_vectors(common, [limits], load_rps * rates_rps, ranks)[0]
        return float(steady_share(features)) >= STARVED_BELOW

    low, high = np.log(_EDGE_RPS)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if serves(float(np.exp(middle))) else (low, middle)
    return float(np.exp(low))


def _popularity(rng: np.random.Generator, count: int, law: float, skew: float) -> NDArray[np.float64]:
    """Return shares of the load: equal, Zipf, log-normal, or three rates assigned at random."""
    if law < 0.15:
        shares = np.ones(count)
    elif law < 0.4:
        shares = rng.permutation(np.array(zipf(count, 2.0 * skew)))
    elif law < 0.75:
        shares = np.exp(2.0 * skew * rng.standard_normal(count))
    else:
        shares = rng.choice(rng.choice(GRID_RATES_RPS, 3, replace=False), count)
    normal: NDArray[np.float64] = shares / shares.sum()
    return normal


def _spread(at: float) -> float:
    """Return a coefficient of variation: one in six lengths is constant."""
    return max(0.0, (at - 1 / 6) * 6 / 5) * 1.5


def _arrivals(at: float) -> ArrivalProcess:
    """Return a Poisson process in half of all cases, else a gamma process from regular to very bursty."""
    return Arrivals.POISSON if at < 0.5 else Renewal(process="gamma", cv=_between(2 * at - 1, 0.25, 6.0))


def _load(at: float) -> float:
    """Return the load over the estimated capacity; 60 % of them lie between 0.5 and 2."""
    if at < 0.6:
        return _between(at / 0.6, 0.5, 2.0)
    return _between((at - 0.6) / 0.25, 0.02, 0.5) if at < 0.85 else _between((at - 0.85) / 0.15, 2.0, 30.0)


def _between(at: float, low: float, high: float) -> float:
    """Interpolate between `low` and `high` on a logarithmic scale."""
    return float(low * (high / low) ** at)


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
        One of `capplan.twin.dataset._generate.DESIGNS`.
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
