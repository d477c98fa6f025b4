"""What a request asks for, as far as the router must know; all else is for the instance to judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from capplan.engine.cluster.queues import Ask
from capplan.engine.server.api_error import ApiError
from capplan.engine.tokenizer import Tokenizer
from capplan.errors import InputError

_COMPLETION_TOKENS: Final = 16  # OpenAI's default


def fields_of(body: bytes) -> dict[str, Any]:
    """Return the fields of a request.

    Raises
    ------
    ApiError
        400, when it is no JSON object or names no model.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is not valid JSON") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "The body must be a JSON object, with Content-Type: application/json")
    if not isinstance(fields.get("model"), str):
        raise ApiError(400, "model: must be a string", "model")
    return fields


def ask_of(fields: dict[str, Any], adapter: str | None, chat: bool, tokenizer: Tokenizer | None) -> Ask:
    """Return a request as queues see it.

    Parameters
    ----------
    fields
        The request.
    adapter
        What it asks for.
    chat
        Whether it is a conversation.
    tokenizer
        Counts its tokens; None: nobody wants to know them. The words around the turns of a conversation are
        not counted.
    """
    if tokenizer is None:
        return Ask(adapter, 0, None)
    prompts = list(_texts(fields.get("messages")) if chat else _prompts(fields.get("prompt")))
    wanted = [fields.get(name) for name in ("max_completion_tokens", "max_tokens")]
    most = next((each for each in wanted if isinstance(each, int) and each > 0), None)
    if most is None and not chat:
        most = _COMPLETION_TOKENS
    answers = 1 if chat else max(1, len(prompts))
    tokens = sum(_count(prompt, tokenizer) for prompt in prompts)
    return Ask(adapter, tokens, None if most is None else most * answers)


def _prompts(prompt: Any) -> Iterator[Any]:
    """Yield the prompts of a completion, each as text or token ids."""
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        yield from prompt
    else:
        yield prompt


def _texts(messages: Any) -> Iterator[Any]:
    """Yield what is said in a conversation."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield from (part.get("text") for part in content if isinstance(part, dict))
        else:
            yield content


def _count(prompt: Any, tokenizer: Tokenizer) -> int:
    """Return the tokens of a prompt; 0 for what the instance will refuse."""
    if isinstance(prompt, list):
        return len(prompt)
    if not isinstance(prompt, str):
        return 0
    try:
        return len(tokenizer.encode(prompt))
    except (InputError, UnicodeError, TypeError):
        return 0
