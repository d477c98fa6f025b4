"""The integer program of the yardstick: parts on a given number of GPUs, the fullest as light as can be."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.planner.solvers.milp_capacity import Capacity

_GAP: Final = 0.05
"""How far the fullest GPU may be from as light as can be, relatively; whether there is an answer is exact."""
_NO_PLACEMENT: Final = 2

Row = tuple[NDArray[np.int64], NDArray[np.float64], float, float]
"""Columns, their coefficients, and the least and the most that they may sum to."""


class TimeIsOver(Exception):  # noqa: N818  (nobody's error)
    """The deadline came before a placement, or the proof that there is none."""


@dataclass(frozen=True)
class Program:
    """What to place.

    Attributes
    ----------
    ranks
        Of the parts, shape (n,).
    loads
        Share of the whole load that each part is, shape (n,); of these the fullest GPU has few.
    capacity
        What a GPU holds.
    apart
        Pairs of parts that must not meet.
    """

    ranks: NDArray[np.int64]
    loads: NDArray[np.float64]
    capacity: Capacity
    apart: Sequence[tuple[int, int]]

    def solve(
        self, gpus: int, cuts: Sequence[tuple[NDArray[np.int64], int]], deadline_s: float
    ) -> list[int] | None:
        """Return the GPU of every part, or None where there is no placement.

        Parameters
        ----------
        gpus
            How many there are.
        cuts
            Parts of which at most so many may meet.
        deadline_s
            When to stop, by `time.monotonic`.

        Raises
        ------
        TimeIsOver
            At the deadline.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        rows = [row for gpu in range(gpus) for row in self._rows_of_gpu(gpu, gpus, cuts)]
        n, columns = self.loads.size, self._columns(gpus)
        rows += [(part * gpus + np.arange(gpus), np.ones(gpus), 1.0, 1.0) for part in range(n)]
        at = np.repeat(np.arange(len(rows)), [row[0].size for row in rows])
        entries = np.concatenate([row[1] for row in rows])
        matrix = csr_array(
            (entries, (at, np.concatenate([row[0] for row in rows]))), shape=(len(rows), columns)
        )
        largest = np.ones(columns)
        for part in range(min(n, gpus)):
            largest[part * gpus + part + 1 : (part + 1) * gpus] = 0.0  # GPUs are alike: part i is on 0..i
        left_s = deadline_s - time.monotonic()
        if left_s <= 0.0:
            raise TimeIsOver
        result = milp(
            np.append(np.zeros(columns - 1), 1.0),
            integrality=np.append(np.ones(columns - 1), 0.0),
            bounds=Bounds(np.zeros(columns), largest),
            constraints=LinearConstraint(
                matrix, np.array([row[2] for row in rows]), np.array([row[3] for row in rows])
            ),
            options={"time_limit": left_s, "mip_rel_gap": _GAP},
        )
        if result.x is not None:
            chosen: list[int] = np.argmax(result.x[: n * gpus].reshape(n, gpus), axis=1).tolist()
            return chosen
        if result.status == _NO_PLACEMENT:
            return None
        raise TimeIsOver

    def _columns(self, gpus: int) -> int:
        """Return how many columns there are.

        Part i on GPU g is column i * gpus + g; GPU g of the r-th largest rank comes after all these; the
        load of the fullest GPU is the last one.
        """
        return (self.loads.size + len(self.capacity.ranks)) * gpus + 1

    def _rows_of_gpu(
        self, gpu: int, gpus: int, cuts: Sequence[tuple[NDArray[np.int64], int]]
    ) -> Iterator[Row]:
        n, ranks = self.loads.size, self.capacity.ranks
        mine = np.arange(n) * gpus + gpu
        largest = (n + np.arange(len(ranks))) * gpus + gpu
        yield largest, np.ones(len(ranks)), 1.0, 1.0
        for part in range(n):  # a GPU of a part has its rank at least
            enough = largest[np.array(ranks) >= self.ranks[part]]
            yield np.append(enough, mine[part]), np.append(np.ones(enough.size), -1.0), 0.0, np.inf
        for row, shares in enumerate(self.capacity.shares):  # binds only where this is the largest rank
            beyond = max(0.0, float(shares.sum()) - 1.0)
            yield np.append(mine, largest[row]), np.append(shares, beyond), -np.inf, 1.0 + beyond
        yield np.append(mine, self._columns(gpus) - 1), np.append(self.loads, -1.0), -np.inf, 0.0
        for i, j in self.apart:
            yield mine[[i, j]], np.ones(2), 0.0, 1.0
        for members, most in cuts:
            yield mine[members], np.ones(members.size), 0.0, float(most)
