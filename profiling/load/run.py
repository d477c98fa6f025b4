"""The open loop: every request goes out when it is due, whatever the server does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from capplan.profiling.load.client import CompletionClient, open_session
from capplan.profiling.load.preflight import Scraper, Scrapes
from capplan.profiling.load.record import (
    REJECTED,
    LogHistogram,
    MeasurementWindow,
    RequestFile,
    RequestRecorder,
    RequestRecords,
    not_sent,
)
from capplan.profiling.load.requests import RequestBodies, Schedule
from capplan.profiling.load.settings import LoadSettings, Target

_EVERY_S: Final = 0.02
_MS_PER_S: Final = 1e3
_LEAD_S: Final = 0.05
"""From the start of the run to time 0, so that the first request need not hurry."""
_TICK_S: Final = 0.25
_CANCEL_S: Final = 5.0
_SENT_IN_A_ROW: Final = 32
"""Requests that are overdue go out in handfuls, between which answers are read."""


class EventLoopLag:
    """Looks at the clock fifty times a second, and notes how late it came to it."""

    def __init__(self) -> None:
        self.late = LogHistogram()

    async def feel(self) -> None:
        """Look until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(_EVERY_S)
            self.late.add(np.array([max(0.0, loop.time() - before - _EVERY_S)]))

    def late_ms(self, percentile: float) -> float | None:
        """Return a percentile of how late it was, in milliseconds; None before the first look."""
        (late_s,) = self.late.percentiles_s((percentile,))
        return None if math.isnan(late_s) else _MS_PER_S * late_s


@dataclass(frozen=True)
class LoadProgress:
    """How far a run is."""

    now_s: float
    horizon_s: float
    sent: int
    in_flight: int
    completed: int
    failed: int
    rejected: int
    tokens: int
    """Input and output tokens of completed requests."""


OnTick = Callable[[LoadProgress], None]


@dataclass(frozen=True, eq=False)
class LoadMeasurement:
    """What a run left."""

    record: RequestRecords
    window: MeasurementWindow
    gaps: LogHistogram
    """Gaps between tokens within the window, of all requests."""
    pulse: EventLoopLag
    """How late the client's event loop was."""
    scrapes: Scrapes
    partial: bool
    """Whether it was stopped before its time."""
    messages: dict[str, str] = field(default_factory=dict)
    """What the first failure of each kind said."""


async def run_load(
    schedule: Schedule,
    bodies: RequestBodies,
    target: Target,
    settings: LoadSettings,
    *,
    stop: asyncio.Event | None = None,
    file: RequestFile | None = None,
    on_tick: OnTick | None = None,
) -> LoadMeasurement:
    """Send the requests of a schedule and wait for their ends.

    Parameters
    ----------
    schedule, bodies
        What is asked when, and how it is written; the models of `bodies` are in the order of the schedule's
        names.
    target, settings
        Whom, and how patiently.
    stop
        Set it to end the run early, with what has come so far.
    file
        Where every request goes; it is up to the caller to keep it.
    on_tick
        Called a few times a second.
    """
    run = _OpenLoop(schedule, bodies, target, settings, file)
    return await run.whole(stop or asyncio.Event(), on_tick)


class _OpenLoop:
    def __init__(
        self,
        schedule: Schedule,
        bodies: RequestBodies,
        target: Target,
        settings: LoadSettings,
        file: RequestFile | None,
    ) -> None:
        self.schedule = schedule
        self.bodies = bodies
        self.target = target
        self.settings = settings
        self.window = MeasurementWindow(settings.warm_up_s, settings.horizon_s)
        self.recorder = RequestRecorder(schedule, self.window, file)
        self.pulse = EventLoopLag()
        self.tasks: set[asyncio.Task[None]] = set()
        self.broken: BaseException | None = None
        self.sent = 0
        self.origin = 0.0
        self.loop = asyncio.get_running_loop()

    def clock(self) -> float:
        return self.loop.time() - self.origin

    async def whole(self, stop: asyncio.Event, on_tick: OnTick | None) -> LoadMeasurement:
        self.stop = stop
        self.origin = self.loop.time() + _LEAD_S
        async with open_session(self.target) as session:
            self.client = CompletionClient(session, self.target, self.settings.timeout_s, self.clock)
            scraper = Scraper(session, self.target, self.settings.metrics_interval_s, self.clock)
            helpers = [
                asyncio.create_task(each)
                for each in (self.pulse.feel(), self._tell(on_tick), scraper.repeat())
            ]
            sender = asyncio.create_task(self._send_all())
            stopped = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({sender, stopped}, return_when=asyncio.FIRST_COMPLETED)
                ended_s = self.clock()
                if not stop.is_set():
                    await self._drain(stopped)
            finally:
                await _cancelled([sender, stopped, *helpers])
                await _cancelled(list(self.tasks))
        if self.broken is not None:
            raise self.broken
        partial = ended_s < self.window.end_s
        window = self._window_until(ended_s) if partial else self.window
        return LoadMeasurement(
            record=self.recorder.record(window.end_s),
            window=window,
            gaps=self.recorder.gaps,
            pulse=self.pulse,
            scrapes=scraper.scrapes(),
            partial=partial,
            messages=self.recorder.messages,
        )

    def _window_until(self, ended_s: float) -> MeasurementWindow:
        """Return the part of the window that was measured; all of the time, if it had not begun."""
        start_s = self.window.start_s if ended_s > self.window.start_s else 0.0
        return MeasurementWindow(start_s, max(ended_s, start_s + 1e-3))

    async def _send_all(self) -> None:
        """Start every request when it is due, and wait for the end of the window."""
        due = self.schedule.due_s.tolist()
        in_a_row = 0
        for number, due_s in enumerate(due):
            now_s = self.clock()
            wait_s = due_s - now_s
            if now_s >= self.window.end_s:
                return  # this client is late; what is still due is never sent
            if wait_s > 0.0:
                await asyncio.sleep(wait_s)
                in_a_row = 0
            else:
                in_a_row += 1
                if in_a_row % _SENT_IN_A_ROW == 0:
                    await asyncio.sleep(0)
            self._start(number)
        await asyncio.sleep(max(0.0, self.window.end_s - self.clock()))

    def _start(self, number: int) -> None:
        limit = self.settings.max_in_flight
        if limit is not None and len(self.tasks) >= limit:
            self.recorder.add(not_sent(number, REJECTED))
            return
        self.sent += 1
        task = self.loop.create_task(self._one(number))
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    async def _one(self, number: int) -> None:
        schedule = self.schedule
        body = self.bodies.body(
            number,
            int(schedule.adapter[number]),
            int(schedule.prompt_tokens[number]),
            int(schedule.output_tokens[number]),
            schedule.shared_prefix_tokens,
        )
        self.recorder.add(await self.client.complete(number, body))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.broken = self.broken or task.exception()
            self.stop.set()

    async def _drain(self, stopped: asyncio.Task[bool]) -> None:
        """Wait for what is in flight, as long as the settings say."""
        until = self.clock() + self.settings.drain_s
        while self.tasks and not stopped.done() and (left := until - self.clock()) > 0.0:
            await asyncio.wait(self.tasks, timeout=min(left, _TICK_S))

    async def _tell(self, on_tick: OnTick | None) -> None:
        while on_tick is not None:
            on_tick(self._snapshot())
            await asyncio.sleep(_TICK_S)

    def _snapshot(self) -> LoadProgress:
        counts = self.recorder.counts
        return LoadProgress(
            now_s=max(0.0, self.clock()),
            horizon_s=self.window.end_s,
            sent=self.sent,
            in_flight=len(self.tasks),
            completed=counts["finished"],
            failed=self.recorder.failures,
            rejected=counts[REJECTED],
            tokens=self.recorder.tokens,
        )


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have noticed."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_S)
