"""Simulations of the scenarios of a design, in parallel."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections.abc import Generator, Sequence
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
from capplan.twin.instance.metrics import SimulationResult
from capplan.twin.instance.simulate import SimulateSettings, simulate
from capplan.twin.sweep import in_parallel

_MS_PER_S: Final = 1e3
_GROUPS_OF_A_DESIGN: Final = 2**40


class NoRow(Enum):
    """Reason why a scenario has no row."""

    REFUSED_FOR_MEMORY = "the engine would not start"
    WITHOUT_REQUESTS = "no request arrived"


@dataclass(frozen=True, eq=False)
class ScenarioRow:
    """Features and outcomes of one scenario."""

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
    """Draw and simulate the scenarios numbered from `start` to before `stop`.

    The seed determines the design and, with its number, the simulation of each scenario.
    """
    samples = draw(design, profile, seed, start, stop)
    return [
        simulate_sample(sample, profile, design, seed, duration_s, number)
        for number, sample in enumerate(samples, start=start)
    ]


def simulate_sample(
    sample: Sample, profile: Profile, design: str, seed: int, duration_s: float, number: int
) -> ScenarioRow | NoRow:
    """Simulate one scenario; an `InfeasibleError` for another reason than memory is raised."""
    settings: SimulateSettings = {
        **sample.settings,
        "duration_s": duration_s,
        "seed": simulation_seed(seed, number),
    }
    try:
        result = simulate(sample.workload, profile, **settings)
    except InfeasibleError as error:
        if error.reason != "memory":
            raise
        return NoRow.REFUSED_FOR_MEMORY
    if result.submitted == 0:
        return NoRow.WITHOUT_REQUESTS
    group = tuple(DESIGNS).index(design) * _GROUPS_OF_A_DESIGN + sample.group
    return ScenarioRow(number, group, sample.features(profile), outcomes(result))


def simulation_seed(seed: int, number: int) -> int:
    """Return the seed of one simulation, different from those of other scenarios and of the designs."""
    words = np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1, np.uint64)
    return int(words[0]) >> 1


def outcomes(result: SimulationResult) -> tuple[float, ...]:
    """Return the outcomes of a simulation in the order of `OUTCOMES`."""
    busy_ms = result.busy_fraction * result.duration_s * _MS_PER_S
    computed = {
        "offered_drawn_tok_s": result.offered_tok_s,
        "step_ms_mean": busy_ms / result.steps if result.steps else 0.0,
    }
    return tuple(float(computed[n] if n in computed else getattr(result, n)) for n in OUTCOMES)


_SCENARIOS_PER_PART: Final = 8

Span = tuple[int, int]
"""Numbers of the first scenario and of the one after the last."""


def parts_of(span: Span) -> list[Span]:
    """Return the parts of a span, small enough that workers finish at about the same time."""
    starts = range(span[0], span[1], _SCENARIOS_PER_PART)
    return [(start, min(start + _SCENARIOS_PER_PART, span[1])) for start in starts]


def simulate_spans(
    spans: Sequence[Span],
    profile: Profile,
    asked: DatasetRequest,
    workers: int | None,
    ray_address: str | None,
) -> Generator[list[ScenarioRow | NoRow], None, None]:
    """Yield the rows of every part of all spans in order; workers as for `capplan.twin.sweep.in_parallel`."""
    parts = [part for span in spans for part in parts_of(span)]
    simulate_part = partial(_simulate_part, profile, asked.design, asked.seed, asked.duration_s)
    return in_parallel(simulate_part, parts, workers=workers, ray_address=ray_address, chunk=1)


def _simulate_part(
    profile: Profile, design: str, seed: int, duration_s: float, span: Span
) -> list[ScenarioRow | NoRow]:
    _end_with_parent(os.getpid())
    return simulate_span(design, profile, seed, duration_s, *span)


@functools.cache
def _end_with_parent(pid: int) -> None:
    """End this process when its parent is killed: it would wait for work forever.

    A forked process inherits this cache, but its entries are of another `pid`.
    """
    del pid
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
