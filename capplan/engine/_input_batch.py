"""Model inputs of one step: arrays on the host, which all ranks receive, and their tensors on the device.

Tokens are ordered by request and requests by adapter: the tokens of an adapter are one slice of every
activation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capplan._jit import jit
from capplan.engine._pool import NULL_PAGE, BlockTables
from capplan.engine._scheduler_output import ScheduledRequests
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
    """Tensors of one step on the device."""

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
    prompts: tuple[torch.Tensor, torch.Tensor] | None = None
    """Pages of all prompts, and their tiles, in place of `prefills` in a CUDA graph."""


class StepInputs(NamedTuple):
    """Inputs of one step on the host, valid until the second `InputBatch.prepare_inputs` after it."""

    columns: NDArray[np.int64]
    """Id, position, page and offset of every token, shape (4, tokens); ids as in `latest`."""
    new_pages: NDArray[np.int64]
    """Pages taken for this step."""
    decodes: NDArray[np.int64]
    """Token index and context of each decode, shape (2, decodes)."""
    tables: NDArray[np.int64]
    """Pages of each decode, shape (decodes, most blocks), padded with the null page."""
    prefills: tuple[tuple[int, int, int, NDArray[np.int64]], ...]
    """Start, end, context and pages of each prefill."""
    segments: tuple[Segment, ...]
    sampled: NDArray[np.int64]
    """Last token of each request that gets a new token."""
    latest: torch.Tensor | None = None
    """Last sampled token of each row, on the device; an id of ``-1 - row`` is that token.

    None: the host knows all ids.
    """

    def on(self, device: torch.device) -> ModelInputs:
        """Return the tensors of the step; on the CPU they share the memory of these arrays."""

        def put(array: NDArray[np.int64]) -> torch.Tensor:
            tensor = torch.from_numpy(array)
            return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)

        decodes = None
        if self.decodes.size:
            at, context = put(self.decodes).unbind(0)
            decodes = Decodes(at, context, put(self.tables))
        tokens, positions, pages, offsets = put(self.columns).unbind(0)
        if self.latest is not None:
            tokens = tokens.where(tokens >= 0, self.latest[(-1 - tokens).clamp(min=0)])
        return ModelInputs(
            tokens=tokens,
            positions=positions,
            pages=pages,
            offsets=offsets,
            new_pages=put(self.new_pages),
            decodes=decodes,
            prefills=tuple(
                Prefill(start, end, context, put(pages)) for start, end, context, pages in self.prefills
            ),
            segments=self.segments,
            sampled=put(self.sampled),
        )


class PreparedStep(NamedTuple):
    """Inputs of a step, and the rows and positions of its new tokens."""

    inputs: StepInputs
    rows: NDArray[np.int64]
    """Rows of the requests that get a new token."""
    next_positions: NDArray[np.int64]
    """Positions of their new tokens."""
    order: NDArray[np.int64]
    """Requests of the step, in the order of their tokens."""


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

    `token_ids` are the known tokens of each row, shape (rows, max_model_len).
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
        # Pinned memory is copied asynchronously: that of a step is used again by the second step after it.
        pin = device.type == "cuda"
        self._buffers, self._others = (
            _Buffers(*(torch.zeros(size, dtype=torch.int64, pin_memory=pin).numpy() for size in sizes))
            for _ in range(2)
        )

    def prepare_inputs(self, scheduled: ScheduledRequests) -> PreparedStep:
        """Take the pages of a step with at least one request and return its inputs."""
        self._buffers, self._others = self._others, self._buffers
        blocks, buffers = self._blocks, self._buffers
        blocks.allocate(scheduled)
        lines = scheduled[blocks.line]
        n = _fill_buffers(
            scheduled, lines, self._token_ids, blocks.table, blocks.shift, self._block_size, buffers
        )
        inputs = StepInputs(
            columns=buffers.columns[:, : n.tokens],
            new_pages=buffers.fresh[: n.fresh],
            decodes=buffers.decodes[:, : n.decodes],
            tables=buffers.pages[: n.decodes * n.widest].reshape(n.decodes, n.widest),
            prefills=tuple(self._prefill(*span) for span in buffers.prefills[: n.prefills].tolist()),
            segments=tuple(Segment(*segment) for segment in buffers.segments[: n.segments].tolist()),
            sampled=buffers.emitting[0, : n.emitting],
        )
        emitting = buffers.emitting[:, : n.emitting]
        order = buffers.order[: scheduled.size]
        return PreparedStep(inputs, rows=emitting[1], next_positions=emitting[2], order=order)

    def _prefill(
        self, start: int, end: int, context: int, line: int
    ) -> tuple[int, int, int, NDArray[np.int64]]:
        pages = self._blocks.table[line, : -(-context // self._block_size)] + self._blocks.shift
        return start, end, context, pages


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
