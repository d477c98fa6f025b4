"""Closed-loop load on a server: operating points, first tokens and adapter loads."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from capplan.errors import CapplanError, InputError
from capplan.profiling._tables import OUTPUT_TOKENS, loading_row
from capplan.profiling.load._client import CompletionClient, open_session
from capplan.profiling.load._preflight import Preflight, bodies_for
from capplan.profiling.load._record import FINISHED, UNFINISHED, RequestOutcome
from capplan.profiling.load._requests import RequestBodies, Target

_SEED: Final = 0
_REQUEST_TIMEOUT_S: Final = 120.0
_MOST_FAILURES: Final = 3
_CANCEL_S: Final = 10.0
_MS_PER_S: Final = 1e3
_LOAD_PROMPT: Final = 8
"""Prompt tokens; few, so that the load dominates."""


@dataclass(frozen=True)
class ServerPoint:
    """Operating point: streams that send their next request on each answer."""

    streams: int
    """Requests in flight."""
    adapters: int
    """Distinct adapters of the streams; 0: the base model."""
    prompt_tokens: int
    """Mean; lengths are uniform from half to one and a half of it."""
    output_tokens: int

    @property
    def name(self) -> str:
        return f"b{self.streams}-a{self.adapters}-p{self.prompt_tokens}-o{self.output_tokens}"

    @property
    def kv_tokens(self) -> int:
        """Upper bound on the tokens of all streams."""
        return self.streams * 3 * (self.prompt_tokens + self.output_tokens) // 2


@dataclass(frozen=True)
class ServerBounds:
    """Limits on operating points of a server."""

    adapters: int
    """Available adapters."""
    a_max: int
    """Adapter slots, a limit on the adapters of a point: none waits for a slot."""
    max_streams: int
    longest: int
    """Tokens of prompt and output together."""
    kv_tokens: int | None
    """Capacity; larger points are left out. None: unknown."""
    prompt_tokens: int
    """Typical prompt of the workload."""
    output_tokens: int

    def __post_init__(self) -> None:
        for name in ("a_max", "max_streams", "prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise InputError("must be at least 1", getattr(self, name), name)
        if self.adapters < 0:
            raise InputError("must be at least 0", self.adapters, "adapters")

    def allow(self, point: ServerPoint) -> bool:
        """Return whether a point runs without waiting."""
        longest = 3 * (point.prompt_tokens + point.output_tokens) // 2
        return longest <= self.longest and (self.kv_tokens is None or point.kv_tokens <= self.kv_tokens)


def design(bounds: ServerBounds, base_model: bool = True) -> list[ServerPoint]:
    """Return the operating points, most informative first.

    Batches and adapters are powers of 2; prompts are a quarter of the typical length, that length and four
    times it; outputs are short and long. Corners come first, then the rest in a random order, so that a short
    budget covers the range. With `base_model`, points without adapters are included.
    """
    corners: list[ServerPoint] = []
    rest: list[ServerPoint] = []
    batches = powers_of_2(bounds.max_streams)
    prompts = sorted({max(4, bounds.prompt_tokens // 4), bounds.prompt_tokens, 4 * bounds.prompt_tokens})
    outputs = sorted({max(4, bounds.output_tokens // 2), 2 * bounds.output_tokens})
    for streams in batches:
        active = [0] if base_model else []
        active += powers_of_2(min(streams, bounds.a_max, bounds.adapters))
        for adapters, prompt, output in itertools.product(active, prompts, outputs):
            point = ServerPoint(streams, adapters, prompt, output)
            ends = ((streams, batches), (adapters, active), (prompt, prompts))
            is_corner = all(value in (values[0], values[-1]) for value, values in ends)
            if bounds.allow(point):
                (corners if is_corner else rest).append(point)
    order = np.random.default_rng(_SEED).permutation(len(rest)).tolist()
    return corners + [rest[at] for at in order]


def powers_of_2(limit: int) -> list[int]:
    """Return the powers of 2 up to a limit, and the limit; none below 1."""
    powers = [1 << shift for shift in range(limit.bit_length()) if 1 << shift <= limit]
    return powers if limit < 1 or limit in powers else [*powers, limit]


@dataclass(frozen=True)
class ClosedLoopRequest:
    """One request of a closed loop, as sent."""

    outcome: RequestOutcome
    model: int
    """Model position."""
    prompt_tokens: int
    output_tokens: int
    """As requested."""


class LoopError(CapplanError):
    """Requests of a measurement failed."""


class RequestSender:
    """Sender of requests with unique numbers, so that no two share a prompt."""

    def __init__(self, client: CompletionClient, bodies: RequestBodies) -> None:
        self._client = client
        self._bodies = bodies
        self._numbers = itertools.count()

    async def send(self, model: int, prompt_tokens: int, output_tokens: int) -> ClosedLoopRequest:
        number = next(self._numbers)
        body = self._bodies.body(number, model, prompt_tokens, output_tokens)
        outcome = await self._client.complete(number, body, output_tokens)
        return ClosedLoopRequest(outcome, model, prompt_tokens, output_tokens)


@asynccontextmanager
async def open_sender(
    target: Target, found: Preflight, names: Sequence[str], used: Sequence[str]
) -> AsyncIterator[RequestSender]:
    """Open a session with a server; `names` are its models by position, `used` those that get requests."""
    async with open_session(target) as session:
        client = CompletionClient(session, target, _REQUEST_TIMEOUT_S, time.monotonic)
        yield RequestSender(client, bodies_for(found, target, names, used))


async def closed_loop(
    sender: RequestSender,
    point: ServerPoint,
    models: Sequence[int],
    ramp_s: float,
    measured_s: float,
    seed: int,
) -> tuple[list[ClosedLoopRequest], float, float]:
    """Keep an operating point up for `ramp_s` + `measured_s` seconds, with models in turn.

    Return all requests, including those in flight at the end, and the ends of the measured interval, which
    begins after the ramp. Raise `LoopError` if requests fail.
    """
    done: list[ClosedLoopRequest] = []
    failures: list[RequestOutcome] = []

    async def stream(number: int) -> None:
        """Send requests one after the other; the first is shortened at random to desynchronize streams."""
        rng = np.random.default_rng((seed, number))
        share = rng.uniform(0.1, 1.0)
        kind = FINISHED
        while kind != UNFINISHED and len(failures) < _MOST_FAILURES:
            prompt, output = (_spread(rng, mean) for mean in (point.prompt_tokens, point.output_tokens))
            model = models[number % len(models)]
            answered = await sender.send(model, prompt, max(2, round(output * share)))
            share, kind = 1.0, answered.outcome.kind
            if kind in (FINISHED, UNFINISHED):
                done.append(answered)
            else:
                failures.append(answered.outcome)

    started_s = time.monotonic()
    streams = [asyncio.create_task(stream(number)) for number in range(point.streams)]
    start_s, end_s = started_s + ramp_s, started_s + ramp_s + measured_s
    try:
        await asyncio.wait(streams, timeout=max(0.0, end_s - time.monotonic()))
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


def _spread(rng: np.random.Generator, mean: int) -> int:
    return int(rng.integers(max(1, (mean + 1) // 2), max(1, 3 * mean // 2) + 1))


async def first_tokens(
    sender: RequestSender,
    models: Sequence[int],
    lengths: Sequence[int],
    repeats: int,
    done: Callable[[], None],
) -> list[dict[str, float]]:
    """Return the time to first token of an idle server, a row per prompt length.

    Raise `LoopError` if a request fails.
    """
    for model in models:
        await _ttft_ms(sender, model, _LOAD_PROMPT)
    rows = []
    for prompt in lengths:
        found = [await _ttft_ms(sender, models[at % len(models)], prompt) for at in range(repeats)]
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
    sender: RequestSender,
    adapters: Mapping[int, int],
    a_max: int,
    s_max: int,
    rounds: int,
    done: Callable[[], None],
) -> list[dict[str, float | str]]:
    """Return the time of copying adapters into slots, a row per rank.

    More adapters than slots are requested in turn, each twice: the first request loads the adapter, the
    second finds it. The load time is the median difference. It includes a disk read if the host holds fewer
    adapters. `adapters` are ranks by model position; nothing is measured unless there are more than slots.
    `done` is called after each of the `rounds`. Raise `LoopError` if a request fails.
    """
    if len(adapters) <= a_max:
        return []
    turn = list(adapters)[: a_max + max(1, a_max // 2, 2)]
    load_ms: dict[int, list[float]] = {}
    for number in range(rounds + 1):
        for model in turn:
            cold, warm = [await _ttft_ms(sender, model, _LOAD_PROMPT) for _ in range(2)]
            if number:  # the first round fills the slots
                load_ms.setdefault(adapters[model], []).append(cold - warm)
        done()
    return [loading_row(rank, s_max, "gpu", times) for rank, times in sorted(load_ms.items())]


async def _ttft_ms(sender: RequestSender, model: int, prompt_tokens: int) -> float:
    outcome = (await sender.send(model, prompt_tokens, OUTPUT_TOKENS)).outcome
    if outcome.kind == UNFINISHED:  # the client turns cancellation into an outcome
        raise asyncio.CancelledError
    if outcome.kind != FINISHED:
        raise LoopError(f"{outcome.kind}: {outcome.message}"[:300])
    return _MS_PER_S * (outcome.times_s[0] - outcome.sent_s)
