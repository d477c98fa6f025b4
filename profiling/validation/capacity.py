"""What an engine bears, as the twin sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from capplan.errors import InfeasibleError

if TYPE_CHECKING:
    from capplan.twin import SimulationResult

_STARVED: Final = 0.5
"""Share of a load below which an engine answers as fast as it ever does."""
_MOST_DOUBLINGS: Final = 20


def saturated_rps(simulated: Callable[[float], SimulationResult]) -> float:
    """Return the rate that an engine answers when far more is asked.

    Parameters
    ----------
    simulated
        Returns what the twin makes of a rate, in requests per second.

    Raises
    ------
    InfeasibleError
        When nothing starves it.
    """
    rate_rps = 1.0
    for _ in range(_MOST_DOUBLINGS):
        found = simulated(rate_rps)
        if found.served_fraction < _STARVED:
            return rate_rps * found.throughput_tok_s / found.offered_tok_s
        rate_rps *= 2.0
    raise InfeasibleError("no load starves this engine", "starvation")
