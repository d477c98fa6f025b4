"""Child processes that end with their parent, however it ends.

A parent that is killed cannot end its children, and a child that waits for work would wait for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Final

PARENT: Final = "CAPPLAN_PARENT"
"""Environment variable of a capplan command: number of the process with which it ends."""

_POLL_S: Final = 1.0


def end_with_pool() -> None:
    """Let a worker of a process pool end with the process of the pool: an ``initializer``."""
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
