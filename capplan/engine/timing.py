"""Engine clocks, phase timers and step records.

All times are integer nanoseconds of the engine's clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from capplan.engine.request import Request
from capplan.engine.scheduler_output import StepCounts
from capplan.serving import state as s
from capplan.spec import write_bytes_atomic

if TYPE_CHECKING:
    from capplan.engine.engine_core import StepOutput


class EngineClock(Protocol):
    """Tells the time."""

    def now_ns(self) -> int:
        """Return the nanoseconds since the clock's start."""
        ...

    def step(self, duration_ns: int) -> None:
        """Note that a step has taken so long."""
        ...

    def sleep_until(self, time_ns: int) -> None:
        """Return at that time, or at once if it has passed."""
        ...


class WallClock:
    """Real time since its creation."""

    def __init__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        """See `EngineClock`."""
        return time.monotonic_ns() - self._start_ns

    def step(self, duration_ns: int) -> None:
        """Time has passed by itself."""

    def sleep_until(self, time_ns: int) -> None:
        """See `EngineClock`."""
        time.sleep(max(0.0, (time_ns - self.now_ns()) * 1e-9))


class VirtualClock:
    """Time that passes in steps only."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        """See `EngineClock`."""
        return self._now_ns

    def step(self, duration_ns: int) -> None:
        """See `EngineClock`."""
        self._now_ns += duration_ns

    def sleep_until(self, time_ns: int) -> None:
        """See `EngineClock`."""
        self._now_ns = max(self._now_ns, time_ns)


class PhaseTimer:
    """Laps in nanoseconds, by name."""

    def __init__(self) -> None:
        self.laps_ns: dict[str, int] = {}
        self._since_ns = time.perf_counter_ns()

    def lap(self, name: str) -> None:
        """Add the time since the last call to a lap."""
        now_ns = time.perf_counter_ns()
        self.laps_ns[name] = self.laps_ns.get(name, 0) + now_ns - self._since_ns
        self._since_ns = now_ns

    def skip(self) -> None:
        """Leave the time since the last call out."""
        self._since_ns = time.perf_counter_ns()

    def until(self, name: str, total_ns: int) -> None:
        """Make the laps so far at least so long together: time that has passed by another clock only."""
        self.laps_ns[name] = self.laps_ns.get(name, 0) + max(0, total_ns - self.total_ns)

    def ms(self, name: str) -> float:
        """Return a lap in milliseconds."""
        return self.laps_ns.get(name, 0) * 1e-6

    @property
    def total_ns(self) -> int:
        """All laps together."""
        return sum(self.laps_ns.values())


class StepRecord(NamedTuple):
    """One step. Counts as the twin's latency models take them: at the time of the decision."""

    step: int
    begin_ns: int
    """By the engine's clock."""
    tokens: int
    decode_requests: int
    """Requests that compute one token and have generated some before."""
    prefill_requests: int
    prefill_tokens: int
    requests: int
    """Running, whether or not they have a token in the step."""
    waiting: int
    kv_tokens: int
    """Held before the step."""
    adapters: int
    """Distinct ones of running requests."""
    resident: int
    rank_sum: int
    """Over the requests of the step."""
    max_rank: int
    loads: int
    disk_loads: int
    preemptions: int
    # -- known at the end of the step --
    finished: int = 0
    duration_ns: int = 0
    schedule_ms: float = 0.0
    load_ms: float = 0.0
    """Time for which the step waited for adapters."""
    prepare_ms: float = 0.0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    commit_ms: float = 0.0


def step_record(
    step: int, begin_ns: int, tally: StepCounts, counters: NDArray[np.int64], disk_loads: int
) -> StepRecord:
    """Return the record of a step that has been decided and not committed, its times still to come."""
    c: list[int] = counters.tolist()
    return StepRecord(
        step=step,
        begin_ns=begin_ns,
        tokens=c[s.STEP_TOKENS],
        decode_requests=tally.decodes,
        prefill_requests=tally.parts - tally.decodes,
        prefill_tokens=tally.prefill_tokens,
        requests=c[s.N_RUNNING] - c[s.N_ENDING],
        waiting=c[s.N_WAITING],
        kv_tokens=c[s.KV_TOKENS],
        adapters=c[s.N_ACTIVE] - c[s.N_CLAIMED],
        resident=c[s.N_RESIDENT],
        rank_sum=tally.rank_sum,
        max_rank=tally.max_rank,
        loads=c[s.N_LOADS],
        disk_loads=disk_loads,
        preemptions=c[s.N_PREEMPTED],
    )


def with_times(record: StepRecord, end_ns: int, finished: int, watch: PhaseTimer) -> StepRecord:
    """Return the record of a step that has ended."""
    return record._replace(
        finished=finished,
        duration_ns=end_ns - record.begin_ns,
        schedule_ms=watch.ms("schedule"),
        load_ms=watch.ms("load"),
        prepare_ms=watch.ms("prepare"),
        forward_ms=watch.ms("forward"),
        sample_ms=watch.ms("sample"),
        commit_ms=watch.ms("commit"),
    )


def write_records(path: str | Path, records: Iterable[StepRecord]) -> None:
    """Write records as Parquet, one row per step; the columns are the fields of `StepRecord`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = list(records)
    columns = {name: [getattr(row, name) for row in rows] for name in StepRecord._fields}
    buffer = BytesIO()
    pq.write_table(pa.table(columns), buffer)
    write_bytes_atomic(path, buffer.getvalue())


_ROWS = 10_000


class RecordFile:
    """A Parquet file with a row per step, in its place once it is closed; see `Watcher`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beside = path.with_name(f"{path.name}.part{os.getpid()}")
        self._rows: list[StepRecord] = []
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stepped(self, step: StepOutput) -> None:
        """See `Watcher`."""
        if step.record is not None:
            self._rows.append(step.record)
            if len(self._rows) >= _ROWS:
                self._flush()

    def ended(self, request: Request) -> None:
        """See `Watcher`; what a request was is in its steps."""

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        self._writer.close()
        self._beside.replace(self._path)

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = {name: [getattr(row, name) for row in self._rows] for name in StepRecord._fields}
        kinds = [(name, pa.float64() if name.endswith("_ms") else pa.int64()) for name in StepRecord._fields]
        table = pa.table(columns, schema=pa.schema(kinds))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._beside, table.schema)
        self._writer.write_table(table)
        self._rows.clear()
