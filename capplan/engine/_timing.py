"""Engine clocks, phase timers and step records.

A server runs on the wall clock. The virtual clock advances only by the measured durations of steps: idle time
is skipped, and the twin, given the same durations, must take the same decisions on the same trace.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np

from capplan.errors import InputError
from capplan.spec import create_beside, error_reason, replace_durably, resolved_output

_ROWS_PER_GROUP: Final = 10_000
_PROBE_LOOPS: Final = 400
_PROBE_SIDE: Final = 64
_PROBE_REPEATS: Final = 3
_PROBE_PERIOD_NS: Final = 50_000_000
"""Least time between two probes. One takes about 0.1 ms."""


class WallClock:
    """Real time since `start_ns` of the monotonic clock, in integer nanoseconds."""

    def __init__(self) -> None:
        self.start_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        """Return the time since the clock's start."""
        return time.monotonic_ns() - self.start_ns

    def step(self, duration_ns: int) -> None:
        """Do nothing: real time has passed already."""

    def sleep_until(self, time_ns: int) -> None:
        """Sleep until a time, if it has not passed."""
        time.sleep(max(0.0, (time_ns - self.now_ns()) * 1e-9))


class VirtualClock:
    """Time that advances by steps only, in integer nanoseconds."""

    start_ns = 0

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        """Return the time since the clock's start."""
        return self._now_ns

    def step(self, duration_ns: int) -> None:
        """Advance by the duration of a step."""
        self._now_ns += duration_ns

    def sleep_until(self, time_ns: int) -> None:
        """Skip to a time, if it has not passed."""
        self._now_ns = max(self._now_ns, time_ns)


EngineClock = WallClock | VirtualClock


class PhaseTimer:
    """Durations of the phases of a step."""

    def __init__(self) -> None:
        self._laps_ns: dict[str, int] = {}
        self._since_ns = time.perf_counter_ns()

    def lap(self, name: str) -> None:
        """Add the time since the last call to a phase."""
        now_ns = time.perf_counter_ns()
        self._laps_ns[name] = self._laps_ns.get(name, 0) + now_ns - self._since_ns
        self._since_ns = now_ns

    def skip(self) -> None:
        """Discard the time since the last call."""
        self._since_ns = time.perf_counter_ns()

    def extend_to(self, name: str, total_ns: int) -> None:
        """Extend a phase until all phases add up to at least `total_ns`."""
        self._laps_ns[name] = self._laps_ns.get(name, 0) + max(0, total_ns - self.total_ns)

    def ms(self, name: str) -> float:
        """Return the duration of a phase in milliseconds."""
        return self._laps_ns.get(name, 0) * 1e-6

    @property
    def total_ns(self) -> int:
        """Sum of all phases."""
        return sum(self._laps_ns.values())


class SpeedProbe:
    """Time of a fixed piece of work, taken now and then: the speed of the CPU at that time.

    A loop of the interpreter and a product of matrices, the two kinds of work in a step. The shortest of
    three repetitions counts, since the first one finds the caches as the step has left them.
    """

    def __init__(self) -> None:
        self._next_ns = 0
        self._square = np.full((_PROBE_SIDE, _PROBE_SIDE), 0.5, np.float32)
        self._product = np.empty_like(self._square)

    def taken_ms(self) -> float:
        """Return the time of the work in milliseconds; 0 if the last one is less than the period ago."""
        now_ns = time.perf_counter_ns()
        if now_ns < self._next_ns:
            return 0.0
        self._next_ns = now_ns + _PROBE_PERIOD_NS
        return 1e-6 * min(self._work_ns() for _ in range(_PROBE_REPEATS))

    def _work_ns(self) -> int:
        start_ns = time.perf_counter_ns()
        total = 0
        for number in range(_PROBE_LOOPS):
            total += number
        np.matmul(self._square, self._square, out=self._product)
        return time.perf_counter_ns() - start_ns


class StepRecord(NamedTuple):
    """Counts and times of one step. Counts are taken at the decision, as in the twin's latency models."""

    step: int
    begin_ns: int
    """By the engine's clock."""
    tokens: int
    decode_requests: int
    """Requests that compute one token after their first output token."""
    prefill_requests: int
    prefill_tokens: int
    prefill_pairs: int
    """Pairs of a query and a key token in the attention of prefills."""
    requests: int
    """Running requests, with or without tokens in the step, but for those that wait for adapter or prompt."""
    waiting: int
    kv_tokens: int
    """Tokens with KV before the step."""
    adapters: int
    """Distinct adapters of running requests."""
    resident: int
    rank_sum: int
    """Over the requests of the step."""
    max_rank: int
    loads: int
    disk_loads: int
    preemptions: int
    finished: int
    duration_ns: int
    schedule_ms: float
    load_ms: float
    """Time for which the step waited for adapters."""
    prepare_ms: float
    forward_ms: float
    sample_ms: float
    commit_ms: float
    probe_ms: float = 0.0
    """Of `SpeedProbe` after the step; 0: not taken."""


class RecordFile:
    """Parquet file of records, which is moved to its path at the end."""

    def __init__(self, path: Path) -> None:
        try:
            self._path = resolved_output(path)
            self._partial = create_beside(self._path)
        except OSError as error:
            raise InputError(f"cannot be written: {error_reason(error)}", location=str(path)) from None
        self._records: list[StepRecord] = []
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._writer.close()
        replace_durably(self._partial, self._path)

    def add(self, record: StepRecord) -> None:
        """Append a record."""
        self._records.append(record)
        if len(self._records) >= _ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = StepRecord._fields
        columns = {name: [getattr(record, name) for record in self._records] for name in names}
        types = [(name, pa.float64() if name.endswith("_ms") else pa.int64()) for name in names]
        table = pa.table(columns, schema=pa.schema(types))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._partial, table.schema)
        self._writer.write_table(table)
        self._records.clear()
