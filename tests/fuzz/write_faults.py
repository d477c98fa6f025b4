"""A fault at every write of commands that write files: ``python -m tests.fuzz.write_faults``.

A command replaces the output of an earlier one. In a forked process each call of the operating system by
which Python code changes the folder of the output raises an error (EIO, ENOSPC) or kills the process, one
after the other; a limit on the size of files, at several sizes, stands for a disk that fills up in the midst
of a file. Afterwards every output must be the old one or the new one (a dataset may also say that it is
unfinished), and the same command without a fault must give the new one.
"""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.common import command_line, markdown
from tests.fuzz.commands import preload, prepare, run_words
from tests.fuzz.isolation import Limits, Outcome, isolated

CALLS: Final = ("fsync", "replace", "rename", "mkdir", "chmod")
"""Calls of `os` that a fault is injected into, beside opening a file for writing."""

EFFECTS: Final[Mapping[str, Callable[[], None]]] = {
    "EIO": lambda: _raise(errno.EIO),
    "ENOSPC": lambda: _raise(errno.ENOSPC),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
SIZES: Final = (0, 1, 100, 1000)
"""Bytes at which the disk is full."""

_MOST_CALLS: Final = 200


def _raise(code: int) -> None:
    raise OSError(code, os.strerror(code))


@dataclass(frozen=True)
class Written:
    """A command that writes, and the command whose output it replaces."""

    name: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    outputs: tuple[str, ...]
    """Files and folders at the top of the working directory; each file of a folder counts on its own."""
    whole: tuple[str, ...] = ()
    """Folders that are replaced as a whole."""
    resumable: str = ""
    """Manifest of a dataset: while it is generated, it holds the request without an answer."""


def _written(
    name: str, line: str, old: str, new: str, outputs: str, whole: tuple[str, ...] = (), resumable: str = ""
) -> Written:
    """Return a command whose line has one part in the earlier run, and another one in the later."""
    words = tuple(tuple(line.format(part).split()) for part in (old, new))
    return Written(name, *words, tuple(outputs.split()), whole, resumable)


_CALIBRATE: Final = "calibrate --steps steps.csv --base ./profile.json -o out.json --quiet --name {}"
_GENERATE: Final = "dataset generate profile.json -o out --duration 20 --workers 1 --scenarios {}"
_PLAN: Final = "plan workload.yaml -o out.json --no-verify --quiet --solver {}"
_ROOFLINE: Final = "profile roofline --gpu {} --model llama-3.1-8b -o out.json --quiet"
_VLLM: Final = "export plan.json --target vllm -o out --unverified --force --port {}"
COMMANDS: Final = (
    _written("plan", _PLAN, "greedy-strict", "maxbase", "out.json"),
    _written("export", _VLLM, "9000", "9500", "out", whole=("out",)),
    _written("dataset", _GENERATE, "2", "4", "out", resumable="out/manifest.json"),
    _written("profile", _ROOFLINE, "h200", "a100-80g", "out.json"),
    _written("calibrate", _CALIBRATE, "old", "new --html out.html", "out.json out.html"),
)


class Fault:
    """An effect at one of the calls that change a folder, by its number from 1."""

    def __init__(self, number: int, effect: Callable[[], None], folder: Path) -> None:
        self.number, self.effect, self.folder = number, effect, str(folder.resolve())
        self.seen = 0

    def install(self, replace: Callable[[Any, str, Any], None]) -> None:
        """Put the fault before the calls; ``replace`` sets an attribute of a module."""
        for name in CALLS:
            replace(os, name, self._before(getattr(os, name)))
        original = io.open

        def open_file(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            if set(mode) & set("wxa+") and not isinstance(file, int) and self._is_inside(file):
                self._count()
            return original(file, mode, *rest, **named)

        replace(io, "open", open_file)

    def _before(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *rest: Any, **named: Any) -> Any:
            path = f"/proc/self/fd/{target}" if isinstance(target, int) else target
            if self._is_inside(path):
                self._count()
            return original(target, *rest, **named)

        return call

    def _is_inside(self, path: Any) -> bool:
        return os.path.realpath(path).startswith(self.folder)

    def _count(self) -> None:
        self.seen += 1
        if self.seen == self.number:
            self.effect()


def run_with_fault(words: Sequence[str], number: int, effect: str) -> int:
    """Run a command in this process with a fault; exit status 99 if it has fewer calls."""
    fault = Fault(number, EFFECTS[effect], Path.cwd())
    fault.install(setattr)
    status = run_words(words)
    return 99 if fault.seen < number else status


def run_on_full_disk(words: Sequence[str], size: int) -> int:
    """Run a command in this process whose files cannot grow beyond a size."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return run_words(words)


def state(folder: Path, written: Written) -> dict[str, bytes]:
    """Return the contents of the outputs by path, without the hidden files of killed processes."""
    found = {}
    for top in written.outputs:
        path = folder / top
        files = path.rglob("*") if path.is_dir() else [path]
        for file in files:
            if file.is_file() and not file.name.startswith("."):
                found[str(file.relative_to(folder))] = file.read_bytes()
    return found


def faults_of(
    now: Mapping[str, bytes], old: Mapping[str, bytes], new: Mapping[str, bytes], written: Written
) -> list[str]:
    """Return the outputs that are neither the old nor the new ones."""
    if written.whole:
        return [] if now in (old, new) else [f"{written.whole[0]} is neither the old nor the new folder"]
    names = now.keys() | old.keys() | new.keys()
    broken = [name for name in sorted(names) if now.get(name) not in (old.get(name), new.get(name))]
    if broken == [written.resumable]:
        manifest = json.loads(now[written.resumable])
        wanted = json.loads(new[written.resumable])
        return [] if manifest == {**wanted, "answered": None} else broken
    return broken


def injected(
    written: Written, base: Path, root: Path, effects: Sequence[str] = tuple(EFFECTS)
) -> tuple[int, list[str]]:
    """Return the number of faults injected into a command, and what they broke."""
    broken: list[str] = []
    folders = {name: root / name for name in ("old", "new")}
    _run(written.old, base, folders["old"])
    _run(written.new, folders["old"], folders["new"])
    old, new = (state(folders[name], written) for name in ("old", "new"))
    assert old
    assert new != old
    count = 0

    def check(name: str, call: Callable[[], int]) -> Outcome:
        folder = root / "now"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(folders["old"], folder)
        outcome = isolated(call, folder, Limits(60.0))
        found = faults_of(state(folder, written), old, new, written)
        if outcome.status == 0 and state(folder, written) != new:
            found.append("success without the new output")
        if "Traceback" in outcome.stderr:
            found.append(outcome.stderr.strip().splitlines()[-1][:150])
        again = isolated(partial(run_words, written.new), folder, Limits(60.0))
        if again.status != 0 or state(folder, written) != new:
            found.append(f"the next run ends with {again.status}: {again.stderr.strip()[-150:]}")
        broken.extend(f"{written.name}, {name}: {each}" for each in found)
        return outcome

    for effect in effects:
        for number in range(1, _MOST_CALLS):
            outcome = check(
                f"{effect} at call {number}", partial(run_with_fault, written.new, number, effect)
            )
            if outcome.status == 99:
                break
            count += 1
    for size in SIZES:
        check(f"a disk full at {size} bytes", partial(run_on_full_disk, written.new, size))
        count += 1
    return count, broken


def _run(words: Sequence[str], source: Path, folder: Path) -> None:
    """Run a command in a copy of a folder; it must succeed."""
    shutil.copytree(source, folder)
    outcome = isolated(partial(run_words, words), folder, Limits(120.0))
    if outcome.status != 0:
        raise RuntimeError(f"{' '.join(words)}: {outcome.stderr}")


def main(words: Sequence[str] | None = None) -> int:
    """Inject all faults and print the counts."""
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", help="Commands whose names contain this.")
    args = parser.parse_args(words)
    preload()
    rows, all_broken = [], []
    with tempfile.TemporaryDirectory() as name:
        base = Path(name) / "base"
        prepare(base)
        for written in COMMANDS:
            if args.only not in written.name:
                continue
            root = Path(name) / written.name
            root.mkdir()
            count, broken = injected(written, base, root)
            all_broken += broken
            rows.append([written.name, str(count), str(len(broken))])
            print("\n".join(broken), flush=True)
    print(markdown(["command", "faults injected", "neither old nor new"], rows))
    return 1 if all_broken else 0


if __name__ == "__main__":
    sys.exit(main())
