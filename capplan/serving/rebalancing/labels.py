"""Server labels (LoRAServe, PERMUTEASSIGNMENT): the bin of each server with the fewest bytes to copy."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array


class ServerLabels(NamedTuple):
    """Bins of servers, and the size of the adapters that they do not store yet."""

    bin_of: list[int]
    """Bin of each server."""
    bytes_to_copy: int
    unpermuted_bytes: int
    """Bytes to copy if each bin went to the server of its number."""


def label_servers(
    bins: Sequence[Collection[str]],
    stored: Sequence[Collection[str]] | None,
    bytes_of: Mapping[str, int],
    *,
    permute: bool = True,
) -> ServerLabels:
    """Return the bin of each server, with the fewest bytes to copy by the Hungarian method.

    Ties go to the labelling that leaves most bins at their index: costs are integers in units of their
    common divisor, and an index that changes costs less than one unit. Floats represent these exactly.

    Parameters
    ----------
    bins
        Names of the adapters of each bin.
    stored
        Names of the adapters that each server stores; None: nothing.
    bytes_of
        Sizes of the adapters; others are ignored.
    permute
        If false, each bin goes to the server of its number.
    """
    cost = _bytes_to_copy(bins, stored or [()] * len(bins), bytes_of)
    unpermuted = int(np.trace(cost))
    if not permute:
        return ServerLabels(list(range(len(bins))), unpermuted, unpermuted)
    unit = max(1, int(np.gcd.reduce(cost, axis=None)))
    elsewhere = 1 - np.eye(len(cost), dtype=np.int64)
    rows, servers = linear_sum_assignment(((cost // unit) * (len(cost) + 1) + elsewhere).astype(np.float64))
    bin_of = rows[np.argsort(servers)].tolist()
    return ServerLabels(bin_of, int(cost[rows, servers].sum()), unpermuted)


def _bytes_to_copy(
    bins: Sequence[Collection[str]], stored: Sequence[Collection[str]], bytes_of: Mapping[str, int]
) -> NDArray[np.int64]:
    """Return the bytes that each server lacks of each bin, shape (bins, servers)."""
    column = {name: i for i, name in enumerate(bytes_of)}
    sizes = np.array([*bytes_of.values()], np.int64)
    needed, held = _members(bins, column), _members(stored, column)
    needed = needed.multiply(sizes[np.newaxis, :]).tocsr()
    everything = np.asarray(needed.sum(axis=1), np.int64).reshape(-1, 1)
    return np.asarray(everything - (needed @ held.T).toarray(), np.int64)


def _members(sets: Sequence[Collection[str]], column: Mapping[str, int]) -> csr_array:
    """Return the matrix of sets and members, of zeros and ones."""
    columns = [[column[name] for name in frozenset(names) if name in column] for names in sets]
    ends = np.cumsum([0, *map(len, columns)])
    flat = np.array([i for own in columns for i in own], np.int64)
    return csr_array((np.ones(flat.size, np.int64), flat, ends), shape=(len(sets), len(column)))
