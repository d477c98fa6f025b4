"""The slices of a measuring campaign, in one list: whoever measures something more adds an entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOST_SLICE_S: Final = 480.0
"""Budget of a slice: with starting and compiling, one stays under nine minutes."""


@dataclass(frozen=True)
class Setting:
    """What a slice is given.

    Attributes
    ----------
    device
        ``cpu``, ``cuda`` or ``cuda:1`` and so on.
    folder
        Where everything of the campaign goes; a slice writes into folders of its own there.
    budget_s
        Seconds that it may take now.
    tiny
        Whether a handful of tiny cases will do: to try the campaign itself.
    seed
        Same seed, same cases.
    """

    device: str
    folder: Path
    budget_s: float
    tiny: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """How far a slice got: whether nothing is left of it, and in words."""

    is_complete: bool
    note: str


@dataclass(frozen=True)
class Slice:
    """One part of a campaign, which can be interrupted and goes on when it is run again.

    Attributes
    ----------
    name
        Unique; names its record.
    run
        Does as much as the budget allows.
    budget_s
        Seconds after which it counts as done whatever is left, over all its runs.
    """

    name: str
    run: Callable[[Setting], Outcome]
    budget_s: float = MOST_SLICE_S

    def __post_init__(self) -> None:
        if not 0.0 < self.budget_s <= MOST_SLICE_S:
            raise ValueError(f"budget_s must be above 0 and at most {MOST_SLICE_S:g}, got {self.budget_s}")


def _kernels(width: int, phase: str) -> Callable[[Setting], Outcome]:
    """Return a slice of kernel timings at one hidden size."""

    def run(setting: Setting) -> Outcome:
        from capplan.profiling.kernels.measure import Options, measure
        from capplan.profiling.kernels.sampling import Limits

        grid = "prefill" if phase == "prefill" else "wide"
        found = measure(
            setting.folder / "kernels",
            Options(
                device=setting.device,
                grids=("tiny" if setting.tiny else grid,),
                phases=(phase,),
                widths=(32 if setting.tiny else width,),
                limits=Limits(budget_s=setting.budget_s, most_visits=2 if setting.tiny else 60),
                seed=setting.seed,
            ),
        )
        return Outcome(found.is_complete, f"{found.settled} of {found.spots} medians settled")

    return run


def slices() -> tuple[Slice, ...]:
    """Return all slices, in the order in which they are run.

    To be added here: step latency, adapter loads and KV capacity of the engine; three validation workloads.
    """
    return (
        Slice("kernels-decode-4096", _kernels(4096, "decode")),
        Slice("kernels-decode-3584", _kernels(3584, "decode")),
        Slice("kernels-prefill-4096", _kernels(4096, "prefill")),
        Slice("kernels-prefill-3584", _kernels(3584, "prefill")),
    )
