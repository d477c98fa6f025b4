"""Operating points at which a server is measured: how many streams, with which lengths and adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from capplan.errors import InputError

_SEED: Final = 0


@dataclass(frozen=True)
class Point:
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
class Bounds:
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

    def allow(self, point: Point) -> bool:
        """Tell whether a point can be measured without anything waiting."""
        longest = 3 * (point.prompt_tokens + point.output_tokens) // 2
        return longest <= self.longest and (self.kv_tokens is None or point.kv_tokens <= self.kv_tokens)


def design(bounds: Bounds, base_model: bool = True) -> list[Point]:
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
    corners: list[Point] = []
    rest: list[Point] = []
    batches = _powers(bounds.max_streams)
    prompts = sorted({max(4, bounds.prompt_tokens // 4), bounds.prompt_tokens, 4 * bounds.prompt_tokens})
    outputs = sorted({max(4, bounds.output_tokens // 2), 2 * bounds.output_tokens})
    for streams in batches:
        active = [0] if base_model else []
        active += _powers(min(streams, bounds.a_max, bounds.adapters))
        for adapters in active:
            for prompt in prompts:
                for output in outputs:
                    point = Point(streams, adapters, prompt, output)
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


def _powers(limit: int) -> list[int]:
    """Return the powers of 2 up to a limit, and the limit; none below 1."""
    powers = [1 << shift for shift in range(limit.bit_length()) if 1 << shift <= limit]
    return powers if limit < 1 or limit in powers else [*powers, limit]
