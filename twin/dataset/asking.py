"""Spans of scenarios, answered by several processes or a cluster in the order they were asked."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Final

from capplan.models.learning.manifest import Asked
from capplan.spec import Profile
from capplan.twin.dataset.answers import NoRow, Row, answer_span
from capplan.twin.sweep import cores, in_parallel

_SCENARIOS_PER_PART: Final = 8  # what a worker is asked at once
_PARTS_PER_WORKER: Final = 16  # in one call of in_parallel, less one: it then hands them out one by one

Span = tuple[int, int]
"""First number of scenarios, and the number after the last."""


def parts_of(span: Span) -> list[Span]:
    """Return a span in parts so small that workers finish at about the same time."""
    starts = range(span[0], span[1], _SCENARIOS_PER_PART)
    return [(start, min(start + _SCENARIOS_PER_PART, span[1])) for start in starts]


def answers_to(
    spans: Sequence[Span], profile: Profile, asked: Asked, workers: int | None, ray_address: str | None
) -> Generator[list[Row | NoRow], None, None]:
    """Give the answers to the parts of all spans, in order.

    Parameters
    ----------
    spans
        What is to be answered.
    profile, asked
        Whose twin answers, and what it is asked.
    workers, ray_address
        As for `capplan.twin.sweep.in_parallel`.
    """
    parts = [part for span in spans for part in parts_of(span)]
    ask = partial(_ask, profile, asked.design, asked.seed, asked.duration_s)
    for window in _windows(parts, workers or cores(), over_ray=ray_address is not None):
        yield from in_parallel(ask, window, workers=workers, ray_address=ray_address)


def _windows(parts: list[Span], workers: int, *, over_ray: bool) -> Iterator[list[Span]]:
    """Give what is answered in one go.

    `in_parallel` sends many items at once when it has many, and a shard would wait for all that went with its
    last one. The first part alone is answered by this process, which then hands its compiled code to the
    workers that it forks. To a cluster, one connection serves for everything.
    """
    if over_ray:
        yield parts
        return
    if parts:
        yield parts[:1]
    size = _PARTS_PER_WORKER * workers - 1
    for at in range(1, len(parts), size):
        yield parts[at : at + size]


def _ask(profile: Profile, design: str, seed: int, duration_s: float, span: Span) -> list[Row | NoRow]:
    _end_with_parent(os.getpid())
    return answer_span(design, profile, seed, duration_s, *span)


@functools.cache
def _end_with_parent(pid: int) -> None:
    """Have this process end when the one that started it is killed; it would wait for work forever.

    Once per process: what a forked one inherits of this cache is about another `pid`.
    """
    del pid
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
