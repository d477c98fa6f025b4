"""The padded form, for comparison: every token multiplies matrices of the largest rank in the batch (BGMV).

Punica's kernel in PyTorch: copies of A and B are gathered for each token, rows beyond an adapter's rank
filled with zeros, so it pays for batch times largest rank. `capplan.engine.lora.grouped` pays for true ranks.

The copies go into buffers that all calls of a step share: fresh ones of many megabytes would cost more in
page faults than the products. Each token's product is a row times a matrix, which PyTorch's batched product
does several times faster than a matrix times a column.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from capplan.engine.batch import Segment
from capplan.engine.lora.grouped import Views
from capplan.engine.lora.placement import SiteViews


class PaddedAdapters:
    """The adapters of one step."""

    def __init__(self, segments: Sequence[Segment], views: Views, tokens: int, device: torch.device) -> None:
        used = [s for s in segments if s.adapter != 0]
        self._views = [views(s.adapter) for s in used]
        sizes = torch.tensor([s.end - s.start for s in used], device=device)
        self._of_token = torch.repeat_interleave(torch.arange(len(used), device=device), sizes)
        self._tokens = torch.cat([torch.arange(s.start, s.end, device=device) for s in used])
        self._one_each = len(used) == self._tokens.shape[0]
        self._buffers: dict[str, torch.Tensor] = {}

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add each token's low-rank part to `out`; see `capplan.engine.models.decoder.Adapters`."""
        self.expand(layer, site, self.shrink(layer, site, x), out)

    def shrink(self, layer: int, site: int, x: torch.Tensor) -> torch.Tensor:
        """Return the low-rank activations, shape (LoRA tokens, 1, rank): the first half of `add`."""
        here = [views[layer][site] for views in self._views]
        shape = (len(here), max(views.rank for views in here), x.shape[1])
        a = self._buffer("adapters", shape, x)
        for matrix, views in zip(a, here, strict=True):
            _pad_a(matrix, views)
        return torch.bmm(x[self._tokens].unsqueeze(1), self._of_tokens(a).transpose(1, 2))

    def expand(self, layer: int, site: int, h: torch.Tensor, out: torch.Tensor) -> None:
        """Add what `shrink` returned, times B, to `out`: the second half of `add`."""
        here = [views[layer][site] for views in self._views]
        b = self._buffer("adapters", (len(here), h.shape[2], out.shape[1]), out)
        for matrix, views in zip(b, here, strict=True):
            _pad_b(matrix, views)
        out.index_add_(0, self._tokens, torch.bmm(h, self._of_tokens(b)).squeeze(1))

    def _of_tokens(self, matrices: torch.Tensor) -> torch.Tensor:
        """Return each token's copy of its adapter's matrix; with one token each, the matrices themselves."""
        if self._one_each:
            return matrices
        copies = self._buffer("tokens", (self._of_token.shape[0], *matrices.shape[1:]), matrices)
        return torch.index_select(matrices, 0, self._of_token, out=copies)

    def _buffer(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """Return a buffer of this shape, whose numbers are whatever an earlier call left."""
        size = shape[0] * shape[1] * shape[2]
        held = self._buffers.get(name)
        if held is None or held.shape[0] < size:
            held = self._buffers[name] = like.new_empty(size)
        return held[:size].view(shape)


def _pad_a(a: torch.Tensor, views: SiteViews) -> None:
    """Fill A, shape (rank, in)."""
    for part in views.shrinks:
        a[part.start : part.end] = part.rows
    a[views.rank :] = 0.0


def _pad_b(b: torch.Tensor, views: SiteViews) -> None:
    """Fill B, shape (rank, out); between the columns of its modules lie zeros."""
    if any(part.out_end - part.out_start != b.shape[1] for part in views.expands):
        b[: views.rank] = 0.0
    for part in views.expands:
        b[part.start : part.end, part.out_start : part.out_end] = part.rows
    b[views.rank :] = 0.0
