"""What the twin answers to the scenarios of a design: a row each, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from capplan.errors import InfeasibleError
from capplan.models.learning.table import OUTCOMES
from capplan.spec import Profile
from capplan.twin.dataset.designs import DESIGNS, Sample, draw
from capplan.twin.result import SimulationResult
from capplan.twin.simulate import Settings, simulate

_MS_PER_S: Final = 1e3
_GROUPS_OF_A_DESIGN: Final = 2**40


class NoRow(Enum):
    """Why a scenario has no row."""

    REFUSED_FOR_MEMORY = "the engine would not start"
    WITHOUT_REQUESTS = "nobody asked anything"


@dataclass(frozen=True, eq=False)
class Row:
    """One scenario and its answer."""

    number: int
    group: int
    """Unique over designs."""
    features: NDArray[np.float32]
    """Shape (features,), in the order of `capplan.models.surrogates.features.FEATURES`."""
    outcomes: tuple[float, ...]
    """In the order of `capplan.models.learning.table.OUTCOMES`."""


def answer_span(
    design: str, profile: Profile, seed: int, duration_s: float, start: int, stop: int
) -> list[Row | NoRow]:
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
        answer_sample(sample, profile, design, seed, duration_s, number)
        for number, sample in enumerate(samples, start=start)
    ]


def answer_sample(
    sample: Sample, profile: Profile, design: str, seed: int, duration_s: float, number: int
) -> Row | NoRow:
    """Have the twin answer one scenario; parameters as for `answer_span`.

    Raises
    ------
    InfeasibleError
        For any other reason than memory.
    """
    asked: Settings = {**sample.settings, "duration_s": duration_s, "seed": simulation_seed(seed, number)}
    try:
        result = simulate(sample.workload, profile, **asked)
    except InfeasibleError as error:
        if error.reason != "memory":
            raise
        return NoRow.REFUSED_FOR_MEMORY
    if result.submitted == 0:
        return NoRow.WITHOUT_REQUESTS
    group = tuple(DESIGNS).index(design) * _GROUPS_OF_A_DESIGN + sample.group
    return Row(number, group, sample.features(profile), outcomes(result))


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
