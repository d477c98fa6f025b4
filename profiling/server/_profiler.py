"""Step, loading and memory tables of a running server.

Engine steps from client-side events.

Every running request gets one token per step, so a gap between its tokens is a step. Each decoding request
gives a step rate: one over its current gap. Their mean, integrated over a window, is the number of steps in
it. Tokens, prompts and adapters of the window are counted by the same events, so a row of a step table
follows without access to the engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InputError
from capplan.profiling import _tables as files
from capplan.profiling._tables import OUTPUT_TOKENS, MeasurementFolder, OnProgress, idle_run, require_same
from capplan.profiling.load._bench import stopped_by_signals
from capplan.profiling.load._preflight import (
    EngineInfo,
    Preflight,
    beside_engine,
    fetch_engine_info,
    preflight,
)
from capplan.profiling.load._record import FINISHED, EventLoopLag, RequestOutcome
from capplan.profiling.load._requests import BASE, DEFAULT_MAX_MODEL_LEN, PromptForm, Target
from capplan.profiling.server._closed_loop import (
    ClosedLoopRequest,
    LoopError,
    RequestSender,
    ServerBounds,
    ServerPoint,
    adapter_loads,
    closed_loop,
    design,
    first_tokens,
    open_sender,
)
from capplan.spec import EngineConfig
from capplan.version import installed_version

_MS_PER_S: Final = 1e3
_LEAST_STEPS: Final = 8.0
_APART: Final = 0.25
"""Share of the median gap that separates the tokens of two steps."""
_LEAST_COVERED: Final = 0.5
"""Minimum share of a window with decoding."""


class _Gaps(NamedTuple):
    """Gaps between the tokens of requests."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    tokens: NDArray[np.float64]
    """Tokens at the end."""
    kv_tokens: NDArray[np.float64]
    """Of the request."""
    model: NDArray[np.int64]


class _Prompts(NamedTuple):
    """Prompts with an observed step; `parts` are the steps of each."""

    first_s: NDArray[np.float64]
    tokens: NDArray[np.float64]
    parts: NDArray[np.float64]
    rank: NDArray[np.float64]


class _Tokens(NamedTuple):
    """Tokens after the first of each request; `weight` is their number at a time."""

    time_s: NDArray[np.float64]
    weight: NDArray[np.float64]
    rank: NDArray[np.float64]


class _Cells(NamedTuple):
    """Time cells between two changes; `steps` and `seconds` are 0 without decoding."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    steps: NDArray[np.float64]
    seconds: NDArray[np.float64]
    kv_tokens: NDArray[np.float64]
    adapters: NDArray[np.float64]


def window_rows(
    answered: Sequence[ClosedLoopRequest],
    edges_s: NDArray[np.float64],
    ranks: Mapping[int, int],
    budget: int | None,
) -> list[dict[str, float]]:
    """Return a row of a step table for each window in which enough steps ran.

    Edges of windows are moved to the nearest end of a step, so that the time and the tokens of a step, and of
    its prompts, are in the same window. `answered` includes requests in flight at the end. `ranks` are by
    model position. `budget` limits the tokens of a step (None: unknown): a longer prompt takes several.
    """
    answered = [each for each in answered if each.outcome.times_s]
    if not answered:
        return []
    gaps = _gaps(answered)
    edges_s = _at_step_ends(edges_s, answered, gaps)
    cells = _cells(gaps, edges_s, ranks)
    prompts = _prompts(answered, cells, ranks, budget)
    rank = np.array([ranks.get(model, 0) for model in gaps.model.tolist()], float)
    tokens = _Tokens(gaps.end_s, gaps.tokens, rank)
    windows = zip(edges_s[:-1].tolist(), edges_s[1:].tolist(), strict=True)
    rows = [_row(low, high, cells, prompts, tokens) for low, high in windows]
    return [row for row in rows if row]


def _row(low: float, high: float, cells: _Cells, prompts: _Prompts, tokens: _Tokens) -> dict[str, float]:
    """Return means per step over a window; empty if too little was observed."""
    inside = (cells.start_s >= low) & (cells.end_s <= high)
    count, covered_s = float(cells.steps[inside].sum()), float(cells.seconds[inside].sum())
    if count < _LEAST_STEPS or covered_s < _LEAST_COVERED * (high - low):
        return {}
    prompt = _Prompts(*(each[(prompts.first_s > low) & (prompts.first_s <= high)] for each in prompts))
    token = _Tokens(*(each[(tokens.time_s > low) & (tokens.time_s <= high)] for each in tokens))
    lora_prompt, lora_token = prompt.rank > 0, token.rank > 0
    in_a_step = prompt.tokens / np.maximum(prompt.parts, 1.0)
    sums = {
        "decodes": token.weight,
        "prefills": prompt.parts,
        "lora_decodes": token.weight[lora_token],
        "lora_prefills": prompt.parts[lora_prompt],
        "lora_prefill_tokens": prompt.tokens[lora_prompt],
        "decode_rank_sum": token.weight * token.rank,
        "prefill_rank_sum": prompt.parts * prompt.rank,
        "prefill_rank_tokens": prompt.tokens * prompt.rank,
    }
    means = {name: float(values.sum()) / count for name, values in sums.items()}
    share = cells.steps[inside] / count
    return {
        "step_ms": _MS_PER_S * covered_s / count,
        "steps": count,
        "tokens": means["decodes"] + float(prompt.tokens.sum()) / count,
        "requests": means["decodes"] + means["prefills"],
        "kv_tokens": float((cells.kv_tokens[inside] * share).sum()),
        "adapters": float((cells.adapters[inside] * share).sum()),
        **means,
        "prompt_std": float(in_a_step.std()) if in_a_step.size else 0.0,
        "max_rank": float(np.max(np.concatenate([[0.0], prompt.rank, token.rank]))),
    }


def _cells(gaps: _Gaps, edges_s: NDArray[np.float64], ranks: Mapping[int, int]) -> _Cells:
    grid = np.unique(np.concatenate([gaps.start_s, gaps.end_s, edges_s]))
    starts, ends = np.searchsorted(grid, gaps.start_s), np.searchsorted(grid, gaps.end_s)

    def level(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of the weights of all gaps over each cell."""
        changes = np.zeros(grid.size)
        np.add.at(changes, starts, weights)
        np.add.at(changes, ends, -weights)
        return np.cumsum(changes)[:-1]

    busy = level(np.ones(starts.size))
    covered = busy > 0.5
    lengths = np.diff(grid)
    adapters = np.zeros(lengths.size)
    for model in set(gaps.model.tolist()) & set(ranks):
        adapters += level((gaps.model == model).astype(float)) > 0.5
    rates = level(gaps.tokens / (gaps.end_s - gaps.start_s))
    return _Cells(
        start_s=grid[:-1],
        end_s=grid[1:],
        steps=np.where(covered, rates / np.maximum(busy, 1.0), 0.0) * lengths,
        seconds=np.where(covered, lengths, 0.0),
        kv_tokens=level(gaps.kv_tokens),
        adapters=adapters,
    )


def _prompts(
    answered: Sequence[ClosedLoopRequest], cells: _Cells, ranks: Mapping[int, int], budget: int | None
) -> _Prompts:
    """Return the prompts that ended during decoding; others have no step time."""
    first_s = np.array([each.outcome.times_s[0] for each in answered])
    tokens = np.array([_prompt_tokens(each) for each in answered], float)
    at = np.clip(np.searchsorted(cells.end_s, first_s, side="left"), 0, cells.end_s.size - 1)
    parts = np.ones(tokens.size) if budget is None else np.ceil(tokens / budget)
    rank = np.array([ranks.get(each.model, 0) for each in answered], float)
    seen = cells.seconds[at] > 0.0
    return _Prompts(first_s[seen], tokens[seen], parts[seen], rank[seen])


def _prompt_tokens(answered: ClosedLoopRequest) -> int:
    """Return prompt tokens as the server counted them, otherwise as requested."""
    counted = answered.outcome.prompt_tokens
    return answered.prompt_tokens if counted is None else counted


def _gaps(answered: Sequence[ClosedLoopRequest]) -> _Gaps:
    """Return the gaps of all requests.

    If a server puts several tokens into an event, each event counts as their mean number.
    """
    typical = _tokens_per_event([each.outcome for each in answered], 1.0)
    parts = []
    for each in answered:
        times, counts = np.unique(np.array(each.outcome.times_s), return_counts=True)
        tokens = counts[1:].astype(float) * max(_tokens_per_event([each.outcome], typical), 1e-9)
        kv_tokens = np.cumsum(tokens) - tokens + (1.0 + _prompt_tokens(each))
        parts.append((times[:-1], times[1:], tokens, kv_tokens, np.full(tokens.size, each.model)))
    return _Gaps(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _tokens_per_event(outcomes: Sequence[RequestOutcome], default: float) -> float:
    """Return the mean tokens per event after the first, over complete requests with known tokens."""
    tokens = events = 0
    for each in outcomes:
        if each.kind == FINISHED and each.output_tokens is not None:
            tokens += each.output_tokens - 1 if len(each.times_s) > 1 else 0
            events += len(each.times_s) - 1
    return tokens / events if events else default


def _at_step_ends(
    edges_s: NDArray[np.float64], answered: Sequence[ClosedLoopRequest], gaps: _Gaps
) -> NDArray[np.float64]:
    """Return the edges moved to ends of steps."""
    times = np.unique(np.concatenate([each.outcome.times_s for each in answered]))
    typical_s = np.median(np.concatenate([[np.inf], gaps.end_s - gaps.start_s]))
    ends = times[np.append(np.diff(times) > _APART * typical_s, True)]
    after = np.minimum(np.searchsorted(ends, edges_s), ends.size - 1)
    before = np.maximum(after - 1, 0)
    return np.unique(np.where(edges_s - ends[before] <= ends[after] - edges_s, ends[before], ends[after]))


NO_STEPS: Final = "no request decoded for long enough"
"""Failure of a point without decode steps."""
FIRST_TOKENS: Final = "first tokens"
LOADS: Final = "adapter loads"
"""Stages before the operating points."""
_LARGEST_BATCH: Final = 64
_RAMP_SHARE: Final = 0.35
_LEAST_RAMP_S: Final = 1.0
_WINDOWS: Final = 3
_IDLE_LENGTHS: Final = 4
_IDLE_ADAPTERS: Final = 4


@dataclass(frozen=True)
class EngineSetting:
    """Engine settings of the server."""

    a_max: int | None
    """Adapter slots; None: as reported by the server."""
    s_max: int
    """Rank of a slot."""
    engine: EngineConfig = EngineConfig()
    """Other settings; open ones have vLLM's defaults, and `max_model_len` is as reported by the server."""


@dataclass(frozen=True)
class ServerProfilingOptions:
    """Extent of a measurement."""

    budget_s: float = 600.0
    """Time for all points; later points are left out."""
    point_s: float = 8.0
    passes: int = 1
    """Passes over all points. Several passes separate the drift of a machine from differences of points."""
    max_streams: int | None = None
    """Largest batch; None: max_num_seqs, at most 64."""
    prompt_tokens: int = 128
    """Typical prompt."""
    output_tokens: int = 64
    prompt_form: PromptForm | None = None
    """None: the first that the server accepts."""
    idle_repeats: int = 15
    """Requests per prompt length on the idle server."""
    load_rounds: int = 6
    """Loads per adapter."""


@dataclass(frozen=True)
class ProfiledServer:
    """Server under measurement."""

    target: Target
    adapters: Mapping[str, int]
    """Ranks by name."""
    found: Preflight
    info: EngineInfo


@dataclass
class ServerProfilingResult:
    """Summary of a measurement."""

    setting: str
    points: int = 0
    skipped: int = 0
    """Points of earlier measurements."""
    left_out: int = 0
    """Points beyond the budget."""
    failed: tuple[str, ...] = ()
    """Points and stages without rows, with the reason."""
    step_rows: int = 0
    loads: int = 0
    kv_tokens: int | None = None
    late_ms_p95: float | None = None
    """Event-loop lag: the error of gaps between tokens."""
    partial: bool = False


class _ServerProfiler:
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
        self.server, self.out, self.options = server, out, options
        self.report = on_progress
        self.ranks = dict(enumerate(server.adapters.values(), start=1))
        """By model position; position 0 is the base model."""
        longest = server.found.max_model_len or DEFAULT_MAX_MODEL_LEN
        self.args = setting.engine.complete(setting.a_max or server.info.a_max or 1, setting.s_max, longest)
        self.bounds = ServerBounds(
            adapters=len(self.ranks),
            a_max=self.args.max_loras,
            max_streams=min(options.max_streams or _LARGEST_BATCH, self.args.max_num_seqs),
            longest=self.args.max_model_len,
            kv_tokens=server.info.kv_tokens,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
        )
        slots = f"a{self.args.max_loras}-s{self.args.max_lora_rank}"
        self.name = f"{slots}-b{self.args.max_num_seqs}-t{self.args.max_num_batched_tokens}"
        self.result = ServerProfilingResult(self.name, kv_tokens=server.info.kv_tokens)
        self._sender = sender
        self._loop_lag = EventLoopLag()

    async def measure(self) -> None:
        """Measure first tokens, adapter loads and operating points; a failed stage does not end the others.

        Raise `InputError` if the folder is of another server.
        """
        facts = self._facts()
        for name, known in self.out.notes().items():
            keys = ("base_model", "ranks") if name == self.name else ("base_model",)
            require_same(known, facts, keys, f"{self.out.path / files.PROVENANCE}: {name}")
        loop_lag = asyncio.create_task(self._loop_lag.watch())
        try:
            if self.server.info.kv_tokens is not None:
                row = {**self._engine(), "kv_tokens": self.server.info.kv_tokens}
                self.out.add(files.MEMORY, self.name, [row])
            await self._run_stage(FIRST_TOKENS, self._first_tokens())
            await self._run_stage(LOADS, self._adapter_loads())
            await self._operating_points()
        finally:  # also when it is interrupted
            loop_lag.cancel()
            self.result.late_ms_p95 = self._loop_lag.percentile_ms(95.0)
            self.out.note(self.name, self._facts())

    async def _run_stage(self, stage: str, work: Awaitable[None]) -> None:
        try:
            await work
        except LoopError as error:
            self._fail(stage, error)

    def _fail(self, name: str, reason: object) -> None:
        self.result.failed += (f"{name}: {reason}",)

    def _counter(self, stage: str, total: int) -> Callable[[], None]:
        """Return a progress counter that starts at 0."""
        done = itertools.count()

        def count() -> None:
            self.report(stage, next(done), total)

        count()
        return count

    def _engine(self) -> dict[str, Any]:
        """Return the engine-setting columns of tables."""
        args = self.args
        known = {"a_max": args.max_loras, "s_max": args.max_lora_rank, "max_num_seqs": args.max_num_seqs}
        share = self.server.info.gpu_memory_utilization
        return known if share is None else {**known, "gpu_memory_utilization": share}

    async def _first_tokens(self) -> None:
        """Measure first tokens of the idle server, and write them as runs of minimal load."""
        if self.out.has(files.FIRST_TOKENS, self.name):
            return
        longest = self.bounds.longest - OUTPUT_TOKENS
        top = min(4 * self.options.prompt_tokens, longest, self.args.max_num_batched_tokens)
        lengths = sorted({int(n) for n in np.geomspace(min(8, top), top, _IDLE_LENGTHS).round()})
        resident = list(self.ranks)[: min(self.args.max_loras, _IDLE_ADAPTERS)]
        counter = self._counter(FIRST_TOKENS, len(lengths))
        rows = await first_tokens(self._sender, resident or [0], lengths, self.options.idle_repeats, counter)
        self.out.add(files.FIRST_TOKENS, self.name, rows)
        settings = {
            **self._engine(),
            "adapters": len(resident),
            "ranks": " ".join(str(self.ranks[at]) for at in resident),
            "max_num_batched_tokens": self.args.max_num_batched_tokens,
            "max_model_len": self.bounds.longest,
        }
        if resident:
            self.out.add(files.RUNS, self.name, [idle_run(self.name, settings, row) for row in rows])

    async def _adapter_loads(self) -> None:
        if self.out.has(files.LOADING, self.name):
            return
        rounds = self.options.load_rounds
        counter = self._counter(LOADS, rounds + 1)
        rows = await adapter_loads(
            self._sender, self.ranks, self.args.max_loras, self.args.max_lora_rank, rounds, counter
        )
        self.result.loads = int(sum(float(row["loads"]) for row in rows))
        self.out.add(files.LOADING, self.name, rows)

    async def _operating_points(self) -> None:
        known = self.out.measured(files.STEPS, self.name, "visit")
        points = design(self.bounds, self.server.target.base_model is not None)
        suffixes = ["", *(f"#{number}" for number in range(2, self.options.passes + 1))]
        passes = [(point, f"{self.name}-{point.name}{suffix}") for suffix in suffixes for point in points]
        todo = [each for each in passes if each[1] not in known]
        room = max(1, int(self.options.budget_s / self.options.point_s))
        self.result.skipped = len(passes) - len(todo)
        self.result.left_out = max(0, len(todo) - room)
        counter = self._counter("operating points", min(room, len(todo)))
        for seed, (point, name) in enumerate(todo[:room]):
            try:
                rows = [{**row, "visit": name} for row in await self._point(point, seed)]
            except LoopError as error:
                self._fail(point.name, error)
            else:
                if rows:
                    self.result.points += 1
                    self.result.step_rows += len(rows)
                    self.out.add(files.STEPS, self.name, rows, replace=False)
                else:
                    self._fail(point.name, NO_STEPS)
            counter()

    async def _point(self, point: ServerPoint, seed: int) -> list[dict[str, Any]]:
        """Measure a point and return the rows of its windows."""
        models = list(self.ranks)[: point.adapters] or [0]
        ramp_s = max(_LEAST_RAMP_S, _RAMP_SHARE * self.options.point_s)
        measured_s = max(1.0, self.options.point_s - ramp_s)
        answered, start_s, end_s = await closed_loop(self._sender, point, models, ramp_s, measured_s, seed)
        edges = np.linspace(start_s, end_s, _WINDOWS + 1)
        rows = window_rows(answered, edges, self.ranks, self.args.max_num_batched_tokens)
        fixed = {
            "run": f"{self.name}-{point.name}",
            "a_max": self.args.max_loras,
            "s_max": self.args.max_lora_rank,
            "adapters_served": max(1, len(self.ranks)),
            "waiting": 0.0,
            "load_ms": 0.0,  # all adapters of a point have slots
            "token_budget": self.args.max_num_batched_tokens,
        }
        if self.server.info.kv_tokens is not None:
            fixed["kv_capacity"] = self.server.info.kv_tokens
        return [{**fixed, **row} for row in rows]

    def _facts(self) -> dict[str, Any]:
        """Return the provenance of the rows."""
        return {
            "measured_by": f"capplan profile server, capplan {installed_version()}",
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "url": self.server.target.shown,
            "base_model": self.server.target.base_model,
            "adapters": len(self.ranks),
            "ranks": dict(self.server.adapters),
            "engine": self.args.model_dump(mode="json"),
            "told_by_the_server": asdict(self.server.info),
            "options": asdict(self.options),
            "prompt_form": self.server.found.prompts.form.value,
            "points": len(self.out.measured(files.STEPS, self.name, "run")),
            "points_left_out": self.result.left_out,
            "points_failed": list(self.result.failed),
            "client_late_ms_p95": self.result.late_ms_p95,
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
    on_progress
        Called with a stage, the number of its parts that are done, and their total.

    Raises
    ------
    InputError
        If the server does not answer, or a setting is missing or wrong.
    """
    chosen, report = options or ServerProfilingOptions(), on_progress or (lambda *_: None)
    return asyncio.run(_profile(target, dict(adapters), setting, out, chosen, report))


async def _profile(
    target: Target,
    adapters: dict[str, int],
    setting: EngineSetting,
    out: MeasurementFolder,
    options: ServerProfilingOptions,
    on_progress: OnProgress,
) -> ServerProfilingResult:
    names = [BASE, *adapters]
    used = names if target.base_model is not None else names[1:]
    if not used:
        raise InputError("must name an adapter, unless a base model is named", location="adapters")
    found = await preflight(target, used, options.prompt_form)
    info = await fetch_engine_info(target)
    if adapters and setting.a_max is None and info.a_max is None:
        raise InputError("is required: the server does not report its adapter slots", location="a_max")
    server = ProfiledServer(target, adapters, found, info)
    stop = asyncio.Event()
    async with beside_engine(target), open_sender(target, found, names, used) as sender:
        profiler = _ServerProfiler(server, sender, setting, out, options, on_progress)
        with stopped_by_signals(stop):
            work = asyncio.create_task(profiler.measure())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
            for each in (work, stopped):
                each.cancel()
            await asyncio.wait({work, stopped})
    if not work.cancelled() and (error := work.exception()) is not None:
        raise error
    profiler.result.partial = stop.is_set()
    return profiler.result
