"""An idle server, one request at a time: what a first token takes, and what a cold adapter adds to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from capplan.profiling.load.outcome import FINISHED, UNFINISHED
from capplan.profiling.server.closed_loop import Asker, LoopError

_MS_PER_S: Final = 1e3
_LOAD_PROMPT: Final = 8
"""Tokens: short, so that the load is a large part of the answer."""
OUTPUT_TOKENS: Final = 2
_LEAST_MS: Final = 1e-3
"""Of a load that is too short to be told from none; calibration takes times above 0."""


async def first_tokens(
    asker: Asker, models: Sequence[int], lengths: Sequence[int], repeats: int, done: Callable[[], None]
) -> list[dict[str, float]]:
    """Return how long the first token takes on an idle server, a row for each prompt length.

    Parameters
    ----------
    asker
        Sends the requests.
    models
        Positions of adapters that fit into the slots together, or of the base model; asked in turn.
    lengths
        Tokens of the prompts.
    repeats
        How often each is asked; the first answers, which may load adapters, are left out.
    done
        Called after each length.

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
    asker: Asker, adapters: Mapping[int, int], a_max: int, s_max: int, rounds: int, done: Callable[[], None]
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


async def _ttft_ms(asker: Asker, model: int, prompt_tokens: int) -> float:
    outcome = (await asker.ask(model, prompt_tokens, OUTPUT_TOKENS)).outcome
    if outcome.kind == UNFINISHED:  # the client takes in that it was cancelled, and tells it so
        raise asyncio.CancelledError
    if outcome.kind != FINISHED:
        raise LoopError(f"{outcome.kind}: {outcome.message}"[:300])
    return _MS_PER_S * (outcome.times_s[0] - outcome.sent_s)
