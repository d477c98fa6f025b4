"""Step times of the engine alone: operating points in order of information, and whole iterations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from capplan.engine import Engine
from capplan.engine.models import model_config
from capplan.engine.settings import EngineOptions
from capplan.models.calibration.least_squares import LinearProblem, cross_validate
from capplan.profiling.engine.memory import BLOCK_TOKENS
from capplan.profiling.engine.options import EngineProfilingOptions, SlotSetting
from capplan.profiling.engine.stepping import EngineBounds, EnginePoint, Stepper, candidates, most_informative
from capplan.profiling.kernels.cases import PAPER_BATCHES, PAPER_RANKS, Case, timing_row

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
    fields["max_in_flight"] = 8 * options.max_num_seqs
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
    """Return step times as a linear problem."""
    design = np.array([[1.0, *(float(row[name]) for name in _COLUMNS)] for row in rows])
    times = np.array([float(row["step_ms"]) for row in rows])
    return LinearProblem(("base", *_COLUMNS), design, times)


class IterationCase(Case):
    """Batch of a whole iteration, a request per adapter."""

    @property
    def configuration(self) -> str:
        """Key that cross-validation keeps in one fold."""
        return self.mix

    @property
    def name(self) -> str:
        """Unique name."""
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
    most = min(options.max_num_seqs, options.max_num_batched_tokens // _PROMPT)
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
    fields["num_kv_blocks"] = widest * 4 + -(-options.max_model_len // BLOCK_TOKENS)
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
