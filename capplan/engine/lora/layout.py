"""Where the numbers of an adapter stand: rows of rank, in one order, whatever memory they lie in.

An adapter of rank r on a linear map from `in` to `out` dimensions is r rows of length `in` (A) and r rows of
length `out` (B, transposed). All its rows follow each other layer by layer; within a layer the four places
where adapters add (q, k and v; o; gate and up; down) follow each other, each with the A rows of all its
modules before their B rows. So the A rows of q, k and v are one matrix, and one product serves all three.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.engine.models.config import ModelConfig

MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SITES: Final = ((0, 1, 2), (3,), (4, 5), (6,))
"""The modules of each place, in the order of `capplan.engine.models.decoder`."""

A, B = 0, 1
GROUPS: Final = tuple((module, side) for site in SITES for side in (A, B) for module in site)
"""The (module, side) groups of rows of one layer, in order: A of a place's modules, then their B."""


class AdapterLayout:
    """The row lengths of a model's adapters.

    Attributes
    ----------
    layers
        Layers of the model.
    sizes
        (in, out) of each module.
    out_starts
        First column of each module's output within the output of its place.
    site_outputs
        The same and the widths, of the modules of each place.
    """

    def __init__(self, config: ModelConfig) -> None:
        hidden, query, kv, inner = (
            config.hidden_size,
            config.query_size,
            config.kv_size,
            config.intermediate_size,
        )
        self.layers = config.layers
        self.sizes = (
            (hidden, query),
            (hidden, kv),
            (hidden, kv),
            (query, hidden),
            (hidden, inner),
            (hidden, inner),
            (inner, hidden),
        )
        self.out_starts = (0, query, query + kv, 0, 0, inner, 0)
        self.site_outputs = tuple(
            (np.array([self.out_starts[m] for m in site]), np.array([self.sizes[m][B] for m in site]))
            for site in SITES
        )
        self._group_lengths = np.array([self.sizes[module][side] for module, side in GROUPS], np.int64)
        self.longest_row = int(self._group_lengths.max())

    def ranks(self, rank: int) -> NDArray[np.int64]:
        """Return the ranks of an adapter that has the same one everywhere, shape (layers, modules)."""
        return np.full((self.layers, len(MODULES)), rank, np.int64)

    def group_rows(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of each group, shape (layers * groups,)."""
        return np.concatenate([ranks[:, [module]] for module, _ in GROUPS], axis=1).ravel()

    def row_lengths(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the length of each row of an adapter, in order."""
        lengths: NDArray[np.int64] = np.repeat(
            np.tile(self._group_lengths, self.layers), self.group_rows(ranks)
        )
        return lengths

    def elements(self, ranks: NDArray[np.int64]) -> int:
        """Return the numbers that an adapter takes."""
        return int(np.tile(self._group_lengths, self.layers) @ self.group_rows(ranks))

    def first_rows(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first row of each group and the end of the last one, shape (layers * groups + 1,)."""
        return np.concatenate([[0], np.cumsum(self.group_rows(ranks))])

    def padded_offsets(self, ranks: NDArray[np.int64], slot_rank: int) -> NDArray[np.int64]:
        """Return where each row stands in a slot that has room for `slot_rank` rows in every group."""
        lengths = np.tile(self._group_lengths, self.layers)
        starts = np.concatenate([[0], np.cumsum(lengths * slot_rank)[:-1]])
        rows = self.group_rows(ranks)
        within = np.arange(rows.sum()) - np.repeat(np.cumsum(rows) - rows, rows)
        offsets: NDArray[np.int64] = np.repeat(starts, rows) + within * np.repeat(lengths, rows)
        return offsets


def group_number(layer: int, module: int, side: int) -> int:
    """Return the number of a group of rows among all layers."""
    return layer * len(GROUPS) + GROUPS.index((module, side))
