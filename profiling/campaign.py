"""A measuring campaign on one machine, slice by slice, as often interrupted as need be.

    python -m capplan.profiling.campaign --device cuda --out datasets/h200

Every slice takes less than nine minutes. What is done, and on what, is in ``campaign.json`` in the folder.
The same command goes on where the last one stopped. ``--time-s`` stops before a time limit of the machine, in
the middle of a slice if need be; a slice that cannot end in the time left is not begun.
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
from typing import Any, Final

from capplan.errors import CapplanError, InputError
from capplan.profiling.campaign_slices import LEAST_S, Setting, Slice, slices
from capplan.spec import read_text, write_text_atomic

RECORD: Final = "campaign.json"


@dataclass
class Progress:
    """What the record says of one slice."""

    spent_s: float = 0.0
    is_complete: bool = False
    runs: list[dict[str, Any]] = field(default_factory=list)

    def is_done(self, each: Slice) -> bool:
        """Tell whether it is complete, or its budget is spent."""
        return self.is_complete or self.spent_s > each.budget_s - each.least_s


class Campaign:
    """The slices and the record of a folder.

    Parameters
    ----------
    folder
        Made if it is not there.
    device
        What is measured.
    parts
        The slices; all there are unless given.
    tiny
        Whether a handful of tiny cases will do.

    Raises
    ------
    InputError
        When the folder holds the record of a campaign on another chip, or a tiny one.
    """

    def __init__(
        self, folder: str | Path, device: str, parts: Sequence[Slice] | None = None, *, tiny: bool = False
    ) -> None:
        from capplan.profiling.machine import device_name

        self.folder = Path(folder)
        self._device = device
        self._of = {"chip": device_name(device), "tiny": tiny}
        self.parts = slices() if parts is None else tuple(parts)
        if tiny:  # all of it is shorter
            self.parts = tuple(replace(each, least_s=min(each.least_s, LEAST_S)) for each in self.parts)
        self.progress: dict[str, Progress] = {}
        if (self.folder / RECORD).exists():
            self.progress = self._read()

    def open_parts(self) -> list[Slice]:
        """Return the slices that are not done."""
        return [each for each in self.parts if not self._of_part(each).is_done(each)]

    def run(
        self,
        time_s: float,
        say: Callable[[str], None] = lambda _: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> bool:
        """Run open slices while the time lasts, and tell whether none failed.

        Parameters
        ----------
        time_s
            Seconds for all of it.
        say
            Told what begins and what came of it, a line each.
        now_s
            The clock.
        """
        until, well = now_s() + time_s, True
        for each in self.open_parts():
            left = min(until - now_s(), each.budget_s - self._of_part(each).spent_s)
            if open_before := self._open_before(each):
                say(f"{each.name}: waits for {', '.join(open_before)}")
            elif left < each.least_s:
                say(f"{each.name}: takes {each.least_s:.0f} s at least, {max(0.0, left):.0f} s are left")
            else:
                say(f"{each.name}: at most {left:.0f} s")
                well = self._run_part(each, left, say, now_s) and well
        return well

    def _open_before(self, each: Slice) -> list[str]:
        """Return the slices that one waits for."""
        return [other.name for other in self.open_parts() if other.name in each.after]

    def _short(self, each: Slice) -> str:
        """Return in words which slices before one ended with their budget."""
        names = [other.name for other in self.parts if other.name in each.after]
        short = [name for name in names if not self.progress[name].is_complete]
        return f"; not complete before it: {', '.join(short)}" if short else ""

    def _run_part(
        self, each: Slice, left_s: float, say: Callable[[str], None], now_s: Callable[[], float]
    ) -> bool:
        from capplan.profiling.machine import describe

        progress = self._of_part(each)
        setting = Setting(self._device, self.folder, left_s, tiny=bool(self._of["tiny"]))
        begin, note = now_s(), "interrupted"
        failed = False
        try:
            outcome = each.run(setting)
            progress.is_complete, note = outcome.is_complete, outcome.note + self._short(each)
        except (CapplanError, OSError, RuntimeError) as error:
            # Out of memory on one slice must not cost the others.
            failed, note = (
                True,
                f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            )
        finally:
            progress.spent_s += now_s() - begin
            machine = describe(self._device)
            progress.runs.append({"seconds": round(now_s() - begin, 1), "note": note, "machine": machine})
            self._write()
        say(f"{each.name}: {note}")
        return not failed

    def _of_part(self, each: Slice) -> Progress:
        return self.progress.setdefault(each.name, Progress())

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {**self._of, "slices": {name: vars(each) for name, each in self.progress.items()}}
        write_text_atomic(self.folder / RECORD, json.dumps(record, indent=2) + "\n")

    def _read(self) -> dict[str, Progress]:
        path = self.folder / RECORD
        try:
            record = json.loads(read_text(path))
            known = {name: record[name] for name in self._of}
            progress = {name: Progress(**each) for name, each in record["slices"].items()}
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            raise InputError("must be the record of a campaign", location=str(path)) from None
        for name, value in self._of.items():
            if known[name] != value:
                rule = f"must be {known[name]!r}, as in the campaign that this folder holds"
                raise InputError(rule, value, f"{path}: {name}")
        return progress


def default_folder(device: str) -> Path:
    """Return ``datasets/<gpu>`` for the chip that is there."""
    from capplan.profiling.machine import device_name

    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower().removeprefix("nvidia ")).strip("-")
    return Path("datasets") / name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; 0: done or out of time, 1: a slice failed, 2: something given is wrong."""
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
        well = _run(given)
    except CapplanError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0 if well else 1


def _run(given: argparse.Namespace) -> bool:
    import torch

    if given.device != "cpu" and not torch.cuda.is_available():
        raise InputError("must be cpu: this PyTorch sees no CUDA device", given.device, "--device")
    campaign = Campaign(given.out or default_folder(given.device), given.device, tiny=given.tiny)
    well = campaign.run(given.time_s, lambda line: _say(f"{time.strftime('%H:%M:%S')} {line}"))
    done = len(campaign.parts) - len(campaign.open_parts())
    more = "" if done == len(campaign.parts) else "; the same command goes on"
    _say(f"{done} of {len(campaign.parts)} slices done in {campaign.folder}{more}")
    return well


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
