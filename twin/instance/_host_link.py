"""Link from host memory to GPUs: one copy at a time, loads on demand before prefetches.

Instances may share a link. Copies are queued in the order of time over all of them; a copy that has begun is
not interrupted. An instance has at most one prefetch at a time.

Pauses of a simulation, in which it calls an interrupt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from capplan._jit import by_reference, inner
from capplan.serving import Records, int_fields, new_record

MAX_PAUSE_NS: Final = 60 * 10**9
"""Largest simulated time between two calls."""
_FIRST_PAUSE_NS: Final = 10**9
_TARGET_S: Final = 0.1
"""Time of computing between two calls, above which the next one comes sooner."""


class Pauses:
    """Times at which a simulation calls its interrupt; an exception that it raises ends the simulation.

    A simulated minute takes milliseconds or, with a long queue, seconds: the distance of the calls adapts to
    the time of computing. What is simulated does not depend on it.
    """

    def __init__(self, interrupt: Callable[[], None] | None) -> None:
        self.next_ns = NEVER_NS if interrupt is None else _FIRST_PAUSE_NS
        """Simulated time of the next call; NEVER_NS without an interrupt."""
        self._interrupt = interrupt
        self._length_ns = _FIRST_PAUSE_NS
        self._called_s = time.monotonic()

    def call(self) -> None:
        """Call the interrupt at `next_ns`, and choose the time of the next call."""
        if self._interrupt is None:
            return
        self._interrupt()
        now_s = time.monotonic()
        growth = min(2.0, _TARGET_S / max(now_s - self._called_s, 1e-9))
        self._called_s = now_s
        self._length_ns = max(1, min(MAX_PAUSE_NS, int(growth * self._length_ns)))
        self.next_ns += self._length_ns


NEVER_NS = 2**62

_LINK = int_fields(
    "free_ns",  # end of the copies that have begun or are on demand
    "busy_ns",  # their time
)
_PREFETCH = int_fields(
    "asked_ns",  # start of the wait of a prefetch that has not begun; NEVER_NS without one
    "copy_ns",  # its duration
    "ready_ns",  # end of the last prefetch that has begun
)


@by_reference
class HostLink(NamedTuple):
    """State of a link."""

    at: np.record
    """Fields as in `_LINK`."""
    prefetches: Records
    """Last prefetch of each instance on the link, shape (instances,); fields as in `_PREFETCH`."""


def new_link(instances: int = 1) -> HostLink:
    """Return an idle link."""
    prefetches = np.zeros(instances, _PREFETCH).view(np.recarray)
    prefetches.asked_ns = NEVER_NS
    return HostLink(at=new_record(_LINK), prefetches=prefetches)


@inner
def copy_on_demand(link: HostLink, now_ns: int, copy_ns: int) -> int:
    """Queue a load on demand and return its end."""
    _begin_prefetches(link, now_ns)
    return _append(link, now_ns, copy_ns)


@inner
def copy_ahead(link: HostLink, place: int, now_ns: int, copy_ns: int) -> None:
    """Queue a prefetch of the instance at `place`."""
    _begin_prefetches(link, now_ns)
    link.prefetches.asked_ns[place] = now_ns
    link.prefetches.copy_ns[place] = copy_ns


@inner
def promote(link: HostLink, place: int, now_ns: int) -> int:
    """Make the prefetch of an instance a load on demand unless it has begun, and return its end."""
    _begin_prefetches(link, now_ns)
    record = link.prefetches[place]
    if record.asked_ns != NEVER_NS:
        record.asked_ns = NEVER_NS
        record.ready_ns = _append(link, now_ns, record.copy_ns)
    return int(link.prefetches.ready_ns[place])


@inner
def prefetched_ns(link: HostLink, place: int) -> int:
    """Return the end of the last prefetch of an instance, unless further loads on demand delay it."""
    asked_ns = link.prefetches.asked_ns[place]
    if asked_ns == NEVER_NS:
        return int(link.prefetches.ready_ns[place])
    free_ns = link.at.free_ns
    earlier = _next_prefetch(link, -1, -1)
    while True:
        record = link.prefetches[earlier]
        free_ns = max(free_ns, record.asked_ns) + record.copy_ns
        if earlier == place:
            return int(free_ns)
        earlier = _next_prefetch(link, record.asked_ns, earlier)


@inner
def _append(link: HostLink, now_ns: int, copy_ns: int) -> int:
    ready_ns: int = max(link.at.free_ns, now_ns) + copy_ns
    link.at.free_ns = ready_ns
    link.at.busy_ns += copy_ns
    return ready_ns


@inner
def _begin_prefetches(link: HostLink, now_ns: int) -> None:
    """Move the prefetches that have begun before `now_ns` to the copies that cannot be overtaken."""
    place = _next_prefetch(link, -1, -1)
    while place >= 0:
        record = link.prefetches[place]
        if max(link.at.free_ns, record.asked_ns) >= now_ns:
            break
        record.ready_ns = _append(link, record.asked_ns, record.copy_ns)
        record.asked_ns = NEVER_NS
        place = _next_prefetch(link, -1, -1)


@inner
def _next_prefetch(link: HostLink, asked_ns: int, place: int) -> int:
    """Return the place of the first waiting prefetch behind (asked_ns, place), or -1."""
    chosen = -1
    least_ns = NEVER_NS
    for other in range(link.prefetches.size):
        other_ns = link.prefetches.asked_ns[other]
        behind = other_ns > asked_ns or (other_ns == asked_ns and other > place)
        if behind and other_ns < least_ns:
            chosen, least_ns = other, other_ns
    return chosen
