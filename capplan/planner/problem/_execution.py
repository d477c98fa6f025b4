"""Execution of simulations: in threads, as compiled ones release the GIL, and until deadlines of planning."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from os import cpu_count
from typing import Final, Self, TypeVar


class OutOfTimeError(Exception):
    """A deadline has passed; solvers and verification end with what they have found."""


@dataclass(frozen=True)
class Deadline:
    """Time at which estimates and simulations end."""

    at_s: float = math.inf
    """Value of `time.monotonic`."""
    latest_s: float = -math.inf
    """The same while the answer is missing."""
    is_missing: Callable[[], bool] = field(default=lambda: False, compare=False)
    """Whether it is."""

    @classmethod
    def after(cls, seconds: float) -> Self:
        """Return the deadline in a number of seconds."""
        return cls(time.monotonic() + seconds)

    @property
    def is_limited(self) -> bool:
        """Whether it can pass."""
        return self.at_s != math.inf

    @property
    def passed(self) -> bool:
        """Whether it has passed."""
        if not self.is_limited:
            return False
        now_s = time.monotonic()
        return now_s > self.at_s and (now_s > self.latest_s or not self.is_missing())

    def check(self) -> None:
        """Raise `OutOfTimeError` if it has passed."""
        if self.passed:
            raise OutOfTimeError


NEVER: Final = Deadline()


def interrupt_at(*deadlines: Deadline) -> Callable[[], None] | None:
    """Return a function that raises `OutOfTimeError` at the first of these deadlines; None without any.

    Simulations call it every simulated minute or sooner.
    """
    limited = [each for each in deadlines if each.is_limited]

    def interrupt() -> None:
        for each in limited:
            each.check()

    return interrupt if limited else None


_SEARCH_SHARE: Final = 0.5
_FIRST_ANSWER_SHARE: Final = 0.7
"""Shares of the time limit at which the search ends, with an answer and without."""
_VERIFICATION_SHARE: Final = 0.85
_UNVERIFIED_SHARE: Final = 0.8
"""Shares at which the verification ends, and a search without verification."""
_SHORTAGE_SHARE: Final = 0.9
"""Share at which the search for a number of GPUs that would hold ends."""
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
        """Return the longest duration of the search, which is the default without a time limit."""
        if self.limit_s is None:
            return default_s
        return self.limit_s * (_FIRST_ANSWER_SHARE if self.verify else _UNVERIFIED_SHARE)

    @property
    def search(self) -> Deadline:
        """Deadline of the search, which is later while no answer is found."""
        if not self.verify:
            return self._share(_UNVERIFIED_SHARE)
        return replace(self._share(_SEARCH_SHARE), latest_s=self._share(_FIRST_ANSWER_SHARE).at_s)

    @property
    def shortage(self) -> Deadline:
        """Deadline of the search for a number of GPUs that would hold."""
        return Deadline.after(_SHORTAGE_S) if self.limit_s is None else self._share(_SHORTAGE_SHARE)

    @property
    def verification(self) -> Deadline:
        """Deadline of the verification; for the single seed of an unverified plan that of everything."""
        return self._share(_VERIFICATION_SHARE) if self.verify else self.end

    @property
    def end(self) -> Deadline:
        """Deadline of everything."""
        return self._share(1.0)

    def _share(self, share: float) -> Deadline:
        return NEVER if self.limit_s is None else Deadline(self.start_s + share * self.limit_s)


Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[str, int, int], None]
"""Called with stage, done and total."""


def no_progress(*_: object) -> None:
    """Report nothing."""


def parallel_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    answered: Callable[[int], None] | None = None,
) -> list[Result]:
    """Return the results of a thread-safe function, in the order of the items.

    `answered` is called in this thread with the number of results so far.
    """
    results: list[Result] = []
    pool = ThreadPoolExecutor(cpu_count())
    try:
        for result in pool.map(function, items):
            results.append(result)
            if answered is not None:
                answered(len(results))
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt, pending calls never start
    return results


def parallel_until(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    deadline: Deadline,
    answered: Callable[[int], None] | None = None,
) -> list[Result | None]:
    """Return the results as `parallel_map` does; None for a call that a deadline ends or prevents.

    A function that takes long ends at the deadline by raising `OutOfTimeError` itself.
    """

    def until(item: Item) -> Result | None:
        try:
            deadline.check()
            return function(item)
        except OutOfTimeError:
            return None

    return parallel_map(until, items, answered)
