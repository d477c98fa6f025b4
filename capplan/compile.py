"""Compilation of requests, serving rules and twin, with a disk cache that notices every edit.

numba's own cache looks at the file of the function it compiled, not at the files of the functions that it
calls: an edited rule could keep running in its old form. Here the cache folder is named after a digest of all
sources that are compiled together, so an edit anywhere in them starts a new folder.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., object])

_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "nogil": True,  # the planner verifies GPUs in threads
        "error_model": "numpy",
        # Undocumented: without numba's runtime, compiled code counts no references. With it, every call from
        # one compiled function to another counts all the state's arrays up and down: more than four fifths of
        # the twin's time. A function that allocates an array, its purpose, fails to compile instead.
        "_nrt": False,
    }
)

# The code that unpacks Python's arguments for a function, all the state's arrays one by one, is most of what
# there is to compile; and handing them from function to function is most of the time of a short one. So what
# only compiled code calls has no such entrance and becomes part of its callers: the twin is twice as fast.
_INTERNAL_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    dict(_OPTIONS) | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
)

_PACKAGE = Path(__file__).resolve().parent
_COMPILED_PACKAGES = ("serving", "models", "twin", "workload")


@functools.cache
def source_digest() -> str:
    """Return the digest of every source that may be compiled together with others, and of numba's version."""
    digest = hashlib.sha256(numba.__version__.encode())
    digest.update(Path(__file__).read_bytes())
    for package in _COMPILED_PACKAGES:
        folder = (_PACKAGE / package).resolve()
        for file in sorted(folder.rglob("*.py")):
            source = file.read_bytes()
            # What learns and writes datasets lies in folders below, and little of it is compiled.
            if file.parent == folder or b"capplan.compile" in source:
                digest.update(str(file.relative_to(folder)).encode())
                digest.update(source)
    return digest.hexdigest()[:16]


@functools.cache
def cache_dir() -> Path:
    """Return the folder of the compiled code, below ``$CAPPLAN_CACHE_DIR`` or ``~/.cache/capplan``."""
    base = os.environ.get("CAPPLAN_CACHE_DIR")
    root = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "capplan"
    return root / f"compiled-{source_digest()}"


@functools.cache
def _cache_is_writable() -> bool:
    """Tell whether the folder can be written; if not, numba would fall back to one that no digest guards."""
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(cache_dir(), os.W_OK)


def is_compiled() -> bool:
    """Tell whether compiled code for these very sources is already on disk."""
    return any(cache_dir().rglob("*.nbc"))


def jit(function: F) -> F:
    """Compile `function` with numba, cached on disk under the digest of all compiled sources.

    Where the cache folder cannot be written, every process compiles for itself.
    """
    return _compiled(function, _OPTIONS)


def inner(function: F) -> F:
    """Compile `function` as `jit` does, for calls from compiled functions only."""
    return _compiled(function, _INTERNAL_OPTIONS)


def _compiled(function: F, options: Mapping[str, Any]) -> F:
    # numba fixes a function's cache folder when it is decorated.
    config: Any = numba.config  # its entries are made at run time, out of sight of type checkers
    before = config.CACHE_DIR
    config.CACHE_DIR = str(cache_dir())
    try:
        compiled: F = numba.njit(cache=_cache_is_writable(), **options)(function)
    finally:
        config.CACHE_DIR = before
    return compiled
