"""Request schemas and error responses of the OpenAI API, with vLLM's additions.

A field that the engine does not support is accepted only with its neutral value. An unknown field is an error
that names the nearest known one. Validation ends at the first invalid item of a list, and every list has a
maximum length, so that its time and memory are those of a valid body of the same size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, TypeVar, cast

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from capplan.engine import SamplingParams
from capplan.errors import InputError
from capplan.spec import unknown_key

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


RETRY: Final = MappingProxyType({"Retry-After": "1"})
_MAX_MESSAGE: Final = 1000
"""Characters of an error message, which may quote the request."""
_MAX_VALUE: Final = 100
_MAX_CONTAINERS: Final = 50_000
"""Lists and objects of a body: the parser takes some 300 bytes and 1 µs for each, however short."""


def clipped(text: str, length: int) -> str:
    """Return the start of a text."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


class ApiError(HTTPException):
    """Error of a request.

    Parameters
    ----------
    param
        Invalid field of the request.
    code
        Machine-readable code, such as ``model_not_found``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, clipped(message, _MAX_MESSAGE), dict(headers or {}))
        self.param = None if param is None else clipped(param, _MAX_VALUE)
        self.code = code

    def body(self) -> bytes:
        """Return the error as JSON."""
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}, ensure_ascii=False).encode("utf-8", errors="replace")

    def response(self) -> Response:
        """Return the error as a response."""
        return Response(self.body(), self.status_code, self.headers, "application/json")


def bad_request(error: InputError) -> ApiError:
    """Return the error for a value that the engine refuses."""
    return ApiError(400, str(error), error.location or None)


def shutting_down() -> ApiError:
    """Return the error for a request that a server does not start, because it ends."""
    return ApiError(503, "The server shuts down", code="shutting_down", headers=RETRY)


def aborted() -> ApiError:
    """Return the error for a request that a server may have started, and cuts off because it ends."""
    return ApiError(503, "The server has shut down during the request", code="aborted", headers=RETRY)


def engine_failed() -> ApiError:
    """Return the error for a request to a server whose engine core has ended."""
    return ApiError(503, "The engine has failed", code="engine_failed", headers=RETRY)


def overloaded(message: str = "The server is overloaded") -> ApiError:
    """Return the error for a request that gives way to others."""
    return ApiError(503, message, code="overloaded", headers=RETRY)


def unknown_model(name: str) -> ApiError:
    """Return the error for a model that is not served."""
    message = f"The model {clipped(name, _MAX_VALUE)!r} does not exist"
    return ApiError(404, message, "model", "model_not_found")


def add_error_handlers(app: FastAPI) -> None:
    """Send every error of an application in OpenAI's form."""

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        api_error = error if isinstance(error, ApiError) else ApiError(error.status_code, error.detail)
        return api_error.response()

    @app.exception_handler(Exception)
    async def internal_error(_: Request, __: Exception) -> Response:
        return ApiError(500, "The server made a mistake").response()


async def json_body(request: Request) -> bytes:
    """Return the bytes of a body that is to be JSON, which the request does not keep."""
    try:
        body = b"".join([part async for part in request.stream()])
    except ClientDisconnect:
        raise ApiError(400, "The client has disconnected") from None
    if not body or not _is_json(request.headers.get("content-type", "")):
        raise _not_an_object()
    return body


def parsed(body: bytes, model: type[Model]) -> Model:
    """Return a body as a model.

    Raises
    ------
    ApiError
        400 if it is not valid JSON, has too many lists and objects, or breaks a rule of the model.
    """
    if _containers(body) > _MAX_CONTAINERS:
        raise ApiError(400, f"The body must not have more than {_MAX_CONTAINERS} lists and objects")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    raise _problem(first)


def _containers(body: bytes) -> int:
    """Return the number of lists and objects of valid JSON, at most; texts are left out if there are many."""
    count = body.count(b"[") + body.count(b"{")
    if count <= _MAX_CONTAINERS:
        return count
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"')[::2])
    return outside.count(b"[") + outside.count(b"{")


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _not_an_object() -> ApiError:
    return ApiError(400, "The body must be a JSON object, with Content-Type: application/json")


def _problem(problem: Mapping[str, Any]) -> ApiError:
    """Return the error of an invalid field of a body."""
    kind, context = problem["type"], problem.get("ctx", {})
    where = [str(part) for part in problem["loc"]]
    if kind == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {context['error']}")
    if kind == "model_type" and not where:
        return _not_an_object()
    if "param" in context:
        where.append(context["param"])
    message = str(problem["msg"])
    if where[0] == "prompt" and kind != "missing":  # else the rule of one type of the union
        where, message = ["prompt"], _PROMPT_RULE
    return ApiError(400, f"{'.'.join(where)}: {message}", where[0])


def request_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the description of a request body for OpenAPI; its definitions are inline."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


def error_code(body: bytes) -> str | None:
    """Return the code of an error's body; None for any other body."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, TypeError, KeyError):
        return None


def model_card(name: str, created: int, parent: str | None, max_model_len: int) -> dict[str, Any]:
    """Return an entry of ``/v1/models``."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "capplan",
        "root": name,  # in vLLM the folder, which is no concern of clients
        "parent": parent,
        "max_model_len": max_model_len,
    }


_MAX_LOGPROBS: Final = 20  # vLLM's --max-logprobs
_MAX_CHOICES: Final = 128  # OpenAI's
_RANDOM_SEED: Final = -1  # vLLM's
_LIKENESS: Final = 0.8
"""Of an unknown field and the one that an error suggests: others that are alike mean something else."""
_MAX_STOPS: Final = 16
_MAX_STOP_LENGTH: Final = 1000
_MAX_STOP_TOKENS: Final = 1024
MAX_MODEL_NAME: Final = 4096
"""Characters: a name may be a path."""
MAX_PROMPTS: Final = 16_384
"""Of one request; the queue of the server, which is shorter, refuses most."""
MAX_MESSAGES: Final = 10_000
_MAX_PARTS: Final = 1000
"""Of one message."""
_MAX_PROMPT_TOKENS: Final = 2**24
"""More than any model takes."""

_ANY: Final = object()
"""Any value: the field has no effect on the output."""

_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    name: neutral
    for neutral, names in (
        (
            (_ANY,),
            "include_reasoning metadata parallel_tool_calls prompt_cache_key prompt_cache_retention "
            "request_id safety_identifier service_tier session_id spaces_between_special_tokens store "
            "truncation_side user verbosity",
        ),
        (
            (),
            "audio cache_salt chat_template guided_choice guided_grammar guided_json guided_regex mm_payload "
            "prediction prompt_embeds prompt_logprobs reasoning_effort repetition_detection "
            "routed_experts_prompt_start structural_tag structured_outputs thinking_token_budget "
            "truncate_prompt_tokens watermarking web_search_options",
        ),
        ((0,), "frequency_penalty presence_penalty priority"),
        ((1,), "best_of length_penalty repetition_penalty stream_interval"),
        (([],), "allowed_token_ids bad_words documents functions logits_processors logprob_token_ids tools"),
        (
            ({},),
            "ec_transfer_params kv_transfer_params logit_bias media_io_kwargs mm_processor_kwargs vllm_xargs",
        ),
        ((True,), "add_generation_prompt skip_special_tokens"),
        (
            (False,),
            "continue_final_message include_stop_str_in_output return_mm_kwargs return_prompt_text "
            "return_token_offsets return_tokens_as_token_ids use_beam_search",
        ),
        (("none", "auto"), "function_call tool_choice"),
        ((["text"],), "modalities"),
        (({"type": "text"},), "response_format"),
        (("",), "suffix"),
    )
    for name in names.split()
}
"""Fields that the server does not support, and the values with which they change nothing, beside null."""

_INSTEAD: Final = MappingProxyType(
    {
        "prompt_logprobs": "echo with logprobs returns those of the prompt",
        "reasoning_effort": "chat_template_kwargs passes it to the model's chat template",
    }
)
"""What to use instead of an unsupported field."""

_ONLY: Final = MappingProxyType(
    {
        **dict.fromkeys(("messages", "top_logprobs", "chat_template_kwargs"), "chat completions"),
        **dict.fromkeys(("prompt", "echo"), "completions"),
    }
)
"""Fields of one of the two kinds of requests."""

Model = TypeVar("Model", bound=BaseModel)

TokenId = Annotated[int, Field(ge=0)]
_PROMPT_RULE: Final = "must be a string, a list of strings, a list of token ids, or a list of such lists"
_Tokens = Annotated[list[TokenId], Field(max_length=_MAX_PROMPT_TOKENS, fail_fast=True)]
Prompts = (
    str
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    | _Tokens
    | Annotated[list[_Tokens], Field(max_length=MAX_PROMPTS, fail_fast=True)]
)


class _Body(BaseModel):
    # Forbidden by the model, each of many unknown keys would be an error of its own.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _refuse_unknown(self) -> Self:
        for name in self.model_extra or {}:
            raise _unknown_field(name, list(type(self).model_fields))
        return self


class StreamOptions(_Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class _Generation(BaseModel):
    """Fields of completions and chat."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: Annotated[str, Field(max_length=MAX_MODEL_NAME)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    stop: str | Annotated[list[str], Field(max_length=_MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_STOP_TOKENS, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED:
                _require_neutral(name, value)
            elif name in _ONLY and value in (None, False):
                continue
            elif name in _ONLY:
                raise _field_error(name, f"is a field of {_ONLY[name]} only")
            else:
                raise _unknown_field(name, list(type(self).model_fields))
        limit = self.max_completion_tokens or self.max_tokens
        if limit is not None and (self.min_tokens or 0) > limit:
            raise _field_error("min_tokens", f"must be at most max_tokens, {limit}")
        if self.stream_options is not None and not self.stream:
            raise _field_error("stream_options", "is only for streams")
        if any(not 1 <= len(stop) <= _MAX_STOP_LENGTH for stop in self.stops()):
            raise _field_error("stop", f"must be strings of 1 to {_MAX_STOP_LENGTH} characters")
        return self

    def stops(self) -> list[str]:
        """Return the stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def include_usage(self) -> bool:
        """Return whether a stream ends with token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def continuous_usage(self) -> bool:
        """Return whether every event of a stream has the token counts so far."""
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    def token_limit(self) -> int | None:
        """Return the maximum length of the output; None: the default."""
        return self.max_completion_tokens or self.max_tokens

    def sampling(
        self, max_tokens: int, logprobs: int | None, *, prompt_logprobs: bool = False
    ) -> SamplingParams:
        """Return the sampling parameters, with OpenAI's defaults."""
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=None if self.seed == _RANDOM_SEED else self.seed,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=tuple(self.stop_token_ids or ()),
        )


class CompletionRequest(_Generation):
    """``POST /v1/completions``."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return cast(list[list[int]], [self.prompt])
        return cast(list[str] | list[list[int]], self.prompt)


class TextPart(_Body):
    """Text part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """One turn of a conversation.

    Clients send responses back with fields that this server leaves empty.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=_MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    def text(self) -> str:
        """Return the text of the message."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(_Generation):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise _field_error("top_logprobs", "needs logprobs: true")
        return self


class LoadAdapterRequest(_Body):
    """``POST /v1/load_lora_adapter``."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    """Replace the adapter of this name, if there is one."""
    is_3d_lora_weight: Literal[False] | None = None


class UnloadAdapterRequest(_Body):
    """``POST /v1/unload_lora_adapter``."""

    lora_name: str
    lora_int_id: int | None = None  # ignored, as in vLLM


_MAX_SHARES: Final = 100_000
_AdapterName = Annotated[str, Field(min_length=1, max_length=256)]


class AdapterSharesRequest(_Body):
    """``POST /v1/adapter_shares``."""

    shares: Annotated[dict[_AdapterName, Annotated[float, Field(ge=0, le=1)]], Field(max_length=_MAX_SHARES)]
    """Share of each adapter's requests that this server gets; adapters that are not named keep theirs."""


def _is(value: Any, neutral: Any) -> bool:
    """Compare, with True and 1 different."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _require_neutral(name: str, value: Any) -> None:
    neutral = _UNSUPPORTED[name]
    if value is None or _ANY in neutral or any(_is(value, each) for each in neutral):
        return
    allowed = [json.dumps(each) for each in (None, *neutral)]
    hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise _field_error(name, f"is not supported; it can only be {' or '.join(allowed)}{hint}")


def _unknown_field(name: str, known: Sequence[str]) -> PydanticCustomError:
    return _field_error(name, unknown_key(clipped(name, _MAX_VALUE), known, _LIKENESS))


def _field_error(param: str, rule: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{rule}", {"param": param, "rule": rule})
