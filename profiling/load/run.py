"""Open-loop load: every request is sent when it is due, however slow the server is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from capplan.profiling.load.client import CompletionClient, open_session
from capplan.profiling.load.preflight import MetricsSampler
from capplan.profiling.load.record import (
    REJECTED,
    LogHistogram,
    MeasurementWindow,
    RequestFile,
    RequestRecorder,
    RequestRecords,
    not_sent,
)
from capplan.profiling.load.requests import LoadSettings, RequestBodies, Schedule, Target
from capplan.profiling.load.result import ServerSample

_LAG_INTERVAL_S: Final = 0.02
_MS_PER_S: Final = 1e3
_LEAD_S: Final = 0.05
"""From the start of the run to time 0, so that the first request is not late."""
_TICK_S: Final = 0.25
_CANCEL_S: Final = 5.0
_SENT_IN_A_ROW: Final = 32
"""Overdue requests that are sent before answers are read again."""


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


@dataclass(frozen=True)
class LoadProgress:
    """Progress of a run; `tokens` are input and output tokens of completed requests."""

    now_s: float
    horizon_s: float
    sent: int
    in_flight: int
    completed: int
    failed: int
    rejected: int
    tokens: int


OnTick = Callable[[LoadProgress], None]


@dataclass(frozen=True, eq=False)
class LoadMeasurement:
    """Measurements of a run."""

    record: RequestRecords
    window: MeasurementWindow
    gaps: LogHistogram
    """Gaps between tokens within the window, of all requests."""
    loop_lag: EventLoopLag
    samples: tuple[ServerSample, ...]
    """Samples of ``/metrics``."""
    partial: bool
    """Whether the run was stopped early."""
    messages: dict[str, str] = field(default_factory=dict)
    """Message of the first failure of each kind."""


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
    """Send the requests of a schedule and wait for their answers.

    Parameters
    ----------
    schedule, bodies
        Due times and bodies; the models of `bodies` are in the order of the schedule's names.
    stop
        Event that ends the run early; the measurement is then partial.
    file
        Destination of every request; the caller keeps it.
    on_tick
        Called four times a second.
    """
    run = _OpenLoop(schedule, bodies, target, settings, file)
    return await run.measure(stop or asyncio.Event(), on_tick)


class _OpenLoop:
    def __init__(
        self,
        schedule: Schedule,
        bodies: RequestBodies,
        target: Target,
        settings: LoadSettings,
        file: RequestFile | None,
    ) -> None:
        self.schedule, self.bodies = schedule, bodies
        self.target, self.settings = target, settings
        self.window = MeasurementWindow(settings.warm_up_s, settings.horizon_s)
        self.recorder = RequestRecorder(schedule, self.window, file)
        self.loop_lag = EventLoopLag()
        self.tasks: set[asyncio.Task[None]] = set()
        self.error: BaseException | None = None
        self.sent = 0
        self.loop = asyncio.get_running_loop()

    def clock(self) -> float:
        return self.loop.time() - self.origin

    async def measure(self, stop: asyncio.Event, on_tick: OnTick | None) -> LoadMeasurement:
        self.stop = stop
        self.origin = self.loop.time() + _LEAD_S
        async with open_session(self.target) as session:
            self.client = CompletionClient(session, self.target, self.settings.timeout_s, self.clock)
            sampler = MetricsSampler(session, self.target, self.settings.metrics_interval_s, self.clock)
            background = (self.loop_lag.watch(), self._report_progress(on_tick), sampler.run())
            helpers = [asyncio.create_task(each) for each in background]
            sender = asyncio.create_task(self._send_all())
            stopped = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({sender, stopped}, return_when=asyncio.FIRST_COMPLETED)
                ended_s = self.clock()
                if not stop.is_set():
                    await self._drain(stopped)
            finally:
                await _cancel([sender, stopped, *helpers])
                await _cancel(list(self.tasks))
        if self.error is not None:
            raise self.error
        partial = ended_s < self.window.end_s
        window = self._window_until(ended_s) if partial else self.window
        return LoadMeasurement(
            record=self.recorder.record(window.end_s),
            window=window,
            gaps=self.recorder.gaps,
            loop_lag=self.loop_lag,
            samples=tuple(sampler.samples),
            partial=partial,
            messages=self.recorder.messages,
        )

    def _window_until(self, ended_s: float) -> MeasurementWindow:
        """Return the measured part of the window; all of the time, if the window had not started."""
        start_s = self.window.start_s if ended_s > self.window.start_s else 0.0
        return MeasurementWindow(start_s, max(ended_s, start_s + 1e-3))

    async def _send_all(self) -> None:
        """Start every request when it is due, and wait for the end of the window."""
        overdue = 0
        for number, due_s in enumerate(self.schedule.due_s.tolist()):
            now_s = self.clock()
            if now_s >= self.window.end_s:
                return  # the client is late; overdue requests are not sent
            if due_s > now_s:
                await asyncio.sleep(due_s - now_s)
                overdue = 0
            else:
                overdue += 1
                if overdue % _SENT_IN_A_ROW == 0:
                    await asyncio.sleep(0)
            self._start(number)
        await asyncio.sleep(max(0.0, self.window.end_s - self.clock()))

    def _start(self, number: int) -> None:
        limit = self.settings.max_in_flight
        if limit is not None and len(self.tasks) >= limit:
            self.recorder.add(not_sent(number, REJECTED))
            return
        self.sent += 1
        task = self.loop.create_task(self._complete(number))
        self.tasks.add(task)
        task.add_done_callback(self._on_done)

    async def _complete(self, number: int) -> None:
        schedule = self.schedule
        body = self.bodies.body(
            number,
            int(schedule.adapter[number]),
            int(schedule.prompt_tokens[number]),
            int(schedule.output_tokens[number]),
            schedule.shared_prefix_tokens,
        )
        self.recorder.add(await self.client.complete(number, body))

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.error = self.error or task.exception()
            self.stop.set()

    async def _drain(self, stopped: asyncio.Task[bool]) -> None:
        """Wait for requests in flight, at most `drain_s`."""
        until_s = self.clock() + self.settings.drain_s
        while self.tasks and not stopped.done() and (left_s := until_s - self.clock()) > 0.0:
            await asyncio.wait(self.tasks, timeout=min(left_s, _TICK_S))

    async def _report_progress(self, on_tick: OnTick | None) -> None:
        while on_tick is not None:
            counts = self.recorder.counts
            on_tick(
                LoadProgress(
                    now_s=max(0.0, self.clock()),
                    horizon_s=self.window.end_s,
                    sent=self.sent,
                    in_flight=len(self.tasks),
                    completed=counts["finished"],
                    failed=self.recorder.failures,
                    rejected=counts[REJECTED],
                    tokens=self.recorder.tokens,
                )
            )
            await asyncio.sleep(_TICK_S)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_CANCEL_S)
