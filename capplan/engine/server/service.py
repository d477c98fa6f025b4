"""Service behind the routes of one server: admission, tokenization, adapters at run time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from capplan.engine.engine import Engine
from capplan.engine.lora.adapter import AdapterLayout, PeftFolder
from capplan.engine.server.async_engine import AsyncEngine, EngineFailureError, StepObserver
from capplan.engine.server.chat_template import chat_template
from capplan.engine.server.limiter import ServerSettings
from capplan.engine.server.metrics import Metrics
from capplan.engine.server.protocol import ApiError, ChatMessage
from capplan.errors import InputError

LONGEST_NAME = 256

_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class AdapterInfo:
    """What `/v1/models` says of an adapter."""

    name: str
    source: str
    created: int = field(default_factory=lambda: int(time.time()))


class ServedAdapters:
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
        driver: AsyncEngine,
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


_LONG_TEXT = 50_000
"""Characters from which on prompts are turned into tokens beside the event loop."""


class Service:
    """An engine, who steps it, and the rules by which clients get at it.

    Attributes
    ----------
    draining
        Whether the server ends: what runs is answered, nothing else is taken.
    refused
        Requests that were not taken, by status.

    Parameters
    ----------
    engine
        Not yet used by anybody else.
    settings
        The server's.
    given
        The adapters that the engine was made with.
    watchers
        See every step.

    Raises
    ------
    InputError
        When an adapter is called as the base model is.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        given: Mapping[str, str | Path | int],
        watchers: Sequence[StepObserver] = (),
    ) -> None:
        if settings.model_name in given:
            rule = "must be other names than the base model's"
            raise InputError(rule, settings.model_name, "adapters")
        self.settings = settings
        self.metrics = Metrics(engine, settings.model_name)
        self.driver = AsyncEngine(engine, [self.metrics, *watchers])
        self.adapters = ServedAdapters(engine, self.driver, settings.model_name, settings.lora_root, given)
        self.tokenizer = engine.tokenizer
        self.template = chat_template(engine.tokenizer, engine.folder)
        self.vocab_size = engine.config.vocab_size
        self.max_model_len = engine.sizes.max_model_len
        self.created = int(time.time())
        self.draining = False
        self.refused = {429: 0, 503: 0}

    def adapter_of(self, model: str) -> str | None:
        """Return the adapter that a model name means; None is the base model.

        Raises
        ------
        ApiError
            404, when there is no such model.
        """
        if model == self.settings.model_name:
            return None
        if model not in self.adapters:
            raise ApiError(404, f"The model {model!r} does not exist", "model", "model_not_found")
        return model

    def refuse_if_full(self, more: int = 1, coming: int = 0) -> None:
        """Raise when so many further prompts cannot be taken beside requests that are still being read.

        Raises
        ------
        ApiError
            503 when the server ends or its engine has, 429 when the queue is full.
        """
        if self.draining:
            raise self._refusal(503, "The server shuts down", "shutting_down", 1)
        if self.driver.failure is not None:
            raise ApiError(503, "The engine has failed", code="engine_failed", headers={"Retry-After": "1"})
        if more > self.settings.max_requests:
            message = f"A request must not have more than {self.settings.max_requests} prompts"
            raise ApiError(400, message, "prompt")
        if self.driver.in_flight + coming + more > self.settings.max_requests:
            raise self._refusal(429, "The queue is full", "queue_full", self._retry_after_s())

    async def encode(
        self, prompts: Sequence[str | list[int]], max_tokens: int | None, *, special: bool = True
    ) -> list[list[int]]:
        """Return the tokens of prompts, checked for their number; `special`: as for the tokenizer.

        Raises
        ------
        ApiError
            400, when one is empty, or too long together with `max_tokens`; 429 and 503 as `refuse_if_full`,
            before any work.
        """
        self.refuse_if_full(len(prompts))
        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) < _LONG_TEXT:
            return [self._encode(prompt, max_tokens, special) for prompt in prompts]
        return await asyncio.to_thread(
            lambda: [self._encode(prompt, max_tokens, special) for prompt in prompts]
        )

    def written(self, messages: Sequence[ChatMessage]) -> str:
        """Return a conversation as one prompt.

        Raises
        ------
        ApiError
            400, when the model's template refuses it.
        """
        try:
            return self.template.write(messages)
        except InputError as error:
            raise ApiError(400, str(error), "messages") from None

    def _encode(self, prompt: str | list[int], max_tokens: int | None, special: bool) -> list[int]:
        tokens = prompt if isinstance(prompt, list) else self._tokens(prompt, special)
        if not tokens:
            raise ApiError(400, "The prompt must not be empty", "prompt")
        if max(tokens) >= self.vocab_size:
            raise ApiError(400, f"Token ids must be below {self.vocab_size}", "prompt")
        room = self.max_model_len - len(tokens)
        if room < 1:
            message = f"The prompt has {len(tokens)} tokens; the model takes less than {self.max_model_len}"
            raise ApiError(400, message, "prompt", "context_length_exceeded")
        if max_tokens is not None and max_tokens > room:
            message = (
                f"The prompt has {len(tokens)} tokens and max_tokens is {max_tokens}; together they must not"
                f" be more than {self.max_model_len}"
            )
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        return tokens

    def _tokens(self, text: str, special: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, special=special)
        except InputError as error:
            raise ApiError(400, str(error), "prompt") from None
        except (UnicodeError, TypeError):  # half of a surrogate pair
            raise ApiError(400, "The prompt must be valid Unicode", "prompt") from None

    def _refusal(self, status: int, message: str, code: str, retry_after_s: int) -> ApiError:
        self.refused[status] += 1
        return ApiError(status, message, code=code, headers={"Retry-After": str(retry_after_s)})

    def _retry_after_s(self) -> int:
        """Return when about half of what is in flight will have been answered, at the present pace."""
        per_s = self.driver.ends_per_s()
        return min(60, max(1, math.ceil(0.5 * self.driver.in_flight / per_s))) if per_s else 5

    async def metrics_text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        refused = dict(self.refused)
        try:
            return await self.driver.run(lambda _: self.metrics.text(refused))
        except EngineFailureError:
            return self.metrics.text(refused)  # its thread has ended
