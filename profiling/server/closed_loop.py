"""Closed loops: so many streams at all times, each asking again as soon as it has been answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from capplan.errors import CapplanError
from capplan.profiling.load.client import Client
from capplan.profiling.load.outcome import FINISHED, UNFINISHED, Outcome
from capplan.profiling.load.prompts import Bodies
from capplan.profiling.server.points import Point

_MOST_FAILURES: Final = 3
_CANCEL_S: Final = 10.0


@dataclass(frozen=True)
class Answered:
    """One request of a closed loop."""

    outcome: Outcome
    model: int
    """Position of its model."""
    prompt_tokens: int
    output_tokens: int
    """As asked."""


class LoopError(CapplanError):
    """Requests to a server that is measured failed."""


class Asker:
    """Sends requests with numbers of their own, so that no two have a prompt in common.

    Parameters
    ----------
    client, bodies, clock
        Whom to ask, how requests are written, and seconds on the client's clock.
    """

    def __init__(self, client: Client, bodies: Bodies, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._client = client
        self._bodies = bodies
        self._numbers = itertools.count()

    async def ask(self, model: int, prompt_tokens: int, output_tokens: int) -> Answered:
        """Send one request to the model of this position and wait for its end."""
        number = next(self._numbers)
        body = self._bodies.body(number, model, prompt_tokens, output_tokens)
        outcome = await self._client.complete(number, body)
        return Answered(outcome, model, prompt_tokens, output_tokens)


async def closed_loop(
    asker: Asker, point: Point, models: Sequence[int], ramp_s: float, measured_s: float, seed: int
) -> tuple[list[Answered], float, float]:
    """Keep a point up for a while.

    Parameters
    ----------
    asker
        Sends the requests.
    point
        How many streams of what.
    models
        Positions of the models that streams ask for in turn.
    ramp_s, measured_s
        How long before, and how long it is measured.
    seed
        Of the lengths.

    Returns
    -------
    answered : list of Answered
        All requests, those under way at the end among them.
    start_s, end_s : float
        The measured time.

    Raises
    ------
    LoopError
        When requests fail.
    """
    done: list[Answered] = []
    failures: list[Outcome] = []
    begun_s = asker.clock()
    streams = [
        asyncio.create_task(_stream(asker, point, models[at % len(models)], (seed, at), done, failures))
        for at in range(point.streams)
    ]
    start_s, end_s = begun_s + ramp_s, begun_s + ramp_s + measured_s
    try:
        await asyncio.wait(streams, timeout=max(0.0, end_s - asker.clock()))
    finally:  # also when this loop itself is cancelled
        for each in streams:
            each.cancel()
        await asyncio.wait(streams, timeout=_CANCEL_S)
    for each in streams:
        if each.done() and not each.cancelled() and (error := each.exception()) is not None:
            raise error
    if len(failures) >= _MOST_FAILURES:
        raise LoopError(f"{failures[-1].kind}: {failures[-1].message}"[:300])
    return done, start_s, end_s


async def _stream(
    asker: Asker,
    point: Point,
    model: int,
    seed: tuple[int, int],
    done: list[Answered],
    failures: list[Outcome],
) -> None:
    """Ask again and again; the first answer is cut short at random, so that streams are out of step."""
    rng = np.random.default_rng(seed)
    share = rng.uniform(0.1, 1.0)
    while True:
        prompt, output = (_spread(rng, mean) for mean in (point.prompt_tokens, point.output_tokens))
        answered = await asker.ask(model, prompt, max(2, round(output * share)))
        share = 1.0
        outcome = answered.outcome
        if outcome.kind in (FINISHED, UNFINISHED):
            done.append(answered)
        else:
            failures.append(outcome)
            if len(failures) >= _MOST_FAILURES:
                return
        if outcome.kind == UNFINISHED:
            return


def _spread(rng: np.random.Generator, mean: int) -> int:
    return int(rng.integers(max(1, (mean + 1) // 2), max(1, 3 * mean // 2) + 1))
