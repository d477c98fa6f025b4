"""What each coefficient is multiplied with, asked of the very functions that charge the twin's steps.

Every form but one is linear in its coefficients, so the regressor of a coefficient is the time of the step
with that coefficient at 1 and the others at 0. A row that is a mean over many steps is taken apart first:
steps with nobody waiting and steps with a queue, steps without a prompt and steps with few or many prompt
tokens, in the proportions that follow if what arrives is Poisson. So terms that begin at a threshold see
steps, not means.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.models.calibration_tables import StepTable
from capplan.models.step_latency import StepFeatures, StepRanks, rank_ms, step_ms


def unit_columns(form: int, names: tuple[str, ...], table: StepTable) -> dict[str, NDArray[np.float64]]:
    """Return the regressor of each coefficient, shape (rows,) each, loads left out.

    Parameters
    ----------
    form
        Number of a form that is linear in its coefficients, by `latency_code`.
    names
        Its coefficients in order.
    table
        The measured steps; ranks that it does not know count as 0.
    """
    step = np.column_stack([getattr(table, name) for name in StepFeatures._fields])
    nothing = np.zeros(table.rows)
    ranks = np.column_stack([table.ranks.get(name, nothing) for name in StepRanks._fields])
    known = "prefills" in table.ranks
    queued = table.likely(table.waiting)
    prefilled = table.likely(table.ranks["prefills"]) if known else np.ones(table.rows)
    columns = np.zeros((table.rows, len(names)))
    lumps = table.lumps if known else np.ones((table.rows, 1))
    _fill(form, np.zeros(len(names)), step, ranks, queued, prefilled, lumps, known, columns)
    return {name: columns[:, at] for at, name in enumerate(names)}


@jit
def _fill(
    form: int,
    k: NDArray[np.float64],
    step: NDArray[np.float64],
    ranks: NDArray[np.float64],
    queued: NDArray[np.float64],
    prefilled: NDArray[np.float64],
    lumps: NDArray[np.float64],
    knows_prefills: bool,
    columns: NDArray[np.float64],
) -> None:
    """Fill `columns`, shape (rows, coefficients); `k` is a working array of zeros."""
    nodes = lumps.shape[1]
    for row in range(step.shape[0]):
        for state in range(2 * (1 + nodes)):  # nobody waiting or a queue; no prompt or an amount of prompts
            with_queue = state % 2
            node = state // 2 - 1
            share = queued[row] if with_queue else 1.0 - queued[row]
            share *= prefilled[row] / nodes if node >= 0 else 1.0 - prefilled[row]
            if share <= 0.0:
                continue
            more = lumps[row, node] / prefilled[row] if node >= 0 else 0.0
            tokens = step[row, 0]
            if knows_prefills:
                tokens = ranks[row, 0] + (tokens - ranks[row, 0]) * more
            features = StepFeatures(
                tokens=tokens,
                requests=step[row, 1],
                kv_tokens=step[row, 2],
                adapters=step[row, 3],
                a_max=step[row, 4],
                s_max=step[row, 5],
                waiting=step[row, 6] / queued[row] if with_queue else 0.0,
                slots_per_adapter=step[row, 7],
            )
            held = StepRanks(
                decodes=ranks[row, 0],
                prefills=ranks[row, 1] * more,
                lora_decodes=ranks[row, 2],
                lora_prefills=ranks[row, 3] * more,
                lora_prefill_tokens=ranks[row, 4] * more,
                max_rank=ranks[row, 5],
                decode_rank_sum=ranks[row, 6],
                prefill_rank_sum=ranks[row, 7] * more,
                prefill_rank_tokens=ranks[row, 8] * more,
            )
            for at in range(k.size):
                k[at] = 1.0
                milliseconds = step_ms(form, k, features) + rank_ms(form, k, features.s_max, held)
                columns[row, at] += share * milliseconds
                k[at] = 0.0
