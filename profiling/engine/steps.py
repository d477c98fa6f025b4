"""Steps of the engine alone, state by state, until they are known well enough or the time is up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capplan.engine import Engine
from capplan.models.calibration.least_squares import LinearProblem, cross_validate
from capplan.profiling.engine.memory import BLOCK_TOKENS
from capplan.profiling.engine.options import Options
from capplan.profiling.engine.points import Bounds, Point, candidates, most_telling
from capplan.profiling.engine.rows import Row
from capplan.profiling.engine.stepping import GROWTH, Stepper

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


@dataclass(frozen=True)
class Found:
    """How far the measuring of one setting has got.

    Attributes
    ----------
    rows
        Of the last state, for the step table.
    error
        SMAPE on left-out states, in percent; NaN while there are too few.
    settled
        Whether that is small enough, or no state is left.
    """

    done: int
    total: int
    rows: list[dict[str, Any]]
    error: float
    settled: bool


def measure_steps(
    options: Options, a_max: int, s_max: int, kv_blocks: int, known: Any, budget_s: float
) -> Iterator[Found]:
    """Measure states of an engine with so many slots of this rank.

    Parameters
    ----------
    options
        The engine, and the error at which to stop.
    a_max, s_max, kv_blocks
        Slots, their rank, and the KV blocks beside them.
    known
        Rows of the step table that there are already for this setting; None: none.
    budget_s
        Time for it.
    """
    until_s = time.monotonic() + budget_s
    ranks = options.adapters(a_max, s_max)
    bounds = Bounds(
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
    found = Found(len(seen), len(every), [], *_verdict(rows, len(seen), left, options.tolerance))
    yield found
    if found.settled or budget_s <= 0.0:
        return
    fields = options.engine_fields(a_max=a_max, s_max=s_max, num_kv_blocks=kv_blocks)
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
            found = Found(len(seen), len(every), new, *verdict)
            yield found


def _seen(point: Point, rows: list[dict[str, Any]]) -> tuple[Point, float, float]:
    """Return a state with the times of its decode step and of the one with a prompt."""
    own = [row for row in rows if str(row["run"]).endswith("/" + point.name)]
    decode = [row["step_ms"] for row in own if row["prefills"] == 0.0]
    mixed = [row["step_ms"] for row in own if row["prefills"] > 0.0 and row["decodes"] > 0.0]
    known = decode or mixed or [row["step_ms"] for row in own]
    return point, float(np.mean(known)), float(np.mean(mixed or known))


def _verdict(
    rows: list[dict[str, Any]], states: int, left: list[Point], tolerance: float
) -> tuple[float, bool]:
    """Return the error on left-out states, and whether it will do."""
    if states < _LEAST_STATES:
        return float("nan"), not left
    error = cross_validate(_problem(rows), [str(row["run"]) for row in rows], _FOLDS)
    return error, error <= 100.0 * tolerance or not left


def _problem(rows: list[Row]) -> LinearProblem:
    """Return a step's time as a sum of what it holds."""
    columns: list[NDArray[np.float64]] = [np.ones(len(rows))]
    columns += [np.array([float(row[name]) for row in rows]) for name in _COLUMNS]
    times = np.array([float(row["step_ms"]) for row in rows])
    return LinearProblem(("base", *_COLUMNS), np.column_stack(columns), times)
