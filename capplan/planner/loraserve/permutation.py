"""Step 5 of Algorithm 1: which server is which bin, so that as few bytes as possible have to be copied."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment


def assign_bins(
    bins: Sequence[Collection[str]], stored: Sequence[Collection[str]], bytes_of: Mapping[str, int]
) -> tuple[list[int], int]:
    """Return the bin of each server, and the bytes of adapters that it then lacks, summed over servers.

    The Hungarian method; among maps of the same cost one that leaves most bins in their place.

    Parameters
    ----------
    bins
        Names of the adapters that each bin serves.
    stored
        Names of those that each server stores, served or not: a copy that lies idle there need not be
        fetched. As many as bins; the servers are alike.
    bytes_of
        Size of every adapter.
    """
    sets = [frozenset(names) for names in stored]
    cost = np.array([[_missing(wanted, there, bytes_of) for there in sets] for wanted in bins])
    chosen_bins, servers = linear_sum_assignment(_with_ties(cost))
    bin_of = dict(zip(servers.tolist(), chosen_bins.tolist(), strict=True))
    return [bin_of[server] for server in range(len(stored))], int(cost[chosen_bins, servers].sum())


def _missing(wanted: Collection[str], there: frozenset[str], bytes_of: Mapping[str, int]) -> int:
    return sum(bytes_of[name] for name in wanted if name not in there)


def _with_ties(cost: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return costs in which leaving a bin in its place is worth less than the smallest saving of bytes.

    In units of the common divisor they stay far below what a floating-point number holds exactly.
    """
    unit = math.gcd(*cost.ravel().tolist()) or 1
    elsewhere = 1 - np.eye(len(cost), dtype=np.int64)
    exact: NDArray[np.float64] = ((cost // unit) * (len(cost) + 1) + elsewhere).astype(np.float64)
    return exact
