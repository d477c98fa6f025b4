"""Service behind the routes of one server: admission, chat templates and tokenization.

A chat template turns a conversation into one prompt. The Jinja template of the model's folder is used if
there is one, as `transformers` keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from capplan.engine import CoreReady, Gauges, StateReport, Tokenizer, is_stopped, load_tokenizer
from capplan.errors import InputError
from capplan.server import _template_worker as template_worker
from capplan.server._adapters import ServedAdapters
from capplan.server._async_engine import AsyncEngine, EngineDeadError, StepObserver
from capplan.server._metrics import Metrics
from capplan.server._protocol import RETRY, ApiError, ChatMessage, engine_failed, shutting_down
from capplan.server._settings import ServerLimits, ServerSettings
from capplan.server._state import ServerState
from capplan.server._template_worker import LENGTH_BYTES, framed
from capplan.spec import BYTES_PER_TOKEN, read_json_object, read_text

if TYPE_CHECKING:
    from capplan.server._adapter_pool import AdapterPool


_TEMPLATE_FILE: Final = "chat_template.jinja"
_CONFIG_FILE: Final = "tokenizer_config.json"
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
_COMMAND: Final = (sys.executable, "-P", str(Path(template_worker.__file__).resolve()))
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LANG", "LC_ALL", "TZ")
"""Variables of the processes: keys are not among them."""
_START_TIMEOUT_S: Final = 30.0
_MAX_CHARACTERS: Final = 2**26

_ROLE: Final = "{{ 'system' if message.role == 'developer' else message.role }}"
_CHATML: Final = (
    "{% for message in messages %}<|im_start|>" + _ROLE + "{{ '\\n' + message.content }}<|im_end|>{{ '\\n' }}"
    "{% endfor %}<|im_start|>assistant{{ '\\n' }}"
)
_LLAMA3: Final = (
    "{% for message in messages %}<|start_header_id|>" + _ROLE + "<|end_header_id|>"
    "{{ '\\n\\n' + message.content.strip() }}<|eot_id|>{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}"
)
_PLAIN: Final = (
    "{% for message in messages %}" + _ROLE + "{{ ': ' + message.content + '\\n' }}{% endfor %}assistant:"
)
_BY_MARKER: Final = (("<|im_start|>", _CHATML), ("<|start_header_id|>", _LLAMA3))


class ChatTemplate:
    """Jinja template, rendered in processes of its own with a time limit: the model's folder is not trusted.

    `special_tokens` are by their names in templates; without them the tokenizer adds its own. A template with
    a `location`, for messages, is checked: if it is none, raise `InputError`.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str] | None = None,
        location: str = "",
        limits: ServerLimits | None = None,
    ) -> None:
        self._source = source
        self._special_tokens = special_tokens or {}
        self.adds_special = special_tokens is None
        self._timeout_s = (limits or ServerLimits()).chat_template_timeout_s
        self._idle: list[_TemplateProcess] = []
        if location:
            try:
                self._idle.append(self._new_process())
            except _RenderError as error:
                raise InputError(f"chat template: {error}", location=location) from None

    def render(self, messages: Sequence[ChatMessage], variables: Mapping[str, Any] | None = None) -> str:
        """Return the prompt of a conversation; `variables` are further ones of the template.

        Threads may call it side by side. If the template refuses the conversation, or takes too long, raise
        `InputError`.
        """
        turns = [{**message.model_dump(exclude_none=True), "content": message.text()} for message in messages]
        context = {
            "add_generation_prompt": True,
            **self._special_tokens,
            **(variables or {}),
            "messages": turns,
        }
        try:
            process = self._idle.pop() if self._idle else self._new_process()
            reply = process.exchange(context)
            self._idle.append(process)
            return _text_of(reply)
        except _RenderError as error:
            raise InputError(f"the model's chat template refuses the conversation: {error}") from None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _new_process(self) -> _TemplateProcess:
        return _TemplateProcess(self._source, self._timeout_s)


class _RenderError(Exception):
    """A template refuses a conversation, or its process has ended."""


class _TemplateProcess:
    """Process of `template_worker`, which ends at the time limit of one conversation."""

    def __init__(self, source: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._socket, inherited = socket.socketpair()
        self._socket.settimeout(timeout_s + _START_TIMEOUT_S)
        self._replies = self._socket.makefile("rb")
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with inherited:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                _COMMAND,
                stdin=inherited.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        settings = {"source": source, "timeout_s": timeout_s, "max_characters": _MAX_CHARACTERS}
        try:
            _text_of(self.exchange(settings))
        except _RenderError:
            self.close()
            raise

    def exchange(self, message: Mapping[str, Any]) -> dict[str, str]:
        """Return the reply to a message; without one in time, end the process and raise `_RenderError`."""
        try:
            self._socket.sendall(framed(message))
            length = int.from_bytes(self._replies.read(LENGTH_BYTES), "big")
            reply: dict[str, str] = json.loads(self._replies.read(length))
        except (OSError, ValueError):  # ValueError: of a part of a reply
            self.close()
            raise _RenderError(f"it takes longer than {self._timeout_s:g} s") from None
        return reply

    def close(self) -> None:
        self._replies.close()
        self._socket.close()
        self._process.kill()
        self._process.wait()


def _text_of(reply: Mapping[str, str]) -> str:
    if "error" in reply:
        raise _RenderError(reply["error"])
    return reply["text"]


def chat_template(
    tokenizer: Tokenizer, folder: Path | None = None, limits: ServerLimits | None = None
) -> ChatTemplate:
    """Return the template in a model's folder, or one chosen by the special tokens of the model."""
    template = None if folder is None else _folder_template(folder, limits)
    if template is not None:
        return template
    found = (source for marker, source in _BY_MARKER if _is_one_token(tokenizer, marker))
    return ChatTemplate(next(found, _PLAIN), limits=limits)


def _folder_template(folder: Path, limits: ServerLimits | None) -> ChatTemplate | None:
    config = read_json_object(folder / _CONFIG_FILE) if (folder / _CONFIG_FILE).is_file() else {}
    tokens = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
    if (folder / _TEMPLATE_FILE).is_file():
        return ChatTemplate(read_text(folder / _TEMPLATE_FILE), tokens, str(folder / _TEMPLATE_FILE), limits)
    source = config.get("chat_template")
    if isinstance(source, list):
        named = [each for each in source if isinstance(each, dict)]
        source = next((each.get("template") for each in named if each.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, tokens, str(folder / _CONFIG_FILE), limits)


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _is_one_token(tokenizer: Tokenizer, marker: str) -> bool:
    try:
        return len(tokenizer.encode(marker)) - len(tokenizer.encode("")) == 1
    except InputError:  # the model has no tokenizer
        return False


_TEMPLATE_PROCESSES: Final = 2
"""A conversation on which the template takes long does not delay all others."""
_LOOK_EVERY_S: Final = 1.0
_GAUGES_TIMEOUT_S: Final = 3.0
"""Longer than most steps, and less than a router waits for its instances."""
_LONG_TEXT: Final = 50_000
"""Characters of prompts from which tokenization runs in a thread."""


class Service(ServerState):
    """An engine and the rules of access to it.

    Parameters
    ----------
    connection
        The server's end of a pair of sockets, at whose other end the engine core is.
    ready
        Facts of the engine.
    initial
        Adapters that the engine was made with.
    """

    adapters: ServedAdapters

    def __init__(
        self,
        connection: socket.socket,
        ready: CoreReady,
        settings: ServerSettings,
        initial: Mapping[str, str | Path | int],
        observers: Sequence[StepObserver] = (),
    ) -> None:
        self.metrics = Metrics(settings.model_name, ready)
        self.engine = AsyncEngine(connection, ready.clock_start_ns, [self.metrics, *observers])
        adapters = ServedAdapters(ready, self.engine, settings, initial)
        super().__init__(settings, adapters, ready.args.max_model_len)
        self.refusals.update({429: 0, 503: 0})
        self.tokenizer = load_tokenizer(ready.folder, ready.config.vocab_size)
        self.template = chat_template(self.tokenizer, ready.folder, settings.limits)
        self.pool: AdapterPool | None = None
        self._template_places = asyncio.Semaphore(_TEMPLATE_PROCESSES)
        self._preparing = 0
        self._awaiting: dict[str, tuple[int, int]] = {}
        self.vocab_size = ready.config.vocab_size
        self._core_pid = ready.pid
        self._core_is_stopped = False
        self._look_again_s = 0.0

    @property
    def failed(self) -> asyncio.Event:
        """Set when the engine has failed."""
        return self.engine.failed

    @property
    def in_flight(self) -> int:
        """Number of prompts in the engine, and of those that are rendered or tokenized for it."""
        return self.engine.in_flight + self._preparing

    def join(self, pool: AdapterPool) -> None:
        """Serve the adapters of a pool, before the first request."""
        self.pool = pool
        self.metrics.register(pool)

    async def served_adapter(self, model: str, body_bytes: int, held: ExitStack) -> str | None:
        """Return the adapter of a model name, which may have to be fetched first; None is the base model.

        Parameters
        ----------
        body_bytes
            Size of the request, from which its prompt is estimated for routers.
        held
            Keeps the adapter served while it is open.

        Raises
        ------
        ApiError
            404 if the model does not exist; as `AdapterPool.require`; 429 and 503 as `refuse_if_full`.
        """
        if self.pool is not None and model != self.settings.model_name:
            self.refuse_if_full()
            held.enter_context(self.adapters.pinned(model))
            with self._prepared(1), self._awaited(model, body_bytes // BYTES_PER_TOKEN):
                await self.pool.require(model)
        return self.adapter_of(model)

    def close(self) -> None:
        """End the processes of the server."""
        self.engine.stop()
        self.template.close()

    async def drain(self) -> None:
        """Wait for running requests, and cancel them after the drain timeout."""
        try:
            await asyncio.wait_for(self.engine.wait_idle(), self.settings.drain_timeout_s)
        except TimeoutError:
            self.engine.cancel_all()

    def unavailability(self) -> ApiError | None:
        """Return why no request is accepted, however short the queue; None: requests are accepted."""
        if self.draining:
            return shutting_down()
        if self.engine.failure is not None:
            return engine_failed()
        if self.core_is_stopped():
            return ApiError(503, "The engine core is stopped", code="engine_stopped", headers=RETRY)
        return None

    def core_is_stopped(self) -> bool:
        """Return whether the engine core was stopped by a signal, as of the last second."""
        now_s = time.monotonic()
        if now_s >= self._look_again_s:
            self._core_is_stopped = is_stopped(self._core_pid)
            self._look_again_s = now_s + _LOOK_EVERY_S
        return self._core_is_stopped

    def refuse_if_full(self, prompts: int = 1) -> None:
        """Check that further prompts can be accepted.

        Raises
        ------
        ApiError
            503 if the server drains or its engine has failed or is stopped, 429 if the queue is full.
        """
        error = self.unavailability()
        if error is not None:
            self.refusals[503] += 1
            raise error
        if prompts > self.settings.max_requests:
            message = f"A request must not have more than {self.settings.max_requests} prompts"
            raise ApiError(400, message, "prompt")
        if self.in_flight + prompts > self.settings.max_requests:
            raise self.refusal(429, "The queue is full", "queue_full", self._retry_after_s())

    async def encode(
        self,
        prompts: Sequence[str | list[int]],
        max_tokens: int | None,
        *,
        special: bool = True,
        choices: int = 1,
    ) -> list[list[int]]:
        """Return the tokens of prompts.

        Parameters
        ----------
        special
            Whether to add special tokens.
        choices
            Outputs of every prompt.

        Raises
        ------
        ApiError
            400 if a prompt is empty, or too long together with `max_tokens`; 429 and 503 as `refuse_if_full`.
        """
        self.refuse_if_full(len(prompts) * choices)

        def encode_all() -> list[list[int]]:
            return [self._encode(prompt, max_tokens, special) for prompt in prompts]

        if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) < _LONG_TEXT:
            return encode_all()
        with self._prepared(len(prompts)):
            return await asyncio.to_thread(encode_all)

    def text_of(self, prompt: str | list[int]) -> str:
        """Return the text of a prompt."""
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    async def apply_chat_template(self, messages: Sequence[ChatMessage], variables: Mapping[str, Any]) -> str:
        """Return a conversation as one prompt; `variables`: further ones of the template.

        Raises
        ------
        ApiError
            400 if the model's template refuses it; 429 and 503 as `refuse_if_full`.
        """
        self.refuse_if_full()
        try:
            with self._prepared(1):
                async with self._template_places:
                    return await asyncio.to_thread(self.template.render, messages, variables)
        except InputError as error:
            raise ApiError(400, str(error), "messages") from None

    @contextlib.contextmanager
    def _prepared(self, prompts: int) -> Iterator[None]:
        """Count prompts in the context: they wait for a thread or process."""
        self._preparing += prompts
        try:
            yield
        finally:
            self._preparing -= prompts

    @contextlib.contextmanager
    def _awaited(self, adapter: str, prompt_tokens: int) -> Iterator[None]:
        """Count a request in the context: it waits for its adapter."""
        requests, tokens = self._awaiting.get(adapter, (0, 0))
        self._awaiting[adapter] = requests + 1, tokens + prompt_tokens
        try:
            yield
        finally:
            requests, tokens = self._awaiting.pop(adapter)
            if requests > 1:
                self._awaiting[adapter] = requests - 1, tokens - prompt_tokens

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

    def _retry_after_s(self) -> int:
        """Return the time in which half of the prompts in flight finish at the present rate."""
        per_s = self.engine.finished_per_s()
        return min(60, max(1, math.ceil(0.5 * self.engine.in_flight / per_s))) if per_s else 5

    async def state(self) -> dict[str, Any]:
        """Return the state that routers read, between two steps.

        ``awaiting``: requests that wait for an adapter that is fetched, and their prompt tokens. The engine
        does not know them yet.

        Raises
        ------
        EngineDeadError, TimeoutError
            If the engine does not answer.
        """
        awaiting = dict(self._awaiting)
        report: StateReport = await asyncio.wait_for(self.engine.call("state_report"), _GAUGES_TIMEOUT_S)
        answers = {"answers": self.metrics.answers, "answer_tokens": self.metrics.answer_tokens}
        return {**report._asdict(), **answers, "awaiting": awaiting}

    async def metrics_text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        try:
            gauges: Gauges | None = await asyncio.wait_for(self.engine.call("gauges"), _GAUGES_TIMEOUT_S)
        except (EngineDeadError, TimeoutError):
            gauges = None
        return self.metrics.text(gauges, dict(self.refusals))
