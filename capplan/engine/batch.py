"""One step as tensors: tokens, positions, where their keys and values go, and who reads which pages.

Tokens stand request by request, and requests by adapter, so that each adapter's tokens are one slice of every
activation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


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
    """Tokens whose logits are wanted: the last ones of the requests that get a new token, ..."""
    rows: NDArray[np.int64]
    """... the rows of these requests, ..."""
    next_positions: NDArray[np.int64]
    """... and the positions of their new tokens."""
