"""The plan's shares without random draws: smooth weighted round robin (nginx, 2012).

Every holder gains its share of credit with each request of the adapter. The holder with most credit gets the
request and pays 1. The initial credit is a part of the share that differs by adapter: otherwise the few
requests of all rare adapters would go to the same instance.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from capplan.compile import inner
from capplan.serving.routers.fleet import Placement


def first_credit(placement: Placement) -> NDArray[np.float64]:
    """Return the credit of every place before the first request."""
    holders = np.diff(placement.start)
    adapter = np.repeat(np.arange(holders.size), holders)
    position = np.arange(adapter.size) - placement.start[adapter]
    part = (position - adapter) % holders[adapter] / holders[adapter]
    return np.asarray(placement.share * part)


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
