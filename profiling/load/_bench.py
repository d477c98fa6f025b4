"""Load test of a server: preflight, open loop, result.

Every request is sent when it is due, however slow the server is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from capplan.errors import InputError
from capplan.processes import without_full_collections
from capplan.profiling.load._client import CompletionClient, open_session
from capplan.profiling.load._preflight import Preflight, beside_engine, bodies_for, preflight, sample_metrics
from capplan.profiling.load._record import (
    FINISHED,
    NOT_FAILURES,
    REJECTED,
    EventLoopLag,
    MeasurementWindow,
    RequestFile,
    RequestRecorder,
    not_sent,
)
from capplan.profiling.load._requests import (
    DEFAULT_MAX_MODEL_LEN,
    LoadSettings,
    PromptForm,
    RequestBodies,
    Schedule,
    Target,
    schedule_of,
)
from capplan.profiling.load._result import (
    BenchResult,
    Failure,
    LagLimits,
    ServerSample,
    UncertainAnswers,
    adapter_metrics,
    client_health,
    overall_metrics,
)
from capplan.version import installed_version

if TYPE_CHECKING:
    from capplan.spec import Profile, Workload

_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class BenchOptions:
    """Requests of a load test as for `schedule_of`, and limits on the client's lag."""

    seed: int = 0
    rate_scale: float = 1.0
    profile: Profile | None = None
    max_model_len: int | None = None
    """Limit on prompt and output tokens; None: the workload's, the server's, or the profile's default."""
    prompt_form: PromptForm | None = None
    """None: the first that the server accepts."""
    limits: LagLimits = field(default_factory=LagLimits)

    def resolved_model_len(self, workload: Workload, found: Preflight | None = None) -> int:
        """Return the limit on prompt and output tokens, at most the positions of the profile's model."""
        chosen = self.max_model_len or workload.engine.max_model_len
        served = None if found is None else found.max_model_len
        if chosen is not None and self.profile is not None:
            self.profile.model.require_positions(chosen)
        default = DEFAULT_MAX_MODEL_LEN
        if self.profile is not None:
            default = self.profile.model.default_max_model_len
        return chosen or served or default


def bench(
    workload: Workload,
    target: Target,
    settings: LoadSettings,
    options: BenchOptions | None = None,
    *,
    file: RequestFile | None = None,
    on_tick: OnTick | None = None,
) -> BenchResult:
    """Load a server with a workload.

    In the main thread an interrupt (Ctrl-C) ends the run early, and the result is marked as partial.

    Parameters
    ----------
    file
        Destination of every request; the caller keeps it.
    on_tick
        Called four times a second.

    Raises
    ------
    InputError
        If the server does not answer, does not serve an adapter, or a setting is invalid.
    """
    with without_full_collections():
        return asyncio.run(_bench(workload, target, settings, options or BenchOptions(), file, on_tick))


async def _bench(
    workload: Workload,
    target: Target,
    settings: LoadSettings,
    options: BenchOptions,
    file: RequestFile | None,
    on_tick: OnTick | None,
) -> BenchResult:
    if target.base_model is None:
        target = replace(target, base_model=workload.base_model)

    draw = partial(
        schedule_of,
        workload,
        settings.horizon_s,
        options.seed,
        rate_scale=options.rate_scale,
        profile=options.profile,
    )
    assumed_len = options.resolved_model_len(workload)
    schedule = draw(assumed_len)
    used = [schedule.names[number] for number in np.unique(schedule.adapter).tolist()]
    if not used:
        rule = "must be long enough, and rates high enough, for a request to be due"
        raise InputError(rule, location="duration_s")
    found = await preflight(target, used, options.prompt_form)
    max_model_len = options.resolved_model_len(workload, found)
    if max_model_len != assumed_len:
        schedule = draw(max_model_len)
    bodies = bodies_for(found, target, schedule.names, used)
    stop = asyncio.Event()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    measured = OpenLoop(schedule, bodies, target, settings, file)
    with stopped_by_signals(stop):
        async with beside_engine(target):
            await measured.run(stop, on_tick)
    given = {
        "seed": options.seed,
        "rate_scale": options.rate_scale,
        "max_model_len": max_model_len,
        "prompt_form": found.prompts.form.value,
        **asdict(settings),
        "extra_body": dict(target.extra_body),
    }
    return bench_result(measured, workload, target, given, started_at, options.limits)


def bench_result(
    measured: OpenLoop,
    workload: Workload,
    target: Target,
    settings: dict[str, Any],
    started_at: str,
    limits: LagLimits | None = None,
) -> BenchResult:
    """Return the result document of a run."""
    record, window = measured.record, measured.window
    counts = {kind: int(record.of_kind(kind).sum()) for kind in record.kinds if kind not in NOT_FAILURES}
    failures = [
        Failure(kind=kind, requests=counts[kind], message=measured.recorder.messages.get(kind, ""))
        for kind in sorted(counts, key=counts.__getitem__, reverse=True)
        if counts[kind]
    ]
    return BenchResult(
        created_by=f"capplan {installed_version()}",
        started_at=started_at,
        url=target.shown,
        base_model=workload.base_model,
        workload_digest=workload.digest(),
        settings=settings,
        partial=measured.partial,
        warm_up_s=window.start_s,
        duration_s=window.duration_s,
        overall=overall_metrics(record, window, measured.recorder.gaps),
        adapters=adapter_metrics(record, window),
        failures=tuple(failures),
        uncertain=UncertainAnswers(
            uncounted=measured.recorder.uncounted,
            buffered=int((record.of_kind(FINISHED) & record.is_buffered).sum()),
            other_length=measured.recorder.other_length,
        ),
        client=client_health(record, window, measured.loop_lag, limits),
        server=tuple(measured.samples),
    )


@contextlib.contextmanager
def stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """Set an event at the first interrupt; a second one ends the process as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def once(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        stop.set()

    for each in _STOP_SIGNALS:
        loop.add_signal_handler(each, once, each)
    try:
        yield
    finally:
        for each in _STOP_SIGNALS:
            loop.remove_signal_handler(each)


_LEAD_S: Final = 0.05
"""From the start of the run to time 0, so that the first request is not late."""

_TICK_S: Final = 0.25
_CANCEL_S: Final = 5.0
_SENT_IN_A_ROW: Final = 32
"""Overdue requests that are sent before answers are read again."""


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


class OpenLoop:
    """Open loop: the requests of a schedule are sent when they are due.

    The models of `bodies` are in the order of the schedule's names. `file` receives every request; the caller
    keeps it.
    """

    def __init__(
        self,
        schedule: Schedule,
        bodies: RequestBodies,
        target: Target,
        settings: LoadSettings,
        file: RequestFile | None = None,
    ) -> None:
        self.schedule, self.bodies = schedule, bodies
        self.target, self.settings = target, settings
        self.window = MeasurementWindow(settings.warm_up_s, settings.horizon_s)
        """Measured window; shorter after an early end."""
        self.recorder = RequestRecorder(schedule, self.window, file)
        self.loop_lag = EventLoopLag()
        self.samples: list[ServerSample] = []
        """Samples of ``/metrics``."""
        self.partial = False
        """Whether the run was stopped early."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.error: BaseException | None = None
        self.sent = 0
        self.loop = asyncio.get_running_loop()

    def _clock(self) -> float:
        return self.loop.time() - self.origin

    async def run(self, stop: asyncio.Event, on_tick: OnTick | None = None) -> None:
        """Send the requests and wait for their answers, until an event ends the run early."""
        self.stop = stop
        self.origin = self.loop.time() + _LEAD_S
        async with open_session(self.target) as session:
            self.client = CompletionClient(session, self.target, self.settings.timeout_s, self._clock)
            interval_s = self.settings.metrics_interval_s
            sampling = sample_metrics(session, self.target, interval_s, self._clock, self.samples)
            background = (self.loop_lag.watch(), self._report_progress(on_tick), sampling)
            helpers = [asyncio.create_task(each) for each in background]
            sender = asyncio.create_task(self._send_all())
            stopped = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait({sender, stopped}, return_when=asyncio.FIRST_COMPLETED)
                ended_s = self._clock()
                if not stop.is_set():
                    await self._drain(stopped)
            finally:
                await _cancel([sender, stopped, *helpers])
                await _cancel(list(self.tasks))
        if self.error is not None:
            raise self.error
        self.partial = ended_s < self.window.end_s
        if self.partial:  # if the window had not started, all of the time is the window
            start_s = self.window.start_s if ended_s > self.window.start_s else 0.0
            self.window = MeasurementWindow(start_s, max(ended_s, start_s + 1e-3))
        self.record = self.recorder.record(self.window.end_s)

    async def _send_all(self) -> None:
        """Start every request when it is due, and wait for the end of the window."""
        overdue = 0
        for number, due_s in enumerate(self.schedule.due_s.tolist()):
            now_s = self._clock()
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
        await asyncio.sleep(max(0.0, self.window.end_s - self._clock()))

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
        output_tokens = int(schedule.output_tokens[number])
        body = self.bodies.body(
            number,
            int(schedule.adapter[number]),
            int(schedule.prompt_tokens[number]),
            output_tokens,
            schedule.shared_prefix_tokens,
        )
        self.recorder.add(await self.client.complete(number, body, output_tokens))

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.error = self.error or task.exception()
            self.stop.set()

    async def _drain(self, stopped: asyncio.Task[bool]) -> None:
        """Wait for requests in flight, at most `drain_s`."""
        until_s = self._clock() + self.settings.drain_s
        while self.tasks and not stopped.done() and (left_s := until_s - self._clock()) > 0.0:
            await asyncio.wait(self.tasks, timeout=min(left_s, _TICK_S))

    async def _report_progress(self, on_tick: OnTick | None) -> None:
        while on_tick is not None:
            counts = self.recorder.counts
            on_tick(
                LoadProgress(
                    now_s=max(0.0, self._clock()),
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
