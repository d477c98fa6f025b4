"""Closed-loop load on a server: operating points, first tokens and adapter loads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from capplan.errors import CapplanError, InputError
from capplan.profiling.load.client import CompletionClient
from capplan.profiling.load.record import FINISHED, UNFINISHED, RequestOutcome
from capplan.profiling.load.requests import RequestBodies

_SEED: Final = 0
_MOST_FAILURES: Final = 3
_CANCEL_S: Final = 10.0
_MS_PER_S: Final = 1e3
_LOAD_PROMPT: Final = 8
"""Tokens: short, so that the load is a large part of the answer."""
OUTPUT_TOKENS: Final = 2
_LEAST_MS: Final = 1e-3
"""Of a load that is too short to be told from none; calibration takes times above 0."""


@dataclass(frozen=True)
class ServerPoint:
    """A closed loop: as soon as a stream's answer is complete, its next request follows.

    Attributes
    ----------
    streams : int
        Requests in flight.
    adapters : int
        Distinct adapters that they ask for in turn; 0: the base model.
    prompt_tokens, output_tokens : int
        Mean lengths; single ones are spread evenly from a half to one and a half of these, so that streams do
        not move in step.
    """

    streams: int
    adapters: int
    prompt_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"b{self.streams}-a{self.adapters}-p{self.prompt_tokens}-o{self.output_tokens}"

    @property
    def kv_tokens(self) -> int:
        """Most tokens that all streams hold at once."""
        return self.streams * 3 * (self.prompt_tokens + self.output_tokens) // 2


@dataclass(frozen=True)
class ServerBounds:
    """What the server can do.

    Attributes
    ----------
    adapters : int
        How many may be asked for.
    a_max : int
        Adapter slots: up to so many are asked for at once, so that none waits for a slot.
    max_streams : int
        Up to so many run at once.
    longest : int
        Tokens of prompt and output together.
    kv_tokens : int, optional
        Capacity; points that might not fit are left out. None: not known.
    prompt_tokens, output_tokens : int
        Typical lengths of the work to be predicted.
    """

    adapters: int
    a_max: int
    max_streams: int
    longest: int
    kv_tokens: int | None
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for name in ("a_max", "max_streams", "prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise InputError("must be at least 1", getattr(self, name), name)
        if self.adapters < 0:
            raise InputError("must be at least 0", self.adapters, "adapters")

    def allow(self, point: ServerPoint) -> bool:
        """Tell whether a point can be measured without anything waiting."""
        longest = 3 * (point.prompt_tokens + point.output_tokens) // 2
        return longest <= self.longest and (self.kv_tokens is None or point.kv_tokens <= self.kv_tokens)


def design(bounds: ServerBounds, base_model: bool = True) -> list[ServerPoint]:
    """Return the points to measure, those that tell most first.

    Batches are powers of 2, adapters among them likewise, prompts a quarter of the typical length, that
    length, and four times it; outputs long and short, so that steps hold few and many prompt tokens. The
    corners come first, then the rest in an order drawn once for all: whoever stops early has some of each.

    Parameters
    ----------
    bounds
        What the server can do.
    base_model
        Whether it also answers without an adapter.
    """
    corners: list[ServerPoint] = []
    rest: list[ServerPoint] = []
    batches = powers_of_2(bounds.max_streams)
    prompts = sorted({max(4, bounds.prompt_tokens // 4), bounds.prompt_tokens, 4 * bounds.prompt_tokens})
    outputs = sorted({max(4, bounds.output_tokens // 2), 2 * bounds.output_tokens})
    for streams in batches:
        active = [0] if base_model else []
        active += powers_of_2(min(streams, bounds.a_max, bounds.adapters))
        for adapters in active:
            for prompt in prompts:
                for output in outputs:
                    point = ServerPoint(streams, adapters, prompt, output)
                    if not bounds.allow(point):
                        continue
                    ends = (
                        streams in (batches[0], batches[-1])
                        and adapters in (active[0], active[-1])
                        and prompt in (prompts[0], prompts[-1])
                    )
                    (corners if ends else rest).append(point)
    order = np.random.default_rng(_SEED).permutation(len(rest)).tolist()
    return corners + [rest[at] for at in order]


def powers_of_2(limit: int) -> list[int]:
    """Return the powers of 2 up to a limit, and the limit; none below 1."""
    powers = [1 << shift for shift in range(limit.bit_length()) if 1 << shift <= limit]
    return powers if limit < 1 or limit in powers else [*powers, limit]


@dataclass(frozen=True)
class ClosedLoopRequest:
    """One request of a closed loop."""

    outcome: RequestOutcome
    model: int
    """Position of its model."""
    prompt_tokens: int
    output_tokens: int
    """As asked."""


class LoopError(CapplanError):
    """Requests to a server that is measured failed."""


class RequestSender:
    """Sends requests with numbers of their own, so that no two have a prompt in common."""

    def __init__(self, client: CompletionClient, bodies: RequestBodies, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._client = client
        self._bodies = bodies
        self._numbers = itertools.count()

    async def ask(self, model: int, prompt_tokens: int, output_tokens: int) -> ClosedLoopRequest:
        """Send one request to the model of this position and wait for its end."""
        number = next(self._numbers)
        body = self._bodies.body(number, model, prompt_tokens, output_tokens)
        outcome = await self._client.complete(number, body)
        return ClosedLoopRequest(outcome, model, prompt_tokens, output_tokens)


async def closed_loop(
    asker: RequestSender,
    point: ServerPoint,
    models: Sequence[int],
    ramp_s: float,
    measured_s: float,
    seed: int,
) -> tuple[list[ClosedLoopRequest], float, float]:
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
    done: list[ClosedLoopRequest] = []
    failures: list[RequestOutcome] = []
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
    asker: RequestSender,
    point: ServerPoint,
    model: int,
    seed: tuple[int, int],
    done: list[ClosedLoopRequest],
    failures: list[RequestOutcome],
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


async def first_tokens(
    asker: RequestSender,
    models: Sequence[int],
    lengths: Sequence[int],
    repeats: int,
    done: Callable[[], None],
) -> list[dict[str, float]]:
    """Return how long the first token takes on an idle server, a row for each prompt length.

    Raises
    ------
    LoopError
        When a request fails.
    """
    for model in models:
        await _ttft_ms(asker, model, _LOAD_PROMPT)
    rows = []
    for prompt in lengths:
        found = [await _ttft_ms(asker, models[at % len(models)], prompt) for at in range(repeats)]
        low, middle, high = np.percentile(found, (25, 50, 75)).tolist()
        rows.append(
            {
                "prompt_tokens": float(prompt),
                "ttft_ms_p50": middle,
                "ttft_ms_p25": low,
                "ttft_ms_p75": high,
                "requests": float(repeats),
            }
        )
        done()
    return rows


async def adapter_loads(
    asker: RequestSender,
    adapters: Mapping[int, int],
    a_max: int,
    s_max: int,
    rounds: int,
    done: Callable[[], None],
) -> list[dict[str, float | str]]:
    """Return how long copying adapters into slots takes, a row for each rank.

    More adapters than slots are asked for in turn, each twice: the first time it must be loaded, since the
    slots hold those asked for since, the second time it is there. The median difference is the load. A server
    that keeps fewer adapters on the host than there are reads them from disk each time, and that is in it.

    Parameters
    ----------
    asker
        Sends the requests.
    adapters
        Position of each adapter and its rank; nothing is measured unless there are more than slots.
    a_max, s_max
        Slots and their rank.
    rounds
        How often each adapter is loaded.
    done
        Called after each round.

    Raises
    ------
    LoopError
        When a request fails.
    """
    if len(adapters) <= a_max:
        return []
    turn = list(adapters)[: a_max + max(1, a_max // 2, 2)]
    longer: dict[int, list[float]] = {}
    for number in range(rounds + 1):
        for model in turn:
            cold, warm = [await _ttft_ms(asker, model, _LOAD_PROMPT) for _ in range(2)]
            if number:  # the first round fills the slots
                longer.setdefault(adapters[model], []).append(cold - warm)
        done()
    return [
        {
            "rank": float(rank),
            "s_max": float(s_max),
            "kind": "gpu",
            "ms": max(_LEAST_MS, float(np.median(differences))),
            "ms_p25": float(np.percentile(differences, 25)),
            "ms_p75": float(np.percentile(differences, 75)),
            "loads": float(len(differences)),
        }
        for rank, differences in sorted(longer.items())
    ]


async def _ttft_ms(asker: RequestSender, model: int, prompt_tokens: int) -> float:
    outcome = (await asker.ask(model, prompt_tokens, OUTPUT_TOKENS)).outcome
    if outcome.kind == UNFINISHED:  # the client takes in that it was cancelled, and tells it so
        raise asyncio.CancelledError
    if outcome.kind != FINISHED:
        raise LoopError(f"{outcome.kind}: {outcome.message}"[:300])
    return _MS_PER_S * (outcome.times_s[0] - outcome.sent_s)
