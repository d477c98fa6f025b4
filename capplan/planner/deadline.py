"""Deadlines of planning, and the division of a time limit among its stages."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Final, Self


class OutOfTimeError(Exception):
    """A deadline has passed; solvers and verification end with what they have found."""


@dataclass(frozen=True)
class Deadline:
    """Time at which simulations and estimates are no longer started."""

    at_s: float = math.inf
    """Value of `time.monotonic`."""

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Return the deadline in a number of seconds."""
        return cls(time.monotonic() + seconds)

    @property
    def passed(self) -> bool:
        """Whether it has passed."""
        return self.at_s != math.inf and time.monotonic() > self.at_s

    def check(self) -> None:
        """Raise `OutOfTimeError` if it has passed."""
        if self.passed:
            raise OutOfTimeError


NEVER: Final = Deadline()

_SEARCH_SHARE: Final = 0.5
_VERIFICATION_SHARE: Final = 0.8
_UNVERIFIED_SHARE: Final = 0.9
"""Shares of the time limit at which the search, the verification, and a search without verification end."""
_SHORTAGE_S: Final = 15.0
"""Time for the number of GPUs that would hold, without a time limit."""


@dataclass(frozen=True)
class TimeBudget:
    """Division of a time limit among search, verification and bottlenecks."""

    limit_s: float | None
    """Time limit; None: no deadline."""
    verify: bool
    """Whether the plan is verified."""
    start_s: float = field(default_factory=time.monotonic)
    """Value of `time.monotonic` at the start."""

    def search_s(self, default_s: float) -> float:
        """Return the duration of the search, which is the default without a time limit."""
        if self.limit_s is None:
            return default_s
        return self.limit_s * (_SEARCH_SHARE if self.verify else _UNVERIFIED_SHARE)

    @property
    def search(self) -> Deadline:
        """Deadline of the search."""
        return self._share(_SEARCH_SHARE if self.verify else _UNVERIFIED_SHARE)

    @property
    def shortage(self) -> Deadline:
        """Deadline of the search for a number of GPUs that would hold."""
        return Deadline.after(_SHORTAGE_S) if self.limit_s is None else self._share(_UNVERIFIED_SHARE)

    @property
    def verification(self) -> Deadline:
        """Deadline of the verification; none for the single seed of an unverified plan."""
        return self._share(_VERIFICATION_SHARE) if self.verify else NEVER

    @property
    def end(self) -> Deadline:
        """Deadline of everything."""
        return self._share(1.0)

    def _share(self, share: float) -> Deadline:
        return NEVER if self.limit_s is None else Deadline(self.start_s + share * self.limit_s)
