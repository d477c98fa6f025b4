"""Records of the requests of a run: compact columns in memory, and a Parquet file with every event."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.profiling.load.requests import Schedule
from capplan.spec.files import error_reason

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
_NO_ROWS: Final = MappingProxyType(
    {name: np.empty(0, object) for name in ("adapter", "kind")}
    | {name: np.empty(0, np.int32) for name in ("number", "prompt_tokens", "output_tokens")}
    | {name: np.empty(0) for name in ("arrival_s", "sent_s", "first_token_s", "last_token_s", "ended_s")}
)
_PENDING_EVENTS: Final = 1 << 15
_PENDING_REQUESTS: Final = 1 << 10


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
    """Return the outcome of an unsent request."""
    return RequestOutcome(number, kind, math.nan, math.nan, [])


class LogHistogram:
    """Histogram of durations in logarithmic bins, exact to a third of a percent."""

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(_BINS, np.int64)

    def add(self, gaps_s: NDArray[np.float64]) -> None:
        """Add durations in seconds."""
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
        found: list[float] = np.where(bins == 0, 0.0, middles).tolist()  # what arrived together
        return found


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
        self.path = Path(os.path.realpath(path))
        self._beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._writer: Any = None
        # All that Arrow loads on first use is loaded now; later it would keep requests waiting.
        self.write(_NO_ROWS, np.empty(0), np.empty(0, np.int64))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
        with contextlib.suppress(OSError):
            self._beside.unlink()

    def write(
        self,
        rows: Mapping[str, NDArray[np.generic]],
        times_s: NDArray[np.float64],
        lengths: NDArray[np.int64],
    ) -> None:
        """Append requests."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table(_columns(rows, times_s, lengths))
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
            self.finished().replace(self.path)
        except OSError as error:
            raise InputError(f"cannot be written: {error_reason(error)}", location=str(self.path)) from None

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _columns(
    rows: Mapping[str, NDArray[Any]], times_s: NDArray[np.float64], lengths: NDArray[np.int64]
) -> dict[str, Any]:
    import pyarrow as pa

    status = rows["kind"]
    finished = status == "finished"
    due, sent, first = rows["arrival_s"], rows["sent_s"], rows["first_token_s"]
    finish = np.where(finished, rows["last_token_s"], np.nan)
    more = rows["output_tokens"] - 1
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
        "number": pa.array(rows["number"].astype(np.int32)),
        "adapter": pa.array([name or None for name in rows["adapter"]], pa.string()),
        "status": pa.array(status, pa.string()),
        "prompt_tokens": pa.array(rows["prompt_tokens"].astype(np.int32)),
        "output_tokens": pa.array(rows["output_tokens"].astype(np.int32)),
        **{name: pa.array(values, pa.float64(), from_pandas=True) for name, values in floats.items()},
        "event_ms": pa.ListArray.from_arrays(pa.array(ends), pa.array(since_sent.astype(np.float32))),
    }


@dataclass(frozen=True)
class MeasurementWindow:
    """Measured interval in seconds on the clock of the run."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s

    def holds(self, times_s: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which times are inside; NaN is not."""
        after, before = times_s >= self.start_s, times_s < self.end_s
        within: NDArray[np.bool_] = np.logical_and(after, before)
        return within


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
    """As the server counted them, otherwise as requested."""
    events: NDArray[np.int32]
    """Events with tokens; fewer than tokens if a server puts several into one."""
    kind: NDArray[np.int16]
    """Position in `kinds`."""
    kinds: tuple[str, ...]

    def __len__(self) -> int:
        return self.due_s.size

    def of_kind(self, name: str) -> NDArray[np.bool_]:
        """Return which requests had this outcome."""
        which: NDArray[np.bool_] = self.kind == (self.kinds.index(name) if name in self.kinds else -1)
        return which


class RequestRecorder:
    """Collector of outcomes."""

    def __init__(
        self, schedule: Schedule, window: MeasurementWindow, file: RequestFile | None = None
    ) -> None:
        n = len(schedule)
        self.gaps = LogHistogram()
        self.counts: Counter[str] = Counter()
        self.tokens = 0
        self.messages: dict[str, str] = {}
        self._schedule = schedule
        self._window = window
        self._file = file
        self._sent, self._first, self._last, self._ended = (np.full(n, np.nan) for _ in range(4))
        self._prompt = schedule.prompt_tokens.copy()
        self._output = schedule.output_tokens.copy()
        self._events = np.zeros(n, np.int32)
        self._kind = np.full(n, -1, np.int16)
        self._kinds: list[str] = [FINISHED, UNFINISHED]
        self._pending: list[RequestOutcome] = []
        self._pending_events = 0

    def add(self, outcome: RequestOutcome) -> None:
        """Add an outcome."""
        at, times = outcome.number, outcome.times_s
        self._sent[at], self._ended[at] = outcome.sent_s, outcome.ended_s
        if times:
            self._first[at], self._last[at] = times[0], times[-1]
        self._events[at] = len(times)
        if outcome.kind == FINISHED:
            if outcome.prompt_tokens is not None:
                self._prompt[at] = outcome.prompt_tokens
            self._output[at] = len(times) if outcome.output_tokens is None else outcome.output_tokens
            self.tokens += int(self._prompt[at]) + int(self._output[at])
        if outcome.kind not in self._kinds:
            self._kinds.append(outcome.kind)
        self._kind[at] = self._kinds.index(outcome.kind)
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
        schedule = self._schedule
        n = int(np.searchsorted(schedule.due_s, until_s, side="left"))
        for number in np.flatnonzero(self._kind[:n] < 0).tolist():
            self.add(not_sent(number, UNFINISHED))
        self._flush()
        return RequestRecords(
            names=schedule.names,
            adapter=schedule.adapter[:n],
            due_s=schedule.due_s[:n],
            sent_s=self._sent[:n],
            first_s=self._first[:n],
            last_s=self._last[:n],
            ended_s=self._ended[:n],
            prompt_tokens=self._prompt[:n],
            output_tokens=self._output[:n],
            events=self._events[:n],
            kind=self._kind[:n],
            kinds=tuple(self._kinds),
        )

    def _flush(self) -> None:
        """Count the gaps of pending outcomes and write them to the file."""
        pending, self._pending, self._pending_events = self._pending, [], 0
        if not pending:
            return
        lengths = np.array([len(each.times_s) for each in pending])
        times = np.fromiter((t for each in pending for t in each.times_s), float, int(lengths.sum()))
        if times.size > 1:
            later = np.ones(times.size, bool)
            later[(np.cumsum(lengths) - lengths)[lengths > 0]] = False  # the first of each request
            gaps = np.diff(times, prepend=0.0)
            self.gaps.add(gaps[later & self._window.holds(times)])
        if self._file is not None:
            self._file.write(self._rows(pending), times, lengths)

    def _rows(self, pending: Sequence[RequestOutcome]) -> Mapping[str, NDArray[np.generic]]:
        at = np.array([each.number for each in pending])
        schedule = self._schedule
        return {
            "number": at,
            "adapter": np.array(schedule.names, dtype=object)[schedule.adapter[at]],
            "kind": np.array([each.kind for each in pending], dtype=object),
            "arrival_s": schedule.due_s[at],
            "sent_s": self._sent[at],
            "first_token_s": self._first[at],
            "last_token_s": self._last[at],
            "ended_s": self._ended[at],
            "prompt_tokens": self._prompt[at],
            "output_tokens": self._output[at],
        }
