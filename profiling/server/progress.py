"""Telling how far a measuring of a server is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called with a stage, how much of it is done, and how much there is."""


class Counter:
    """Tells how much of a stage is done, each time it is called.

    Parameters
    ----------
    tell
        Who is told.
    stage, total
        Its name, and how much there is of it.
    """

    def __init__(self, tell: OnProgress, stage: str, total: int) -> None:
        self._tell, self._stage, self._total, self._done = tell, stage, total, 0
        tell(stage, 0, total)

    def __call__(self) -> None:
        """Count one more."""
        self._done += 1
        self._tell(self._stage, self._done, self._total)
