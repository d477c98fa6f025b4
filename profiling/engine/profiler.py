"""Resumable measurement of the reference engine into a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from capplan.errors import InputError
from capplan.profiling import tables as files
from capplan.profiling.engine import options as stages
from capplan.profiling.engine.memory import base_profile, loading_rows, memory_row
from capplan.profiling.engine.options import LIMITS, EngineProfilingOptions, SlotSetting
from capplan.profiling.engine.served import serve_and_measure
from capplan.profiling.engine.steps import iteration_rows, measure_steps
from capplan.profiling.machine import describe
from capplan.profiling.tables import MeasurementFolder, OnProgress, idle_run, require_same
from capplan.spec import Profile, read_text, write_text_atomic

_LOAD_ROUNDS: Final = 12
_FIXED: Final = ("threads", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "ranks")
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
            **{name: getattr(self.options, name) for name in LIMITS},
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
        options = asdict(self.options)
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
