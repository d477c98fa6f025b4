"""The form of conversations that comes with a model: a Jinja template, where `transformers` keeps it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from capplan.engine.server.schemas import Message
from capplan.errors import InputError
from capplan.spec import read_text

_FILE: Final = "chat_template.jinja"
_SETTINGS: Final = "tokenizer_config.json"
_MARKS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class OwnTemplate:
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
        environment.globals.update(raise_exception=_raise, strftime_now=_now)
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise InputError(f"chat template: {error}", location=location) from None
        self._marks = marks

    def __call__(self, messages: Sequence[Message]) -> str:
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


def own_template(folder: Path | None) -> OwnTemplate | None:
    """Return the template in a model's folder, the default one of several; None where there is none.

    Raises
    ------
    InputError
        When it cannot be read.
    """
    if folder is None:
        return None
    settings = _settings(folder / _SETTINGS)
    marks = {name: _text(settings[name]) for name in _MARKS if settings.get(name)}
    if (folder / _FILE).is_file():
        return OwnTemplate(read_text(folder / _FILE), marks, str(folder / _FILE))
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = [each for each in source if isinstance(each, dict)]
        source = next((each.get("template") for each in named if each.get("name") == "default"), None)
    return OwnTemplate(source, marks, str(folder / _SETTINGS)) if isinstance(source, str) else None


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        found = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise InputError(f"must be JSON: {error.msg}", location=f"{file}:{error.lineno}") from None
    return found if isinstance(found, dict) else {}


def _text(mark: Any) -> str:
    return str(mark.get("content", "")) if isinstance(mark, dict) else str(mark)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # Jinja's own would escape it for HTML


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
