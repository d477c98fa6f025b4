"""Chat templates: a conversation as one prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from capplan.engine.server.protocol import ChatMessage
from capplan.engine.tokenizer import Tokenizer
from capplan.errors import InputError
from capplan.spec import read_text

_FILE: Final = "chat_template.jinja"

_SETTINGS: Final = "tokenizer_config.json"

_MARKS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class JinjaTemplate:
    """A model's own template.

    Parameters
    ----------
    source
        The template.
    marks
        Its special tokens by the names that templates call them.
    location
        Where it came from, for messages.

    Raises
    ------
    InputError
        When it is no template.
    """

    def __init__(self, source: str, marks: dict[str, str], location: str) -> None:
        # A model's folder may come from anywhere: its template reads what it is given and nothing else.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise InputError(f"chat template: {error}", location=location) from None
        self._marks = marks

    def __call__(self, messages: Sequence[ChatMessage]) -> str:
        """Return the prompt of a conversation, all special tokens in it.

        Raises
        ------
        InputError
            When the template refuses the conversation.
        """
        turns = [{**message.model_dump(exclude_none=True), "content": message.text()} for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._marks)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InputError(f"the model's chat template refuses the conversation: {error}") from None


def model_template(folder: Path | None) -> JinjaTemplate | None:
    """Return the template in a model's folder, the default one of several; None where there is none.

    Raises
    ------
    InputError
        When it cannot be read.
    """
    if folder is None:
        return None
    settings = _settings(folder / _SETTINGS)
    marks = {name: _token_text(settings[name]) for name in _MARKS if settings.get(name)}
    if (folder / _FILE).is_file():
        return JinjaTemplate(read_text(folder / _FILE), marks, str(folder / _FILE))
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = [each for each in source if isinstance(each, dict)]
        source = next((each.get("template") for each in named if each.get("name") == "default"), None)
    return JinjaTemplate(source, marks, str(folder / _SETTINGS)) if isinstance(source, str) else None


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise InputError(f"must be JSON: {error.msg}", location=f"{file}:{error.lineno}") from None
    return found if isinstance(found, dict) else {}


def _token_text(mark: Any) -> str:
    return str(mark.get("content", "")) if isinstance(mark, dict) else str(mark)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own would escape it for HTML


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


@dataclass(frozen=True)
class ChatTemplate:
    """The form of conversations."""

    write: Callable[[Sequence[ChatMessage]], str]
    """Returns the prompt."""
    adds_special: bool = True
    """Whether the beginning-of-text token is left to the tokenizer."""


def chat_template(tokenizer: Tokenizer, folder: Path | None = None) -> ChatTemplate:
    """Return the template in a model's folder.

    Where there is none: that of which the marks are single tokens of the model; else a plain one.

    Raises
    ------
    InputError
        When the folder's cannot be read.
    """
    own = model_template(folder)
    if own is not None:
        return ChatTemplate(own, adds_special=False)
    for mark, write in _KNOWN:
        if _is_one_token(tokenizer, mark):
            return ChatTemplate(write)
    return ChatTemplate(plain)


def chatml(messages: Sequence[ChatMessage]) -> str:
    """Return Qwen's form."""
    turns = [f"<|im_start|>{_role(message)}\n{message.text()}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def llama3(messages: Sequence[ChatMessage]) -> str:
    """Return the form of Llama 3."""
    turns = [f"{_header(_role(message))}{message.text().strip()}<|eot_id|>" for message in messages]
    return "".join(turns) + _header("assistant")


def plain(messages: Sequence[ChatMessage]) -> str:
    """Return a form that any model can follow: a line per turn."""
    turns = [f"{_role(message)}: {message.text()}\n" for message in messages]
    return "".join(turns) + "assistant:"


def _header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def _role(message: ChatMessage) -> str:
    return "system" if message.role == "developer" else message.role


_KNOWN: Final = (("<|im_start|>", chatml), ("<|start_header_id|>", llama3))


def _is_one_token(tokenizer: Tokenizer, mark: str) -> bool:
    try:
        return len(tokenizer.encode(mark)) - len(tokenizer.encode("")) == 1
    except InputError:  # the model takes token ids only
        return False
