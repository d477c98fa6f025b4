"""Model inputs of one step.

Tokens are ordered by request and requests by adapter: the tokens of an adapter are one slice of every
activation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.compile import jit
from capplan.engine.pool import NULL_PAGE, BlockTables
from capplan.engine.scheduler_output import ScheduledRequests
from capplan.serving import Limits


class Segment(NamedTuple):
    """Tokens [start, end) of a step use this adapter; 0 is the base model."""

    adapter: int
    start: int
    end: int


class Prefill(NamedTuple):
    """A request with several tokens [start, end) in a step; `context` tokens are computed after it."""

    start: int
    end: int
    context: int
    pages: torch.Tensor


class Decodes(NamedTuple):
    """The requests with one token in a step."""

    at: torch.Tensor
    """Where their tokens stand, shape (requests,)."""
    context: torch.Tensor
    """Tokens that each reads, its own included, shape (requests,)."""
    pages: torch.Tensor
    """Shape (requests, most blocks), padded with the null page."""


class ModelInputs(NamedTuple):
    """What the model runs in one step."""

    tokens: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    """The page of each token's keys and values, ..."""
    places: torch.Tensor
    """... and its place there."""
    new_pages: torch.Tensor
    """Pages that were taken for this step."""
    decodes: Decodes | None
    prefills: tuple[Prefill, ...]
    segments: tuple[Segment, ...]
    sampled: torch.Tensor
    """Tokens whose logits are wanted: the last ones of the requests that get a new token, ..."""
    rows: NDArray[np.int64]
    """... the rows of these requests, ..."""
    next_positions: NDArray[np.int64]
    """... and the positions of their new tokens."""


class _Buffers(NamedTuple):
    """What `_fill_buffers` writes; as much of each as `_Counts` says."""

    columns: NDArray[np.int64]
    """Every token's id, position, page and place there, shape (4, tokens)."""
    decodes: NDArray[np.int64]
    """Where each decode's token stands, and its context, shape (2, requests)."""
    pages: NDArray[np.int64]
    """Pages of each decode, one table of as many columns as the longest needs."""
    fresh: NDArray[np.int64]
    """Pages that hold nothing of their request yet."""
    emitting: NDArray[np.int64]
    """Last token, row and next position of each request that gets a new token, shape (3, requests)."""
    segments: NDArray[np.int64]
    """Shape (adapters, 3)."""
    prefills: NDArray[np.int64]
    """Start, end, context and line of the block table of each request with several tokens."""
    order: NDArray[np.int64]
    """Parts by adapter."""
    first: NDArray[np.int64]
    """Where each adapter's parts begin there."""


class _Counts(NamedTuple):
    tokens: int
    decodes: int
    widest: int
    fresh: int
    emitting: int
    segments: int
    prefills: int


class InputBatch:
    """Makes batches. One stays valid until the next is made."""

    def __init__(
        self,
        limits: Limits,
        adapters: int,
        known: NDArray[np.int32],
        blocks: BlockTables,
        device: torch.device,
    ) -> None:
        seqs = min(limits.max_num_seqs, known.shape[0])
        tokens = max(limits.max_num_batched_tokens, seqs)
        blocks_per_request = -(-limits.max_model_len // limits.block_size)
        self._known = known
        self._blocks = blocks
        self._block_size = limits.block_size
        self._device = device
        sizes = (
            (4, tokens),
            (2, seqs),
            (seqs * blocks_per_request,),
            (seqs + tokens // limits.block_size + 1,),
            (3, seqs),
            (adapters + 1, 3),
            (seqs, 4),
            (seqs,),
            (adapters + 2,),
        )
        # A GPU copies from pinned memory by itself; nothing is overwritten before the step's logits are back.
        pin = device.type == "cuda"
        self._tensors = [torch.zeros(size, dtype=torch.int64, pin_memory=pin) for size in sizes]
        self._lists = _Buffers(*(tensor.numpy() for tensor in self._tensors))

    def compose(self, parts: ScheduledRequests) -> ModelInputs:
        """Return the batch of a step, which has at least one part; pages that it needs are taken."""
        blocks, lists, device = self._blocks, self._lists, self._device
        blocks.take(parts)
        lines = parts[blocks.line]
        n = _fill_buffers(parts, lines, self._known, blocks.table, blocks.shift, self._block_size, lists)
        columns, decodes, pages, fresh, emitting = self._tensors[:5]

        def there(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

        tokens, positions, page, place = there(columns[:, : n.tokens]).unbind(0)
        reading = None
        if n.decodes:
            at, context = there(decodes[:, : n.decodes]).unbind(0)
            table = there(pages[: n.decodes * n.widest]).view(n.decodes, n.widest)
            reading = Decodes(at, context, table)
        return ModelInputs(
            tokens=tokens,
            positions=positions,
            pages=page,
            places=place,
            new_pages=there(fresh[: n.fresh]),
            decodes=reading,
            prefills=tuple(self._prefill(*span) for span in lists.prefills[: n.prefills].tolist()),
            segments=tuple(Segment(*segment) for segment in lists.segments[: n.segments].tolist()),
            sampled=there(emitting[0, : n.emitting]),
            rows=lists.emitting[1, : n.emitting],
            next_positions=lists.emitting[2, : n.emitting],
        )

    def _prefill(self, start: int, end: int, context: int, line: int) -> Prefill:
        pages = self._blocks.table[line, : -(-context // self._block_size)] + self._blocks.shift
        return Prefill(start, end, context, torch.from_numpy(pages).to(self._device))


@jit
def _fill_buffers(
    parts: Any,
    lines: NDArray[np.int64],
    known: NDArray[np.int32],
    table: NDArray[np.int64],
    shift: int,
    block_size: int,
    lists: _Buffers,
) -> _Counts:
    """Write the lists of a step.

    Parameters
    ----------
    parts, lines
        The requests of the step, and their lines of the block table.
    known
        Tokens of each row, shape (rows, max_model_len).
    table, shift
        See `BlockTables`.
    block_size
        Tokens of a page.
    lists
        Where everything goes.
    """
    n = parts.size
    first = lists.first
    first[:] = 0
    widest = 0
    for i in range(n):
        first[parts.adapter[i] + 1] += 1
        if parts.tokens[i] == 1:
            widest = max(widest, parts.computed[i] // block_size + 1)
    for adapter in range(1, first.size):
        first[adapter] += first[adapter - 1]
    for i in range(n):  # afterwards, first[adapter] is where the next one's begin
        lists.order[first[parts.adapter[i]]] = i
        first[parts.adapter[i]] += 1

    at = decodes = fresh = emitting = segments = prefills = 0
    last_adapter = -1
    for k in range(n):
        i = lists.order[k]
        row, line, tokens, computed = parts.row[i], lines[i], parts.tokens[i], parts.computed[i]
        context = computed + tokens
        if parts.adapter[i] != last_adapter:
            last_adapter = parts.adapter[i]
            lists.segments[segments, 0] = last_adapter
            lists.segments[segments, 1] = at
            segments += 1
        for position in range(computed, context):
            token = at + position - computed
            lists.columns[0, token] = known[row, position]
            lists.columns[1, token] = position
            lists.columns[2, token] = table[line, position // block_size] + shift
            lists.columns[3, token] = position % block_size
        needed = (context + block_size - 1) // block_size
        for block in range((computed + block_size - 1) // block_size, needed):
            lists.fresh[fresh] = table[line, block] + shift
            fresh += 1
        if tokens == 1:
            lists.decodes[0, decodes] = at
            lists.decodes[1, decodes] = context
            for block in range(widest):
                page = table[line, block] + shift if block < needed else NULL_PAGE
                lists.pages[decodes * widest + block] = page
            decodes += 1
        else:
            lists.prefills[prefills, 0] = at
            lists.prefills[prefills, 1] = at + tokens
            lists.prefills[prefills, 2] = context
            lists.prefills[prefills, 3] = line
            prefills += 1
        at += tokens
        lists.segments[segments - 1, 2] = at
        if parts.emits[i]:
            lists.emitting[0, emitting] = at - 1
            lists.emitting[1, emitting] = row
            lists.emitting[2, emitting] = context
            emitting += 1
    return _Counts(at, decodes, widest, fresh, emitting, segments, prefills)
