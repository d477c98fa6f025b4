"""Limits of this process that thousands of connections run into."""

from __future__ import annotations

import contextlib


def raise_file_limit() -> None:
    """Let this process open as many files and connections as it may; where that cannot be set, nothing."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
