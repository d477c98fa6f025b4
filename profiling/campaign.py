"""Measuring campaign on one machine in resumable slices.

    python -m capplan.profiling.campaign --device cuda --out datasets/h200

Every slice takes less than nine minutes. ``campaign.json`` in the folder records progress and machine. The
same command resumes a campaign. ``--time-s`` ends it before a time limit of the machine, if necessary within
a slice; a slice that cannot end in time is not started.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from capplan.errors import CapplanError, InputError
from capplan.spec import read_text, write_text_atomic

if TYPE_CHECKING:
    from capplan.profiling.validation.loop import ClosedLoop

MOST_SLICE_S: Final = 480.0
"""Budget of a slice; with starting and compiling, a slice stays under nine minutes."""
LEAST_S: Final = 5.0
"""Minimum time left for starting a slice."""
_START_S: Final = 60.0
"""Time for loading a model."""
_LEAST_ENGINE_S: Final = _START_S + 30.0
_PLAN_S: Final = 180.0
"""Time for a calibration and two verified plans."""
_VALIDATION_S: Final = 120.0
_LEAST_VALIDATION_S: Final = _START_S + _VALIDATION_S + 30.0
"""Includes the twin's simulations."""
_LOADS: Final = (0.4, 0.9, 1.5)
"""Loads of the validations, as shares of the capacity."""
_TINY_BUDGET_S: Final = 6.0
_TINY_S: Final = 1.0
RECORD: Final = "campaign.json"


@dataclass(frozen=True)
class SliceSettings:
    """Inputs of a slice.

    Attributes
    ----------
    device
        ``cpu``, ``cuda`` or ``cuda:1`` and so on.
    folder
        Folder of the campaign.
    budget_s
        Time limit of this run.
    tiny
        Whether to run a few tiny cases, to test the campaign itself.
    seed
        Seed of the cases.
    """

    device: str
    folder: Path
    budget_s: float
    tiny: bool = False
    seed: int = 0


@dataclass(frozen=True)
class SliceResult:
    """Completeness of a slice, and a note."""

    is_complete: bool
    note: str


@dataclass(frozen=True)
class Slice:
    """Resumable part of a campaign.

    Attributes
    ----------
    name
        Unique name, the key of its record.
    run
        Measures until done or out of time.
    budget_s
        Time limit over all runs, after which the slice counts as done.
    least_s
        Minimum time of a run; with less of its budget left, the slice counts as done.
    after
        Names of slices that must be done first.
    """

    name: str
    run: Callable[[SliceSettings], SliceResult]
    budget_s: float = MOST_SLICE_S
    least_s: float = LEAST_S
    after: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.budget_s <= MOST_SLICE_S:
            raise ValueError(f"budget_s must be above 0 and at most {MOST_SLICE_S:g}, got {self.budget_s}")
        if not 0.0 < self.least_s <= self.budget_s:
            raise ValueError(f"least_s must be above 0 and at most {self.budget_s:g}, got {self.least_s}")


def _kernels(width: int, phase: str) -> Callable[[SliceSettings], SliceResult]:
    """Return a slice of kernel timings at one hidden size."""

    def run(setting: SliceSettings) -> SliceResult:
        from capplan.profiling.kernels.cases import SamplingLimits
        from capplan.profiling.kernels.measure import KernelProfilingOptions, measure

        grid = "prefill" if phase == "prefill" else "wide"
        found = measure(
            setting.folder / "kernels",
            KernelProfilingOptions(
                device=setting.device,
                grids=("tiny" if setting.tiny else grid,),
                phases=(phase,),
                widths=(32 if setting.tiny else width,),
                limits=SamplingLimits(budget_s=setting.budget_s, max_passes=2 if setting.tiny else 60),
                seed=setting.seed,
            ),
        )
        return SliceResult(found.is_complete, f"{found.converged} of {found.points} medians settled")

    return run


def _loop(setting: SliceSettings) -> ClosedLoop:
    """Return the closed loop of a campaign: Llama-3.1-8B with random weights, or the tiny one."""
    from capplan.profiling.validation.loop import ClosedLoop, LoopSettings

    if setting.tiny:
        known = LoopSettings(
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
        known = LoopSettings(
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


def _engine(*stages: str) -> Callable[[SliceSettings], SliceResult]:
    """Return a slice of stages of `capplan profile engine`."""

    def run(setting: SliceSettings) -> SliceResult:
        budget_s = min(setting.budget_s, _TINY_BUDGET_S) if setting.tiny else setting.budget_s
        start_s = 0.0 if setting.tiny else _START_S
        is_complete = _loop(setting).measure(max(1.0, budget_s - start_s), stages)
        return SliceResult(
            is_complete or setting.tiny, f"measured {', '.join(stages)} for at most {budget_s:.0f} s"
        )

    return run


def _plan(setting: SliceSettings) -> SliceResult:
    loop = _loop(setting)
    loop.plan()
    return SliceResult(True, f"planned, with {loop.group()['engine_args']['max_loras']} slots")


def _validation(load: float) -> Callable[[SliceSettings], SliceResult]:
    """Return a slice that runs the plan at a share of its capacity."""

    def run(setting: SliceSettings) -> SliceResult:
        from capplan.profiling.validation.loop import VoidError

        try:
            found = _loop(setting).validate(load, _TINY_S if setting.tiny else _VALIDATION_S)
        except VoidError as error:
            if setting.tiny:  # a second on a busy machine need not be sound
                return SliceResult(True, str(error))
            raise
        verdict = "agree" if found["agrees"] else "disagree"
        return SliceResult(True, f"twin and engine {verdict} at {load:.0%} of the capacity")

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
    # A profile of incomplete tables would be kept, so planning waits for all of them.
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


@dataclass
class SliceProgress:
    """Progress of one slice, as recorded."""

    spent_s: float = 0.0
    is_complete: bool = False
    runs: list[dict[str, Any]] = field(default_factory=list)

    def is_done(self, each: Slice) -> bool:
        """Return whether the slice is complete or its budget is spent."""
        return self.is_complete or self.spent_s > each.budget_s - each.least_s


class Campaign:
    """Slices of a campaign and their record in a folder.

    Raises
    ------
    InputError
        If the folder holds the record of a campaign on another chip, or a tiny one.
    """

    def __init__(
        self, folder: str | Path, device: str, parts: Sequence[Slice] | None = None, *, tiny: bool = False
    ) -> None:
        from capplan.profiling.machine import device_name

        self.folder = Path(folder)
        self._device = device
        self._of = {"chip": device_name(device), "tiny": tiny}
        self.parts = slices() if parts is None else tuple(parts)
        if tiny:
            self.parts = tuple(replace(each, least_s=min(each.least_s, LEAST_S)) for each in self.parts)
        self.progress: dict[str, SliceProgress] = {}
        if (self.folder / RECORD).exists():
            self.progress = self._read()

    def pending_parts(self) -> list[Slice]:
        """Return the pending slices."""
        return [each for each in self.parts if not self._progress_of(each).is_done(each)]

    def run(
        self,
        time_s: float,
        log: Callable[[str], None] = lambda _: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> bool:
        """Run pending slices within `time_s` seconds; return whether none failed."""
        until, succeeded = now_s() + time_s, True
        for each in self.pending_parts():
            left = min(until - now_s(), each.budget_s - self._progress_of(each).spent_s)
            if pending := self._pending_before(each):
                log(f"{each.name}: waits for {', '.join(pending)}")
            elif left < each.least_s:
                log(f"{each.name}: takes {each.least_s:.0f} s at least, {max(0.0, left):.0f} s are left")
            else:
                log(f"{each.name}: at most {left:.0f} s")
                succeeded = self._run_part(each, left, log, now_s) and succeeded
        return succeeded

    def _pending_before(self, each: Slice) -> list[str]:
        """Return the pending prerequisites of a slice."""
        return [other.name for other in self.pending_parts() if other.name in each.after]

    def _incomplete_note(self, each: Slice) -> str:
        """Return a note on prerequisites that ended with their budget."""
        names = [other.name for other in self.parts if other.name in each.after]
        short = [name for name in names if not self.progress[name].is_complete]
        return f"; not complete before it: {', '.join(short)}" if short else ""

    def _run_part(
        self, each: Slice, left_s: float, log: Callable[[str], None], now_s: Callable[[], float]
    ) -> bool:
        from capplan.profiling.machine import describe

        progress = self._progress_of(each)
        setting = SliceSettings(self._device, self.folder, left_s, tiny=bool(self._of["tiny"]))
        begin, note, failed = now_s(), "interrupted", False
        try:
            result = each.run(setting)
            progress.is_complete, note = result.is_complete, result.note + self._incomplete_note(each)
        except (CapplanError, OSError, RuntimeError) as error:  # such as out of memory; later slices run
            failed, note = True, f"failed: {(str(error) or type(error).__name__).splitlines()[0]}"
        finally:
            progress.spent_s += now_s() - begin
            machine = describe(self._device)
            progress.runs.append({"seconds": round(now_s() - begin, 1), "note": note, "machine": machine})
            self._write()
        log(f"{each.name}: {note}")
        return not failed

    def _progress_of(self, each: Slice) -> SliceProgress:
        return self.progress.setdefault(each.name, SliceProgress())

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {**self._of, "slices": {name: vars(each) for name, each in self.progress.items()}}
        write_text_atomic(self.folder / RECORD, json.dumps(record, indent=2) + "\n")

    def _read(self) -> dict[str, SliceProgress]:
        path = self.folder / RECORD
        try:
            record = json.loads(read_text(path))
            known = {name: record[name] for name in self._of}
            progress = {name: SliceProgress(**each) for name, each in record["slices"].items()}
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise InputError("must be the record of a campaign", location=str(path)) from None
        for name, value in self._of.items():
            if known[name] != value:
                rule = f"must be {known[name]!r}, as in the campaign that this folder holds"
                raise InputError(rule, value, f"{path}: {name}")
        return progress


def default_folder(device: str) -> Path:
    """Return ``datasets/<gpu>`` for the device's chip."""
    from capplan.profiling.machine import device_name

    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower().removeprefix("nvidia ")).strip("-")
    return Path("datasets") / name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; exit status 0: done or out of time, 1: a slice failed, 2: invalid input."""
    parser = argparse.ArgumentParser(
        prog="python -m capplan.profiling.campaign",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cuda unless given")
    parser.add_argument("--out", type=Path, help="folder; datasets/<gpu> unless given")
    parser.add_argument("--time-s", type=float, default=float("inf"), help="stop after so many seconds")
    parser.add_argument("--tiny", action="store_true", help="a handful of cases, to try the campaign")
    given = parser.parse_args(arguments)
    try:
        succeeded = _run(given)
    except CapplanError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0 if succeeded else 1


def _run(given: argparse.Namespace) -> bool:
    import torch

    if given.device != "cpu" and not torch.cuda.is_available():
        raise InputError("must be cpu: this PyTorch sees no CUDA device", given.device, "--device")
    campaign = Campaign(given.out or default_folder(given.device), given.device, tiny=given.tiny)
    succeeded = campaign.run(given.time_s, lambda line: _print(f"{time.strftime('%H:%M:%S')} {line}"))
    done = len(campaign.parts) - len(campaign.pending_parts())
    more = "" if done == len(campaign.parts) else "; the same command goes on"
    _print(f"{done} of {len(campaign.parts)} slices done in {campaign.folder}{more}")
    return succeeded


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
