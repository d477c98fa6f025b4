"""Resumable measurement of the reference engine into a folder.

Step times of the engine behind its server.

Streams over HTTP keep operating points up; the server records its steps. Its processes and their CPUs are
those of `capplan serve`, and the client keeps off the CPUs of the engine core, as in a load test.

Step times of the engine alone: operating points in order of information, and whole iterations.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch

from capplan.engine import Engine, EngineOptions
from capplan.engine.models import model_config
from capplan.errors import InputError
from capplan.models.calibration import LinearProblem, cross_validate
from capplan.profiling import _tables as files
from capplan.profiling._machine import describe
from capplan.profiling._tables import OUTPUT_TOKENS, MeasurementFolder, OnProgress, idle_run, require_same
from capplan.profiling.engine import _options as stages
from capplan.profiling.engine._memory import BLOCK_TOKENS, base_profile, loading_rows, memory_row
from capplan.profiling.engine._options import EngineProfilingOptions, SlotSetting
from capplan.profiling.engine._stepping import (
    COUNTS,
    PHASES,
    EngineBounds,
    EnginePoint,
    Stepper,
    candidates,
    most_informative,
)
from capplan.profiling.kernels._measure import PAPER_BATCHES, PAPER_RANKS, Case, timing_row
from capplan.profiling.load._preflight import beside_engine, preflight
from capplan.profiling.load._record import FINISHED
from capplan.profiling.load._requests import BASE, Target
from capplan.profiling.server._closed_loop import (
    LoopError,
    RequestSender,
    ServerBounds,
    ServerPoint,
    closed_loop,
    design,
    first_tokens,
    open_sender,
)
from capplan.profiling.server._process import ServerCommand, engine_words, running_server
from capplan.spec import Profile, read_text, write_text_atomic

_LEAST_POINTS: Final = 20
_FOLDS: Final = 5
_COLUMNS: Final = (
    *("tokens", "kv_tokens", "adapters", "requests"),
    *("decode_rank_sum", "prefill_rank_tokens", "waiting"),
)
_WIDER: Final = (1, 2, 48, 64)
_PROMPT: Final = 16
_DECODES: Final = 5
_REPEATS: Final = 3


@dataclass(frozen=True)
class StepProgress:
    """Progress of one setting; `error` is the SMAPE on left-out points in percent, or NaN."""

    done: int
    total: int
    rows: list[dict[str, Any]]
    error: float
    converged: bool


def measure_steps(
    options: EngineProfilingOptions,
    slots: SlotSetting,
    kv_blocks: int,
    known: list[dict[str, Any]],
    budget_s: float,
) -> Iterator[StepProgress]:
    """Measure operating points of an engine, most informative first, within `budget_s` seconds."""
    until_s = time.monotonic() + budget_s
    ranks, rows = options.adapters(slots), list(known)
    own_ranks = tuple(sorted(set(ranks.values())))
    bounds = EngineBounds(options.engine_args(slots), own_ranks, kv_blocks * BLOCK_TOKENS)
    every = candidates(bounds, options.seed)
    measured = {str(row["run"]).partition("/")[2] for row in rows}
    left = [point for point in every if point.name not in measured]
    seen = [_seen(point, rows) for point in every if point.name in measured]
    mean_rank = float(np.mean(own_ranks)) if own_ranks else 0.0

    def progress(new: list[dict[str, Any]]) -> StepProgress:
        error = float("nan")
        if len(seen) >= _LEAST_POINTS:
            error = cross_validate(_problem(rows), [str(row["run"]) for row in rows], _FOLDS)
        return StepProgress(len(seen), len(every), new, error, error <= 100.0 * options.tolerance or not left)

    found = progress([])
    yield found
    if found.converged or budget_s <= 0.0:
        return
    fields = options.engine_fields(max_loras=slots.a_max, max_lora_rank=slots.s_max)
    fields["num_kv_blocks"] = kv_blocks
    fields["max_in_flight"] = 8 * options.widest.max_num_seqs
    fixed = {**slots._asdict(), "adapters_served": max(1, len(ranks))}
    with Engine(options.model, ranks, virtual_time=True, **fields) as engine:
        stepper = Stepper(engine, ranks, options.seed)
        while left and time.monotonic() < until_s and not found.converged:
            point = left.pop(most_informative(left, seen, mean_rank))
            run = f"{slots.name}/{point.name}"
            new = [{"run": run, **fixed, **row} for row in stepper.measure(point)]
            rows += new
            seen.append(_seen(point, new))
            found = progress(new)
            yield found


def _seen(point: EnginePoint, rows: list[dict[str, Any]]) -> tuple[EnginePoint, float, float]:
    """Return a point with its decode and mixed step times in milliseconds."""
    own = [row for row in rows if str(row["run"]).endswith("/" + point.name)]
    decode = [row["step_ms"] for row in own if row["prefills"] == 0.0]
    mixed = [row["step_ms"] for row in own if row["prefills"] > 0.0 and row["decodes"] > 0.0]
    known = decode or mixed or [row["step_ms"] for row in own]
    return point, float(np.mean(known)), float(np.mean(mixed or known))


def _problem(rows: list[dict[str, Any]]) -> LinearProblem:
    design = np.array([[1.0, *(float(row[name]) for name in _COLUMNS)] for row in rows])
    times = np.array([float(row["step_ms"]) for row in rows])
    return LinearProblem(("base", *_COLUMNS), design, times)


class IterationCase(Case):
    """Batch of a whole iteration, a request per adapter."""

    @property
    def configuration(self) -> str:
        return self.mix

    @property
    def name(self) -> str:
        return f"{self.grid}-{self.mix}"


def iteration_cases(most: int, seed: int) -> list[IterationCase]:
    """Return the batches of uniform and of random ranks, in a random order."""
    rng = np.random.default_rng(seed)
    found = []
    for grid, sizes in (("paper", PAPER_BATCHES), ("wide", _WIDER)):
        for size in (size for size in sizes if size <= most):
            mixes = [(f"{size}x{rank}", (rank,) * size) for rank in PAPER_RANKS]
            for at, top in enumerate(PAPER_RANKS[1:]):
                drawn = rng.choice([rank for rank in PAPER_RANKS if rank <= top], size).tolist()
                mixes.append((f"{size}-mixed{at}", tuple(drawn)))
            found += [IterationCase(grid, "decode", mix, 0, ranks) for mix, ranks in mixes]
    return [found[at] for at in rng.permutation(len(found)).tolist()]


def iteration_rows(
    options: EngineProfilingOptions, known: set[str], end_s: float
) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """Measure batches until `end_s` on the monotonic clock; yield the number done, the total, and rows."""
    most = min(options.widest.max_num_seqs, options.widest.max_num_batched_tokens // _PROMPT)
    every = iteration_cases(most, options.seed)
    todo = [case for case in every if case.name not in known]
    if not todo:
        return
    yield 0, len(todo), []
    if time.monotonic() >= end_s:
        return
    widest = max(len(case.ranks) for case in every)
    ranks = {f"r{rank}-{at}": rank for rank in PAPER_RANKS for at in range(widest)}
    fields = options.engine_fields(max_loras=widest, max_lora_rank=max(PAPER_RANKS), max_num_seqs=widest)
    fields["num_kv_blocks"] = widest * 4 + -(-options.widest.max_model_len // BLOCK_TOKENS)
    settings = EngineOptions.parse(options.engine_fields())
    kernel = settings.chosen_lora_kernel(settings.torch_dtype(model_config(options.model)))
    with Engine(options.model, ranks, virtual_time=True, **fields) as engine:
        stepper = Stepper(engine, ranks, options.seed)
        for done, case in enumerate(todo, start=1):
            if time.monotonic() >= end_s:
                return
            names = [f"r{rank}-{at}" for at, rank in enumerate(case.ranks)]
            prefill_ms, decode_ms = stepper.iteration_ms(names, _PROMPT, _DECODES, _REPEATS)
            prefill = replace(case, phase="prefill", tokens_each=_PROMPT)
            rows = [
                timing_row(each, kernel, "iteration", 0, [1e3 * milliseconds], 0) | {"visits": _REPEATS}
                for each, milliseconds in ((case, decode_ms), (prefill, prefill_ms))
            ]
            yield done, len(todo), rows


_RAMP_SHARE: Final = 0.3
_PAUSE_S: Final = 0.3
_GROUPS: Final = 3
"""Groups of steps with prompts, by prompt tokens."""
_LEAST_STEPS: Final = 4
_IDLE_PROMPTS: Final = (16, 128)
_IDLE_REPEATS: Final = 15
_TYPICAL_TOKENS: Final = 64
"""Typical prompt and output of the operating points, for a long context."""
_LONGEST_OVER_TYPICAL: Final = 8
"""The longest prompts of a design are four times the typical one and fill half of a short context."""


class Window(NamedTuple):
    """Measured interval of a point on the client's clock, and its load."""

    name: str
    start_s: float
    end_s: float
    streams: float
    """Requests in flight."""
    rate_rps: float
    """Requests that ended per second."""


def serve_and_measure(
    options: EngineProfilingOptions,
    slots: SlotSetting,
    kv_blocks: int,
    budget_s: float,
    folder: Path,
    done: Callable[[int, int], None],
) -> _Client:
    """Start a server and measure its steps at operating points; return the client with the rows."""
    typical = min(_TYPICAL_TOKENS, options.widest.max_model_len // _LONGEST_OVER_TYPICAL)
    bounds = ServerBounds(
        adapters=slots.a_max,
        a_max=slots.a_max,
        max_streams=options.widest.max_num_seqs,
        longest=options.widest.max_model_len,
        kv_tokens=kv_blocks * BLOCK_TOKENS,
        prompt_tokens=typical,
        output_tokens=typical,
    )
    points = design(bounds)[: max(1, int(budget_s / options.point_s))]
    records = folder / f".records-{slots.name}.parquet"
    client = _Client(options, slots)
    try:
        with running_server(_server_command(options, slots, kv_blocks, records)) as url:
            last_s = asyncio.run(client.measure(Target(url, base_model=options.model), points, done))
        if last_s is not None:
            client.steps = _rows(records, client.windows, last_s)
    finally:
        records.unlink(missing_ok=True)
    return client


def _server_command(
    options: EngineProfilingOptions, slots: SlotSetting, kv_blocks: int, records: Path
) -> ServerCommand:
    more = {
        "--dtype": options.dtype,
        "--device": options.device,
        "--rules": options.rules,
        "--seed": options.seed,
        "--num-kv-blocks": None if options.on_gpu else kv_blocks,
        "--lora-kernel": options.lora_kernel,
        "--cpu-affinity": options.cpu_affinity,
    }
    flags = engine_words(options.engine_args(slots), more)
    return ServerCommand(options.model, options.adapters(slots), flags, options.threads, records)


class _Client:
    """Closed-loop client of one server."""

    def __init__(self, options: EngineProfilingOptions, slots: SlotSetting) -> None:
        self.windows: list[Window] = []
        self.steps: list[dict[str, Any]] = []
        """Rows of the step table."""
        self.idle: list[dict[str, float]] = []
        """First tokens of the idle server, a row per prompt length."""
        self.failed: list[str] = []
        """Points without rows, with the reason."""
        self._options, self._slots = options, slots
        longest = options.widest.max_model_len - OUTPUT_TOKENS
        self._idle_prompts = sorted({min(tokens, longest) for tokens in _IDLE_PROMPTS})

    async def measure(
        self, target: Target, points: Sequence[ServerPoint], done: Callable[[int, int], None]
    ) -> float | None:
        """Measure points; return the time of the engine's last step, or None if it is unknown."""
        names = [BASE, *self._options.adapters(self._slots)]
        found = await preflight(target, names)
        async with beside_engine(target), open_sender(target, found, names, names) as sender:
            try:
                self.idle = await first_tokens(sender, [1], self._idle_prompts, _IDLE_REPEATS, lambda: None)
            except LoopError as error:
                self.failed.append(f"first tokens: {error}")
            last_s = None
            for number, point in enumerate(points):
                done(number, len(points))
                last_s = await self._point(sender, point, number)
            done(len(points), len(points))
            if last_s is not None or not self.windows:
                return last_s
            # The last step of a failed point has no known time, that of one more request does.
            outcome = (await sender.send(0, self._idle_prompts[0], OUTPUT_TOKENS)).outcome
            return outcome.times_s[0] if outcome.kind == FINISHED else None

    async def _point(self, sender: RequestSender, point: ServerPoint, number: int) -> float | None:
        """Measure a point; return the end of its window, at which its streams are cancelled."""
        models, point_s = self._models(point, number), self._options.point_s
        ramp_s = _RAMP_SHARE * point_s
        seed = self._options.seed + number
        try:
            done, start_s, end_s = await closed_loop(sender, point, models, ramp_s, point_s - ramp_s, seed)
        except LoopError as error:
            self.failed.append(f"{point.name}: {error}")
            return None
        ended = sum(start_s <= each.outcome.ended_s < end_s for each in done)
        rate_rps = ended / (end_s - start_s)
        self.windows.append(Window(point.name, start_s, end_s, float(point.streams), rate_rps))
        return end_s

    def _models(self, point: ServerPoint, number: int) -> list[int]:
        """Return adapters of one rank or, in turn, of all ranks; the base model without adapters."""
        if point.adapters == 0:
            return [0]
        a_max, ranks = self._slots.a_max, len(self._options.fitting(self._slots.s_max))
        chosen = number % (ranks + 1) if ranks > 1 else 0
        if chosen == ranks:
            return [1 + at % ranks * a_max + at // ranks for at in range(point.adapters)]
        return [1 + chosen * a_max + at for at in range(point.adapters)]


def _rows(records: Path, windows: Sequence[Window], last_s: float) -> list[dict[str, Any]]:
    """Return the rows of all windows.

    The last record gives the offset of the engine's clock from the client's: it is the step before the
    streams were cancelled at the end of the last window, or that of a first token.
    """
    import pandas as pd

    table = recorded_rows(pd.read_parquet(records), _PAUSE_S)
    offset_ms = float(table["begin_ms"].iloc[-1]) - 1e3 * last_s
    found: list[dict[str, Any]] = []
    for window in windows:
        start, end = (1e3 * at + offset_ms for at in (window.start_s, window.end_s))
        own = table[(table["begin_ms"] >= start) & (table["begin_ms"] < end)]
        load = {"streams": window.streams, "rate_rps": window.rate_rps}
        probe = {"probe_ms": float(own["probe_ms"].mean())}  # of the window, since a part of it has few
        found += [{"run": window.name, **load, **row, **probe} for row in grouped(own)]
    return found


def recorded_rows(records: Any, pause_s: float) -> Any:
    """Return rows of a step table from a server's records, a row per step.

    The step time is the interval between the starts of two steps, so it includes waiting for other threads.
    Steps before a pause, and steps after which nothing runs, are left out.
    """
    import pandas as pd

    records = records.astype(np.float64)
    begin_ms = records["begin_ns"] * 1e-6
    decodes, prefills = records["decode_requests"], records["prefill_requests"]
    mean_rank = records["rank_sum"] / (decodes + prefills).clip(lower=1.0)
    lora = (mean_rank > 0.0).astype(float)
    step_ms = np.append(np.diff(begin_ms), np.inf)
    rows = pd.DataFrame(
        {
            "begin_ms": begin_ms,
            "step_ms": step_ms,
            **{name: records[name] for name in COUNTS},
            "load_ms": 0.0,
            "decodes": decodes,
            "prefills": prefills,
            "lora_decodes": decodes * lora,
            "lora_prefills": prefills * lora,
            "lora_prefill_tokens": records["prefill_tokens"] * lora,
            "max_rank": records["max_rank"],
            "decode_rank_sum": decodes * mean_rank,
            "prefill_rank_sum": prefills * mean_rank,
            "prefill_rank_tokens": records["prefill_tokens"] * mean_rank,
            "prefill_mpairs": records["prefill_pairs"] * 1e-6,
            **{name: records[name] for name in PHASES},
            "probe_ms": records["probe_ms"].replace(0.0, np.nan),
        }
    )
    goes_on = records["requests"] + records["waiting"] > records["finished"]
    keep = goes_on & (step_ms < pause_s * 1e3) & (records["loads"] == 0)
    return rows[keep].reset_index(drop=True)


def grouped(steps: Any) -> list[dict[str, float]]:
    """Return mean rows of similar steps: without prompts, and grouped by prompt tokens."""
    prompts = steps["prefills"] > 0
    parts = [steps[~prompts]]
    with_prompts = steps[prompts].sort_values("tokens")
    if len(with_prompts):
        edges = np.linspace(0, len(with_prompts), _GROUPS + 1).astype(int).tolist()
        parts += [with_prompts.iloc[low:high] for low, high in itertools.pairwise(edges)]
    columns = [name for name in steps.columns if name != "begin_ms"]
    return [
        {**{name: float(part[name].mean()) for name in columns}, "seen": float(len(part))}
        for part in parts
        if len(part) >= _LEAST_STEPS
    ]


_LOAD_ROUNDS: Final = 12
_FIXED: Final = ("threads", "engine", "ranks")
"""Options that must stay the same when a measurement is resumed."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class EngineProfilingResult:
    """Progress of a measurement."""

    rows: dict[str, int]
    """Rows of each table."""
    step_error: float
    """SMAPE on left-out points of the bare engine's steps, worst setting, in percent; NaN if unknown."""
    is_complete: bool
    """Whether nothing is left to measure, or all errors are within the tolerance."""
    failed: tuple[str, ...] = ()
    """Points of the server whose requests failed, with the reason."""


class _EngineProfiler:
    """One resumable measurement."""

    def __init__(self, out: str | Path, options: EngineProfilingOptions, on_progress: OnProgress) -> None:
        self.out, self.options, self.report = MeasurementFolder(out), options, on_progress
        self.base = base_profile(options)
        self._settings = [SlotSetting(a_max, s_max) for s_max in options.s_max for a_max in options.a_max]
        self._until_s = time.monotonic() + options.budget_s
        self._errors: list[float] = []
        self._failed: list[str] = []
        self._note()

    def run(self) -> EngineProfilingResult:
        work = {
            stages.MEMORY: self._memory,
            stages.LOADS: self._loads,
            stages.STEPS: self._steps,
            stages.ITERATIONS: self._iterations,
            stages.SERVED: self._served,
        }
        complete = [measure() for stage, measure in work.items() if stage in self.options.stages]
        names = (files.MEMORY, files.LOADING, files.STEPS, files.SERVED, files.ITERATIONS, files.RUNS)
        rows = {name: len(table) for name in names if (table := self.out.table(name)) is not None}
        worst = max(self._errors, default=float("nan"))
        return EngineProfilingResult(rows, worst, all(complete), tuple(self._failed))

    def _end_s(self, stage: str) -> float:
        """Return the end of a stage that starts now."""
        now_s = time.monotonic()
        return now_s + (self._until_s - now_s) * self.options.share(stage)

    def _each(self, stage: str, items: Sequence[Item]) -> Iterator[Item]:
        """Yield items and report the progress."""
        for done, item in enumerate(items):
            self.report(stage, done, len(items))
            yield item
        self.report(stage, len(items), len(items))

    def _timed_settings(self, stage: str) -> Iterator[tuple[SlotSetting, float]]:
        """Yield the slot settings with their shares of a stage's remaining time."""
        end_s = self._end_s(stage)
        for at, slots in enumerate(self._settings):
            yield slots, (end_s - time.monotonic()) / (len(self._settings) - at)

    def _memory(self) -> bool:
        ends = (1,) if self.options.on_gpu else (1, 2 * max(self.options.a_max))
        more = [SlotSetting(a_max, s_max) for s_max in self.options.s_max for a_max in ends]
        for slots in self._each("KV memory", list(dict.fromkeys([*self._settings, *more]))):
            if not self.out.has(files.MEMORY, slots.name):
                self.out.add(files.MEMORY, slots.name, [memory_row(self.options, self.base, slots)])
        return True

    def _loads(self) -> bool:
        for s_max in self._each("adapter loads", self.options.s_max):
            if not self.out.has(files.LOADING, f"s{s_max}"):
                self.out.add(files.LOADING, f"s{s_max}", loading_rows(self.options, s_max, _LOAD_ROUNDS))
        return True

    def _kv_blocks(self, name: str) -> int:
        """Return the KV blocks of a setting from the memory table."""
        rows = self.out.rows(files.MEMORY, name)
        if not rows:
            raise InputError(f"must be among the stages: {stages.STEPS} needs it", stages.MEMORY, "stages")
        return int(rows[0]["kv_tokens"]) // self.base.engine.block_size

    def _steps(self) -> bool:
        complete = True
        for slots, share_s in self._timed_settings(stages.STEPS):
            kv_blocks, known = self._kv_blocks(slots.name), self.out.rows(files.STEPS, slots.name)
            for found in measure_steps(self.options, slots, kv_blocks, known, share_s):
                self.report(f"steps, {slots.a_max} slots of rank {slots.s_max}", found.done, found.total)
                self.out.add(files.STEPS, slots.name, found.rows, replace=False)
            self._errors.append(found.error)
            complete = complete and found.converged
        return complete

    def _iterations(self) -> bool:
        known = self.out.measured(files.ITERATIONS, "iterations", "case")
        end_s = self._end_s(stages.ITERATIONS)
        done = total = 0
        for done, total, rows in iteration_rows(self.options, known, end_s):
            self.report("whole iterations", done, total)
            self.out.add(files.ITERATIONS, "iterations", rows, replace=False)
        return done == total

    def _served(self) -> bool:
        complete = True
        for slots, share_s in self._timed_settings(stages.SERVED):
            if self.out.has(files.SERVED, slots.name):
                continue
            if share_s < self.options.point_s:
                complete = False
                continue
            stage = f"served steps, {slots.a_max} slots of rank {slots.s_max}"
            kv_blocks = self._kv_blocks(slots.name)
            found = serve_and_measure(
                self.options, slots, kv_blocks, share_s, self.out.path, partial(self.report, stage)
            )
            fixed = {**slots._asdict(), "adapters_served": len(self.options.adapters(slots))}
            steps = [{**fixed, **row, "run": f"{slots.name}-{row['run']}"} for row in found.steps]
            self.out.add(files.RUNS, slots.name, [self._idle_run(slots, row) for row in found.idle])
            self.out.add(files.SERVED, slots.name, steps)
            self._failed += [f"{slots.name}, {each}" for each in found.failed]
            complete = complete and bool(steps)
        return complete

    def _idle_run(self, slots: SlotSetting, row: dict[str, float]) -> dict[str, Any]:
        settings = {
            **slots._asdict(),
            "adapters": 1,
            "ranks": self.options.fitting(slots.s_max)[0],
            **self.options.limits,
        }
        return idle_run(slots.name, settings, row)

    def _note(self) -> None:
        """Write base profile and provenance; refuse a folder of another engine or other options."""
        file = self.out.path / files.BASE
        if file.exists():
            known = Profile.model_validate(json.loads(read_text(file)))
            if (known.name, known.engine, known.model) != (self.base.name, self.base.engine, self.base.model):
                rule = f"must be {known.name} with the same engine, which this folder is of"
                raise InputError(rule, self.base.name, str(file))
            self.base = known
        else:
            write_text_atomic(file, json.dumps(self.base.model_dump(mode="json"), indent=2) + "\n")
        options = {**vars(self.options), "engine": self.options.limits}
        for facts in self.out.notes().values():
            if isinstance(facts.get("options"), dict):
                require_same(facts["options"], options, _FIXED, str(self.out.path))
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.out.note(now, {"options": options, "machine": describe(self.options.device)})


def profile_engine(
    out: str | Path, options: EngineProfilingOptions, on_progress: OnProgress = lambda *_: None
) -> EngineProfilingResult:
    """Measure an engine into a folder of tables that calibration reads.

    Parameters
    ----------
    out
        The folder; its rows are not measured again.
    on_progress
        Called with a stage, the number of its parts that are done, and their total.

    Raises
    ------
    InputError
        For invalid settings, or a folder of another engine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        return _EngineProfiler(out, options, on_progress).run()
    finally:
        torch.set_num_threads(threads)
