"""Conversations as one prompt, in the form that the model was trained on as far as its tokenizer tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from capplan.engine.server.schemas import Message
from capplan.engine.tokenizer import Tokenizer
from capplan.errors import InputError

Template = Callable[[Sequence[Message]], str]


def chat_template(tokenizer: Tokenizer) -> Template:
    """Return the template of a model, known by the marks that are single tokens of it; else a plain one.

    The beginning-of-text token is left to the tokenizer.
    """
    for mark, template in _TEMPLATES:
        if _is_one_token(tokenizer, mark):
            return template
    return plain


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


_TEMPLATES: Final = (("<|im_start|>", chatml), ("<|start_header_id|>", llama3))


def _is_one_token(tokenizer: Tokenizer, mark: str) -> bool:
    try:
        return len(tokenizer.encode(mark)) - len(tokenizer.encode("")) == 1
    except InputError:  # the model takes token ids only
        return False
