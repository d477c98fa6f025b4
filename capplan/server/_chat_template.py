"""Chat templates: a conversation as one prompt.

The Jinja template of the model's folder is used if there is one, as `transformers` keeps it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from capplan.engine import Tokenizer
from capplan.errors import InputError
from capplan.server import _template_worker as template_worker
from capplan.server._protocol import ChatMessage
from capplan.server._settings import ServerLimits
from capplan.server._template_worker import LENGTH_BYTES, framed
from capplan.spec import read_json_object, read_text

_FILE: Final = "chat_template.jinja"
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
    if (folder / _FILE).is_file():
        return ChatTemplate(read_text(folder / _FILE), tokens, str(folder / _FILE), limits)
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
