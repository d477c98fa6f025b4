"""A load test from beginning to end: ask the server, draw the requests, send them, reduce what came back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from capplan.errors import InputError
from capplan.profiling.load.preflight import Preflight, bodies_for, preflight
from capplan.profiling.load.record import NOT_FAILURES, RequestFile
from capplan.profiling.load.requests import DEFAULT_MAX_MODEL_LEN, PromptForm, Schedule, schedule_of
from capplan.profiling.load.result import (
    BenchResult,
    Failure,
    LagLimits,
    ServerSample,
    adapter_metrics,
    client_health,
    overall_metrics,
)
from capplan.profiling.load.run import LoadMeasurement, OnTick, run_load
from capplan.profiling.load.settings import LoadSettings, Target

if TYPE_CHECKING:
    from capplan.spec import Profile, Workload

_STOPPED_BY: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class BenchOptions:
    """What is drawn, and how it is judged.

    Attributes
    ----------
    seed, rate_scale, profile
        As for `schedule_of`.
    max_model_len : int, optional
        Where lengths end; None: the workload's, or else the server's, or else 8192.
    prompt_form : PromptForm, optional
        None: the first that the server takes.
    limits : LagLimits
        Up to where the client counts as having kept up.
    """

    seed: int = 0
    rate_scale: float = 1.0
    profile: Profile | None = None
    max_model_len: int | None = None
    prompt_form: PromptForm | None = None
    limits: LagLimits = field(default_factory=LagLimits)


def bench(
    workload: Workload,
    target: Target,
    settings: LoadSettings,
    options: BenchOptions | None = None,
    *,
    file: RequestFile | None = None,
    on_tick: OnTick | None = None,
) -> BenchResult:
    """Load a server with a workload and say what came of it.

    In the main thread, an interrupt (Ctrl-C) ends the run early, and the result is marked as partial.

    Parameters
    ----------
    workload
        What is asked.
    target, settings, options
        Whom, for how long, and with which draw.
    file
        Where every request goes; it is up to the caller to keep it.
    on_tick
        Called a few times a second.

    Raises
    ------
    InputError
        When the server cannot be asked, does not serve an adapter, or a setting breaks a rule.
    """
    with _calm_collector():
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
        target = Target(target.url, target.api_key, workload.base_model, target.models, target.extra_body)
    schedule = _schedule(workload, settings, options, None)
    used = used_adapters(schedule)
    found = await preflight(target, used, options.prompt_form)
    if _max_model_len(workload, options, found) != _max_model_len(workload, options, None):
        schedule = _schedule(workload, settings, options, found)
    bodies = bodies_for(found, target, schedule.names, used)
    stop = asyncio.Event()
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with stopped_by_signals(stop):
        measured = await run_load(schedule, bodies, target, settings, stop=stop, file=file, on_tick=on_tick)
    asked = {
        "seed": options.seed,
        "rate_scale": options.rate_scale,
        "max_model_len": _max_model_len(workload, options, found),
        "prompt_form": found.prompts.form.value,
        "warm_up_s": settings.warm_up_s,
        "duration_s": settings.duration_s,
        "timeout_s": settings.timeout_s,
        "drain_s": settings.drain_s,
        "max_in_flight": settings.max_in_flight,
        "metrics_interval_s": settings.metrics_interval_s,
        "extra_body": dict(target.extra_body),
    }
    return bench_result(measured, workload, target, asked, started_at, options.limits)


def bench_result(
    measured: LoadMeasurement,
    workload: Workload,
    target: Target,
    settings: dict[str, Any],
    started_at: str,
    limits: LagLimits | None = None,
) -> BenchResult:
    """Reduce what a run left to its document.

    Parameters
    ----------
    measured
        From `run_load`.
    workload, target, settings, started_at
        What was asked of whom, how and when.
    limits
        Up to where the client counts as having kept up.
    """
    from capplan import __version__

    record, window = measured.record, measured.window
    return BenchResult(
        created_by=f"capplan {__version__}",
        started_at=started_at,
        url=target.shown,
        base_model=workload.base_model,
        workload_digest=workload.digest(),
        settings=settings,
        partial=measured.partial,
        warm_up_s=window.start_s,
        duration_s=window.duration_s,
        overall=overall_metrics(record, window, measured.gaps),
        adapters=adapter_metrics(record, window),
        failures=_failures(measured),
        client=client_health(record, window, measured.pulse, limits),
        server=tuple(
            ServerSample(time_s=each.time_s, took_ms=each.took_ms, values=dict(each.values))
            for each in measured.scrapes.samples
        ),
    )


def used_adapters(schedule: Schedule) -> list[str]:
    """Return the names of the adapters that a schedule asks for.

    Raises
    ------
    InputError
        When nothing is due at all.
    """
    numbers = sorted(set(schedule.adapter.tolist()))
    if not numbers:
        rule = "must be long enough, and rates high enough, for a request to be due"
        raise InputError(rule, location="duration_s")
    return [schedule.names[number] for number in numbers]


def _schedule(
    workload: Workload, settings: LoadSettings, options: BenchOptions, found: Preflight | None
) -> Schedule:
    return schedule_of(
        workload,
        settings.horizon_s,
        options.seed,
        _max_model_len(workload, options, found),
        rate_scale=options.rate_scale,
        profile=options.profile,
    )


def _max_model_len(workload: Workload, options: BenchOptions, found: Preflight | None) -> int:
    told = options.max_model_len or workload.engine.max_model_len
    if told is None and found is not None:
        told = found.max_model_len
    return told or DEFAULT_MAX_MODEL_LEN


def _failures(measured: LoadMeasurement) -> tuple[Failure, ...]:
    record = measured.record
    counted = [(kind, int(record.of_kind(kind).sum())) for kind in record.kinds if kind not in NOT_FAILURES]
    return tuple(
        Failure(kind=kind, requests=count, message=measured.messages.get(kind, ""))
        for kind, count in sorted(counted, key=lambda each: -each[1])
        if count
    )


@contextlib.contextmanager
def stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """Set an event at the first interrupt; a second one ends the process as usual."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def once(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)
        stop.set()

    for each in _STOPPED_BY:
        loop.add_signal_handler(each, once, each)
    try:
        yield
    finally:
        for each in _STOPPED_BY:
            loop.remove_signal_handler(each)


@contextlib.contextmanager
def _calm_collector() -> Iterator[None]:
    """Keep the garbage collector from walking through all modules again and again while requests are due."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
