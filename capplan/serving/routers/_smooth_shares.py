"""The plan's shares without random draws: smooth weighted round robin (nginx, 2012).

Every holder gains its share of credit with each request of the adapter. The holder with most credit gets the
request and pays 1. The initial credit is a part of the share that differs by adapter: otherwise the few
requests of all rare adapters would go to the same instance.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capplan._jit import inner
from capplan.serving.routers._fleet import (
    Fleet,
    Placement,
    Router,
    RoutingRule,
    adapter_of_places,
    places_in_both,
)


def first_credit(placement: Placement) -> NDArray[np.float64]:
    """Return the credit of every place before the first request."""
    holders, adapter = np.diff(placement.start), adapter_of_places(placement)
    position = np.arange(adapter.size) - placement.start[adapter]
    part = (position - adapter) % holders[adapter] / holders[adapter]
    return np.asarray(placement.share * part)


def carried_credit(
    credit: NDArray[np.float64], before: Placement, after: Placement, numbers: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """Return the credit of every place of a new routing table.

    Holders that stay keep theirs, so that many short periods do not begin every time with the same holder.
    New ones have their first credit.

    Parameters
    ----------
    credit
        By place of the table before. Places beyond those of its last adapter are not used.
    numbers
        As for `places_in_both`.
    """
    carried = first_credit(after)
    here, there = places_in_both(before, after, numbers)
    carried[there] = credit[here]
    return carried


@inner
def by_credit(placement: Placement, first: int, last: int, credit: NDArray[np.float64]) -> int:
    """Return the holder with most credit, the first one of several, and update the credits.

    Fast without compilation, too.
    """
    own = credit[first:last]
    own += placement.share[first:last]
    chosen = int(own.argmax())
    own[chosen] -= 1.0
    return first + chosen


@inner
def smooth_share(
    rule: RoutingRule, fleet: Fleet, placement: Placement, first: int, last: int, draw: float
) -> int:
    """Return the holder with most credit, as `by_credit` does."""
    return by_credit(placement, first, last, rule.credit)


ROUTERS = {
    "smooth-shares": Router(
        smooth_share,
        "the same shares by smooth weighted round robin",
        "nginx",
        reads_state=False,
        keeps_credit=True,
    )
}
