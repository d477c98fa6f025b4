"""Chat templates: a conversation as one prompt.

The Jinja template of the model's folder is used if there is one, as `transformers` keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from capplan.engine.server.protocol import ChatMessage
from capplan.engine.tokenizer import Tokenizer
from capplan.errors import InputError
from capplan.spec import read_text
from capplan.spec.files import read_json_object

_FILE: Final = "chat_template.jinja"
_CONFIG_FILE: Final = "tokenizer_config.json"
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


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
    """Jinja template, rendered in a sandbox: the model's folder is not trusted.

    Parameters
    ----------
    special_tokens
        Special tokens by their names in templates; None: the tokenizer adds them.
    location
        Origin of the template, for messages.

    Attributes
    ----------
    adds_special
        Whether the tokenizer adds the beginning-of-text token.

    Raises
    ------
    InputError
        If the source is not a template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str] | None = None, location: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise InputError(f"chat template: {error}", location=location) from None
        self._special_tokens = special_tokens or {}
        self.adds_special = special_tokens is None

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the prompt of a conversation.

        Raises
        ------
        InputError
            If the template refuses the conversation.
        """
        turns = [{**message.model_dump(exclude_none=True), "content": message.text()} for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._special_tokens)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InputError(f"the model's chat template refuses the conversation: {error}") from None


def chat_template(tokenizer: Tokenizer, folder: Path | None = None) -> ChatTemplate:
    """Return the template in a model's folder, or one chosen by the special tokens of the model.

    Raises
    ------
    InputError
        If the template in the folder cannot be read.
    """
    template = None if folder is None else _folder_template(folder)
    if template is not None:
        return template
    found = (source for marker, source in _BY_MARKER if _is_one_token(tokenizer, marker))
    return ChatTemplate(next(found, _PLAIN))


def _folder_template(folder: Path) -> ChatTemplate | None:
    config = read_json_object(folder / _CONFIG_FILE) if (folder / _CONFIG_FILE).is_file() else {}
    tokens = {name: _token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name)}
    if (folder / _FILE).is_file():
        return ChatTemplate(read_text(folder / _FILE), tokens, str(folder / _FILE))
    source = config.get("chat_template")
    if isinstance(source, list):
        named = [each for each in source if isinstance(each, dict)]
        source = next((each.get("template") for each in named if each.get("name") == "default"), None)
    return ChatTemplate(source, tokens, str(folder / _CONFIG_FILE)) if isinstance(source, str) else None


def _token_text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own filter escapes HTML


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _is_one_token(tokenizer: Tokenizer, marker: str) -> bool:
    try:
        return len(tokenizer.encode(marker)) - len(tokenizer.encode("")) == 1
    except InputError:  # the model has no tokenizer
        return False
