"""Rows of an adapter in memory: copying them there, and looking at them as few large matrices.

Rows that stand one behind the other in memory are copied at once and multiplied at once. In a static slot
whose rank is the adapter's that is a whole place of a layer; in pages, whatever lies in one page. A matrix
that a page boundary cuts is multiplied in parts: over A's rows and B's rows the product is a sum, or a
concatenation, so the result is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine.lora.adapter import HostAdapter
from capplan.engine.lora.layout import SITES, A, AdapterLayout, B, group_number


class Shrink(NamedTuple):
    """Some rows of A: columns [start, end) of the low-rank activations are ``x @ rows.T``."""

    start: int
    end: int
    rows: torch.Tensor


class Expand(NamedTuple):
    """Some rows of B: columns [out_start, out_end) of the output grow by ``h[:, start:end] @ rows``."""

    start: int
    end: int
    out_start: int
    out_end: int
    rows: torch.Tensor


class SiteViews(NamedTuple):
    """An adapter at one place of a layer; `rank` counts the columns of all modules there."""

    rank: int
    shrinks: tuple[Shrink, ...]
    expands: tuple[Expand, ...]


@dataclass(frozen=True)
class Placement:
    """An adapter in memory: `offsets` says at which element of `memory` each row begins."""

    layout: AdapterLayout
    memory: torch.Tensor
    ranks: NDArray[np.int64]
    offsets: NDArray[np.int64]

    def copy_from(self, adapter: HostAdapter) -> None:
        """Copy all rows, as few copies as their places allow."""
        lengths = self.layout.row_lengths(self.ranks)
        source = np.concatenate([[0], np.cumsum(lengths)])
        for first, end in _runs(self.offsets, lengths):
            size = int(source[end] - source[first])
            at = int(self.offsets[first])
            part = adapter.flat[int(source[first]) : int(source[end])]
            self.memory[at : at + size].copy_(part, non_blocking=True)

    def views(self) -> list[list[SiteViews]]:
        """Return the matrices of every layer and place."""
        first_rows = self.layout.first_rows(self.ranks)
        return [
            [self._site(layer, site, first_rows) for site in SITES] for layer in range(self.layout.layers)
        ]

    def _site(self, layer: int, site: tuple[int, ...], first_rows: NDArray[np.int64]) -> SiteViews:
        begin = int(first_rows[group_number(layer, site[0], A)])
        end = int(first_rows[group_number(layer, site[-1], A) + 1])
        shrinks = [
            Shrink(first - begin, last - begin, rows)
            for first, last, rows in self._matrices(begin, end, self.layout.sizes[site[0]][A])
        ]
        expands = []
        column = 0
        for module in site:
            rank = int(self.ranks[layer, module])
            size = self.layout.sizes[module][B]
            begin_b = int(first_rows[group_number(layer, module, B)])
            out = self.layout.out_starts[module]
            for first, last, rows in self._matrices(begin_b, begin_b + rank, size):
                at = column - begin_b
                expands.append(Expand(first + at, last + at, out, out + size, rows))
            column += rank
        return SiteViews(end - begin, tuple(shrinks), tuple(expands))

    def _matrices(self, begin: int, end: int, length: int) -> list[tuple[int, int, torch.Tensor]]:
        """Return the rows from `begin` to `end`, all of one length, as (first, end, matrix)."""
        offsets = self.offsets[begin:end]
        return [
            (
                begin + first,
                begin + last,
                self.memory[int(offsets[first]) : int(offsets[first]) + (last - first) * length].view(
                    -1, length
                ),
            )
            for first, last in _runs(offsets, np.full(offsets.size, length))
        ]


def _runs(offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return the (first, end) of rows that stand one behind the other."""
    if offsets.size == 0:
        return []
    breaks = 1 + np.flatnonzero(offsets[:-1] + lengths[:-1] != offsets[1:])
    edges = [0, *breaks.tolist(), offsets.size]
    return list(pairwise(edges))
