"""Conversations as one prompt, in the form that the model was trained on as far as its folder tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from capplan.engine.server.own_template import own_template
from capplan.engine.server.schemas import Message
from capplan.engine.tokenizer import Tokenizer
from capplan.errors import InputError


@dataclass(frozen=True)
class ChatTemplate:
    """The form of conversations."""

    write: Callable[[Sequence[Message]], str]
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
    own = own_template(folder)
    if own is not None:
        return ChatTemplate(own, adds_special=False)
    for mark, write in _KNOWN:
        if _is_one_token(tokenizer, mark):
            return ChatTemplate(write)
    return ChatTemplate(plain)


def chatml(messages: Sequence[Message]) -> str:
    """Return Qwen's form."""
    turns = [f"<|im_start|>{_role(message)}\n{message.text()}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def llama3(messages: Sequence[Message]) -> str:
    """Return the form of Llama 3."""
    turns = [f"{_header(_role(message))}{message.text().strip()}<|eot_id|>" for message in messages]
    return "".join(turns) + _header("assistant")


def plain(messages: Sequence[Message]) -> str:
    """Return a form that any model can follow: a line per turn."""
    turns = [f"{_role(message)}: {message.text()}\n" for message in messages]
    return "".join(turns) + "assistant:"


def _header(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


_KNOWN: Final = (("<|im_start|>", chatml), ("<|start_header_id|>", llama3))


def _is_one_token(tokenizer: Tokenizer, mark: str) -> bool:
    try:
        return len(tokenizer.encode(mark)) - len(tokenizer.encode("")) == 1
    except InputError:  # the model takes token ids only
        return False
