"""Whole iterations on the grid of Toppings (section 5: batch 4 to 32, ranks 8 to 64), and on a wider one.

The table has the columns of a table of kernel timings, so that the very fits of kernels are made of it: one
row per batch, with the times of a decode step and of the prefill of one prompt per request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from capplan.engine import Engine
from capplan.engine.settings import EngineSettings
from capplan.profiling.engine.memory import config_of
from capplan.profiling.engine.options import Options
from capplan.profiling.engine.stepping import Stepper

HALF: Final = "iteration"
RANKS: Final = (8, 16, 32, 64)
_PAPER: Final = (4, 8, 12, 16, 20, 24, 28, 32)
_WIDER: Final = (1, 2, 48, 64)
_PROMPT: Final = 16
_DECODES: Final = 5
_REPEATS: Final = 3


@dataclass(frozen=True)
class Batch:
    """Ranks of the adapters of a batch, one request each."""

    grid: str
    configuration: str
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """What it is called in the table."""
        return f"{self.grid}-{self.configuration}"


def batches(most: int, seed: int) -> list[Batch]:
    """Return the batches, of one rank each or of ranks drawn from all.

    Parameters
    ----------
    most
        Requests that the engine runs at once.
    seed
        Of the drawn ranks.
    """
    rng = np.random.default_rng(seed)
    found = []
    for grid, sizes in (("paper", _PAPER), ("wide", _WIDER)):
        for size in (size for size in sizes if size <= most):
            found += [Batch(grid, f"{size}x{rank}", (rank,) * size) for rank in RANKS]
            for at, top in enumerate(RANKS[1:]):
                drawn = rng.choice([rank for rank in RANKS if rank <= top], size).tolist()
                found.append(Batch(grid, f"{size}-mixed{at}", tuple(drawn)))
    order = rng.permutation(len(found)).tolist()
    return [found[at] for at in order]


def iteration_rows(
    options: Options, known: set[str], left_s: Callable[[], float]
) -> Iterator[tuple[int, int, list[dict[str, Any]]]]:
    """Measure batches until the time is up; yield how many are done, how many there are, and the rows.

    Parameters
    ----------
    options
        The engine.
    known
        Names of batches that were measured before.
    left_s
        Tells how many seconds are left.
    """
    every = batches(min(options.max_num_seqs, options.max_num_batched_tokens // _PROMPT), options.seed)
    todo = [batch for batch in every if batch.name not in known]
    if not todo:
        return
    yield 0, len(todo), []
    if left_s() <= 0.0:
        return
    widest = max(len(batch.ranks) for batch in every)
    ranks = {f"r{rank}-{at}": rank for rank in RANKS for at in range(widest)}
    fields: dict[str, Any] = options.engine_fields(a_max=widest, s_max=max(RANKS), max_num_seqs=widest)
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


def _kernel(options: Options) -> str:
    """Return the name of the kernel that the engine chooses."""
    fields: dict[str, Any] = options.engine_fields()
    settings = EngineSettings(**fields)
    return settings.chosen_lora_kernel(settings.torch_dtype(config_of(options.model)))


def _row(kernel: str, batch: Batch, phase: str, tokens: int, milliseconds: float) -> dict[str, Any]:
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
