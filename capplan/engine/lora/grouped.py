"""Applying adapters on the CPU: one small product per adapter, at its true rank.

A step's tokens stand adapter by adapter, so nothing is gathered and nothing padded: each adapter multiplies
its slice of the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from capplan.engine.batch import Segment
from capplan.engine.lora.placement import SiteViews

Views = Callable[[int], Sequence[Sequence[SiteViews]]]
"""Returns the matrices of an adapter by layer and place."""


class GroupedAdapters:
    """The adapters of one step."""

    def __init__(self, segments: Sequence[Segment], views: Views) -> None:
        self._segments = [(s.start, s.end, views(s.adapter)) for s in segments if s.adapter != 0]

    def add(self, layer: int, site: int, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add each token's low-rank part to `out`; see `capplan.engine.models.decoder.Adapters`."""
        for start, end, views in self._segments:
            here = views[layer][site]
            if here.rank:
                _expand(here, _shrink(here, x[start:end]), out[start:end])

    def shrink(self, layer: int, site: int, x: torch.Tensor) -> list[torch.Tensor | None]:
        """Return each adapter's low-rank activations, None where it has no rank: the first half of `add`."""
        found = [(views[layer][site], x[start:end]) for start, end, views in self._segments]
        return [_shrink(here, part) if here.rank else None for here, part in found]

    def expand(
        self, layer: int, site: int, activations: Sequence[torch.Tensor | None], out: torch.Tensor
    ) -> None:
        """Add what `shrink` returned, times B, to `out`: the second half of `add`."""
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
