"""Compilation of floating-point kernels: as `capplan.compile.jit`, but sums may be taken in any order."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import numba

from capplan.compile import cache_dir

F = TypeVar("F", bound=Callable[..., object])


def fast(function: F) -> F:
    """Compile a function that calls none of another file, so numba's own cache notices every edit."""
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(cache_dir())
    try:
        writable = os.access(cache_dir(), os.W_OK)
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": True, "cache": writable}
        compiled: F = numba.njit(**options)(function)
    finally:
        config.CACHE_DIR = before
    return compiled
