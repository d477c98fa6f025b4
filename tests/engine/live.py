"""A real server on loopback, and its engine core, in threads of the test's process."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from capplan.engine import Engine
from capplan.engine._core_process import CoreLoop, warm_up
from capplan.server import DrainingServer, ServerApp, ServerSettings, Service, bind, url_of
from capplan.server._adapter_pool import PoolParams, open_pool
from tests.engine.engines import TINY_MODEL, check_engine

T = TypeVar("T")

TINY = TINY_MODEL.replace(
    layers=2, hidden_size=32, heads=4, kv_heads=2, intermediate_size=48, max_positions=512
)
ADMIN_KEY = "admin"
SIZES: Mapping[str, Any] = {"num_kv_blocks": 400, "block_size": 8, "max_num_seqs": 64, "max_lora_rank": 16}


class Live:
    """A running server.

    Attributes
    ----------
    url
        Where; without ``/v1``.
    engine
        Its engine, which belongs to the core's thread while requests run.
    """

    def __init__(self, engine: Engine, adapters: Mapping[str, str | Path | int], **settings: Any) -> None:
        self.engine = engine
        pool_params = settings.pop("pool_params", PoolParams())
        connection, self._core_end = socket.socketpair()
        loop = CoreLoop(engine, self._core_end)
        key = {"admin_api_key": ADMIN_KEY} if "lora_root" in settings else {}
        server_settings = ServerSettings(**({"model_name": "base"} | key | settings))
        self.service = Service(connection, loop.ready(), server_settings, adapters)
        self._connection = connection
        self._core = threading.Thread(target=self._run_core, args=(loop,))
        self._core.start()
        self._listener = bind("127.0.0.1", 0)
        self.url = url_of(self._listener)
        if server_settings.pool is not None:
            self.service.join(open_pool(server_settings, self.service.adapters, self.url, pool_params))
        self._is_ready = threading.Event()
        self.server = DrainingServer(ServerApp(self.service), self.service, self._ready)
        self._thread = threading.Thread(target=self.server.run, args=([self._listener],))
        self._thread.start()
        assert self._is_ready.wait(60), "the server does not start"

    def _run_core(self, loop: CoreLoop) -> None:
        with self._core_end, contextlib.suppress(MemoryError):  # what a test raises
            loop.run()

    def _ready(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._is_ready.set()

    def on_loop(self, function: Callable[[], T]) -> T:
        """Return what a function returns on the server's event loop."""

        async def call() -> T:
            return function()

        return self.run(call())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def check_idle(self) -> None:
        """Check that no request has left a row, block, slot, state or task."""
        waiting = asyncio.run_coroutine_threadsafe(self.service.engine.wait_idle(), self.loop)
        waiting.result(60)
        assert asyncio.run_coroutine_threadsafe(self.service.engine.is_alive(60), self.loop).result(60)
        check_nothing_in_flight(self.engine)  # the core waits for a message
        assert self.service.engine.in_flight == 0
        self.on_loop(lambda: None)
        names = self.on_loop(lambda: [str(task.get_coro()) for task in asyncio.all_tasks(self.loop)])
        assert [name for name in names if "run_asgi" in name or "_watch_connection" in name] == []

    def close(self) -> None:
        """Stop the server and its engine."""
        self.loop.call_soon_threadsafe(setattr, self.server, "should_exit", True)
        self.join()

    def join(self) -> None:
        """Wait for the end of the server, and stop its engine."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server does not end"
        self.service.close()
        self._core.join(60)
        assert not self._core.is_alive(), "the engine core does not end"
        self._connection.close()
        self.engine.close()


def check_nothing_in_flight(engine: Engine) -> None:
    """Check an idle engine."""
    state, counters = engine.core.state, engine.core.state.counters
    assert engine.core.requests == {}
    check_engine(engine)
    assert counters.n_free_rows == state.rows.size
    assert counters.n_running == counters.n_waiting == 0
    assert counters.free_blocks + counters.adapter_pages == counters.capacity


@contextlib.contextmanager
def live(
    adapters: Mapping[str, str | Path | int], engine: Mapping[str, Any] | None = None, **settings: Any
) -> Iterator[Live]:
    """Serve the tiny model."""
    fields = {**SIZES, "max_in_flight": settings.get("max_requests", 1024), **(engine or {})}
    made = Engine(TINY, adapters, **fields)
    warm_up(made)
    server = Live(made, adapters, **settings)
    try:
        yield server
    finally:
        if server._thread.is_alive():
            server.close()
