"""Step, loading and memory tables of a running server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

import numpy as np

from capplan.errors import InputError
from capplan.profiling import tables as files
from capplan.profiling.load.bench import stopped_by_signals
from capplan.profiling.load.client import CompletionClient, open_session
from capplan.profiling.load.preflight import EngineInfo, Preflight, bodies_for, fetch_engine_info, preflight
from capplan.profiling.load.requests import BASE, DEFAULT_MAX_MODEL_LEN, PromptForm, Target
from capplan.profiling.load.run import EventLoopLag
from capplan.profiling.server.closed_loop import (
    LoopError,
    RequestSender,
    ServerBounds,
    ServerPoint,
    adapter_loads,
    closed_loop,
    design,
    first_tokens,
)
from capplan.profiling.server.windows import window_rows
from capplan.profiling.tables import OUTPUT_TOKENS, MeasurementFolder, idle_run, require_same

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with a stage, the number of its parts that are done, and their total."""
NO_STEPS: Final = "no request decoded for long enough"
"""Failure of a point without decode steps."""
FIRST_TOKENS: Final = "first tokens"
LOADS: Final = "adapter loads"
"""Stages before the operating points."""
_REQUEST_TIMEOUT_S: Final = 120.0
_LARGEST_BATCH: Final = 64
_RAMP_SHARE: Final = 0.35
_LEAST_RAMP_S: Final = 1.0
_WINDOWS: Final = 3
_IDLE_LENGTHS: Final = 4
_IDLE_ADAPTERS: Final = 4


@dataclass(frozen=True)
class EngineSetting:
    """Engine settings of the server.

    Attributes
    ----------
    a_max : int, optional
        Adapter slots; None: as reported by the server.
    s_max : int
        Rank of a slot.
    max_num_seqs, max_num_batched_tokens : int
        Limits of a step.
    max_model_len : int, optional
        Limit on prompt and output tokens; None: as reported by the server.
    """

    a_max: int | None
    s_max: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None


@dataclass(frozen=True)
class ServerProfilingOptions:
    """Extent of a measurement.

    Attributes
    ----------
    budget_s : float
        Time for all points; later points are left out.
    point_s : float
        Time per point.
    passes : int
        Passes over all points. Several passes separate the drift of a machine from differences of points.
    max_streams : int, optional
        Largest batch; None: max_num_seqs, at most 64.
    prompt_tokens, output_tokens : int
        Typical lengths.
    prompt_form : PromptForm, optional
        None: the first that the server accepts.
    idle_repeats : int
        Requests per prompt length on the idle server.
    load_rounds : int
        Loads per adapter.
    """

    budget_s: float = 600.0
    point_s: float = 8.0
    passes: int = 1
    max_streams: int | None = None
    prompt_tokens: int = 128
    output_tokens: int = 64
    prompt_form: PromptForm | None = None
    idle_repeats: int = 15
    load_rounds: int = 6


class Counter:
    """Progress counter of a stage."""

    def __init__(self, report: OnProgress, stage: str, total: int) -> None:
        self._report, self._stage, self._total, self._done = report, stage, total, 0
        report(stage, 0, total)

    def __call__(self) -> None:
        """Count one part."""
        self._done += 1
        self._report(self._stage, self._done, self._total)


@dataclass(frozen=True)
class ProfiledServer:
    """Server under measurement."""

    target: Target
    adapters: Mapping[str, int]
    """Ranks by name."""
    found: Preflight
    info: EngineInfo


@dataclass(frozen=True)
class ServerProfilingResult:
    """Summary of a measurement."""

    setting: str
    points: int
    skipped: int
    """Points of earlier measurements."""
    left_out: int
    """Points beyond the budget."""
    failed: tuple[str, ...]
    """Points and stages without rows, with the reason."""
    step_rows: int
    loads: int
    kv_tokens: int | None
    late_ms_p95: float | None
    """Event-loop lag: the error of gaps between tokens."""
    partial: bool


class ServerProfiler:
    """One resumable measurement."""

    def __init__(
        self,
        server: ProfiledServer,
        sender: RequestSender,
        setting: EngineSetting,
        out: MeasurementFolder,
        options: ServerProfilingOptions,
        on_progress: OnProgress,
    ) -> None:
        self.server, self.setting, self.out, self.options = server, setting, out, options
        self.report = on_progress
        self.ranks = dict(enumerate(server.adapters.values(), start=1))
        """By model position; position 0 is the base model."""
        self.with_base = server.target.base_model is not None
        self.a_max = setting.a_max or server.info.a_max or 1
        self.bounds = ServerBounds(
            adapters=len(self.ranks),
            a_max=self.a_max,
            max_streams=min(options.max_streams or _LARGEST_BATCH, setting.max_num_seqs),
            longest=setting.max_model_len or server.found.max_model_len or DEFAULT_MAX_MODEL_LEN,
            kv_tokens=server.info.kv_tokens,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
        )
        self.name = (
            f"a{self.a_max}-s{setting.s_max}-b{setting.max_num_seqs}-t{setting.max_num_batched_tokens}"
        )
        self._sender = sender
        self._points = self._skipped = self._left_out = self._rows = self._loads = 0
        self._failed: list[str] = []
        self._loop_lag = EventLoopLag()

    async def measure(self) -> None:
        """Measure first tokens, adapter loads and operating points; a failed stage does not end the others.

        Raises
        ------
        InputError
            If the folder is of another server.
        """
        require_same(self.out, self.name, self._facts())
        loop_lag = asyncio.create_task(self._loop_lag.watch())
        try:
            self._write_memory()
            await self._run_stage(FIRST_TOKENS, self._first_tokens)
            await self._run_stage(LOADS, self._adapter_loads)
            await self._operating_points()
        finally:  # also when it is interrupted
            loop_lag.cancel()
            self.out.note(self.name, self._facts())

    async def _run_stage(self, stage: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except LoopError as error:
            self._failed.append(f"{stage}: {error}")

    def profiled(self, *, partial: bool) -> ServerProfilingResult:
        """Return the summary."""
        return ServerProfilingResult(
            setting=self.name,
            points=self._points,
            skipped=self._skipped,
            left_out=self._left_out,
            failed=tuple(self._failed),
            step_rows=self._rows,
            loads=self._loads,
            kv_tokens=self.server.info.kv_tokens,
            late_ms_p95=self._loop_lag.percentile_ms(95.0),
            partial=partial,
        )

    def _engine(self) -> dict[str, Any]:
        """Return the engine-setting columns of tables."""
        known = {"a_max": self.a_max, "s_max": self.setting.s_max, "max_num_seqs": self.setting.max_num_seqs}
        share = self.server.info.gpu_memory_utilization
        return known if share is None else {**known, "gpu_memory_utilization": share}

    def _write_memory(self) -> None:
        kv_tokens = self.server.info.kv_tokens
        if kv_tokens is not None:
            self.out.add(files.MEMORY, self.name, [{**self._engine(), "kv_tokens": kv_tokens}])

    async def _first_tokens(self) -> None:
        """Measure first tokens of the idle server, and write them as runs of minimal load."""
        if self.out.has(files.FIRST_TOKENS, self.name):
            return
        longest = self.bounds.longest - OUTPUT_TOKENS
        top = min(4 * self.options.prompt_tokens, longest, self.setting.max_num_batched_tokens)
        lengths = sorted({int(n) for n in np.geomspace(min(8, top), top, _IDLE_LENGTHS).round()})
        resident = list(self.ranks)[: min(self.a_max, _IDLE_ADAPTERS)]
        counter = Counter(self.report, FIRST_TOKENS, len(lengths))
        rows = await first_tokens(self._sender, resident or [0], lengths, self.options.idle_repeats, counter)
        self.out.add(files.FIRST_TOKENS, self.name, rows)
        if resident:
            self.out.add(files.RUNS, self.name, [self._idle_run(row, resident) for row in rows])

    def _idle_run(self, row: Mapping[str, float], resident: Sequence[int]) -> dict[str, Any]:
        return {
            **self._engine(),
            "run": f"{self.name}-idle-p{row['prompt_tokens']:g}",
            "adapters": len(resident),
            "ranks": " ".join(str(self.ranks[at]) for at in resident),
            "max_num_batched_tokens": self.setting.max_num_batched_tokens,
            "max_model_len": self.bounds.longest,
            **idle_run(row["prompt_tokens"], row["ttft_ms_p50"]),
        }

    async def _adapter_loads(self) -> None:
        if self.out.has(files.LOADING, self.name):
            return
        rounds = self.options.load_rounds
        counter = Counter(self.report, LOADS, rounds + 1)
        rows = await adapter_loads(self._sender, self.ranks, self.a_max, self.setting.s_max, rounds, counter)
        self._loads = int(sum(float(row["loads"]) for row in rows))
        self.out.add(files.LOADING, self.name, rows)

    async def _operating_points(self) -> None:
        known = self.out.measured(files.STEPS, self.name, "visit")
        points = design(self.bounds, self.with_base)
        passes = [(point, number) for number in range(self.options.passes) for point in points]
        todo = [each for each in passes if self._pass_name(*each) not in known]
        self._skipped = len(passes) - len(todo)
        room = max(1, int(self.options.budget_s / self.options.point_s))
        self._left_out = max(0, len(todo) - room)
        counter = Counter(self.report, "operating points", min(room, len(todo)))
        for seed, (point, number) in enumerate(todo[:room]):
            try:
                rows = await self._point(point, seed)
            except LoopError as error:
                self._failed.append(f"{point.name}: {error}")
            else:
                name = self._pass_name(point, number)
                self._add_rows(point, [{**row, "visit": name} for row in rows])
            counter()

    def _add_rows(self, point: ServerPoint, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            self._failed.append(f"{point.name}: {NO_STEPS}")
            return
        self._points += 1
        self._rows += len(rows)
        self.out.add(files.STEPS, self.name, rows, replace=False)

    async def _point(self, point: ServerPoint, seed: int) -> list[dict[str, Any]]:
        """Measure a point and return the rows of its windows."""
        models = list(self.ranks)[: point.adapters] or [0]
        ramp_s = max(_LEAST_RAMP_S, _RAMP_SHARE * self.options.point_s)
        measured_s = max(1.0, self.options.point_s - ramp_s)
        answered, start_s, end_s = await closed_loop(self._sender, point, models, ramp_s, measured_s, seed)
        edges = np.linspace(start_s, end_s, _WINDOWS + 1)
        rows = window_rows(answered, edges, self.ranks, self.setting.max_num_batched_tokens)
        fixed = {
            "run": self._run_name(point),
            "a_max": self.a_max,
            "s_max": self.setting.s_max,
            "adapters_served": max(1, len(self.ranks)),
            "waiting": 0.0,
            "load_ms": 0.0,  # all adapters of a point have slots
            "token_budget": self.setting.max_num_batched_tokens,
        }
        if self.server.info.kv_tokens is not None:
            fixed["kv_capacity"] = self.server.info.kv_tokens
        return [{**fixed, **row} for row in rows]

    def _run_name(self, point: ServerPoint) -> str:
        return f"{self.name}-{point.name}"

    def _pass_name(self, point: ServerPoint, number: int) -> str:
        run = self._run_name(point)
        return run if number == 0 else f"{run}#{number + 1}"

    def _facts(self) -> dict[str, Any]:
        """Return the provenance of the rows."""
        from capplan import __version__

        return {
            "measured_by": f"capplan profile server, capplan {__version__}",
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "url": self.server.target.shown,
            "base_model": self.server.target.base_model,
            "adapters": len(self.ranks),
            "ranks": dict(self.server.adapters),
            "engine": asdict(self.setting),
            "told_by_the_server": asdict(self.server.info),
            "options": asdict(self.options),
            "prompt_form": self.server.found.prompts.form.value,
            "points": len(self.out.measured(files.STEPS, self.name, "run")),
            "points_left_out": self._left_out,
            "points_failed": self._failed,
            "client_late_ms_p95": self._loop_lag.percentile_ms(95.0),
        }


def profile_server(
    target: Target,
    adapters: Mapping[str, int],
    setting: EngineSetting,
    out: MeasurementFolder,
    options: ServerProfilingOptions | None = None,
    on_progress: OnProgress | None = None,
) -> ServerProfilingResult:
    """Measure a server without other traffic, and write rows after every point.

    Points of earlier measurements are skipped. In the main thread an interrupt (Ctrl-C) ends the measurement
    and keeps its rows.

    Parameters
    ----------
    target
        The server; a named base model is measured, too.
    adapters
        Ranks by adapter name.
    setting
        Engine settings of the server.
    out
        Folder of tables.
    options
        Extent of the measurement.
    on_progress
        Called with a stage, the number of its parts that are done, and their total.

    Raises
    ------
    InputError
        If the server does not answer, or a setting is missing or wrong.
    """
    settings = options or ServerProfilingOptions()
    return asyncio.run(_profile(target, dict(adapters), setting, out, settings, on_progress or _ignore))


async def _profile(
    target: Target,
    adapters: dict[str, int],
    setting: EngineSetting,
    out: MeasurementFolder,
    options: ServerProfilingOptions,
    on_progress: OnProgress,
) -> ServerProfilingResult:
    with_base = target.base_model is not None
    if not adapters and not with_base:
        raise InputError("must name an adapter, unless a base model is named", location="adapters")
    asked = [BASE, *adapters] if with_base else list(adapters)
    found = await preflight(target, asked, options.prompt_form)
    info = await fetch_engine_info(target)
    if adapters and setting.a_max is None and info.a_max is None:
        raise InputError("is required: the server does not tell its adapter slots", location="a_max")
    server = ProfiledServer(target, adapters, found, info)
    bodies = bodies_for(found, target, [BASE, *adapters], asked)
    stop = asyncio.Event()
    async with open_session(target) as session:
        client = CompletionClient(session, target, _REQUEST_TIMEOUT_S, time.monotonic)
        sender = RequestSender(client, bodies, time.monotonic)
        profiler = ServerProfiler(server, sender, setting, out, options, on_progress)
        with stopped_by_signals(stop):
            work = asyncio.create_task(profiler.measure())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for each in (work, stopped):
                each.cancel()
            await asyncio.wait({work, stopped})
    if not work.cancelled() and (error := work.exception()) is not None:
        raise error
    return profiler.profiled(partial=stop.is_set())


def _ignore(stage: str, done: int, total: int) -> None:
    """Show nothing."""
