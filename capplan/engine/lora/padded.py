"""The padded form, for comparison: every token multiplies matrices of the largest rank in the batch (BGMV).

Punica's kernel in PyTorch: copies of A and B are gathered for each token, rows beyond an adapter's rank
filled with zeros, so it pays for batch times largest rank. `capplan.engine.lora.grouped` pays for true ranks.
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

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add each token's low-rank part to `out`; see `capplan.engine.models.decoder.Adapters`."""
        here = [views[layer][site] for views in self._views]
        rank = max(views.rank for views in here)
        a = torch.stack([_padded_a(views, rank, x) for views in here])
        b = torch.stack([_padded_b(views, rank, out) for views in here])
        h = torch.bmm(a[self._of_token], x[self._tokens].unsqueeze(2))
        delta = torch.bmm(b[self._of_token].transpose(1, 2), h).squeeze(2)
        out.index_add_(0, self._tokens, delta)


def _padded_a(views: SiteViews, rank: int, x: torch.Tensor) -> torch.Tensor:
    a = x.new_zeros(rank, x.shape[1])
    for part in views.shrinks:
        a[part.start : part.end] = part.rows
    return a


def _padded_b(views: SiteViews, rank: int, out: torch.Tensor) -> torch.Tensor:
    b = out.new_zeros(rank, out.shape[1])
    for part in views.expands:
        b[part.start : part.end, part.out_start : part.out_end] = part.rows
    return b
