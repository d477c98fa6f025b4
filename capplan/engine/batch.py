"""One step as tensors: tokens, positions, where their keys and values go, and who reads which pages.

Tokens stand request by request, and requests by adapter, so that each adapter's tokens are one slice of every
activation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.blocks import BlockTables
from capplan.engine.decisions import Parts, fill_tokens


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


class Batch(NamedTuple):
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
    """Tokens whose logits are wanted: the last ones of requests that get a new token, ..."""
    emitting: NDArray[np.int64]
    """... and the numbers of these requests among the parts of the step."""


def build_batch(
    parts: Parts, blocks: BlockTables, known: NDArray[np.int32], block_size: int, device: torch.device
) -> Batch:
    """Put the parts of a step together.

    Parameters
    ----------
    parts
        The requests of the step; at least one.
    blocks
        Their pages; those that the step needs are taken.
    known
        Tokens of each row, shape (rows, max_model_len).
    block_size
        Tokens of a page.
    device
        Where the tensors go.
    """
    held = -(-parts.computed // block_size)
    context = parts.computed + parts.tokens
    needed = -(-context // block_size)
    tables = blocks.tables(parts, held, needed)
    width = np.arange(tables.shape[1])
    fresh = tables[(width >= held[:, None]) & (width < needed[:, None])]

    order = np.argsort(parts.adapter, kind="stable")
    ends = np.cumsum(parts.tokens[order])
    starts = ends - parts.tokens[order]
    flat = np.empty((4, int(ends[-1])), np.int64)
    fill_tokens(parts, order, known, tables, flat, block_size)
    emits = np.flatnonzero(parts.emits[order])

    def to_device(array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)

    tokens, positions, pages, places = to_device(flat).unbind(0)
    single = parts.tokens[order] == 1
    one = order[single]
    decodes = None
    if one.size:
        widest = int(needed[one].max())
        decodes = Decodes(to_device(starts[single]), to_device(context[one]), to_device(tables[one, :widest]))
    prefills = tuple(
        Prefill(
            int(starts[i]),
            int(ends[i]),
            int(context[order[i]]),
            to_device(tables[order[i], : needed[order[i]]]),
        )
        for i in np.flatnonzero(~single)
    )
    return Batch(
        tokens=tokens,
        positions=positions,
        pages=pages,
        places=places,
        new_pages=to_device(fresh),
        decodes=decodes,
        prefills=prefills,
        segments=_segments(parts.adapter[order], starts, ends),
        sampled=to_device(ends[emits] - 1),
        emitting=order[emits],
    )


def _segments(
    adapters: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[Segment, ...]:
    first = np.flatnonzero(np.diff(adapters, prepend=-1))
    last = np.append(first[1:], adapters.size) - 1
    return tuple(
        Segment(int(adapters[f]), int(starts[f]), int(ends[e])) for f, e in zip(first, last, strict=True)
    )
