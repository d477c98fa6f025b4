"""The toy server in a thread of the tests' process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.stand_in_servers import ToyServer
from tests.profiling.load.servers import listening


@contextmanager
def toy_server(**settings: Any) -> Iterator[tuple[str, ToyServer]]:
    """Give the address of a server and the server."""
    server = ToyServer(**settings)
    with listening(server.start) as url:
        yield url, server
