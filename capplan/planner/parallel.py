"""Many questions at once: in threads, since compiled twins let each other run, or as who is asked prefers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from capplan.planner.problem import Assignment, Estimate, Estimator

Item = TypeVar("Item")
Result = TypeVar("Result")


def estimate_all(estimator: Estimator, assignments: Sequence[Assignment]) -> list[Estimate]:
    """Return the estimates of several instances, in their order.

    An estimator may have a batch method ``estimate_all(assignments)``; any other is called in threads.
    """
    own: Callable[[Sequence[Assignment]], list[Estimate]] | None = getattr(estimator, "estimate_all", None)
    return parallel_map(estimator, assignments) if own is None else own(assignments)


def parallel_map(
    ask: Callable[[Item], Result], items: Iterable[Item], answered: Callable[[int], None] | None = None
) -> list[Result]:
    """Return the answers in the order of the items, whichever comes first.

    Parameters
    ----------
    ask
        A function without side effects that other threads can see.
    items
        What it is asked.
    answered
        Called in this thread with the number of answers so far.
    """
    answers: list[Result] = []
    pool = ThreadPoolExecutor(cpu_count())
    try:
        for answer in pool.map(ask, items):
            answers.append(answer)
            if answered is not None:
                answered(len(answers))
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt, what has not begun never does
    return answers
