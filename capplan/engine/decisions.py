"""What the scheduler decided for one step, read out of its state: who computes which tokens.

The scheduler touches only what changes, so a step is not listed anywhere: it follows from the running order
and from what decoding and partial rows are. Compiled, because it looks at every running request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.serving import NONE, State
from capplan.serving.state import N_LOADS, N_PREEMPTED, RUN_HEAD, STEP_DECODES, TICK

_PART = np.dtype(
    [
        (name, np.int64)
        for name in (
            "request",
            "row",
            "place",  # line of the pool's block table; NONE without prefix caching
            "adapter",
            "tokens",  # to compute in this step
            "computed",  # tokens with valid KV before it
            "emits",  # whether the step ends with a new token of this request
        )
    ],
    align=True,
)

Parts = np.ndarray[Any, Any]
"""Requests with tokens in a step, in running order; fields as in `_PART`."""


class Tally(NamedTuple):
    """Counts of a step, requests by whether they compute one token after others that they have generated."""

    parts: int
    decodes: int
    prefill_tokens: int
    rank_sum: int
    max_rank: int


def new_parts(max_num_seqs: int) -> Parts:
    """Return room for the parts of one step."""
    return np.zeros(max_num_seqs, _PART)


def read_step(state: State, rank_of: NDArray[np.int64], parts: Parts) -> tuple[Parts, Tally]:
    """Return the requests with tokens in the step that `schedule` decided last, listed in `parts`.

    Call it between `schedule` and `commit`. `rank_of` are the adapters' ranks.
    """
    tally = _list_parts(state.counters, state.rows, rank_of, parts)
    return parts[: tally.parts], tally


@jit
def _list_parts(
    c: NDArray[np.int64], rows: np.recarray[Any, Any], rank_of: NDArray[np.int64], parts: Parts
) -> Tally:
    row = c[RUN_HEAD]
    n = decodes = prefill_tokens = rank_sum = max_rank = 0
    while row != NONE:
        tokens = 0
        computed = rows.computed[row]
        emits = True
        if rows.since[row] >= 0:
            tokens = 1 if c[STEP_DECODES] > 0 else 0
            computed += c[TICK] - rows.since[row]
        elif rows.since[row] == NONE:
            tokens = rows.tokens[row]
            emits = computed + tokens == rows.prompt[row] + rows.output[row]
        if tokens > 0:
            part = parts[n]
            part.request = rows.request[row]
            part.row = row
            part.place = rows.place[row]
            part.adapter = rows.adapter[row]
            part.tokens = tokens
            part.computed = computed
            part.emits = emits
            n += 1
            if tokens == 1 and rows.output[row] > 0:
                decodes += 1
            else:
                prefill_tokens += tokens
            rank = rank_of[rows.adapter[row]]
            rank_sum += rank
            max_rank = max(max_rank, rank)
        row = rows.following[row]
    return Tally(n, decodes, prefill_tokens, rank_sum, max_rank)


class Decision(NamedTuple):
    """What was decided for one step, requests by their number."""

    begin_ns: int
    tokens: list[tuple[int, int]]
    """(request, tokens) in running order."""
    preempted: list[int]
    loads: list[tuple[int, bool]]
    """(adapter, from disk)"""


def describe(state: State, parts: Parts, begin_ns: int) -> Decision:
    """Return the decision that `schedule` left in a state; call it before `commit`."""
    c, adapters = state.counters, state.adapters
    n = c[N_LOADS]
    preempted = state.rows.request[state.lists.preempted[: c[N_PREEMPTED]]]
    from_disk = adapters.load_from_disk[:n].astype(bool)
    return Decision(
        begin_ns,
        list(zip(parts["request"].tolist(), parts["tokens"].tolist(), strict=True)),
        preempted.tolist(),
        list(zip(adapters.loads[:n].tolist(), from_disk.tolist(), strict=True)),
    )
