"""Commands of capplan as processes of their own, with the threads that they would have alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def run_capplan(words: Sequence[str], threads: int, fine: Sequence[int] = (0,)) -> str:
    """Run a command of capplan and return what it printed.

    Parameters
    ----------
    words
        The command without its first word.
    threads
        Of numerical libraries in that process.
    fine
        Exit codes that are no failure.

    Raises
    ------
    RuntimeError
        When it ends with another one; with its last words.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "capplan", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode not in fine:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(f"capplan {words[0]} ended with status {done.returncode}: {last}")
    return done.stdout


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """Return flags and their values as words of a command."""
    return [str(word) for pair in flags.items() for word in pair]
