"""Who gets the next request of an adapter: the plan's shares, by the rule that the cluster twin simulates.

`capplan.serving.routing.smooth_shares` is called as the Python function it is written as: one decision takes
microseconds, and nothing needs to be compiled before the first request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capplan.serving.routing import Placement
from capplan.serving.routing import smooth_shares as rule

_by_credit: Final[Callable[..., int]] = getattr(rule.by_credit, "py_func", rule.by_credit)


class Shares:
    """Smooth weighted round robin over the holders of each adapter that are there.

    The share of holders that are away goes to the others in proportion; their credits stand still meanwhile.

    Parameters
    ----------
    held
        For each instance the adapters it holds, with the share of the adapter's requests meant for it. Shares
        are normalised over holders; the base model is everywhere alike.
    """

    def __init__(self, held: Sequence[Mapping[str, float]]) -> None:
        holders: dict[str | None, list[tuple[int, float]]] = {None: [(i, 1.0) for i in range(len(held))]}
        for i, shares in enumerate(held):
            for name, share in shares.items():
                holders.setdefault(name, []).append((i, share))
        self._number = {name: number for number, name in enumerate(holders)}
        self._placement = _placement(list(holders.values()))
        self._credit = rule.first_credit(self._placement)

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._number

    def holders(self, adapter: str | None) -> list[int]:
        """Return the instances that hold an adapter; None is the base model."""
        return [int(each) for each in self._placement.instance[slice(*self._range(adapter))]]

    def choose(self, adapter: str | None, is_there: Callable[[int], bool]) -> int | None:
        """Return the instance that gets a request; None when no holder is there."""
        first, last = self._range(adapter)
        there = [place for place in range(first, last) if is_there(int(self._placement.instance[place]))]
        if not there:
            return None
        if len(there) == last - first:
            place = _by_credit(self._placement, first, last, self._credit)
        else:
            place = there[self._among(np.array(there))]
        return int(self._placement.instance[place])

    def _among(self, places: NDArray[Any]) -> int:
        """Choose among some of the places of an adapter, and return which of them."""
        parts = _placement([[(int(self._placement.instance[p]), self._placement.share[p]) for p in places]])
        credit = self._credit[places]
        chosen = _by_credit(parts, 0, places.size, credit)
        self._credit[places] = credit
        return chosen

    def _range(self, adapter: str | None) -> tuple[int, int]:
        number = self._number[adapter]
        return int(self._placement.start[number]), int(self._placement.start[number + 1])


def _placement(lists: Sequence[Sequence[tuple[int, float]]]) -> Placement:
    """Return a placement from the holders of each adapter; where all shares are 0, they get equal ones."""
    shares = []
    for holders in lists:
        total = sum(share for _, share in holders)
        shares += [share / total if total > 0 else 1.0 / len(holders) for _, share in holders]
    counts = [len(holders) for holders in lists]
    return Placement(
        start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        instance=np.array([i for holders in lists for i, _ in holders], np.int32),
        local=np.zeros(
            sum(counts), np.int32
        ),  # what an adapter's number is at an instance, is its own affair
        share=np.array(shares, np.float64),
    )
