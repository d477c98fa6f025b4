"""The adapters that clients may ask for, and loading and unloading them while the server runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from capplan.engine.engine import Engine
from capplan.engine.lora.layout import AdapterLayout
from capplan.engine.lora.sources import PeftFolder
from capplan.engine.server.api_error import ApiError
from capplan.engine.server.driver import Driver
from capplan.errors import InputError

LONGEST_NAME = 256
_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class AdapterInfo:
    """What `/v1/models` says of an adapter."""

    name: str
    source: str
    created: int = field(default_factory=lambda: int(time.time()))


class Adapters:
    """Adapters by name. Belongs to the event loop.

    Parameters
    ----------
    engine, driver
        The engine, of which only what never changes is read here, and who steps it.
    base_name
        The name of the base model, which no adapter may have.
    root
        The folder that adapters are loaded from; None: none can be.
    given
        Name to folder or rank of those that the engine started with.
    """

    def __init__(
        self,
        engine: Engine,
        driver: Driver,
        base_name: str,
        root: Path | None,
        given: Mapping[str, str | Path | int],
    ) -> None:
        self._driver = driver
        self._base_name = base_name
        self._root = None if root is None else root.resolve()
        self._layout = AdapterLayout(engine.config)
        self._dtype = engine.settings.torch_dtype(engine.config)
        self._known = {name: AdapterInfo(name, str(source)) for name, source in given.items()}
        self._one_at_a_time = asyncio.Lock()

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def all(self) -> list[AdapterInfo]:
        """Return all adapters, oldest first."""
        return list(self._known.values())

    async def load(self, name: str, path: str) -> None:
        """Make an adapter known.

        Raises
        ------
        ApiError
            When the name is taken or no name, the folder lies outside of the root, or the adapter is broken
            or does not go with the model.
        """
        if not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
            rule = f"lora_name must be 1 to {LONGEST_NAME} printable characters"
            raise ApiError(400, rule, "lora_name")
        async with self._one_at_a_time:
            if name in self._known or name == self._base_name:
                raise ApiError(400, f"The adapter {name!r} is loaded already", "lora_name", "already_loaded")
            folder = await asyncio.to_thread(self._confined, path)
            try:
                # Once in full beside the engine, so that it never meets one that is broken.
                source = PeftFolder(folder)
                await asyncio.to_thread(source.read, self._layout, self._dtype, pin=False)
                await self._driver.run(lambda engine: engine.add_adapter(name, folder))
            except InputError as error:
                message = str(error).replace(f"{self._root}/", "")  # where the root is, is nobody's business
                raise ApiError(400, message, "lora_path") from None
            self._known[name] = AdapterInfo(name, path)

    async def unload(self, name: str) -> None:
        """Forget an adapter.

        Raises
        ------
        ApiError
            When there is none of that name, or requests use it.
        """
        async with self._one_at_a_time:
            info = self._known.pop(name, None)  # nobody can ask for it from now on
            if info is None:
                raise ApiError(404, f"There is no adapter {name!r}", "lora_name", "adapter_not_found")
            try:
                await self._driver.run(lambda engine: engine.remove_adapter(name))
            except InputError as error:
                self._known[name] = info
                raise ApiError(409, str(error), "lora_name", "adapter_in_use") from None

    def _confined(self, path: str) -> Path:
        """Return the folder of an adapter, all links followed, if it lies within the root."""
        if self._root is None:
            raise ApiError(403, "No adapters can be loaded: the server has no --lora-root", "lora_path")
        outside = ApiError(
            403, "lora_path must lie within the server's --lora-root", "lora_path", "outside_root"
        )
        try:
            folder = (self._root / path).resolve()
            if not folder.is_relative_to(self._root):
                raise outside
            for name in _FILES:  # a folder inside may hold links to files outside
                if not (folder / name).resolve().is_relative_to(self._root):
                    raise outside
            found = folder.is_dir()
        except (OSError, ValueError, RuntimeError):  # a name too long, a NUL in it, links in a circle
            raise ApiError(400, "lora_path is no path", "lora_path") from None
        if not found:
            raise ApiError(404, f"There is no folder {path!r}", "lora_path", "not_found")
        return folder
