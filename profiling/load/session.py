"""The session in which a server is asked about itself: models, metrics, a first token."""

from __future__ import annotations

import aiohttp

from capplan.profiling.load.settings import Target


def open_session(target: Target) -> aiohttp.ClientSession:
    """Return a session with the headers of the target; inside a running event loop only."""
    return aiohttp.ClientSession(headers=target.headers(), timeout=aiohttp.ClientTimeout(total=None))
