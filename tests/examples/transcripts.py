"""Console transcripts of the examples: ``python -m tests.examples.transcripts [NAME ...]`` records them.

The README of an example has a block of commands, each on a line that begins with ``$``, and below each what
it prints on a terminal of 150 columns, with ``exit status N`` where that is not 0. Commands run in a copy of
the folder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLES: Final = ROOT / "examples"
_BLOCK: Final = re.compile(r"(?<=```console\n).*?(?=```)", re.DOTALL)
_COLUMNS: Final = "150"
_COMPILING: Final = "compiling the digital twin"
_TIMEOUT_S: Final = 300


class Step(NamedTuple):
    """A command, and what it prints."""

    command: str
    output: str


def examples() -> list[Path]:
    """Return the folders of the examples."""
    return sorted(path.parent for path in EXAMPLES.glob("*/README.md"))


def recorded(folder: Path) -> list[Step]:
    """Return the commands of an example with their recorded output."""
    (block,) = _BLOCK.findall((folder / "README.md").read_text(encoding="utf-8"))
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
    return [Step(*part.split("\n", 1)) for part in parts]


def run(folder: Path, commands: Iterable[str]) -> Iterator[Step]:
    """Run commands one after the other in a copy of a folder."""
    with TemporaryDirectory() as scratch:
        copy, programs = Path(scratch, folder.name), Path(scratch, "bin")
        shutil.copytree(folder, copy)
        programs.mkdir()
        for name, words in (("capplan", "-m capplan "), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
            (programs / name).chmod(0o755)
        path = f"{programs}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": _COLUMNS}
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=copy,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TIMEOUT_S,
            )
            lines = [line for line in done.stdout.splitlines() if not line.startswith(_COMPILING)]
            status = f"exit status {done.returncode}\n" if done.returncode else ""
            yield Step(command, "".join(f"{line.rstrip()}\n" for line in lines) + status)


def record(folder: Path) -> None:
    """Write what the commands of an example print into its README."""
    steps = run(folder, [step.command for step in recorded(folder)])
    block = "".join(f"$ {step.command}\n{step.output}" for step in steps)
    path = folder / "README.md"
    path.write_text(_BLOCK.sub(lambda _: block, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    for each in [EXAMPLES / name for name in sys.argv[1:]] or examples():
        record(each)
