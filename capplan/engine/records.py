"""What every step did and how long its phases took, for calibration."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.engine.decisions import Tally
from capplan.engine.stopwatch import Stopwatch
from capplan.serving import state as s
from capplan.spec import write_bytes_atomic


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
    step: int, begin_ns: int, tally: Tally, counters: NDArray[np.int64], disk_loads: int
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


def with_times(record: StepRecord, end_ns: int, finished: int, watch: Stopwatch) -> StepRecord:
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
