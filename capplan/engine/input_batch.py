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
    """Tokens [start, end) of a step and their adapter; 0 is the base model."""

    adapter: int
    start: int
    end: int


class Prefill(NamedTuple):
    """Request with several tokens [start, end) in a step; `context` tokens have KV after it."""

    start: int
    end: int
    context: int
    pages: torch.Tensor


class Decodes(NamedTuple):
    """Requests with one token in a step."""

    at: torch.Tensor
    """Index of each token, shape (requests,)."""
    context: torch.Tensor
    """Tokens that each reads, including its own, shape (requests,)."""
    pages: torch.Tensor
    """Shape (requests, most blocks), padded with the null page."""


class ModelInputs(NamedTuple):
    """Tensors of one step, valid until the next `InputBatch.prepare_inputs`."""

    tokens: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    """Page of each token's keys and values."""
    offsets: torch.Tensor
    """Offset of each token in its page."""
    new_pages: torch.Tensor
    """Pages taken for this step."""
    decodes: Decodes | None
    prefills: tuple[Prefill, ...]
    segments: tuple[Segment, ...]
    sampled: torch.Tensor
    """Last token of each request that gets a new token."""
    rows: NDArray[np.int64]
    """Rows of these requests."""
    next_positions: NDArray[np.int64]
    """Positions of their new tokens."""


class _Buffers(NamedTuple):
    """Output of `_fill_buffers`; `_Counts` holds the used part of each."""

    columns: NDArray[np.int64]
    """Id, position, page and offset of every token, shape (4, tokens)."""
    decodes: NDArray[np.int64]
    """Token index and context of each decode, shape (2, requests)."""
    pages: NDArray[np.int64]
    """Pages of each decode: a flat table, as wide as the longest context needs."""
    fresh: NDArray[np.int64]
    """Pages without KV of their request."""
    emitting: NDArray[np.int64]
    """Last token, row and next position of each request that gets a new token, shape (3, requests)."""
    segments: NDArray[np.int64]
    """Shape (adapters, 3)."""
    prefills: NDArray[np.int64]
    """Start, end, context and block table line of each request with several tokens."""
    order: NDArray[np.int64]
    """Requests by adapter."""
    first: NDArray[np.int64]
    """First position of each adapter in `order`."""


class _Counts(NamedTuple):
    tokens: int
    decodes: int
    widest: int
    fresh: int
    emitting: int
    segments: int
    prefills: int


class InputBatch:
    """Preallocated model inputs.

    Parameters
    ----------
    token_ids
        Known tokens of each row, shape (rows, max_model_len).
    """

    def __init__(
        self,
        limits: Limits,
        adapters: int,
        token_ids: NDArray[np.int32],
        blocks: BlockTables,
        device: torch.device,
    ) -> None:
        seqs = min(limits.max_num_seqs, token_ids.shape[0])
        tokens = max(limits.max_num_batched_tokens, seqs)
        blocks_per_request = -(-limits.max_model_len // limits.block_size)
        self._token_ids = token_ids
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
        # Pinned memory is copied asynchronously; it is not overwritten before the step's logits are back.
        pin = device.type == "cuda"
        self._tensors = [torch.zeros(size, dtype=torch.int64, pin_memory=pin) for size in sizes]
        self._buffers = _Buffers(*(tensor.numpy() for tensor in self._tensors))

    def prepare_inputs(self, scheduled: ScheduledRequests) -> ModelInputs:
        """Take the pages of a step with at least one request and return its inputs."""
        blocks, buffers, device = self._blocks, self._buffers, self._device
        blocks.allocate(scheduled)
        lines = scheduled[blocks.line]
        n = _fill_buffers(
            scheduled, lines, self._token_ids, blocks.table, blocks.shift, self._block_size, buffers
        )
        columns, decodes, pages, fresh, emitting = self._tensors[:5]

        def on_device(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

        tokens, positions, page, offset = on_device(columns[:, : n.tokens]).unbind(0)
        decode_inputs = None
        if n.decodes:
            at, context = on_device(decodes[:, : n.decodes]).unbind(0)
            table = on_device(pages[: n.decodes * n.widest]).view(n.decodes, n.widest)
            decode_inputs = Decodes(at, context, table)
        return ModelInputs(
            tokens=tokens,
            positions=positions,
            pages=page,
            offsets=offset,
            new_pages=on_device(fresh[: n.fresh]),
            decodes=decode_inputs,
            prefills=tuple(self._prefill(*span) for span in buffers.prefills[: n.prefills].tolist()),
            segments=tuple(Segment(*segment) for segment in buffers.segments[: n.segments].tolist()),
            sampled=on_device(emitting[0, : n.emitting]),
            rows=buffers.emitting[1, : n.emitting],
            next_positions=buffers.emitting[2, : n.emitting],
        )

    def _prefill(self, start: int, end: int, context: int, line: int) -> Prefill:
        pages = self._blocks.table[line, : -(-context // self._block_size)] + self._blocks.shift
        return Prefill(start, end, context, torch.from_numpy(pages).to(self._device))


@jit
def _order_by_adapter(scheduled: Any, buffers: _Buffers, block_size: int) -> int:
    """Sort the requests by adapter (counting sort); return the most blocks of a decode request."""
    first = buffers.first
    first[:] = 0
    widest = 0
    for i in range(scheduled.size):
        first[scheduled.adapter[i] + 1] += 1
        if scheduled.tokens[i] == 1:
            widest = max(widest, scheduled.computed[i] // block_size + 1)
    for adapter in range(1, first.size):
        first[adapter] += first[adapter - 1]
    for i in range(scheduled.size):  # afterwards, first[adapter] is the next adapter's first position
        buffers.order[first[scheduled.adapter[i]]] = i
        first[scheduled.adapter[i]] += 1
    return widest


@jit
def _fill_buffers(
    scheduled: Any,
    lines: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    table: NDArray[np.int64],
    shift: int,
    block_size: int,
    buffers: _Buffers,
) -> _Counts:
    """Fill the buffers of a step; `lines` are the requests' lines of the block table, see `BlockTables`."""
    widest = _order_by_adapter(scheduled, buffers, block_size)
    at = decodes = fresh = emitting = segments = prefills = 0
    last_adapter = -1
    for i in buffers.order[: scheduled.size]:
        row, line, tokens, computed = scheduled.row[i], lines[i], scheduled.tokens[i], scheduled.computed[i]
        context = computed + tokens
        if scheduled.adapter[i] != last_adapter:
            last_adapter = scheduled.adapter[i]
            buffers.segments[segments, 0] = last_adapter
            buffers.segments[segments, 1] = at
            segments += 1
        for position in range(computed, context):
            token = at + position - computed
            buffers.columns[0, token] = token_ids[row, position]
            buffers.columns[1, token] = position
            buffers.columns[2, token] = table[line, position // block_size] + shift
            buffers.columns[3, token] = position % block_size
        needed = (context + block_size - 1) // block_size
        for block in range((computed + block_size - 1) // block_size, needed):
            buffers.fresh[fresh] = table[line, block] + shift
            fresh += 1
        if tokens == 1:
            buffers.decodes[0, decodes] = at
            buffers.decodes[1, decodes] = context
            for block in range(widest):
                page = table[line, block] + shift if block < needed else NULL_PAGE
                buffers.pages[decodes * widest + block] = page
            decodes += 1
        else:
            buffers.prefills[prefills, 0] = at
            buffers.prefills[prefills, 1] = at + tokens
            buffers.prefills[prefills, 2] = context
            buffers.prefills[prefills, 3] = line
            prefills += 1
        at += tokens
        buffers.segments[segments - 1, 2] = at
        if scheduled.emits[i]:
            buffers.emitting[0, emitting] = at - 1
            buffers.emitting[1, emitting] = row
            buffers.emitting[2, emitting] = context
            emitting += 1
    return _Counts(at, decodes, widest, fresh, emitting, segments, prefills)
