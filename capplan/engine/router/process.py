"""Router process: start the instances, listen, drain and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvicorn

from capplan.engine.models import ModelConfig, builtin_config, read_config
from capplan.engine.router.app import RouterState, make_app
from capplan.engine.router.instances import InstanceSpec
from capplan.engine.router.launcher import Launcher
from capplan.engine.router.supervisor import FleetSettings, InstanceFleet, RestartPolicy
from capplan.engine.server.limiter import ServerSettings
from capplan.engine.server.process import bind, url_of
from capplan.engine.tokenizer import Tokenizer, load_tokenizer
from capplan.serving.memory import kv_bytes_per_token, lora_elements_per_rank

try:
    import resource
except ImportError:  # no such limit on Windows
    resource = None  # type: ignore[assignment]

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)

_KEEP_ALIVE_S: Final = 75

_LAST_WORDS_S: Final = 5
"""For answers that are written out already, and for those that the end of the instances cuts off."""


@dataclass(frozen=True)
class RouterConfig:
    """A plan's instances and the router before them, as settings.

    Attributes
    ----------
    specs
        The instances.
    launcher
        Starts them.
    server
        The router's settings.
    max_queue
        Most requests that wait before an instance, where the plan has queues by size.
    care
        How instances are looked after.
    say
        Told what happens to instances, a line each.
    """

    specs: Sequence[InstanceSpec]
    launcher: Launcher
    server: ServerSettings
    max_queue: int = 512
    care: RestartPolicy = field(default_factory=RestartPolicy)
    say: Callable[[str], None] = lambda line: logging.getLogger(__name__).warning(line)


def run_router(cluster: RouterConfig, ready: Callable[[str], None]) -> int:
    """Serve until told to stop.

    Parameters
    ----------
    cluster
        What to serve.
    ready
        Called with the URL once all instances take requests.

    Returns
    -------
    int
        Exit status: 0 when told to stop, 1 when no instance could be kept alive.

    Raises
    ------
    InputError, LaunchError
        When an instance does not start.
    """
    front = new_router_state(cluster)
    _allow_many_connections()
    with bind(cluster.server.host, cluster.server.port) as listener:
        RouterServer(front, lambda: ready(url_of(listener))).run([listener])
    return int(front.fleet.failed.is_set())


def new_router_state(cluster: RouterConfig) -> RouterState:
    """Return a router with its instances, none of which is started yet."""
    config, tokenizer = _model_of(cluster.specs[0].model)
    arch = config.arch(2)  # the ratio below does not depend on the bytes of a number
    settings = FleetSettings(
        care=cluster.care,
        adapter_tokens_per_rank=arch.dtype_bytes * lora_elements_per_rank(arch) / kv_bytes_per_token(arch),
        most_queued=cluster.max_queue,
    )
    fleet = InstanceFleet(cluster.specs, cluster.launcher, settings, cluster.say)
    has_queues = any(spec.queues is not None for spec in cluster.specs)
    return RouterState(cluster.server, fleet, tokenizer if has_queues else None)


def _allow_many_connections() -> None:
    """Raise the limit of open files as far as it goes: a request takes two, and the usual limit is 1024."""
    if resource is not None:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _model_of(model: str) -> tuple[ModelConfig, Tokenizer]:
    """Return the numbers of a model and its tokenizer; checks the name before anything is started."""
    path = Path(model)
    config = read_config(model) if path.exists() else builtin_config(model)
    return config, load_tokenizer(path if path.is_dir() else None, config.vocab_size)


class RouterServer(uvicorn.Server):
    """uvicorn with instances: they are up before it listens, and gone when it has ended.

    The first SIGTERM or SIGINT lets running requests finish, for a time, while new ones are refused with 503;
    the second ends at once.
    """

    def __init__(self, front: RouterState, ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(front),
                log_level=logging.WARNING,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_LAST_WORDS_S,
            )
        )
        self._front = front
        self._ready = ready
        self._at_once = False
        self._starting: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Run until told to stop; no instance is left then."""
        try:
            await super().serve(sockets)
        finally:
            for task in self._tasks:
                task.cancel()
            await self._front.fleet.stop(self._at_once)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the instances, listen, and say so."""
        self._starting = asyncio.ensure_future(self._front.fleet.start())
        try:
            await self._starting
        except asyncio.CancelledError:  # told to end before anything was there
            self.should_exit = True
            return
        finally:
            self._starting = None
        await super().startup(sockets)
        self._tasks.append(asyncio.ensure_future(self._watch_fleet()))
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs; unlike uvicorn, do not raise them again afterwards."""
        if threading.current_thread() is not threading.main_thread():  # where signals cannot be had
            yield
            return
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.end)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def end(self) -> None:
        """Finish what runs and stop; called again, stop."""
        if self._starting is not None:
            self._at_once = True
            self._starting.cancel()
        elif self._front.draining:
            self._at_once = self.should_exit = self.force_exit = True
        else:
            self._front.draining = True
            self._tasks.append(asyncio.ensure_future(self._drain()))

    async def _drain(self) -> None:
        try:
            await asyncio.wait_for(self._front.tally.wait_idle(), self._front.settings.drain_timeout_s)
        except TimeoutError:  # what still runs ends with an error
            await self._front.fleet.stop(at_once=False)
        self.should_exit = True

    async def _watch_fleet(self) -> None:
        await self._front.fleet.failed.wait()
        self.should_exit = True
