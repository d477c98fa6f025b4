"""Parallel evaluation of instances, in threads: compiled simulations release the GIL."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import TypeVar

from capplan.planner.problem._deadline import Deadline, OutOfTimeError

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
