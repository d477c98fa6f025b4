"""What the scheduler decided for one step, read out of its state: who computes which tokens.

The scheduler touches only what changes, so a step is not listed anywhere: it follows from the running order
and from what decoding and partial rows are. Compiled, because it looks at every running request.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

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

Parts = np.recarray[Any, Any]
"""Requests with tokens in a step, in running order; fields as in `_PART`."""


def new_parts(max_num_seqs: int) -> Parts:
    """Return room for the parts of one step."""
    return np.zeros(max_num_seqs, _PART).view(np.recarray)


def read_step(state: State, parts: Parts) -> Parts:
    """Return the requests with tokens in the step that `schedule` decided last, listed in `parts`.

    Call it between `schedule` and `commit`.
    """
    return cast(Parts, parts[: _list_parts(state, parts)])


@jit
def _list_parts(state: State, parts: Parts) -> int:
    c = state.counters
    row = c[RUN_HEAD]
    n = 0
    while row != NONE:
        tokens = 0
        computed = state.rows.computed[row]
        emits = True
        if state.rows.since[row] >= 0:
            tokens = 1 if c[STEP_DECODES] > 0 else 0
            computed += c[TICK] - state.rows.since[row]
        elif state.rows.since[row] == NONE:
            tokens = state.rows.tokens[row]
            emits = computed + tokens == state.rows.prompt[row] + state.rows.output[row]
        if tokens > 0:
            parts.request[n] = state.rows.request[row]
            parts.row[n] = row
            parts.place[n] = state.rows.place[row]
            parts.adapter[n] = state.rows.adapter[row]
            parts.tokens[n] = tokens
            parts.computed[n] = computed
            parts.emits[n] = emits
            n += 1
        row = state.rows.following[row]
    return n


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
        list(zip(parts.request.tolist(), parts.tokens.tolist(), strict=True)),
        preempted.tolist(),
        list(zip(adapters.loads[:n].tolist(), from_disk.tolist(), strict=True)),
    )


@jit
def fill_tokens(
    parts: Parts,
    order: NDArray[np.int64],
    known: NDArray[np.int32],
    tables: NDArray[np.int64],
    out: NDArray[np.int64],
    block_size: int,
) -> int:
    """Write every token of a step, request by request, into the columns of `out`; return their number.

    Parameters
    ----------
    parts
        The requests of the step.
    order
        The numbers of the parts in the order in which their tokens are to stand.
    known
        Tokens of each row, shape (rows, max_model_len).
    tables
        Pages of each part, shape (parts, blocks).
    out
        Shape (4, tokens): token, position, page, place in the page.
    block_size
        Tokens of a page.
    """
    at = 0
    for part in order:
        row = parts.row[part]
        first = parts.computed[part]
        for position in range(first, first + parts.tokens[part]):
            out[0, at] = known[row, position]
            out[1, at] = position
            out[2, at] = tables[part, position // block_size]
            out[3, at] = position % block_size
            at += 1
    return at
