"""Simulations of the scenarios of a design, in parallel."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError
from capplan.models.training.data import OUTCOMES, DatasetRequest
from capplan.spec import Profile
from capplan.twin.dataset.designs import DESIGNS, Sample, draw
from capplan.twin.metrics import SimulationResult
from capplan.twin.simulate import SimulateSettings, simulate
from capplan.twin.sweep import cores, in_parallel

_MS_PER_S: Final = 1e3
_GROUPS_OF_A_DESIGN: Final = 2**40


class NoRow(Enum):
    """Why a scenario has no row."""

    REFUSED_FOR_MEMORY = "the engine would not start"
    WITHOUT_REQUESTS = "nobody asked anything"


@dataclass(frozen=True, eq=False)
class ScenarioRow:
    """One scenario and its answer."""

    number: int
    group: int
    """Unique over designs."""
    features: NDArray[np.float32]
    """Shape (features,), in the order of `capplan.models.surrogates.features.FEATURES`."""
    outcomes: tuple[float, ...]
    """In the order of `capplan.models.training.data.OUTCOMES`."""


def simulate_span(
    design: str, profile: Profile, seed: int, duration_s: float, start: int, stop: int
) -> list[ScenarioRow | NoRow]:
    """Draw the scenarios numbered `start` to `stop` and have the twin answer them.

    Parameters
    ----------
    design
        One of `capplan.twin.dataset.designs.DESIGNS`.
    profile
        Whose twin answers.
    seed
        Of the design and, with a scenario's number, of its simulation.
    duration_s
        Horizon of each simulation.
    start, stop
        First number, and the number after the last.
    """
    samples = draw(design, profile, seed, start, stop)
    return [
        simulate_sample(sample, profile, design, seed, duration_s, number)
        for number, sample in enumerate(samples, start=start)
    ]


def simulate_sample(
    sample: Sample, profile: Profile, design: str, seed: int, duration_s: float, number: int
) -> ScenarioRow | NoRow:
    """Have the twin answer one scenario; parameters as for `simulate_span`.

    Raises
    ------
    InfeasibleError
        For any other reason than memory.
    """
    asked: SimulateSettings = {
        **sample.settings,
        "duration_s": duration_s,
        "seed": simulation_seed(seed, number),
    }
    try:
        result = simulate(sample.workload, profile, **asked)
    except InfeasibleError as error:
        if error.reason != "memory":
            raise
        return NoRow.REFUSED_FOR_MEMORY
    if result.submitted == 0:
        return NoRow.WITHOUT_REQUESTS
    group = tuple(DESIGNS).index(design) * _GROUPS_OF_A_DESIGN + sample.group
    return ScenarioRow(number, group, sample.features(profile), outcomes(result))


def simulation_seed(seed: int, number: int) -> int:
    """Return the seed of one simulation; no other scenario has it, and no design draws from it."""
    words = np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1, np.uint64)
    return int(words[0]) >> 1


def outcomes(result: SimulationResult) -> tuple[float, ...]:
    """Return what is kept of a simulation, in the order of `OUTCOMES`."""
    busy_ms = result.busy_fraction * result.duration_s * _MS_PER_S
    computed = {
        "offered_drawn_tok_s": result.offered_tok_s,
        "step_ms_mean": busy_ms / result.steps if result.steps else 0.0,
    }
    return tuple(float(computed[n] if n in computed else getattr(result, n)) for n in OUTCOMES)


_SCENARIOS_PER_PART: Final = 8  # what a worker is asked at once
_PARTS_PER_WORKER: Final = 16  # in one call of in_parallel, less one: it then hands them out one by one

Span = tuple[int, int]
"""First number of scenarios, and the number after the last."""


def parts_of(span: Span) -> list[Span]:
    """Return a span in parts so small that workers finish at about the same time."""
    starts = range(span[0], span[1], _SCENARIOS_PER_PART)
    return [(start, min(start + _SCENARIOS_PER_PART, span[1])) for start in starts]


def simulate_spans(
    spans: Sequence[Span],
    profile: Profile,
    asked: DatasetRequest,
    workers: int | None,
    ray_address: str | None,
) -> Generator[list[ScenarioRow | NoRow], None, None]:
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


def _ask(
    profile: Profile, design: str, seed: int, duration_s: float, span: Span
) -> list[ScenarioRow | NoRow]:
    _end_with_parent(os.getpid())
    return simulate_span(design, profile, seed, duration_s, *span)


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
