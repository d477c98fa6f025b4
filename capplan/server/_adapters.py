"""Adapters of a server: those it started with, and those loaded at run time from below a root."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from capplan.engine import CoreReady
from capplan.engine.lora import AdapterLayout, PeftFolder
from capplan.errors import InputError
from capplan.server._async_engine import AsyncEngine, EngineDeadError
from capplan.server._protocol import RETRY, ApiError, engine_failed, overloaded
from capplan.server._settings import NAME_RULE, ServerSettings, is_name
from capplan.spec import ADAPTER_CONFIG, NOT_PRINTABLE, WEIGHTS_FILE, is_printable

T = TypeVar("T")

_MAX_CANDIDATES: Final = 8
"""Adapters tried for removal when there is no room for another one."""
_MAX_READERS: Final = 12
"""Threads that read adapters. Users bound their reads below it; it is reached if a file system hangs."""


class ServedAdapters:
    """Adapters of a server by name; `initial`: folder or rank of those that the engine started with.

    Methods that change adapters raise `ApiError` if the engine has failed or the time limit has passed.
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
        self._adapters = {name: int(time.time()) for name in initial}
        self._outdated: dict[str, int] = {}
        self._folders: dict[str, str] = {}
        self._lock = asyncio.Lock()
        self._capacity = ready.max_adapters
        self._pins: Counter[str] = Counter()
        self.readers = ReaderThreads()

    def __contains__(self, name: object) -> bool:
        return name in self._adapters

    def created(self) -> Mapping[str, int]:
        """Return the time at which each adapter was created, oldest first, in seconds since 1970."""
        return self._adapters

    async def load(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load an adapter from a folder below the root.

        `in_place`: replace the adapter of this name, if one was loaded and no request uses it. An adapter
        that is broken or does not fit the model, a folder outside the root, and a name that is invalid, taken
        or in use are errors.
        """
        if not is_name(name):
            raise ApiError(400, f"lora_name {NAME_RULE}", "lora_name")
        if not is_printable(path):
            raise ApiError(400, f"lora_path must be without {NOT_PRINTABLE}", "lora_path")
        async with self._changing():
            replaces = in_place and name in self._adapters and name not in self._folders
            if name == self._base_name or (name in self._adapters and not replaces):
                raise ApiError(400, f"The adapter {name!r} is loaded already", "lora_name", "already_loaded")
            try:
                # A full read outside the engine core rejects broken adapters.
                source = await self._read(path)
                if not replaces:
                    await self._add(name, source)
                elif not await self._engine.call("replace_adapter", name, source):
                    message = f"Requests use the adapter {name!r}"
                    raise ApiError(409, message, "lora_name", "adapter_in_use")
            except InputError as error:
                raise ApiError(400, str(error), "lora_path") from None
            self._adapters[name] = int(time.time())

    async def unload(self, name: str) -> None:
        """Remove an adapter that exists and that no request uses."""
        async with self._changing():
            created = self._adapters.pop(name, None)  # new requests get 404 from here on
            if created is None:
                raise ApiError(404, f"There is no adapter {name!r}", "lora_name", "adapter_not_found")
            try:
                await self._engine.call("remove_adapter", name)
            except InputError as error:
                self._adapters[name] = created
                raise ApiError(409, str(error), "lora_name", "adapter_in_use") from None
            self._folders.pop(name, None)

    def check(self, folder: PeftFolder) -> None:
        """Read an adapter as the engine core will, with its errors, in a thread of the caller."""
        folder.read(self._layout, self._dtype, pin=False, max_rank=self._max_rank)

    async def serve(self, name: str, folder: PeftFolder, removable: Iterable[str]) -> bool:
        """Serve an adapter that has been checked; return False while requests use another one of its name.

        If there is no room, the first of `removable` that no request uses are removed for it.
        """
        async with self._changing():
            former = self._folders.get(name)
            if name in self._adapters and former not in (None, folder.name):
                self._expire(name)
            if former == folder.name and name in self._outdated:  # the registry has it again
                self._adapters[name] = self._outdated.pop(name)
            if name in self._adapters:
                return True
            try:
                if not await self._replace(name, folder, removable):
                    return False
            except InputError as error:
                raise ApiError(400, str(error).replace(folder.name, name), "model") from None
            self._adapters[name] = int(time.time())
            self._folders[name] = folder.name
            return True

    async def _replace(self, name: str, folder: PeftFolder, removable: Iterable[str]) -> bool:
        """Add an adapter to the engine; return False while requests use the outdated one of its name."""
        if name not in self._outdated:
            await self._make_room(removable)
            await self._add(name, folder)
            return True
        try:
            replaced = bool(await self._engine.call("replace_adapter", name, folder))
        except asyncio.CancelledError:
            self._folders[name] = ""  # the core has either of them
            raise
        except InputError:
            del self._outdated[name], self._folders[name]
            raise
        if replaced:
            del self._outdated[name]
        return replaced

    async def _make_room(self, removable: Iterable[str]) -> None:
        """Remove adapters until there is room for another one."""
        candidates = [each for each in removable if each in self._adapters or each in self._outdated]
        del candidates[_MAX_CANDIDATES:]
        while len(self._adapters) + len(self._outdated) >= self._capacity:
            if not candidates:
                raise overloaded("There is no room for further adapters: all are in use")
            await self._removed(candidates.pop(0))

    async def expire(self, name: str, folder: str) -> None:
        """Serve an adapter to no further requests if it is the one of a folder; those that run go on."""
        async with self._changing():
            if name in self._adapters and self._folders.get(name) == folder:
                self._expire(name)

    def _expire(self, name: str) -> None:
        self._outdated[name] = self._adapters.pop(name)

    def is_outdated(self, name: str) -> bool:
        """Return whether the engine has a former adapter of a name, which gets no further requests."""
        return name in self._outdated

    def folders(self) -> set[str]:
        """Return the names of the folders of the adapters that the engine has by `serve`."""
        return set(self._folders.values())

    async def withdraw(self, name: str) -> bool:
        """Stop to serve an adapter unless requests use it; return whether it is not served any more."""
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
        adapters = self._adapters if name in self._adapters else self._outdated
        if name not in adapters:
            return True
        if self._pins[name]:
            return False
        created = adapters.pop(name)
        try:
            await self._engine.call("remove_adapter", name)
        except InputError:  # requests use it
            adapters[name] = created
            return False
        self._folders.pop(name, None)
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
        """Return what a function returns; raise 503 if all threads hang."""
        if self._running >= _MAX_READERS:
            raise overloaded("The file system of adapters does not respond")
        self._running += 1
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def settle(value: Any, error: BaseException | None) -> None:  # also after this call was cancelled
            self._running -= 1
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
