"""Responses in OpenAI's format, whole or as server-sent events.

The constant part of a chunk is serialised once per answer.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from capplan.engine.request import TokenLogprobs
from capplan.engine.server.output_stream import Choice, ClientGoneError, Delta, OutputStream
from capplan.engine.server.protocol import ApiError
from capplan.engine.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """One kind of answer."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """Return the events before the first token."""
        ...

    def event(self, delta: Delta) -> bytes:
        """Return the event of a delta."""
        ...

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Return the events after the last token."""
        ...

    def document(self, choices: Sequence[Choice]) -> bytes:
        """Return the whole answer."""
        ...


class _Format(ABC):
    """What completions and chat have in common.

    Parameters
    ----------
    model
        The name that the client asked for.
    tokenizer
        Writes tokens of log-probabilities.
    with_usage
        Whether a stream ends with the numbers of tokens.
    with_tokens
        Whether to tell token ids, as vLLM's `return_token_ids` asks for.
    """

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, model: str, tokenizer: Tokenizer, with_usage: bool, with_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._with_usage = with_usage
        self._with_tokens = with_tokens
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._offsets: dict[int, int] = {}  # characters of each choice's tokens so far
        head = _dumps(self._head(self.chunk_kind))[:-1]
        self._before = f'data: {head},"choices":[{{"index":'
        self._after = '}],"usage":null}\n\n' if with_usage else "}]}\n\n"
        self._goes_on = f',"logprobs":null,"finish_reason":null,"stop_reason":null{self._after}'

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """See `Format`."""
        if not self._with_usage:
            return DONE
        document = self._head(self.chunk_kind) | {"choices": [], "usage": usage(choices)}
        return f"data: {_dumps(document)}\n\n".encode() + DONE

    def _whole(self, parts: list[dict[str, Any]], choices: Sequence[Choice]) -> bytes:
        if self._with_tokens:
            for part, choice in zip(parts, choices, strict=True):
                part["prompt_token_ids"] = list(choice.ticket.prompt)
                part["token_ids"] = choice.tokens
        document = self._head(self.kind) | {"choices": parts, "usage": usage(choices)}
        return _dumps(document).encode()

    def _event(self, delta: Delta, content: str) -> bytes:
        """Return an event; `content` is the part that holds the text."""
        if delta.finish_reason is None and not delta.logprobs and not self._with_tokens:
            return f"{self._before}{delta.choice},{content}{self._goes_on}".encode()
        more: dict[str, Any] = {
            "logprobs": (
                self._logprobs(delta.choice, delta.tokens, delta.logprobs) if delta.logprobs else None
            ),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if self._with_tokens:
            more["token_ids"] = list(delta.tokens)
        return f"{self._before}{delta.choice},{content},{_dumps(more)[1:-1]}{self._after}".encode()

    @abstractmethod
    def _logprobs(
        self, choice: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """Return log-probabilities as this kind of answer has them."""

    def _all_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        return (
            self._logprobs(choice.ticket.index, choice.tokens, choice.logprobs) if choice.logprobs else None
        )

    def _word(self, token: int) -> str:
        return self._tokenizer.decode([token])


class CompletionFormat(_Format):
    """``text_completion``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """See `Format`."""
        if not self._with_tokens:
            return b""
        events = []
        for choice in choices:
            prompt = _dumps({"text": "", "prompt_token_ids": list(choice.ticket.prompt)})[1:-1]
            events.append(f"{self._before}{choice.ticket.index},{prompt}{self._after}".encode())
        return b"".join(events)

    def event(self, delta: Delta) -> bytes:
        """See `Format`."""
        return self._event(delta, f'"text":{_quoted(delta.text)}')

    def document(self, choices: Sequence[Choice]) -> bytes:
        """See `Format`."""
        parts = [
            {
                "index": choice.ticket.index,
                "text": choice.text,
                "logprobs": self._all_logprobs(choice),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in choices
        ]
        return self._whole(parts, choices)

    def _logprobs(
        self, choice: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        words = [self._word(token) for token in tokens]
        offsets = [self._offsets.get(choice, 0)]
        for word in words:
            offsets.append(offsets[-1] + len(word))
        self._offsets[choice] = offsets[-1]
        tops = []
        for word, each in zip(words, logprobs, strict=True):
            # Tokens with the same text: the likelier one counts.
            top = {self._word(token): _finite(logprob) for token, logprob in reversed(each.top)}
            tops.append({word: _finite(each.logprob)} | top)
        return {
            "tokens": words,
            "token_logprobs": [_finite(each.logprob) for each in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets[:-1],
        }


class ChatFormat(_Format):
    """``chat.completion``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """See `Format`."""
        role = '"delta":{"role":"assistant","content":""}'
        return b"".join([self._event(Delta(choice.ticket.index, "", (), ()), role) for choice in choices])

    def event(self, delta: Delta) -> bytes:
        """See `Format`."""
        return self._event(delta, f'"delta":{{"content":{_quoted(delta.text)}}}')

    def document(self, choices: Sequence[Choice]) -> bytes:
        """See `Format`."""
        parts = [
            {
                "index": choice.ticket.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._all_logprobs(choice),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in choices
        ]
        return self._whole(parts, choices)

    def _logprobs(
        self, choice: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        content = []
        for token, each in zip(tokens, logprobs, strict=True):
            top = [self._likelihood(other, logprob) for other, logprob in each.top]
            content.append(self._likelihood(token, each.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _likelihood(self, token: int, logprob: float) -> dict[str, Any]:
        word = self._word(token)
        return {"token": word, "logprob": _finite(logprob), "bytes": list(word.encode())}


def usage(choices: Iterable[Choice]) -> dict[str, int]:
    """Return the tokens of an answer; prompt and completion are counted as the engine computed them."""
    counts = [(choice.prompt_tokens, len(choice.tokens)) for choice in choices]
    prompt, completion = sum(p for p, _ in counts), sum(c for _, c in counts)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


_dumps: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode

_quoted: Final = json.encoder.encode_basestring_ascii


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else -9999.0  # JSON has no infinity; OpenAI writes this


_JSON = b"application/json"

_EVENTS = b"text/event-stream; charset=utf-8"


class CompletionResponse(Response):
    """Runs a reply's prompts and sends the answer.

    A request that fails before its first token ends with the status of the error, streams included.
    """

    def __init__(self, reply: OutputStream, form: Format) -> None:
        super().__init__()
        self._reply = reply
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; leave nothing running."""
        try:
            async with self._reply.running(receive):
                await self._answer(send)
        except ClientGoneError:
            return

    async def _answer(self, send: Send) -> None:
        while not self._reply.ended:
            await self._reply.deltas()
        body = self._form.document(self._reply.choices)
        await _begin(send, _JSON, (b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.body", "body": body})


class StreamResponse(CompletionResponse):
    """Sends server-sent events."""

    async def _answer(self, send: Send) -> None:
        reply, form = self._reply, self._form
        deltas = await reply.deltas()
        await _begin(send, _EVENTS, (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
        body = form.opening(reply.choices)
        try:
            while not reply.ended:
                body += b"".join([form.event(delta) for delta in deltas])
                await send({"type": "http.response.body", "body": body, "more_body": True})
                body, deltas = b"", await reply.deltas()
            body += b"".join([form.event(delta) for delta in deltas]) + form.closing(reply.choices)
        except ApiError as error:  # too late for a status
            body = b"data: " + error.body() + b"\n\n"
        await send({"type": "http.response.body", "body": body})


async def _begin(send: Send, media_type: bytes, *headers: tuple[bytes, bytes]) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", media_type), *headers],
        }
    )
