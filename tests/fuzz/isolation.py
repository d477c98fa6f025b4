"""Calls in forked processes with limits on time and memory, and what became of them.

An import of capplan with its compiled code takes over a second, a fork of a process that has it some
milliseconds. A forked call sees the modules, the compiled code and nothing of the calls before it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.005
_GIB: Final = 2**30
_COUNTED_EVERY_S: Final = 0.5

OUTPUTS: Final = ("stdout", "stderr")
"""Files of a call's output, beside its folder."""


@dataclass(frozen=True)
class Limits:
    """Limits of a call; one that reaches them is ended."""

    seconds: float = 60.0
    """Elapsed time."""
    bytes: int = 2 * _GIB
    """Address space beyond that of the parent."""
    processes: int = 64


@dataclass(frozen=True)
class Outcome:
    """End of a call."""

    status: int
    """Exit status; minus the signal that ended it."""
    stdout: str
    stderr: str
    cpu_s: float
    """Processor time, with that of the processes it waited for."""
    peak_bytes: int
    """Peak resident memory, modules included, without what the parent has gathered since its first call."""
    left: int
    """Processes of its group that outlived it; they are killed."""


def isolated(call: Callable[[], int], folder: Path, limits: Limits) -> Outcome:
    """Run a call in a forked process, with ``folder`` as its working directory.

    The caller must have a single thread.

    Parameters
    ----------
    call : callable
        Returns its exit status.
    folder : Path
        An existing folder; the output goes to files beside it.
    limits : Limits
        Time and memory.
    """
    outputs = [folder.with_name(f"{folder.name}.{name}") for name in OUTPUTS]
    sys.stdout.flush()
    sys.stderr.flush()
    gathered_bytes = max(0, _memory(1) - _resident_at_first())
    started_s = time.monotonic()
    process = os.fork()
    if process == 0:
        _child(call, folder, outputs, limits)
    status, usage = _awaited(process, started_s, limits)
    left = _end_group(process)
    stdout, stderr = (path.read_text(errors="replace") for path in outputs)
    exit_status = os.waitstatus_to_exitcode(status)
    cpu_s = usage.ru_utime + usage.ru_stime
    return Outcome(exit_status, stdout, stderr, cpu_s, usage.ru_maxrss * 1024 - gathered_bytes, left)


@cache
def _resident_at_first() -> int:
    return _memory(1)


def _child(call: Callable[[], int], folder: Path, outputs: list[Path], limits: Limits) -> None:
    """Run the call and exit, without the parent's exit handlers."""
    status = 70  # EX_SOFTWARE
    try:
        os.setsid()
        os.chdir(folder)
        for number, path in enumerate(outputs, start=1):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, number)
            os.close(file)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        most = _memory(0) + limits.bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = call()
    except BaseException:  # noqa: BLE001 - reported as the interpreter would
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                status = status or 70
        os._exit(status)


def _memory(field: int) -> int:
    """Return the address space of this process, field 0, or its resident memory, field 1."""
    return int(Path("/proc/self/statm").read_text().split()[field]) * os.sysconf("SC_PAGE_SIZE")


def _awaited(process: int, started_s: float, limits: Limits) -> tuple[int, resource.struct_rusage]:
    """Return the wait status of a process and its use; its group is killed at a limit."""
    counted_s = started_s
    while True:
        found, status, usage = os.wait4(process, os.WNOHANG)
        if found:
            return status, usage
        now_s = time.monotonic()
        if now_s - counted_s > _COUNTED_EVERY_S:
            counted_s = now_s
            if now_s - started_s > limits.seconds or _members(process) > limits.processes:
                os.killpg(process, signal.SIGKILL)
        time.sleep(_POLL_S)


def _members(group: int) -> int:
    """Return the number of running processes of a group."""
    found = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        found += int(fields[2]) == group and fields[0] != "Z"
    return found


def _end_group(group: int) -> int:
    """Kill the processes of a group and return how many there were."""
    left = _members(group)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    return left
