"""What is kept of the requests of a run: compact columns in memory, and a Parquet file with every event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.profiling.load.gaps import GapHistogram
from capplan.profiling.load.outcome import FINISHED, NOT_FAILURES, UNFINISHED, Outcome, not_sent
from capplan.profiling.load.request_file import RequestFile
from capplan.profiling.load.schedule import Schedule

_PENDING_EVENTS: Final = 1 << 15
_PENDING_REQUESTS: Final = 1 << 10


@dataclass(frozen=True)
class Window:
    """The measured time, in seconds on the clock of the run."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Its length."""
        return self.end_s - self.start_s

    def holds(self, times_s: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Tell which times are within; NaN is not."""
        after, before = times_s >= self.start_s, times_s < self.end_s
        within: NDArray[np.bool_] = np.logical_and(after, before)
        return within


@dataclass(frozen=True, eq=False)
class Record:
    """Requests in the order in which they were due; the arrays have shape (requests,)."""

    names: tuple[str, ...]
    """Adapters by number; the first is the base model, with the empty name."""
    adapter: NDArray[np.int32]
    due_s: NDArray[np.float64]
    sent_s: NDArray[np.float64]
    """NaN where it was not sent."""
    first_s: NDArray[np.float64]
    """Arrival of the first token; NaN without."""
    last_s: NDArray[np.float64]
    """Arrival of the last token so far; NaN without."""
    ended_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int32]
    """As the server counted them, or else as asked."""
    output_tokens: NDArray[np.int32]
    """As the server counted them; as asked for requests that did not finish."""
    events: NDArray[np.int32]
    """Events with tokens; fewer than tokens where the server sent several at once."""
    kind: NDArray[np.int16]
    """Position in `kinds`."""
    kinds: tuple[str, ...]

    def __len__(self) -> int:
        return self.due_s.size

    def of_kind(self, name: str) -> NDArray[np.bool_]:
        """Tell which requests ended in this way."""
        which: NDArray[np.bool_] = self.kind == (self.kinds.index(name) if name in self.kinds else -1)
        return which


class Recorder:
    """Takes in outcomes as they come.

    Parameters
    ----------
    schedule
        The requests.
    window
        In which gaps between tokens are counted.
    file
        Where every request goes, with the times of its events; None: nowhere.
    """

    def __init__(self, schedule: Schedule, window: Window, file: RequestFile | None = None) -> None:
        n = len(schedule)
        self.gaps = GapHistogram()
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
        self._pending: list[Outcome] = []
        self._pending_events = 0

    def add(self, outcome: Outcome) -> None:
        """Take in one outcome."""
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
        """How many requests failed so far."""
        return sum(count for kind, count in self.counts.items() if kind not in NOT_FAILURES)

    def record(self, until_s: float) -> Record:
        """Return the requests that were due before ``until_s``; those that never went out are unfinished."""
        schedule = self._schedule
        n = int(np.searchsorted(schedule.due_s, until_s, side="left"))
        for number in np.flatnonzero(self._kind[:n] < 0).tolist():
            self.add(not_sent(number, UNFINISHED))
        self._flush()
        return Record(
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
        """Count the gaps of pending outcomes, write them, and forget them."""
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

    def _rows(self, pending: Sequence[Outcome]) -> Mapping[str, NDArray[np.generic]]:
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
