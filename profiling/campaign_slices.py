"""The slices of a measuring campaign, in one list: whoever measures something more adds an entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from capplan.profiling.validation.loop import ClosedLoop

MOST_SLICE_S: Final = 480.0
"""Budget of a slice: with starting and compiling, one stays under nine minutes."""

LEAST_S: Final = 5.0
"""Time left under which no slice is begun."""
_START_S: Final = 60.0
"""For loading a model before anything is measured."""
_LEAST_ENGINE_S: Final = _START_S + 30.0
_PLAN_S: Final = 180.0
"""For a calibration and two plans, of a minute each and what confirms them."""
_VALIDATION_S: Final = 120.0
_LEAST_VALIDATION_S: Final = _START_S + _VALIDATION_S + 30.0
"""With the twin's answers."""
_LOADS: Final = (0.4, 0.9, 1.5)
"""Of the validations, as shares of the capacity."""
_TINY_BUDGET_S: Final = 6.0
_TINY_S: Final = 1.0


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
    least_s
        Seconds that it takes at least; with fewer it is not begun, and with fewer left of its budget it
        counts as done.
    after
        Names of slices that must be done before it.
    """

    name: str
    run: Callable[[Setting], Outcome]
    budget_s: float = MOST_SLICE_S
    least_s: float = LEAST_S
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.budget_s <= MOST_SLICE_S:
            raise ValueError(f"budget_s must be above 0 and at most {MOST_SLICE_S:g}, got {self.budget_s}")
        if not 0.0 < self.least_s <= self.budget_s:
            raise ValueError(f"least_s must be above 0 and at most {self.budget_s:g}, got {self.least_s}")


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


def _loop(setting: Setting) -> ClosedLoop:
    """Return the closed loop of a campaign: Llama-3.1-8B with random weights, or the tiny one."""
    from capplan.profiling.validation.loop import ClosedLoop, LoopSetting

    if setting.tiny:
        known = LoopSetting(
            model="tiny-llama",
            device=setting.device,
            adapters=3,
            ranks=(8,),
            slots=(2,),
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=128,
            prompt_tokens=(48.0, 8.0),
            output_tokens=(56.0, 8.0),  # long, so that an hour of the twin holds few requests
            point_s=1.0,
            plan_seeds=1,
        )
    else:
        known = LoopSetting(
            model="meta-llama/Llama-3.1-8B-Instruct",
            device=setting.device,
            adapters=64,
            ranks=(8, 16, 32, 64),
            slots=(8, 32),
            max_num_seqs=128,
            max_num_batched_tokens=2048,
            max_model_len=4096,
            prompt_tokens=(223.0, 245.0),
            output_tokens=(194.0, 206.0),
            form=None,
        )
    return ClosedLoop(setting.folder, known)


def _engine(*stages: str) -> Callable[[Setting], Outcome]:
    """Return a slice of stages of `capplan profile engine`."""

    def run(setting: Setting) -> Outcome:
        budget_s = min(setting.budget_s, _TINY_BUDGET_S) if setting.tiny else setting.budget_s
        start_s = 0.0 if setting.tiny else _START_S
        is_complete = _loop(setting).measure(max(1.0, budget_s - start_s), stages)
        return Outcome(
            is_complete or setting.tiny, f"measured {', '.join(stages)} for at most {budget_s:.0f} s"
        )

    return run


def _plan(setting: Setting) -> Outcome:
    loop = _loop(setting)
    loop.plan()
    return Outcome(True, f"planned, with {loop.group()['engine_args']['max_loras']} slots")


def _validation(load: float) -> Callable[[Setting], Outcome]:
    """Return a slice that runs the plan at a share of its capacity."""

    def run(setting: Setting) -> Outcome:
        from capplan.profiling.validation.loop import VoidError

        try:
            found = _loop(setting).validate(load, _TINY_S if setting.tiny else _VALIDATION_S)
        except VoidError as error:
            if setting.tiny:  # a second on a busy machine need not be sound
                return Outcome(True, str(error))
            raise
        told = "agree" if found["agrees"] else "disagree"
        return Outcome(True, f"twin and engine {told} at {load:.0%} of the capacity")

    return run


def slices() -> tuple[Slice, ...]:
    """Return all slices, in the order in which they are run."""
    engine = tuple(
        Slice(name, _engine(*stages), least_s=_LEAST_ENGINE_S)
        for name, stages in (
            ("engine-loads", ("memory", "loads")),
            ("engine-steps", ("memory", "steps")),
            ("engine-iterations", ("iterations",)),
            ("engine-served", ("memory", "served")),
        )
    )
    # A profile of half of the tables would stay: what is planned waits for all of them.
    plan = Slice("plan", _plan, least_s=_PLAN_S, after=tuple(each.name for each in engine))
    planned = (*plan.after, plan.name)
    shares = {f"validation-{round(100 * load)}": load for load in _LOADS}
    validations = (
        Slice(name, _validation(load), least_s=_LEAST_VALIDATION_S, after=planned)
        for name, load in shares.items()
    )
    return (
        Slice("kernels-decode-4096", _kernels(4096, "decode")),
        Slice("kernels-decode-3584", _kernels(3584, "decode")),
        Slice("kernels-prefill-4096", _kernels(4096, "prefill")),
        Slice("kernels-prefill-3584", _kernels(3584, "prefill")),
        *engine,
        plan,
        *validations,
    )
