"""States of an engine at which steps are timed, and which of them to measure next.

A state is a batch that decodes and, in some steps, a prompt beside it. Which ones tell most follows from what
a step's time is made of: with the states so far and their times as weights, the next one is that whose time
is known least (its leverage, as in D-optimal designs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

MIXED: Final = 0
"""Rank of a state in which adapters of all ranks take part."""

_CONTEXTS: Final = (16, 128, 512, 2048, 8192)
_PROMPTS: Final = (16, 64, 256, 1024, 4096)
_RIDGE: Final = 1e-6


@dataclass(frozen=True)
class Point:
    """A state of the engine.

    Attributes
    ----------
    batch
        Requests that decode.
    context
        Tokens that each of them holds, about.
    prompt
        Tokens of a prompt that joins them in some steps.
    adapters
        Distinct adapters in the batch; 0: the base model alone.
    rank
        Of the adapters, or `MIXED`.
    waiting
        Requests that wait meanwhile.
    """

    batch: int
    context: int
    prompt: int
    adapters: int
    rank: int = MIXED
    waiting: int = 0

    @property
    def name(self) -> str:
        """What it is called in tables."""
        rank = "mixed" if self.rank == MIXED else str(self.rank)
        return f"b{self.batch}-c{self.context}-p{self.prompt}-a{self.adapters}-r{rank}-w{self.waiting}"


@dataclass(frozen=True)
class Bounds:
    """What an engine can hold."""

    a_max: int
    ranks: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_tokens: int
    growth: int
    """Tokens that each request gains while a state is measured."""

    def fits(self, point: Point) -> bool:
        """Tell whether a state can be kept up without anybody being preempted."""
        longest = max(point.context + self.growth, point.prompt + 1)
        held = point.batch * (point.context + self.growth) + point.prompt
        return (
            longest < self.max_model_len
            and held <= self.kv_tokens // 2
            and point.batch + point.prompt <= self.max_num_batched_tokens
        )


def powers(limit: int) -> list[int]:
    """Return the powers of 2 up to a limit, and the limit; none below 1."""
    found = [1 << shift for shift in range(limit.bit_length()) if 1 << shift <= limit]
    return found if limit < 1 or limit in found else [*found, limit]


def candidates(bounds: Bounds, seed: int) -> list[Point]:
    """Return the states of an engine that are worth measuring, in an order drawn once.

    Batches are powers of 2 and adapters among them likewise; contexts and prompts go by factors of 4 and 8.
    Ranks take turns. Where the batch is full, a queue stands behind it, too.
    """
    rng = np.random.default_rng(seed)
    ranks = (*bounds.ranks, MIXED) if len(bounds.ranks) > 1 else bounds.ranks
    found: list[Point] = []
    for batch in dict.fromkeys(_room(batch, bounds) for batch in powers(bounds.max_num_seqs)):
        for context in _CONTEXTS:
            for adapters in (0, *powers(min(batch, bounds.a_max))):
                prompt = int(rng.choice(_PROMPTS))
                rank = MIXED if adapters == 0 else int(rng.choice(ranks))
                point = Point(batch, context, prompt, adapters, rank)
                found.append(_shortened(point, bounds))
    for adapters in (0, min(bounds.a_max, bounds.max_num_seqs)):
        for waiting in (bounds.max_num_seqs, 4 * bounds.max_num_seqs):
            prompt = min(_PROMPTS)
            found.append(Point(bounds.max_num_seqs, min(_CONTEXTS), prompt, adapters, MIXED, waiting))
    kept = [point for point in dict.fromkeys(found) if bounds.fits(point)]
    return [kept[at] for at in rng.permutation(len(kept)).tolist()]


def _room(batch: int, bounds: Bounds) -> int:
    """Leave one place in the batch for the prompt."""
    return max(1, min(batch, bounds.max_num_seqs - 1))


def _shortened(point: Point, bounds: Bounds) -> Point:
    """Return the state with the longest prompt that it has room for, up to its own."""
    for prompt in sorted(_PROMPTS, reverse=True):
        shorter = Point(point.batch, point.context, prompt, point.adapters, point.rank)
        if prompt <= point.prompt and bounds.fits(shorter):
            return shorter
    return point


def step_features(point: Point, mean_rank: float) -> NDArray[np.float64]:
    """Return what the state's two kinds of steps hold, shape (2, features): decode, and with the prompt."""
    rank = 0.0 if point.adapters == 0 else float(point.rank or mean_rank)
    decode = [
        1.0,
        point.batch,
        point.batch * point.context,
        point.adapters,
        point.batch * rank,
        point.waiting,
    ]
    return np.array([[*decode, 0.0, 0.0], [*decode, point.prompt, point.prompt * rank]], np.float64)


def most_telling(
    left: Sequence[Point],
    seen: Sequence[tuple[Point, float, float]],
    mean_rank: float,
) -> int:
    """Return the position of the state to measure next.

    Parameters
    ----------
    left
        States that are still to be had.
    seen
        States that were measured, with the milliseconds of their two kinds of steps.
    mean_rank
        Of the adapters, for states with mixed ranks.
    """
    features = np.array([step_features(point, mean_rank) for point in left])
    scale = np.maximum(features.max(axis=(0, 1)), 1.0)
    size = scale.size
    information = _RIDGE * np.eye(size)
    rows, times = np.zeros((0, size)), np.zeros(0)
    if seen:
        rows = np.concatenate([step_features(point, mean_rank) for point, _, _ in seen]) / scale
        times = np.array([each for _, decode, mixed in seen for each in (decode, mixed)])
        weighted = rows / times[:, None]
        information = information + weighted.T @ weighted * float(times.min()) ** 2
    scaled = features / scale
    expected = np.ones(scaled.shape[:2])
    if len(times) >= size:
        found = np.linalg.lstsq(rows / times[:, None], np.ones(times.size), rcond=None)[0]
        expected = np.maximum(scaled @ found, float(times.min()) / 2) / float(times.min())
    unknown = np.einsum("psi,ij,psj->ps", scaled, np.linalg.inv(information), scaled) / expected**2
    return int(np.argmax(unknown.max(axis=1)))
