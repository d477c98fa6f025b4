"""Load test of a server: preflight, requests, open loop, result."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from capplan import __version__
from capplan.errors import InputError
from capplan.profiling.load.preflight import Preflight, bodies_for, preflight
from capplan.profiling.load.record import NOT_FAILURES, RequestFile
from capplan.profiling.load.requests import (
    DEFAULT_MAX_MODEL_LEN,
    LoadSettings,
    PromptForm,
    Target,
    schedule_of,
)
from capplan.profiling.load.result import (
    BenchResult,
    Failure,
    LagLimits,
    adapter_metrics,
    client_health,
    overall_metrics,
)
from capplan.profiling.load.run import LoadMeasurement, OnTick, run_load

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
    """Limit on prompt and output tokens; None: the workload's, the server's, or 8192."""
    prompt_form: PromptForm | None = None
    """None: the first that the server accepts."""
    limits: LagLimits = field(default_factory=LagLimits)

    def resolved_model_len(self, workload: Workload, found: Preflight | None = None) -> int:
        """Return the limit on prompt and output tokens."""
        chosen = self.max_model_len or workload.engine.max_model_len
        if chosen is None and found is not None:
            chosen = found.max_model_len
        return chosen or DEFAULT_MAX_MODEL_LEN


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
    gc.collect()
    gc.freeze()  # shorter collections while requests are due
    try:
        return asyncio.run(_bench(workload, target, settings, options or BenchOptions(), file, on_tick))
    finally:
        gc.unfreeze()


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
    with stopped_by_signals(stop):
        measured = await run_load(schedule, bodies, target, settings, stop=stop, file=file, on_tick=on_tick)
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
    measured: LoadMeasurement,
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
        Failure(kind=kind, requests=counts[kind], message=measured.messages.get(kind, ""))
        for kind in sorted(counts, key=counts.__getitem__, reverse=True)
        if counts[kind]
    ]
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
        failures=tuple(failures),
        client=client_health(record, window, measured.loop_lag, limits),
        server=measured.samples,
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
