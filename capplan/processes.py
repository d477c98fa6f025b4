"""Processes: children that end with their parent, however it ends, open files, and garbage collections.

A parent that is killed cannot end its children, and a child that waits for work would wait for ever.

A full garbage collection visits all objects of a process: half a second and more for ten thousand requests in
flight. Python starts one whenever the number of objects has grown by a quarter.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Final

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

PARENT: Final = "CAPPLAN_PARENT"
"""Environment variable of a capplan command: number of the process with which it ends."""

_POLL_S: Final = 1.0
_PR_SET_PDEATHSIG: Final = 1
_ASSUMED_FILES: Final = 1024
_NEVER: Final = 2**31 - 1
_COLLECTION_EVERY_S: Final = 10.0
_COLLECTION_SHARE: Final = 0.01
"""Largest share of time in full collections."""


def end_with_pool() -> None:
    """Let a worker of a process pool end with the process of the pool, or at Ctrl-C: an ``initializer``."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once, also in compiled code, and without a traceback
    threading.Thread(target=_end_after_pool, daemon=True).start()


def _end_after_pool() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def attached(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a capplan command that ends with this process."""
    return {**os.environ, **(environment or {}), PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """Let this process stop as after SIGTERM once the process named by the environment has ended."""
    parent = os.environ.pop(PARENT, "")  # not for children of this process
    if parent.isdecimal():
        threading.Thread(target=_stop_after, args=(int(parent),), daemon=True).start()


def _stop_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def end_by_kernel_with(parent: int) -> None:
    """Let the kernel kill this process, on Linux, when the process that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before
            sys.exit(1)


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Start processes, in the context, that Ctrl-C in a terminal does not reach: their parent ends them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which they inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def open_file_limit() -> int:
    """Return the limit of open files of this process."""
    if resource is None:
        return _ASSUMED_FILES
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def raise_file_limit() -> None:
    """Raise the limit of open files to its maximum; the usual one allows a thousand connections."""
    if resource is not None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def without_full_collections() -> Iterator[None]:
    """Let Python start no full garbage collection; young objects are collected as usual.

    Objects that exist at the beginning are left out of collections until the end.
    """
    young, middle, old = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()


async def collect_rarely(every_s: float = _COLLECTION_EVERY_S) -> None:
    """Start full garbage collections until cancelled: for processes in `without_full_collections`.

    One starts after `every_s`, and later if its predecessor took more than 1 % of that time.
    """
    wait_s = every_s
    while True:
        await asyncio.sleep(wait_s)
        begin_s = time.monotonic()
        gc.collect()
        wait_s = max(every_s, (time.monotonic() - begin_s) / _COLLECTION_SHARE)
