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

from capplan.engine.request import SamplingParams
from capplan.errors import InputError
from capplan.server.output_stream import OutputStream
from capplan.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    bad_request,
    json_body,
    parsed,
)
from capplan.server.responses import (
    ChatFormat,
    CompletionFormat,
    EventStreamResponse,
    FullResponse,
    ResponseFormat,
)
from capplan.server.service import Service

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
                max_tokens = body.token_limit() or max(_COMPLETION_TOKENS, body.min_tokens or 0)
                if not body.prompts():
                    raise ApiError(400, "There must be at least one prompt", "prompt")
                texts = body.prompts()
                special = body.add_special_tokens is not False
                prompts = await service.encode(texts, max_tokens, special=special, choices=body.n or 1)
                echo = [service.text_of(each) for each in texts] if body.echo else []
            params = self._params(body, max_tokens, body.logprobs, bool(body.echo))
            return self._response(body, prompts, adapter, params, CompletionFormat, echo)

    async def chat_completions(self, request: Request) -> FullResponse:
        """Complete a conversation."""
        service, data = self._service, await json_body(request)
        with ExitStack() as held:
            with service.holding(len(data)):
                body = parsed(data, ChatRequest)
                size = len(data)
                del data
                adapter = await service.served_adapter(body.model, size, held)
                limit = body.token_limit()
                text = await service.apply_chat_template(body.messages, body.chat_template_kwargs or {})
                special = service.template.adds_special or bool(body.add_special_tokens)
                (prompt,) = await service.encode([text], limit, special=special, choices=body.n or 1)
            logprobs = (body.top_logprobs or 0) if body.logprobs else None
            max_tokens = limit or service.max_model_len - len(prompt)
            params = self._params(body, max_tokens, logprobs)
            return self._response(body, [prompt], adapter, params, ChatFormat)

    def _params(
        self, body: CompletionRequest | ChatRequest, max_tokens: int, logprobs: int | None, echo: bool = False
    ) -> SamplingParams:
        try:
            return body.sampling(max_tokens, logprobs, prompt_logprobs=echo and logprobs is not None)
        except InputError as error:
            field = error.location.rpartition(".")[2]
            raise bad_request(InputError(error.rule, error.value, field)) from None

    def _response(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: Sequence[Sequence[int]],
        adapter: str | None,
        params: SamplingParams,
        format_type: type[ResponseFormat],
        echo: Sequence[str] = (),
    ) -> FullResponse:
        service, choices = self._service, body.n or 1
        service.refuse_if_full(len(prompts) * choices)
        tokenizer, streamed = service.tokenizer, bool(body.stream)
        form = format_type(
            body.model,
            tokenizer,
            with_usage=body.include_usage(),
            continuous_usage=body.continuous_usage(),
            with_tokens=bool(body.return_token_ids),
            echo=[text for text in echo for _ in range(choices)],
        )
        stops = body.stops()
        stream = OutputStream(service.engine, tokenizer, prompts, adapter, params, stops, streamed, choices)
        return EventStreamResponse(stream, form) if streamed else FullResponse(stream, form)
