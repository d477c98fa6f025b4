"""Adapters of a server: those it started with, and those loaded at run time from below a root."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from capplan.engine.lora import AdapterLayout, PeftFolder
from capplan.engine.messages import CoreReady
from capplan.engine.server.async_engine import AsyncEngine
from capplan.engine.server.limits import NAME_RULE, is_name
from capplan.engine.server.output_stream import EngineDeadError
from capplan.engine.server.protocol import RETRY, ApiError, engine_failed, overloaded
from capplan.engine.server.settings import ServerSettings
from capplan.errors import InputError
from capplan.spec.lora_modules import ADAPTER_CONFIG
from capplan.spec.peft_folder import WEIGHTS_FILE

T = TypeVar("T")

_MAX_CANDIDATES: Final = 8
"""Adapters tried for removal when there is no room for another one."""
_MAX_READERS: Final = 12
"""Threads that read adapters. Users bound their reads below it; it is reached if a file system hangs."""


@dataclass(frozen=True)
class AdapterInfo:
    """Entry of an adapter in `/v1/models`."""

    name: str
    created: int = field(default_factory=lambda: int(time.time()))


class ServedAdapters:
    """Adapters of a server by name.

    Parameters
    ----------
    ready
        Facts of the engine.
    initial
        Name to folder or rank of the adapters that the engine started with.

    Attributes
    ----------
    readers
        Threads that read adapters.
    """

    def __init__(
        self,
        ready: CoreReady,
        engine: AsyncEngine,
        settings: ServerSettings,
        initial: Mapping[str, str | Path | int],
    ) -> None:
        self._engine = engine
        self._base_name = settings.model_name
        self._root = (settings.lora_root or Path()).resolve()  # requests are refused without a root
        self._timeout_s = settings.limits.lora_timeout_s
        self._layout = AdapterLayout(ready.config)
        self._dtype = ready.dtype
        self._max_rank = ready.args.max_lora_rank
        self._adapters = {name: AdapterInfo(name) for name in initial}
        self._lock = asyncio.Lock()
        self._capacity = ready.max_adapters
        self._pins: Counter[str] = Counter()
        self.readers = ReaderThreads()

    def __contains__(self, name: object) -> bool:
        return name in self._adapters

    def all(self) -> list[AdapterInfo]:
        """Return all adapters, oldest first."""
        return list(self._adapters.values())

    async def load(self, name: str, path: str) -> None:
        """Load an adapter from a folder below the root.

        Raises
        ------
        ApiError
            If the name is invalid or taken, the folder is outside the root, the adapter is broken or does not
            fit the model, or the time limit has passed.
        """
        if not is_name(name):
            raise ApiError(400, f"lora_name {NAME_RULE}", "lora_name")
        async with self._changing():
            if name in self._adapters or name == self._base_name:
                raise ApiError(400, f"The adapter {name!r} is loaded already", "lora_name", "already_loaded")
            try:
                # A full read outside the engine core rejects broken adapters.
                source = await self._read(path)
                await self._add(name, source)
            except InputError as error:
                raise ApiError(400, str(error), "lora_path") from None
            self._adapters[name] = AdapterInfo(name)

    async def unload(self, name: str) -> None:
        """Remove an adapter.

        Raises
        ------
        ApiError
            If it does not exist, requests use it, or the time limit has passed.
        """
        async with self._changing():
            info = self._adapters.pop(name, None)  # new requests get 404 from here on
            if info is None:
                raise ApiError(404, f"There is no adapter {name!r}", "lora_name", "adapter_not_found")
            try:
                await self._engine.call("remove_adapter", name)
            except InputError as error:
                self._adapters[name] = info
                raise ApiError(409, str(error), "lora_name", "adapter_in_use") from None

    def check(self, folder: PeftFolder) -> None:
        """Read an adapter as the engine core will, in a thread of the caller.

        Raises
        ------
        InputError
            If it is broken or does not fit the model.
        """
        folder.read(self._layout, self._dtype, pin=False, max_rank=self._max_rank)

    async def serve(self, name: str, folder: PeftFolder, removable: Iterable[str]) -> None:
        """Serve an adapter that has been checked.

        Parameters
        ----------
        removable
            Adapters that may be removed for it if there is no room, the first ones first.

        Raises
        ------
        ApiError
            If the adapter is broken, there is no room, or the time limit has passed.
        """
        async with self._changing():
            if name in self._adapters:
                return
            candidates = [each for each in removable if each in self._adapters][:_MAX_CANDIDATES]
            while len(self._adapters) >= self._capacity:
                if not candidates:
                    raise overloaded("There is no room for further adapters: all are in use")
                await self._removed(candidates.pop(0))
            try:
                await self._add(name, folder)
            except InputError as error:
                raise ApiError(400, str(error), "model") from None
            self._adapters[name] = AdapterInfo(name)

    async def withdraw(self, name: str) -> bool:
        """Stop to serve an adapter unless requests use it; return whether it is not served any more.

        Raises
        ------
        ApiError
            If the engine has failed or the time limit has passed.
        """
        async with self._changing():
            return await self._removed(name)

    @contextlib.contextmanager
    def pinned(self, name: str) -> Iterator[None]:
        """Keep an adapter served, once it is, until its requests are in the engine, which keeps it then."""
        self._pins[name] += 1
        try:
            yield
        finally:
            self._pins[name] -= 1
            if not self._pins[name]:
                del self._pins[name]

    async def _removed(self, name: str) -> bool:
        if name not in self._adapters:
            return True
        if self._pins[name]:
            return False
        info = self._adapters.pop(name)
        try:
            await self._engine.call("remove_adapter", name)
        except InputError:  # requests use it
            self._adapters[name] = info
            return False
        return True

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Change adapters one at a time, within the time limit."""
        try:
            async with asyncio.timeout(self._timeout_s), self._lock:
                yield
        except EngineDeadError:
            raise engine_failed() from None
        except TimeoutError:
            message = f"The adapters could not be changed within {self._timeout_s:g} s"
            raise ApiError(503, message, code="timeout", headers=RETRY) from None

    async def _add(self, name: str, source: PeftFolder) -> None:
        """Add an adapter to the engine core, or leave none there."""
        try:
            await self._engine.call("add_adapter", name, source)
        except asyncio.CancelledError:
            self._engine.post("remove_adapter", name)  # the core takes messages in order
            raise

    async def _read(self, path: str) -> PeftFolder:
        """Return the folder of an adapter that can be read."""

        def read() -> PeftFolder:
            folder = _below(self._root, path)
            self.check(folder)
            return folder

        return await self.readers.run(read)


def _below(root: Path, path: str) -> PeftFolder:
    """Return an adapter whose files are within the root, with all links resolved."""
    outside = ApiError(403, "lora_path must lie within the server's --lora-root", "lora_path", "outside_root")
    try:
        folder = (root / path).resolve()
        config, weights = ((folder / name).resolve() for name in (ADAPTER_CONFIG, WEIGHTS_FILE))
        if not all(each.is_relative_to(root) for each in (folder, config, weights)):
            raise outside
        found = folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # a long name, a NUL, a loop of links
        raise ApiError(400, "lora_path is no path", "lora_path") from None
    if not found:
        raise ApiError(404, f"There is no folder {path!r}", "lora_path", "not_found")
    return PeftFolder(str(folder.relative_to(root)), config, weights, root)


class ReaderThreads:
    """Daemon threads that read adapters: a file system that hangs does not keep the process from ending."""

    def __init__(self) -> None:
        self._running = 0

    async def run(self, function: Callable[[], T]) -> T:
        """Return what a function returns.

        Raises
        ------
        ApiError
            503 if all threads hang.
        """
        if self._running >= _MAX_READERS:
            raise overloaded("The file system of adapters does not respond")
        self._running += 1
        return await _in_daemon_thread(function, self._ended)

    def _ended(self) -> None:
        self._running -= 1


async def _in_daemon_thread(function: Callable[[], T], on_end: Callable[[], None]) -> T:
    """Return what a function returns; a thread that hangs does not keep the process from ending.

    Parameters
    ----------
    on_end
        Called on the event loop when the function ends, also after this call was cancelled.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        on_end()
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function()
        except BaseException as raised:  # noqa: BLE001 - raised in the caller
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True, name="adapter-reader").start()
    return await result
