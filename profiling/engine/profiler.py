"""Resumable measurement of the reference engine into a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from capplan.errors import InputError
from capplan.profiling import tables as files
from capplan.profiling.engine import options as stages
from capplan.profiling.engine.memory import base_profile, loading_rows, memory_row
from capplan.profiling.engine.options import EngineProfilingOptions
from capplan.profiling.engine.steps import iteration_rows, measure_steps
from capplan.profiling.machine import describe
from capplan.profiling.tables import BASE, ITERATIONS, SERVED, STEPS, MeasurementFolder, idle_run
from capplan.spec import Profile, read_text, write_text_atomic

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with a stage, the number of its parts that are done, and their total."""
_LOAD_ROUNDS: Final = 12
_FIXED: Final = ("threads", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "ranks")
"""Options that must stay the same when a measurement is resumed."""


@dataclass(frozen=True)
class EngineProfilingResult:
    """Progress of a measurement.

    Attributes
    ----------
    rows
        Rows of each table.
    step_error
        SMAPE on left-out points of the bare engine's steps, worst setting, in percent; NaN if unknown.
    is_complete
        Whether nothing is left to measure, or all errors are within the tolerance.
    failed
        Points of the server whose requests failed, with the reason.
    """

    rows: dict[str, int]
    step_error: float
    is_complete: bool
    failed: tuple[str, ...] = ()


class EngineProfiler:
    """One resumable measurement."""

    def __init__(self, out: str | Path, options: EngineProfilingOptions, on_progress: OnProgress) -> None:
        self.out, self.options, self.report = MeasurementFolder(out), options, on_progress
        self.base = base_profile(options)
        self._until_s = time.monotonic() + options.budget_s
        self._errors: list[float] = []
        self._failed: list[str] = []
        self._complete: dict[str, bool] = {}
        self._note()

    def run(self) -> EngineProfilingResult:
        """Measure all requested stages."""
        work = {
            stages.MEMORY: self._memory,
            stages.LOADS: self._loads,
            stages.STEPS: self._steps,
            stages.ITERATIONS: self._iterations,
            stages.SERVED: self._served,
        }
        for stage in stages.STAGES:
            if stage in self.options.stages:
                self._complete[stage] = work[stage]()
        return self.outcome()

    def outcome(self) -> EngineProfilingResult:
        """Return the progress."""
        tables = (files.MEMORY, files.LOADING, STEPS, SERVED, ITERATIONS, files.RUNS)
        rows = {name: len(table) for name in tables if (table := self.out.table(name)) is not None}
        worst = max(self._errors, default=float("nan"))
        return EngineProfilingResult(rows, worst, all(self._complete.values()), tuple(self._failed))

    def _left_s(self, stage: str) -> float:
        return (self._until_s - time.monotonic()) * self.options.share(stage)

    def _settings(self) -> Iterator[tuple[int, int, str]]:
        for s_max in self.options.s_max:
            for a_max in self.options.a_max:
                yield a_max, s_max, f"a{a_max}-s{s_max}"

    def _memory(self) -> bool:
        pairs = list(self._settings())
        ends = (1,) if self.options.on_gpu else (1, 2 * max(self.options.a_max))
        more = [(a_max, s_max) for s_max in self.options.s_max for a_max in ends]
        pairs += [(*pair, "a{}-s{}".format(*pair)) for pair in more if pair not in [p[:2] for p in pairs]]
        for done, (a_max, s_max, name) in enumerate(pairs):
            self.report("KV memory", done, len(pairs))
            if not self.out.has(files.MEMORY, name):
                self.out.add(files.MEMORY, name, [memory_row(self.options, self.base, a_max, s_max)])
        self.report("KV memory", len(pairs), len(pairs))
        return True

    def _loads(self) -> bool:
        sizes = self.options.s_max
        for done, s_max in enumerate(sizes):
            self.report("adapter loads", done, len(sizes))
            name = f"s{s_max}"
            if not self.out.has(files.LOADING, name):
                self.out.add(files.LOADING, name, loading_rows(self.options, s_max, _LOAD_ROUNDS))
        self.report("adapter loads", len(sizes), len(sizes))
        return True

    def _kv_blocks(self, name: str) -> int:
        """Return the KV blocks of a setting from the memory table."""
        table = self.out.table(files.MEMORY)
        if table is None or not (table["setting"] == name).any():
            raise InputError(f"must be among the stages: {stages.STEPS} needs it", stages.MEMORY, "stages")
        return int(table.loc[table["setting"] == name, "kv_tokens"].iloc[0]) // self.base.engine.block_size

    def _steps(self) -> bool:
        pairs, complete = list(self._settings()), True
        until_s = time.monotonic() + self._left_s(stages.STEPS)
        for at, (a_max, s_max, name) in enumerate(pairs):
            share_s = (until_s - time.monotonic()) / (len(pairs) - at)
            known = self.out.table(STEPS)
            own = None if known is None else known[known["setting"] == name]
            for found in measure_steps(self.options, a_max, s_max, self._kv_blocks(name), own, share_s):
                self.report(f"steps, {a_max} slots of rank {s_max}", found.done, found.total)
                if found.rows:
                    self.out.add(STEPS, name, found.rows, replace=False)
                error, settled = found.error, found.settled
            self._errors.append(error)
            complete = complete and settled
        return complete

    def _iterations(self) -> bool:
        known = self.out.measured(ITERATIONS, "iterations", "case")
        until_s = time.monotonic() + self._left_s(stages.ITERATIONS)
        done = total = 0
        for done, total, rows in iteration_rows(self.options, known, lambda: until_s - time.monotonic()):
            self.report("whole iterations", done, total)
            self.out.add(ITERATIONS, "iterations", rows, replace=False)
        return done == total

    def _served(self) -> bool:
        from capplan.profiling.engine.served import serve_and_measure

        pairs = list(self._settings())
        until_s, complete = time.monotonic() + self._left_s(stages.SERVED), True
        for at, (a_max, s_max, name) in enumerate(pairs):
            if self.out.has(SERVED, name):
                continue
            share_s = (until_s - time.monotonic()) / (len(pairs) - at)
            if share_s < self.options.point_s:
                complete = False
                continue
            found = serve_and_measure(
                self.options,
                a_max,
                s_max,
                self._kv_blocks(name),
                share_s,
                self.out.path,
                lambda done, total, shown=(a_max, s_max): self.report(  # type: ignore[misc]
                    f"served steps, {shown[0]} slots of rank {shown[1]}", done, total
                ),
            )
            fixed = self._fixed(a_max, s_max)
            steps = [{**fixed, **row, "run": f"{name}-{row['run']}"} for row in found.steps]
            self.out.add(files.RUNS, name, [self._idle_run(a_max, s_max, row) for row in found.idle])
            self.out.add(SERVED, name, steps)
            self._failed += [f"{name}, {each}" for each in found.failed]
            complete = complete and bool(steps)
        return complete

    def _fixed(self, a_max: int, s_max: int) -> dict[str, Any]:
        adapters = len(self.options.adapters(a_max, s_max))
        return {"a_max": a_max, "s_max": s_max, "adapters_served": adapters}

    def _idle_run(self, a_max: int, s_max: int, row: dict[str, float]) -> dict[str, Any]:
        """Return first tokens of an idle server as a run of minimal load."""
        return {
            "run": f"a{a_max}-s{s_max}-idle-p{row['prompt_tokens']:g}",
            "a_max": a_max,
            "s_max": s_max,
            "adapters": 1,
            "ranks": self.options.fitting(s_max)[0],
            "max_num_seqs": self.options.max_num_seqs,
            "max_num_batched_tokens": self.options.max_num_batched_tokens,
            "max_model_len": self.options.max_model_len,
            "gpu_memory_utilization": self.options.gpu_memory_utilization,
            **idle_run(row["prompt_tokens"], row["ttft_ms_p50"]),
        }

    def _note(self) -> None:
        """Write base profile and provenance; refuse a folder of another engine."""
        file = self.out.path / BASE
        if file.exists():
            known = Profile.model_validate(json.loads(read_text(file)))
            if (known.name, known.engine, known.model) != (self.base.name, self.base.engine, self.base.model):
                rule = f"must be {known.name} with the same engine, which this folder is of"
                raise InputError(rule, self.base.name, str(file))
            self.base = known
        else:
            write_text_atomic(file, json.dumps(self.base.model_dump(mode="json"), indent=2) + "\n")
        self._require_same()
        facts = {"options": asdict(self.options), "machine": describe(self.options.device)}
        self.out.note(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), facts)

    def _require_same(self) -> None:
        """Refuse options that differ from those of the existing rows."""
        for at, facts in self.out.notes().items():
            known = facts.get("options")
            for name in _FIXED if isinstance(known, dict) else ():
                there, here = known.get(name), getattr(self.options, name)
                if there is not None and there != (list(here) if isinstance(here, tuple) else here):
                    rule = f"must be {there}, as of {at}, to go on with what is there; choose another folder"
                    raise InputError(rule, here, f"{self.out.path}: {name}")


def profile_engine(
    out: str | Path, options: EngineProfilingOptions, on_progress: OnProgress = lambda *_: None
) -> EngineProfilingResult:
    """Measure an engine into a folder of tables that calibration reads.

    Parameters
    ----------
    out
        The folder; its rows are not measured again.
    options
        Engine, settings and time.
    on_progress
        Called with a stage, the number of its parts that are done, and their total.

    Raises
    ------
    InputError
        For invalid settings, or a folder of another engine.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        return EngineProfiler(out, options, on_progress).run()
    finally:
        torch.set_num_threads(threads)
