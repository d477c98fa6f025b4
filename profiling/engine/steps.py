"""Step times of the engine alone: operating points in order of information, and whole iterations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capplan.engine import Engine
from capplan.engine.models import model_config
from capplan.engine.settings import EngineOptions
from capplan.models.calibration.least_squares import LinearProblem, cross_validate
from capplan.profiling.engine.memory import BLOCK_TOKENS
from capplan.profiling.engine.options import EngineProfilingOptions
from capplan.profiling.engine.stepping import (
    GROWTH,
    EngineBounds,
    EnginePoint,
    Row,
    Stepper,
    candidates,
    most_telling,
)

_LEAST_STATES: Final = 20
_FOLDS: Final = 5
_COLUMNS: Final = (
    "tokens",
    "kv_tokens",
    "adapters",
    "requests",
    "decode_rank_sum",
    "prefill_rank_tokens",
    "waiting",
)
HALF: Final = "iteration"
RANKS: Final = (8, 16, 32, 64)
_PAPER: Final = (4, 8, 12, 16, 20, 24, 28, 32)
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
    settled: bool


def measure_steps(
    options: EngineProfilingOptions, a_max: int, s_max: int, kv_blocks: int, known: Any, budget_s: float
) -> Iterator[StepProgress]:
    """Measure operating points of an engine, most informative first, within `budget_s` seconds."""
    until_s = time.monotonic() + budget_s
    ranks = options.adapters(a_max, s_max)
    bounds = EngineBounds(
        a_max=a_max,
        ranks=tuple(sorted(set(ranks.values()))),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        kv_tokens=kv_blocks * BLOCK_TOKENS,
        growth=GROWTH,
    )
    every = candidates(bounds, options.seed)
    rows: list[dict[str, Any]] = [] if known is None else known.to_dict("records")
    measured = {str(row["run"]).partition("/")[2] for row in rows}
    left = [point for point in every if point.name not in measured]
    seen = [_seen(point, rows) for point in every if point.name in measured]
    mean_rank = float(np.mean(bounds.ranks)) if bounds.ranks else 0.0
    found = StepProgress(len(seen), len(every), [], *_verdict(rows, len(seen), left, options.tolerance))
    yield found
    if found.settled or budget_s <= 0.0:
        return
    fields = options.engine_fields(max_loras=a_max, max_lora_rank=s_max, num_kv_blocks=kv_blocks)
    fields["max_in_flight"] = 8 * options.max_num_seqs
    fixed = {"a_max": a_max, "s_max": s_max, "adapters_served": max(1, len(ranks))}
    with Engine(options.model, ranks, virtual_time=True, **fields) as engine:
        stepper = Stepper(engine, ranks, options.seed)
        while left and time.monotonic() < until_s and not found.settled:
            point = left.pop(most_telling(left, seen, mean_rank))
            run = f"a{a_max}-s{s_max}/{point.name}"
            new = [{"run": run, **fixed, **row} for row in stepper.measure(point)]
            rows += new
            seen.append(_seen(point, new))
            verdict = _verdict(rows, len(seen), left, options.tolerance)
            found = StepProgress(len(seen), len(every), new, *verdict)
            yield found


def _seen(point: EnginePoint, rows: list[dict[str, Any]]) -> tuple[EnginePoint, float, float]:
    """Return a point with its decode and mixed step times in milliseconds."""
    own = [row for row in rows if str(row["run"]).endswith("/" + point.name)]
    decode = [row["step_ms"] for row in own if row["prefills"] == 0.0]
    mixed = [row["step_ms"] for row in own if row["prefills"] > 0.0 and row["decodes"] > 0.0]
    known = decode or mixed or [row["step_ms"] for row in own]
    return point, float(np.mean(known)), float(np.mean(mixed or known))


def _verdict(
    rows: list[dict[str, Any]], states: int, left: list[EnginePoint], tolerance: float
) -> tuple[float, bool]:
    """Return the error on left-out points, and whether measuring has converged."""
    if states < _LEAST_STATES:
        return float("nan"), not left
    error = cross_validate(_problem(rows), [str(row["run"]) for row in rows], _FOLDS)
    return error, error <= 100.0 * tolerance or not left


def _problem(rows: list[Row]) -> LinearProblem:
    """Return step times as a linear problem."""
    columns: list[NDArray[np.float64]] = [np.ones(len(rows))]
    columns += [np.array([float(row[name]) for row in rows]) for name in _COLUMNS]
    times = np.array([float(row["step_ms"]) for row in rows])
    return LinearProblem(("base", *_COLUMNS), np.column_stack(columns), times)


@dataclass(frozen=True)
class IterationBatch:
    """Adapter ranks of a batch, one request each."""

    grid: str
    configuration: str
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.grid}-{self.configuration}"


def batches(most: int, seed: int) -> list[IterationBatch]:
    """Return the batches of uniform and of random ranks, in a random order."""
    rng = np.random.default_rng(seed)
    found = []
    for grid, sizes in (("paper", _PAPER), ("wide", _WIDER)):
        for size in (size for size in sizes if size <= most):
            found += [IterationBatch(grid, f"{size}x{rank}", (rank,) * size) for rank in RANKS]
            for at, top in enumerate(RANKS[1:]):
                drawn = rng.choice([rank for rank in RANKS if rank <= top], size).tolist()
                found.append(IterationBatch(grid, f"{size}-mixed{at}", tuple(drawn)))
    order = rng.permutation(len(found)).tolist()
    return [found[at] for at in order]


def iteration_rows(
    options: EngineProfilingOptions, known: set[str], left_s: Callable[[], float]
) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """Measure batches until `left_s()` is 0; yield the number done, the total, and rows."""
    every = batches(min(options.max_num_seqs, options.max_num_batched_tokens // _PROMPT), options.seed)
    todo = [batch for batch in every if batch.name not in known]
    if not todo:
        return
    yield 0, len(todo), []
    if left_s() <= 0.0:
        return
    widest = max(len(batch.ranks) for batch in every)
    ranks = {f"r{rank}-{at}": rank for rank in RANKS for at in range(widest)}
    fields: dict[str, Any] = options.engine_fields(
        max_loras=widest, max_lora_rank=max(RANKS), max_num_seqs=widest
    )
    fields["num_kv_blocks"] = widest * 4 + -(-options.max_model_len // 16)
    with Engine(options.model, ranks, virtual_time=True, **fields) as engine:
        stepper = Stepper(engine, ranks, options.seed)
        kernel = _kernel(options)
        for done, batch in enumerate(todo, start=1):
            if left_s() <= 0.0:
                return
            names = [f"r{rank}-{at}" for at, rank in enumerate(batch.ranks)]
            prefill_ms, decode_ms = stepper.iteration_ms(names, _PROMPT, _DECODES, _REPEATS)
            yield (
                done,
                len(todo),
                [
                    _row(kernel, batch, "decode", 1, decode_ms),
                    _row(kernel, batch, "prefill", _PROMPT, prefill_ms),
                ],
            )


def _kernel(options: EngineProfilingOptions) -> str:
    """Return the engine's LoRA kernel."""
    engine = EngineOptions.parse(options.engine_fields())
    return engine.chosen_lora_kernel(engine.torch_dtype(model_config(options.model)))


def _row(kernel: str, batch: IterationBatch, phase: str, tokens: int, milliseconds: float) -> dict[str, Any]:
    size, rank_sum = len(batch.ranks), sum(batch.ranks)
    return {
        "kernel": kernel,
        "half": HALF,
        "width": 0,
        "case": batch.name,
        "configuration": batch.configuration,
        "grid": batch.grid,
        "phase": phase,
        "requests": size,
        "tokens": size * tokens,
        "adapters": size,
        "max_rank": max(batch.ranks),
        "rank_sum": rank_sum,
        "adapter_rank_sum": rank_sum,
        "rank_tokens": rank_sum * tokens,
        "median_us": milliseconds * 1e3,
        "relative_error": float("nan"),
        "visits": _REPEATS,
        "disturbed": 0,
        "visits_us": [milliseconds * 1e3],
    }
