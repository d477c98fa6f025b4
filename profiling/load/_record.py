"""Records of the requests of a run: compact columns in memory, and a Parquet file with every event."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.profiling.load._requests import Schedule
from capplan.spec import create_beside, error_reason, replace_durably, resolved_output

FINISHED: Final = "finished"
UNFINISHED: Final = "unfinished"
"""Waiting or executing at the end of the run."""
REJECTED: Final = "rejected"
"""Not sent: the limit of requests in flight was reached."""
TIMEOUT: Final = "timeout"
DISCONNECTED: Final = "disconnected"
"""Connection closed before the end of the answer."""
REFUSED: Final = "refused"
"""No connection."""
BAD_RESPONSE: Final = "bad_response"
"""Neither HTTP nor a completion."""
HTTP_PREFIX: Final = "http_"
"""Prefix of a status other than 200."""
CLIENT_LIMIT: Final = "client_limit"
"""No file descriptor or port left on the client."""
NOT_FAILURES: Final = (FINISHED, UNFINISHED, REJECTED)
_SMALLEST_S: Final = 1e-5
_PER_OCTAVE: Final = 128
_BINS: Final = 32 * _PER_OCTAVE  # up to eleven hours
_MS_PER_S: Final = 1e3
_BUFFERED_S: Final = 2e-5
"""Mean time between tokens below which something has held them back: engines take 50 times as long."""
_BUFFERED_GAPS: Final = 4
"""Fewer tokens may arrive at once at a busy client."""
_PENDING_EVENTS: Final = 1 << 15
_PENDING_REQUESTS: Final = 1 << 10
_LAG_INTERVAL_S: Final = 0.02


class RequestOutcome(NamedTuple):
    """Outcome of one request; times in seconds on the clock of the run, NaN if absent."""

    number: int
    """Index in the schedule."""
    kind: str
    sent_s: float
    """Time of sending."""
    ended_s: float
    """Time of the last byte or of the failure."""
    times_s: list[float]
    """Arrival of each event with a token."""
    prompt_tokens: int | None = None
    """As the server counted them; None if not reported."""
    output_tokens: int | None = None
    message: str = ""
    """Message of a failure."""


def not_sent(number: int, kind: str) -> RequestOutcome:
    return RequestOutcome(number, kind, math.nan, math.nan, [])


class LogHistogram:
    """Histogram of durations in logarithmic bins, exact to a third of a percent."""

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(_BINS, np.int64)

    def add(self, gaps_s: NDArray[np.float64]) -> None:
        places = np.log2(np.maximum(gaps_s, _SMALLEST_S) / _SMALLEST_S) * _PER_OCTAVE
        bins = np.minimum(places.astype(np.int64), _BINS - 1)
        self.counts += np.bincount(bins, minlength=_BINS)

    def percentiles_s(self, percentiles: Sequence[float]) -> list[float]:
        """Return percentiles in seconds; NaN if empty."""
        up_to = np.cumsum(self.counts)
        if up_to[-1] == 0:
            return [math.nan] * len(percentiles)
        bins = np.searchsorted(up_to, np.array(percentiles) / 100.0 * up_to[-1])
        middles = _SMALLEST_S * 2.0 ** ((bins + 0.5) / _PER_OCTAVE)
        found: list[float] = np.where(bins == 0, 0.0, middles).tolist()  # arrived together
        return found


@dataclass(frozen=True)
class MeasurementWindow:
    """Measured interval in seconds on the clock of the run."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    def holds(self, times_s: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which times are inside; NaN is not."""
        return (times_s >= self.start_s) & (times_s < self.end_s)


@dataclass(frozen=True, eq=False)
class RequestRecords:
    """Requests in order of due time; arrays have shape (requests,)."""

    names: tuple[str, ...]
    """Adapters by number; the first is the base model with the empty name."""
    adapter: NDArray[np.int32]
    due_s: NDArray[np.float64]
    sent_s: NDArray[np.float64]
    """NaN if not sent."""
    first_s: NDArray[np.float64]
    """Arrival of the first token, or NaN."""
    last_s: NDArray[np.float64]
    """Arrival of the last token so far, or NaN."""
    ended_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int32]
    """As the server counted them, otherwise as requested."""
    output_tokens: NDArray[np.int32]
    """As the server counted them, otherwise events with text; of unfinished requests as requested."""
    events: NDArray[np.int32]
    """Events with tokens; fewer than tokens if a server puts several into one."""
    kind: NDArray[np.int16]
    """Position in `kinds`, or -1 without an outcome."""
    kinds: Sequence[str]

    @classmethod
    def without_outcomes(cls, schedule: Schedule) -> Self:
        """Return the records of requests that are not sent yet."""
        n = len(schedule)
        times = {name: np.full(n, np.nan) for name in ("sent_s", "first_s", "last_s", "ended_s")}
        return cls(
            names=schedule.names,
            adapter=schedule.adapter,
            due_s=schedule.due_s,
            **times,
            prompt_tokens=schedule.prompt_tokens.copy(),
            output_tokens=schedule.output_tokens.copy(),
            events=np.zeros(n, np.int32),
            kind=np.full(n, -1, np.int16),
            kinds=[FINISHED, UNFINISHED],
        )

    def __len__(self) -> int:
        return self.due_s.size

    def take(self, rows: NDArray[np.int64] | slice) -> Self:
        columns: dict[str, Any] = {
            name: value[rows] for name, value in vars(self).items() if isinstance(value, np.ndarray)
        }
        return replace(self, **columns)

    @property
    def is_buffered(self) -> NDArray[np.bool_]:
        """Return which requests got all their tokens at once, so that only their E2E was measured."""
        gaps = self.output_tokens - 1
        return (gaps >= _BUFFERED_GAPS) & (self.last_s - self.first_s < _BUFFERED_S * gaps)

    def of_kind(self, name: str) -> NDArray[np.bool_]:
        """Return which requests had this outcome."""
        which: NDArray[np.bool_] = self.kind == (self.kinds.index(name) if name in self.kinds else -2)
        return which


class RequestFile:
    """Parquet file with one row per request, in order of completion.

    Columns: number (index in the schedule), adapter (null: the base model), status, arrival_s (due time),
    sent_s, first_token_s, finish_s (last token; null unless finished), prompt_tokens, output_tokens, lag_ms
    (sent - due), ttft_s and e2e_s (since due), ttft_sent_s (since sending), tpot_ms, and event_ms (events
    with a token, since sending).

    Parameters
    ----------
    path
        Final path; the file is written beside it and renamed by `keep`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.path = resolved_output(path)
            self._beside = create_beside(self.path)
        except OSError as error:
            raise InputError(f"cannot be written: {error_reason(error)}", location=os.fspath(path)) from None
        self._writer: Any = None
        # Arrow loads much on first use, which later would delay requests.
        none, numbers = np.empty(0, np.int32), np.empty(0, np.int64)
        schedule = Schedule(np.empty(0), none, none, none, names=("",))
        self.write(RequestRecords.without_outcomes(schedule), numbers, np.empty(0), numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        with contextlib.suppress(OSError):
            self._beside.unlink()

    def write(
        self,
        records: RequestRecords,
        numbers: NDArray[np.int64],
        times_s: NDArray[np.float64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Append requests with their numbers, event times and numbers of events."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table(_columns(records, numbers, times_s, lengths))
        try:
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._beside, table.schema, compression="zstd")
            self._writer.write_table(table)
        except OSError as error:
            raise InputError(f"cannot be written: {error_reason(error)}", location=str(self.path)) from None

    def finished(self) -> Path:
        """Complete the file and return its temporary path."""
        self._close()
        return self._beside

    def keep(self) -> None:
        """Move the file to its path."""
        try:
            replace_durably(self.finished(), self.path)
        except OSError as error:
            raise InputError(f"cannot be written: {error_reason(error)}", location=str(self.path)) from None

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _columns(
    records: RequestRecords,
    numbers: NDArray[np.int64],
    times_s: NDArray[np.float64],
    lengths: NDArray[np.int64],
) -> dict[str, Any]:
    import pyarrow as pa

    adapters = np.array([name or None for name in records.names], object)
    due, sent, first = records.due_s, records.sent_s, records.first_s
    finish = np.where(records.of_kind(FINISHED), records.last_s, np.nan)
    more = np.where(records.is_buffered, 0, records.output_tokens - 1)
    tpot_ms = _MS_PER_S * (finish - first) / np.where(more > 0, more, np.nan)
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    since_sent = (times_s - np.repeat(sent, lengths)) * _MS_PER_S
    floats = {
        "arrival_s": due,
        "sent_s": sent,
        "first_token_s": first,
        "finish_s": finish,
        "lag_ms": _MS_PER_S * (sent - due),
        "ttft_s": first - due,
        "ttft_sent_s": first - sent,
        "e2e_s": finish - due,
        "tpot_ms": tpot_ms,
    }
    return {
        "number": pa.array(numbers.astype(np.int32)),
        "adapter": pa.array(adapters[records.adapter], pa.string()),
        "status": pa.array(np.array(records.kinds, object)[records.kind], pa.string()),
        "prompt_tokens": pa.array(records.prompt_tokens),
        "output_tokens": pa.array(records.output_tokens),
        **{name: pa.array(values, pa.float64(), from_pandas=True) for name, values in floats.items()},
        "event_ms": pa.ListArray.from_arrays(pa.array(ends), pa.array(since_sent.astype(np.float32))),
    }


class RequestRecorder:
    """Collector of outcomes."""

    def __init__(
        self, schedule: Schedule, window: MeasurementWindow, file: RequestFile | None = None
    ) -> None:
        self.gaps = LogHistogram()
        self.counts: Counter[str] = Counter()
        self.tokens = 0
        self.messages: dict[str, str] = {}
        self.uncounted = self.other_length = 0
        self._all = RequestRecords.without_outcomes(schedule)
        self._kinds = [FINISHED, UNFINISHED]
        self._window = window
        self._file = file
        self._pending: list[RequestOutcome] = []
        self._pending_events = 0

    def add(self, outcome: RequestOutcome) -> None:
        at, times, every = outcome.number, outcome.times_s, self._all
        every.sent_s[at], every.ended_s[at] = outcome.sent_s, outcome.ended_s
        if times:
            every.first_s[at], every.last_s[at] = times[0], times[-1]
        every.events[at] = len(times)
        if outcome.kind == FINISHED:
            if outcome.prompt_tokens is not None:
                every.prompt_tokens[at] = outcome.prompt_tokens
            tokens = len(times) if outcome.output_tokens is None else outcome.output_tokens
            self.uncounted += outcome.output_tokens is None
            self.other_length += tokens != every.output_tokens[at]
            every.output_tokens[at] = tokens
            self.tokens += int(every.prompt_tokens[at]) + int(every.output_tokens[at])
        if outcome.kind not in self._kinds:
            self._kinds.append(outcome.kind)
        every.kind[at] = self._kinds.index(outcome.kind)
        self.counts[outcome.kind] += 1
        if outcome.message:
            self.messages.setdefault(outcome.kind, outcome.message)
        self._pending.append(outcome)
        self._pending_events += len(times)
        if self._pending_events >= _PENDING_EVENTS or len(self._pending) >= _PENDING_REQUESTS:
            self._flush()

    @property
    def failures(self) -> int:
        """Failed requests so far."""
        return sum(count for kind, count in self.counts.items() if kind not in NOT_FAILURES)

    def record(self, until_s: float) -> RequestRecords:
        """Return the requests due before ``until_s``; unsent ones are unfinished."""
        n = int(np.searchsorted(self._all.due_s, until_s, side="left"))
        for number in np.flatnonzero(self._all.kind[:n] < 0).tolist():
            self.add(not_sent(number, UNFINISHED))
        self._flush()
        return replace(self._all.take(slice(n)), kinds=tuple(self._kinds))

    def _flush(self) -> None:
        """Count the gaps of pending outcomes and write them to the file."""
        pending, self._pending, self._pending_events = self._pending, [], 0
        if not pending:
            return
        numbers = np.array([each.number for each in pending])
        lengths = np.array([len(each.times_s) for each in pending])
        times = np.fromiter((t for each in pending for t in each.times_s), float, int(lengths.sum()))
        if times.size > 1:
            later = np.ones(times.size, bool)
            later[(np.cumsum(lengths) - lengths)[lengths > 0]] = False  # the first of each request
            later &= ~np.repeat(self._all.take(numbers).is_buffered, lengths)
            gaps = np.diff(times, prepend=0.0)
            self.gaps.add(gaps[later & self._window.holds(times)])
        if self._file is not None:
            records = replace(self._all.take(numbers), kinds=self._kinds)
            self._file.write(records, numbers, times, lengths)


class EventLoopLag:
    """Lateness of the event loop, sampled 50 times a second.

    Times that the loop takes, such as those of tokens, are late by as much.
    """

    def __init__(self) -> None:
        self.late = LogHistogram()

    async def watch(self) -> None:
        """Sample until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before_s = loop.time()
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.late.add(np.array([max(0.0, loop.time() - before_s - _LAG_INTERVAL_S)]))

    def percentile_ms(self, percentile: float) -> float | None:
        """Return a percentile in milliseconds; None without any sample."""
        (late_s,) = self.late.percentiles_s((percentile,))
        return None if math.isnan(late_s) else _MS_PER_S * late_s
