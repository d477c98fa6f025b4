"""CPUs of an engine core that computes on them.

A core with CPUs of its own is not held up by its server and the clients on this machine, so its steps take
as long under load as they did when they were measured. Cores on one machine claim different CPUs, by locks
that end with the process which holds them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from capplan.errors import InputError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

AUTO: Final = "auto"
NONE: Final = "none"
_RULE: Final = f"must be {AUTO}, {NONE}, or CPUs such as 2,4-7"


def allowed_cpus() -> tuple[int, ...]:
    """Return the CPUs that this process may run on; none where the system does not tell."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def device_name(device: str) -> str:
    """Return the name of the device's chip."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    return cpu_model()


def cpu_model() -> str:
    """Return the processor's name."""
    return cpuinfo("model name") or platform.machine() or "unknown"


def cpuinfo(field: str) -> str | None:
    """Return a field of the first processor in ``/proc/cpuinfo``; None if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    found = (line.partition(":")[2].strip() for line in lines if line.startswith(field))
    return next(found, None)


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the CPUs of a list such as ``2,4-7``.

    Raises `InputError` if it is no such list, names a CPU that this process may not use, or leaves none for
    the server.
    """
    allowed = allowed_cpus()
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() for end in ends):
            raise InputError(_RULE, text, "cpu_affinity")
        found.update(range(int(ends[0]), int(ends[1]) + 1))
    for cpu in sorted(found):
        if cpu not in allowed:
            rule = f"must name CPUs that this process may use, {','.join(map(str, allowed))}"
            raise InputError(rule, cpu, "cpu_affinity")
    if not set(allowed) - found:
        raise InputError("must leave a CPU for the server", text, "cpu_affinity")
    return tuple(sorted(found))


@contextlib.contextmanager
def bound_to(cpus: Sequence[int]) -> Iterator[None]:
    """Run this thread, and those and the processes that it starts, on these CPUs; none: on any."""
    before = allowed_cpus()
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        if cpus:
            os.sched_setaffinity(0, before)


def other_cpus(cpus: Sequence[int]) -> tuple[int, ...]:
    """Return the CPUs beside some; none if there is none."""
    return tuple(cpu for cpu in allowed_cpus() if cpu not in cpus)


@contextlib.contextmanager
def core_cpus(choice: str, device: str) -> Iterator[tuple[int, ...]]:
    """Claim the CPUs of an engine core; yield none if it is not to be bound to any.

    Parameters
    ----------
    choice
        ``auto``: for an engine that computes on the CPU, as many as it has threads (``OMP_NUM_THREADS``, or
        all CPUs but one), if that leaves a CPU for the server and no other core has claimed them.
        ``none``, or a list of CPUs.
    device
        As for `EngineOptions`.
    """
    with contextlib.ExitStack() as stack:
        if choice == NONE or (choice == AUTO and device != "cpu"):
            yield ()
        elif choice != AUTO:
            yield parse_cpus(choice)
        else:
            allowed = allowed_cpus()
            yield _claimed(stack, allowed, _threads() or len(allowed) - 1)


def _threads() -> int:
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() else 0


def _claimed(stack: contextlib.ExitStack, allowed: Sequence[int], threads: int) -> tuple[int, ...]:
    """Claim CPUs, the last ones first, since the first ones handle most interrupts; all or none."""
    if fcntl is None or not 0 < threads < len(allowed):
        return ()
    found: list[int] = []
    with contextlib.ExitStack() as claims:
        for cpu in reversed(allowed[1:]):
            if len(found) < threads and _claim(claims, cpu):
                found.append(cpu)
        if len(found) < threads:
            return ()
        stack.enter_context(claims.pop_all())
    return tuple(sorted(found))


def _claim(stack: contextlib.ExitStack, cpu: int) -> bool:
    """Lock the file of a CPU; return False if another process holds it."""
    path = Path(tempfile.gettempdir()) / f"capplan-cpu{cpu}-{os.getuid()}.lock"
    with contextlib.ExitStack() as opened:
        try:
            # Others can write to this folder: a link is not followed, a FIFO does not block.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = opened.enter_context(os.fdopen(os.open(path, flags, 0o600), "rb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        stack.enter_context(opened.pop_all())
    return True
