"""How a request ended, and what is kept of it."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

FINISHED: Final = "finished"
UNFINISHED: Final = "unfinished"
"""Still waiting or executing when the run ended."""
REJECTED: Final = "rejected"
"""Not sent: as many were in flight as may be."""
TIMEOUT: Final = "timeout"
DISCONNECTED: Final = "disconnected"
"""The server closed the connection before the answer was complete."""
REFUSED: Final = "refused"
"""No connection could be made."""
BAD_RESPONSE: Final = "bad_response"
"""What came back is no HTTP, or no completion."""
HTTP_PREFIX: Final = "http_"
"""Followed by the status: an answer other than 200."""
CLIENT_LIMIT: Final = "client_limit"
"""This machine had no file descriptor or port left for another connection."""

NOT_FAILURES: Final = (FINISHED, UNFINISHED, REJECTED)


class Outcome(NamedTuple):
    """One request. Times are seconds on the clock of the run; NaN where nothing happened."""

    number: int
    """Its place in the schedule."""
    kind: str
    sent_s: float
    """When its bytes were handed to the connection."""
    ended_s: float
    """When its last byte had come, or it failed."""
    times_s: list[float]
    """When each event with a token arrived."""
    prompt_tokens: int | None = None
    """As the server counted them; None where it did not say."""
    output_tokens: int | None = None
    message: str = ""
    """What a failure said."""


def not_sent(number: int, kind: str) -> Outcome:
    """Return the outcome of a request that never went out."""
    return Outcome(number, kind, math.nan, math.nan, [])
