"""Threads: compiled twins let each other run, so all cores share the work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def in_parallel(
    ask: Callable[[Item], Answer], items: Iterable[Item], answered: Callable[[int], None] | None = None
) -> list[Answer]:
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
    answers: list[Answer] = []
    pool = ThreadPoolExecutor(cpu_count())
    try:
        for answer in pool.map(ask, items):
            answers.append(answer)
            if answered is not None:
                answered(len(answers))
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt, what has not begun never does
    return answers
