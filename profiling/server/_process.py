"""`capplan serve` and other commands of capplan as child processes, which end with this one."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from capplan.errors import InputError
from capplan.processes import attached
from capplan.spec import EngineArgs

_START_S: Final = 600.0
_END_S: Final = 60.0
_MOST_CHARACTERS: Final = 400


@dataclass(frozen=True)
class ServerCommand:
    """`capplan serve` command: model, adapters (folder or rank), flags, threads, step records."""

    model: str
    adapters: Mapping[str, str | int] = field(default_factory=dict)
    flags: Sequence[str] = ()
    threads: int = 1
    records: Path | None = None

    def words(self) -> list[str]:
        modules = [f"{name}={source}" for name, source in self.adapters.items()]
        return [
            *(sys.executable, "-m", "capplan", "serve", "--model", self.model, "--port", "0", "--json"),
            *self.flags,
            *flag_words({"--steps-out": self.records}),
            *(["--lora-modules", *modules] if modules else []),
        ]


@contextmanager
def running_server(command: ServerCommand) -> Iterator[str]:
    """Start a server, yield its address, and stop it.

    Raise `InputError` if it does not start; the message holds its last line.
    """
    environment = attached({"OMP_NUM_THREADS": str(command.threads)})
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(  # noqa: S603 - our own program
            command.words(), stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        try:
            yield _address(process, errors)
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _address(process: subprocess.Popen[str], errors: IO[str]) -> str:
    watch = threading.Timer(_START_S, process.kill)
    watch.start()
    try:
        line = process.stdout.readline() if process.stdout is not None else ""
    finally:
        watch.cancel()
    try:
        return str(json.loads(line)["url"])
    except (ValueError, KeyError, TypeError):
        process.wait(_END_S)
        errors.seek(0)
        rule = f"did not start: {_last_line(errors.read())[:_MOST_CHARACTERS]}"
        raise InputError(rule, location="capplan serve") from None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def run_capplan(words: Sequence[str], threads: int, fine: Sequence[int] = (0,)) -> str:
    """Run a capplan command and return its output.

    Raise `RuntimeError` if its exit code is not among `fine`; the message holds the last line of its errors,
    which are printed.
    """
    environment = attached({"OMP_NUM_THREADS": str(threads)})
    command = [sys.executable, "-m", "capplan", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode not in fine:
        sys.stderr.write(done.stderr)
        message = f"capplan {words[0]} ended with status {done.returncode}: {_last_line(done.stderr)}"
        raise RuntimeError(message)
    return done.stdout


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """Return flags and values as command-line words, without flags whose value is None."""
    return [str(word) for pair in flags.items() if pair[1] is not None for word in pair]


def engine_words(args: EngineArgs, flags: Mapping[str, object]) -> tuple[str, ...]:
    """Return the words of `capplan serve` for engine settings and further flags."""
    return (*itertools.chain.from_iterable(args.flags()), *flag_words(flags))
