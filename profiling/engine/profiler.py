"""Measures the reference engine into a folder, as far as the time allows; called again, it goes on."""

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
from capplan.profiling.tables import BASE, ITERATIONS, SERVED, STEPS, MeasurementFolder
from capplan.spec import Profile, read_text, write_text_atomic

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and how much there is."""
_LOAD_ROUNDS: Final = 12
_IDLE_RATE_RPS: Final = 0.01
_IDLE_RUN_S: Final = 20_000.0
_FIXED: Final = ("threads", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "ranks")
"""Options that must not change when a measuring goes on: rows would not go together."""


@dataclass(frozen=True)
class EngineProfilingResult:
    """How far a measuring got.

    Attributes
    ----------
    rows
        Rows of each table.
    step_error
        SMAPE on left-out states of the engine's own steps, of the worst setting, in percent; NaN: not known.
    is_complete
        Whether nothing is left to measure, or all of it is known well enough.
    failed
        States of the server whose requests failed, with the reason.
    """

    rows: dict[str, int]
    step_error: float
    is_complete: bool
    failed: tuple[str, ...] = ()


class EngineProfiler:
    """One measuring."""

    def __init__(self, out: str | Path, options: EngineProfilingOptions, on_progress: OnProgress) -> None:
        self.out, self.options, self.tell = MeasurementFolder(out), options, on_progress
        self.base = base_profile(options)
        self._until_s = time.monotonic() + options.budget_s
        self._errors: list[float] = []
        self._failed: list[str] = []
        self._complete: dict[str, bool] = {}
        self._note()

    def run(self) -> EngineProfilingResult:
        """Measure all stages that were asked for."""
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
        """Return how far it got."""
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
            self.tell("KV memory", done, len(pairs))
            if not self.out.has(files.MEMORY, name):
                self.out.add(files.MEMORY, name, [memory_row(self.options, self.base, a_max, s_max)])
        self.tell("KV memory", len(pairs), len(pairs))
        return True

    def _loads(self) -> bool:
        sizes = self.options.s_max
        for done, s_max in enumerate(sizes):
            self.tell("adapter loads", done, len(sizes))
            name = f"s{s_max}"
            if not self.out.has(files.LOADING, name):
                self.out.add(files.LOADING, name, loading_rows(self.options, s_max, _LOAD_ROUNDS))
        self.tell("adapter loads", len(sizes), len(sizes))
        return True

    def _kv_blocks(self, name: str) -> int:
        """Return the blocks of a setting, by the table of memory."""
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
                self.tell(f"steps, {a_max} slots of rank {s_max}", found.done, found.total)
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
            self.tell("whole iterations", done, total)
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
                lambda done, total, shown=(a_max, s_max): self.tell(  # type: ignore[misc]
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
        """Return what an idle server answers as a run that hardly loads it: tells what a request costs."""
        return {
            "run": f"a{a_max}-s{s_max}-idle-p{row['prompt_tokens']:g}",
            "a_max": a_max,
            "s_max": s_max,
            "adapters": 1,
            "ranks": self.options.fitting(s_max)[0],
            "rates_rps": _IDLE_RATE_RPS,
            "prompt_mean": row["prompt_tokens"],
            "prompt_std": 0,
            "output_mean": 2,
            "output_std": 0,
            "max_num_seqs": self.options.max_num_seqs,
            "max_num_batched_tokens": self.options.max_num_batched_tokens,
            "max_model_len": self.options.max_model_len,
            "gpu_memory_utilization": self.options.gpu_memory_utilization,
            "duration_s": _IDLE_RUN_S,
            "ttft_s_p50": row["ttft_ms_p50"] / 1e3,
        }

    def _note(self) -> None:
        """Write what is measured, once; refuse a folder of something else."""
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
        """Refuse options with which the rows that are there do not go together."""
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
        The folder; what it holds already is not measured again.
    options
        The engine and the time.
    on_progress
        Called with a stage, how much of it is done, and how much there is.

    Raises
    ------
    InputError
        For settings that the engine refuses, or a folder of another engine.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        return EngineProfiler(out, options, on_progress).run()
    finally:
        torch.set_num_threads(threads)
