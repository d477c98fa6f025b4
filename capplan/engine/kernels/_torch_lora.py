"""LoRA products in PyTorch: one product per adapter at its rank, or padded to the largest rank (BGMV)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from capplan.engine._input_batch import Segment
from capplan.engine.lora._memory import SiteViews
from capplan.engine.models._decoder import LoRALayers

Views = Callable[[int], Sequence[Sequence[SiteViews]]]
"""Matrices of an adapter by layer and site."""


class GroupedLoRA(LoRALayers):
    """One product per adapter at its rank.

    The tokens of an adapter are one slice of the activations: nothing is gathered or padded.
    """

    def __init__(self, segments: Sequence[Segment], views: Views) -> None:
        self._segments = [(s.start, s.end, views(s.adapter)) for s in segments if s.adapter != 0]

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the low-rank product of each token of `x` to `out`."""
        for start, end, views in self._segments:
            here = views[layer][site]
            if here.rank:
                _expand(here, _shrink(here, x[start:end]), out[start:end])

    def shrink(self, layer: int, site: int, x: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the low-rank activations of each adapter, None without rank: the first half of `add`."""
        found = [(views[layer][site], x[start:end]) for start, end, views in self._segments]
        return [_shrink(here, part) if here.rank else None for here, part in found]

    def expand(
        self, layer: int, site: int, activations: Sequence[torch.Tensor | None], out: torch.Tensor
    ) -> None:
        """Add the product of `shrink` and B to `out`: the second half of `add`."""
        for (start, end, views), h in zip(self._segments, activations, strict=True):
            if h is not None:
                _expand(views[layer][site], h, out[start:end])


def _shrink(views: SiteViews, x: torch.Tensor) -> torch.Tensor:
    if len(views.shrinks) == 1:
        return x @ views.shrinks[0].rows.t()
    return torch.cat([x @ part.rows.t() for part in views.shrinks], dim=1)


def _expand(views: SiteViews, h: torch.Tensor, out: torch.Tensor) -> None:
    for part in views.expands:
        out[:, part.out_start : part.out_end].addmm_(h[:, part.start : part.end], part.rows)


_COPIES_BYTES: Final = 2**20
"""Size of the buffer of padded matrices, unless one is larger: what the cache of a core holds."""

Pad = Callable[[torch.Tensor, SiteViews], None]


class PaddedLoRA(LoRALayers):
    """Punica's BGMV in PyTorch, for comparison: every token at the largest rank in the batch.

    A and B are copied per token, with zeros beyond an adapter's rank. The copies of a few tokens at a time
    share a small buffer: large ones cost more in page faults and cache misses than the products do. Each
    product is a row times a matrix, which PyTorch's batched product computes several times faster than a
    matrix times a column.
    """

    def __init__(self, segments: Sequence[Segment], views: Views, device: torch.device) -> None:
        used = [s for s in segments if s.adapter != 0]
        self._views = [views(s.adapter) for s in used]
        self._sizes = [s.end - s.start for s in used]
        self._tokens = torch.cat([torch.arange(s.start, s.end, device=device) for s in used])
        self._buffer: torch.Tensor | None = None

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the low-rank product of each token of `x` to `out`."""
        self.expand(layer, site, self.shrink(layer, site, x), out)

    def shrink(self, layer: int, site: int, x: torch.Tensor) -> torch.Tensor:
        """Return the low-rank activations, shape (LoRA tokens, 1, rank): the first half of `add`."""
        here = [views[layer][site] for views in self._views]
        rank = max(views.rank for views in here)
        rows = x[self._tokens].unsqueeze(1)
        h = x.new_empty(rows.shape[0], 1, rank)
        for first, a in self._copies(here, rank, x, _pad_a):
            end = first + a.shape[0]
            torch.bmm(rows[first:end], a.transpose(1, 2), out=h[first:end])
        return h

    def expand(self, layer: int, site: int, h: torch.Tensor, out: torch.Tensor) -> None:
        """Add the product of `shrink` and B to `out`: the second half of `add`."""
        here = [views[layer][site] for views in self._views]
        delta = out.new_empty(h.shape[0], 1, out.shape[1])
        for first, b in self._copies(here, h.shape[2], out, _pad_b):
            end = first + b.shape[0]
            torch.bmm(h[first:end], b, out=delta[first:end])
        out.index_add_(0, self._tokens, delta.squeeze(1))

    def _copies(
        self, here: Sequence[SiteViews], rank: int, like: torch.Tensor, pad: Pad
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (index of the first token, padded matrices) for a few tokens at a time."""
        width = like.shape[1]
        most = max(1, _COPIES_BYTES // max(1, rank * width * like.element_size()))
        buffer = self._room(min(most, self._tokens.shape[0]), rank, width, like)
        first = held = 0
        for views, size in zip(here, self._sizes, strict=True):
            while size:
                more = min(size, most - held)
                pad(buffer[held], views)
                if more > 1:
                    buffer[held + 1 : held + more] = buffer[held]
                held, size = held + more, size - more
                if held == most:
                    yield first, buffer
                    first, held = first + held, 0
        if held:
            yield first, buffer[:held]

    def _room(self, copies: int, rank: int, width: int, like: torch.Tensor) -> torch.Tensor:
        """Return the buffer in this shape, with arbitrary contents."""
        numbers = copies * rank * width
        if self._buffer is None or self._buffer.shape[0] < numbers:
            self._buffer = like.new_empty(numbers)
        return self._buffer[:numbers].view(copies, rank, width)


def _pad_a(a: torch.Tensor, views: SiteViews) -> None:
    """Fill A, shape (rank, in)."""
    for part in views.shrinks:
        a[part.start : part.end] = part.rows
    a[views.rank :] = 0.0


def _pad_b(b: torch.Tensor, views: SiteViews) -> None:
    """Fill B, shape (rank, out), with zeros outside the columns of its modules."""
    if any(part.out_end - part.out_start != b.shape[1] for part in views.expands):
        b[: views.rank] = 0.0
    for part in views.expands:
        b[part.start : part.end, part.out_start : part.out_end] = part.rows
    b[views.rank :] = 0.0
