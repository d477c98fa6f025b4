"""Serving a stream of requests that arrive at given times, under real time or under time that steps move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from capplan.engine.arguments import Prompt
from capplan.engine.engine import Engine
from capplan.engine.request import Completion, Request, SamplingParams

_LONGEST_WAIT_S = 60.0


class Arrival(NamedTuple):
    """A request and when it arrives, in nanoseconds after the replay begins."""

    arrival_ns: int
    prompt: Prompt
    adapter: str | None
    params: SamplingParams


def replay(engine: Engine, arrivals: Sequence[Arrival]) -> list[Completion | None]:
    """Serve requests in the order of their arrival and return the answers; None where the engine was full.

    With `Engine(virtual_time=True)` idle time takes no time, and the same measured durations of steps lead to
    the same decisions again.
    """
    start_ns = engine.loop.clock.now_ns()
    requests: list[Request | None] = []
    while True:
        now_ns = engine.loop.clock.now_ns() - start_ns
        while len(requests) < len(arrivals) and arrivals[len(requests)].arrival_ns <= now_ns:
            requests.append(_submitted(engine, arrivals[len(requests)], start_ns))
        if engine.step() is not None:
            continue
        upcoming = [start_ns + arrivals[len(requests)].arrival_ns] if len(requests) < len(arrivals) else []
        waits_s = (upcoming[0] - engine.loop.clock.now_ns()) * 1e-9 if upcoming else _LONGEST_WAIT_S
        loaded_ns = engine.loop.loader.next_ns(timeout_s=max(0.0, waits_s))
        if loaded_ns is not None:
            upcoming.append(loaded_ns)
        if not upcoming:
            return [None if request is None else engine.completion(request) for request in requests]
        engine.loop.clock.sleep_until(min(upcoming))


def _submitted(engine: Engine, arrival: Arrival, start_ns: int) -> Request | None:
    at_ns = start_ns + arrival.arrival_ns
    request = engine.new_request(arrival.prompt, arrival.adapter, arrival.params, at_ns)
    return request if engine.submit(request) else None
