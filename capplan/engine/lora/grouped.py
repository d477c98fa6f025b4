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
                _add(here, x[start:end], out[start:end])


def _add(views: SiteViews, x: torch.Tensor, out: torch.Tensor) -> None:
    if len(views.shrinks) == 1:
        h = x @ views.shrinks[0].rows.t()
    else:
        h = torch.cat([x @ part.rows.t() for part in views.shrinks], dim=1)
    for part in views.expands:
        out[:, part.out_start : part.out_end].addmm_(h[:, part.start : part.end], part.rows)
