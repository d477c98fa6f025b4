"""Completions of one server: checks of a request, its prompts in the engine, and the response.

They do not pass through the web framework, which takes as long per request as the server itself.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Final, TypeAlias

from fastapi import Request
from starlette.types import Receive, Scope, Send

from capplan.engine.server.output_stream import OutputStream
from capplan.engine.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    bad_request,
    json_body,
    parsed,
)
from capplan.engine.server.responses import (
    ChatFormat,
    CompletionFormat,
    EventStreamResponse,
    FullResponse,
    ResponseFormat,
)
from capplan.engine.server.service import Service
from capplan.errors import InputError

_COMPLETION_TOKENS: Final = 16  # OpenAI's default

Endpoint: TypeAlias = Callable[[Request], Awaitable[FullResponse]]


class Generation:
    """ASGI application that completes prompts and conversations.

    Attributes
    ----------
    endpoints
        Endpoint and request body of each path.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self.endpoints: Mapping[str, tuple[Endpoint, type[CompletionRequest | ChatRequest]]] = (
            MappingProxyType(
                {
                    "/v1/completions": (self.completions, CompletionRequest),
                    "/v1/chat/completions": (self.chat_completions, ChatRequest),
                }
            )
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond; an error before the first token has its status."""
        endpoint, _ = self.endpoints[scope["path"]]
        response: FullResponse | None = None
        try:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except Exception:
            if response is not None and response.has_begun:
                raise
            logging.getLogger(__name__).exception("a request has failed")
            await ApiError(500, "The server made a mistake").response()(scope, receive, send)

    async def completions(self, request: Request) -> FullResponse:
        """Complete a prompt, or each of several."""
        service, data = self._service, await json_body(request)
        with ExitStack() as held:
            with service.holding(len(data)):
                body = parsed(data, CompletionRequest)
                size = len(data)
                del data
                adapter = await service.served_adapter(body.model, size, held)
                max_tokens = body.max_tokens or _COMPLETION_TOKENS
                if not body.prompts():
                    raise ApiError(400, "There must be at least one prompt", "prompt")
                prompts = await service.encode(body.prompts(), max_tokens)
            return self._response(body, prompts, adapter, max_tokens, body.logprobs, CompletionFormat)

    async def chat_completions(self, request: Request) -> FullResponse:
        """Complete a conversation."""
        service, data = self._service, await json_body(request)
        with ExitStack() as held:
            with service.holding(len(data)):
                body = parsed(data, ChatRequest)
                size = len(data)
                del data
                adapter = await service.served_adapter(body.model, size, held)
                limit = body.max_completion_tokens or body.max_tokens
                text = await service.apply_chat_template(body.messages)
                (prompt,) = await service.encode([text], limit, special=service.template.adds_special)
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            max_tokens = limit or service.max_model_len - len(prompt)
            return self._response(body, [prompt], adapter, max_tokens, logprobs, ChatFormat)

    def _response(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Sequence[int]],
        adapter: str | None,
        max_tokens: int,
        logprobs: int | None,
        format_type: type[ResponseFormat],
    ) -> FullResponse:
        service = self._service
        service.refuse_if_full(len(prompts))
        try:
            params = body.sampling(max_tokens, logprobs)
        except InputError as error:
            field = error.location.rpartition(".")[2]
            raise bad_request(InputError(error.rule, error.value, field)) from None
        tokenizer, streamed = service.tokenizer, bool(body.stream)
        form = format_type(body.model, tokenizer, body.include_usage(), bool(body.return_token_ids))
        stream = OutputStream(service.engine, tokenizer, prompts, adapter, params, body.stops(), streamed)
        return EventStreamResponse(stream, form) if streamed else FullResponse(stream, form)
