"""Prompts in the engine: their states, the output stream of an HTTP request, and the client of the core.

A `RequestState` follows one prompt through the engine. Its outputs are `RequestOutput`. An `OutputStream`
collects the outputs of all prompts of an HTTP request, and adds their text.

The core runs in a process of its own (`capplan.engine._core_process`). Prompts, cancellations and calls go to
it as messages, which it takes between two steps; the tokens of a step come back in one.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
import socket
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from capplan.engine import (
    AbortRequests,
    AddRequests,
    ByteTokenizer,
    Call,
    CoreFailed,
    Ended,
    FinishReason,
    FrameReader,
    NewRequest,
    Refusals,
    Reply,
    SamplingParams,
    StepRecord,
    StepTokens,
    Tokenizer,
    TokenLogprobs,
    frame,
)
from capplan.errors import InputError
from capplan.server._protocol import RETRY, ApiError, aborted, bad_request

if TYPE_CHECKING:
    from capplan.server._http_protocol import ClientLink


_MAX_HELD: Final = 3
"""An incomplete UTF-8 character (at most 4 bytes) is not completed after this many further tokens."""


class EngineDeadError(RuntimeError):
    """The engine core has ended."""

    def __init__(self, reason: str = "the engine core has failed") -> None:
        super().__init__(reason)


class ClientGoneError(Exception):
    """The client has disconnected."""


class ByteDetokenizer:
    """Incremental text of tokens that are bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the new text without incomplete characters."""
        return self._decoder.decode(bytes([token for token in tokens if token < 256]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Incremental text of any tokenizer.

    New text is the difference between the text of the last tokens with and without the new ones. The text of
    a token can depend on the one before it (a space at the start of a word), so no token is decoded alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._known = 0  # tokens of the window whose text has been returned
        self._known_text = ""
        self._held = 0  # calls in a row without text

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the new text without incomplete characters."""
        self._window.extend(tokens)
        text = self._tokenizer.decode(self._window)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and self._held < _MAX_HELD:
            self._held += 1
            return ""
        self._held = 0
        new = text[len(self._known_text) :]
        del self._window[: self._known]
        self._known = len(self._window)
        self._known_text = self._tokenizer.decode(self._window)
        return new

    def finish(self) -> str:
        return self._tokenizer.decode(self._window)[len(self._known_text) :]


def new_detokenizer(tokenizer: Tokenizer) -> ByteDetokenizer | WindowDetokenizer:
    """Return a detokenizer whose parts add up to the text of all tokens, invalid bytes aside."""
    return ByteDetokenizer() if isinstance(tokenizer, ByteTokenizer) else WindowDetokenizer(tokenizer)


class StopChecker:
    """Search for stop strings in a growing text; holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._hold = max((len(stop) for stop in stops), default=1) - 1

    def __bool__(self) -> bool:
        return bool(self._stops)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that can be sent, and the stop string after it, if found."""
        if not self._stops:
            return text, None
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            at, stop = min(found)
            return self._held[:at], stop
        sent = max(0, len(self._held) - self._hold)
        text, self._held = self._held[:sent], self._held[sent:]
        return text, None

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class RequestOutput(NamedTuple):
    """New output of one prompt."""

    state: RequestState
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs | None] = ()
    """None: of the first token of an echoed prompt."""
    finish_reason: FinishReason | None = None
    error: ApiError | None = None
    """Response if the prompt has failed."""
    text: str = ""
    stop_reason: str | int | None = None
    """Stop string or stop token of the request that ended it."""


class RequestState:
    """State of one prompt of an HTTP request, which has a choice for each of the request's `n`.

    Its times are on the engine's clock. `token_count` are the tokens of the engine so far, `tokens`,
    `logprobs` and `text` the output so far, up to a stop string. `prompt_logprobs` are of the tokens after
    the first one.
    """

    def __init__(
        self, stream: OutputStream, index: int, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        self.stream = stream
        self.index = index
        self.prompt = prompt
        self.params = params
        self.final_only = stream.final_only
        self.tag = -1
        self.first_token_ns: int | None = None
        self.last_token_ns: int | None = None
        self.token_count = 0
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._new_tokens: list[int] = []
        self._new_logprobs: list[TokenLogprobs] = []
        self._texts: list[str] = []
        self._detokenizer = new_detokenizer(stream.tokenizer)
        self._stops = StopChecker(stream.stops)

    @property
    def text(self) -> str:
        """Output text so far."""
        return "".join(self._texts)

    def add_token(self, token: int, time_ns: int, logprobs: TokenLogprobs | None) -> None:
        """Add a token of the engine to the next output."""
        self._new_tokens.append(token)
        self.token_count += 1
        if logprobs is not None:
            self._new_logprobs.append(logprobs)
        self.last_token_ns = time_ns
        if self.first_token_ns is None:
            self.first_token_ns = time_ns

    def new_output(self, ended: Ended | None = None) -> RequestOutput:
        """Return the output since the last call, without text; `ended`: the last one."""
        tokens, self._new_tokens = self._new_tokens, []
        logprobs, self._new_logprobs = self._new_logprobs, []
        if ended is None:
            return RequestOutput(self, tokens, logprobs)
        error = None
        if ended.reason == "abort":
            error = aborted()
        elif ended.reason == "error":
            error = ApiError(500, ended.error or "The request failed", code="request_failed")
        return RequestOutput(self, tokens, logprobs, ended.reason, error)

    def detokenize(self, output: RequestOutput) -> RequestOutput:
        """Add an output to the state and return it with its text, up to a stop string."""
        if self._stops and len(output.tokens) > 1:
            return self._detokenize_singly(output)
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        if output.finish_reason is None and not self._stops:  # fast path
            text = self._detokenizer.feed(output.tokens)
            self._texts.append(text)
            return RequestOutput(self, output.tokens, output.logprobs, text=text)
        ended_by_token = output.finish_reason == "stop"  # a stop token has no text
        text = self._detokenizer.feed(output.tokens[:-1] if ended_by_token else output.tokens)
        if output.finish_reason is not None:
            text += self._detokenizer.finish()
        if len(self.tokens) <= self.params.min_tokens:  # as in vLLM, a stop string does not begin before it
            text, stop = self._stops.finish() + text, None
        else:
            text, stop = self._stops.feed(text)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        elif output.finish_reason is not None:
            text += self._stops.finish()
            self.finish_reason = output.finish_reason
            if ended_by_token and self.tokens[-1] in self.params.stop_token_ids:
                self.stop_reason = self.tokens[-1]
        self._texts.append(text)
        return output._replace(text=text, finish_reason=self.finish_reason, stop_reason=self.stop_reason)

    def _detokenize_singly(self, output: RequestOutput) -> RequestOutput:
        """Add tokens one by one up to the one that completes a stop string, and drop the rest."""
        text, known = "", len(self.tokens)
        last = len(output.tokens) - 1
        for at in range(last + 1):
            single = output._replace(
                tokens=output.tokens[at : at + 1],
                logprobs=output.logprobs[at : at + 1],
                finish_reason=output.finish_reason if at == last else None,
            )
            text += self.detokenize(single).text
            if self.finish_reason is not None:
                break
        taken = len(self.tokens) - known
        tokens, logprobs = output.tokens[:taken], output.logprobs[:taken]
        return RequestOutput(
            self, tokens, logprobs, self.finish_reason, text=text, stop_reason=self.stop_reason
        )


class OutputStream:
    """Outputs of all prompts of one HTTP request: each token of a `stream`, otherwise one output per prompt.

    Every prompt has `choices`; with a seed, the second one has the next seed, and so on.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        adapter: str | None,
        params: SamplingParams,
        stops: Sequence[str],
        stream: bool,
        choices: int = 1,
    ) -> None:
        self.tokenizer = tokenizer
        self.adapter = adapter
        self.choices = choices
        self.stops = stops
        self.arrival_ns = engine.now_ns()
        self.final_only = not stream and not stops  # a stop string is detected while tokens arrive
        seeds = [None if params.seed is None else (params.seed + i) % 2**63 for i in range(choices)]
        each = [params if i == 0 else params.replace(seed=seed) for i, seed in enumerate(seeds)]
        pairs = itertools.product(prompts, each)
        self.states = [RequestState(self, index, *pair) for index, pair in enumerate(pairs)]
        self._engine = engine
        self._outputs: list[RequestOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._unfinished = len(self.states)
        self._disconnected = False

    @property
    def finished(self) -> bool:
        return self._unfinished == 0

    def on_output(self, output: RequestOutput) -> None:
        """Queue an output of the engine."""
        self._outputs.append(output)
        self._wake()

    @contextlib.contextmanager
    def running(self, client: ClientLink) -> Iterator[None]:
        """Submit the prompts; cancel them at the end, or when the client disconnects."""
        self._engine.submit(self.states)
        client.on_gone(self._disconnect)
        try:
            yield
        finally:
            client.on_gone(None)
            if not self.finished:
                self._engine.cancel(self.states)

    async def next_outputs(self) -> list[RequestOutput]:
        """Wait for outputs and return them with their text.

        If a prompt is refused, or its request fails, raise `ApiError`, and if the client has gone
        `ClientGoneError`.
        """
        while True:
            if not self._outputs and not self._disconnected:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if self._disconnected:
                raise ClientGoneError
            outputs = [new for output in self._take() if (new := self._process(output)) is not None]
            if outputs:
                return outputs

    def _take(self) -> list[RequestOutput]:
        """Return the queued outputs; those of a single prompt are merged."""
        outputs, self._outputs = self._outputs, []
        if len(outputs) > 1 and len(self.states) == 1:
            tokens: list[Any] = [token for output in outputs for token in output.tokens]
            logprobs = [logprob for output in outputs for logprob in output.logprobs]
            return [outputs[-1]._replace(tokens=tokens, logprobs=logprobs)]
        return outputs

    def _process(self, output: RequestOutput) -> RequestOutput | None:
        state = output.state
        if state.finish_reason is not None:  # output after a stop string
            return None
        if output.error is not None:
            raise output.error
        processed = state.detokenize(output)
        if processed.finish_reason is not None:
            self._unfinished -= 1
            if output.finish_reason is None:  # by a stop string, which the engine does not see
                self._engine.cancel([state], "stop")
        return processed

    def _disconnect(self) -> None:
        self._disconnected = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_PACE_REQUESTS: Final = 64


class StepObserver(Protocol):
    """Observer of the engine, called on the event loop."""

    def on_step(self, record: StepRecord, states: Sequence[RequestState]) -> None:
        """Observe a step and the prompts that got a token in it, before they have it."""
        ...

    def on_ended(self, state: RequestState, ended: Ended) -> None:
        """Observe the end of a prompt that was queued."""
        ...


class AsyncEngine:
    """Client of an engine core, at the other end of a pair of sockets; it belongs to the event loop.

    The engine's clock starts at `clock_start_ns` of the monotonic clock. `failure` says why the core has
    ended; `failed` is set then.
    """

    def __init__(
        self, connection: socket.socket, clock_start_ns: int, observers: Sequence[StepObserver] = ()
    ) -> None:
        self._connection = connection
        self._clock_start_ns = clock_start_ns
        self._observers = observers
        self._transport: asyncio.WriteTransport | None = None
        self._tags = itertools.count()
        self._states: dict[int, RequestState] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._finish_times_s: deque[float] = deque(maxlen=_PACE_REQUESTS)
        self._stopped = False
        self.failure: EngineDeadError | None = None
        self.failed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Number of submitted prompts that have not finished."""
        return len(self._states)

    def finished_per_s(self) -> float:
        """Return the recent rate of finished prompts; 0 if unknown."""
        since_s = time.monotonic() - self._finish_times_s[0] if self._finish_times_s else 0.0
        return len(self._finish_times_s) / since_s if since_s > 0 else 0.0

    async def start(self) -> None:
        """Take messages on the running event loop."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(
            lambda: _Connection(self._take, self._on_end), sock=self._connection.dup()
        )

    def stop(self) -> None:
        """Close the connection, at which the core ends; running prompts are dropped."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def submit(self, states: Iterable[RequestState]) -> None:
        """Queue prompts; their streams receive outputs until each has finished."""
        requests = []
        for state in states:
            state.tag = next(self._tags)
            self._states[state.tag] = state
            stream, prompt = state.stream, array("i", state.prompt).tobytes()
            requests.append(NewRequest(state.tag, prompt, stream.adapter, state.params, stream.arrival_ns))
        self._idle.clear()
        if self.failure is None:
            self._send(AddRequests(requests))
        else:
            self._fail_all()

    def cancel(self, states: Iterable[RequestState], reason: FinishReason = "abort") -> None:
        """Cancel the unfinished ones of some prompts."""
        tags = [state.tag for state in states if state.tag in self._states]
        if tags:
            self._send(AbortRequests(tags, reason))

    def cancel_all(self) -> None:
        self.cancel(list(self._states.values()))

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the core between two steps and return its result.

        If the core ends, or has ended, before the call, raise `EngineDeadError`.
        """
        if self.failure is not None or self._stopped:
            raise EngineDeadError
        number = next(self._tags)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        try:
            self._send(Call(number, method, arguments))
            return await future
        finally:
            del self._calls[number]

    def post(self, method: str, *arguments: object) -> None:
        """Call a method of the core and ignore the result."""
        if self.failure is None and not self._stopped:
            self._send(Call(next(self._tags), method, arguments))

    async def is_alive(self, timeout_s: float) -> bool:
        """Return whether the core answers within a time."""
        try:
            await asyncio.wait_for(self.call("ping"), timeout_s)
        except (TimeoutError, EngineDeadError):
            return False
        return True

    def now_ns(self) -> int:
        """Return the time of the engine's clock."""
        return time.monotonic_ns() - self._clock_start_ns

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def _send(self, message: Any) -> None:
        if self._transport is not None:
            self._transport.write(frame(message))

    def _take(self, message: Any) -> None:
        if isinstance(message, StepTokens):
            self._on_step(message)
        elif isinstance(message, Refusals):
            self._on_refusals(message.errors)
        elif isinstance(message, Reply):
            self._on_reply(message)
        elif isinstance(message, CoreFailed):
            self._fail(EngineDeadError(message.error))

    def _on_step(self, step: StepTokens) -> None:
        """Deliver the results of a step to their streams."""
        states = [self._states[tag] for tag in step.tags]
        if step.record is not None:
            for observer in self._observers:
                observer.on_step(step.record, states)
            end_ns = step.record.begin_ns + step.record.duration_ns
            for state, token in zip(states, step.tokens, strict=True):
                state.add_token(token, end_ns, step.logprobs.get(state.tag))
                if state.tag in step.prompt_logprobs:
                    state.prompt_logprobs = step.prompt_logprobs[state.tag]
        for state in states:
            if state.tag not in step.ended and not state.final_only:
                state.stream.on_output(state.new_output())
        for tag, ended in step.ended.items():
            self._end(self._states[tag], ended)

    def _end(self, state: RequestState, ended: Ended) -> None:
        for observer in self._observers:
            observer.on_ended(state, ended)
        self._deliver_last(state, state.new_output(ended))

    def _on_refusals(self, errors: Mapping[int, InputError | None]) -> None:
        full = ApiError(429, "The queue is full", code="queue_full", headers=RETRY)
        for tag, error in errors.items():
            reply = full if error is None else bad_request(error)
            state = self._states[tag]
            self._deliver_last(state, RequestOutput(state, finish_reason="error", error=reply))

    def _deliver_last(self, state: RequestState, output: RequestOutput) -> None:
        del self._states[state.tag]
        self._finish_times_s.append(time.monotonic())
        state.stream.on_output(output)
        if not self._states:
            self._idle.set()

    def _on_reply(self, reply: Reply) -> None:
        future = self._calls.get(reply.number)
        if future is None or future.done():  # its caller has gone
            return
        if reply.error is None:
            future.set_result(reply.result)
        else:
            future.set_exception(reply.error)

    def _on_end(self) -> None:
        if not self._stopped:
            self._fail(EngineDeadError("the engine core has ended"))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError())

    def _fail(self, failure: EngineDeadError) -> None:
        if self.failure is None:
            self.failure = failure
            self.failed.set()
            self._fail_all()

    def _fail_all(self) -> None:
        message = "The engine has failed; please try again"
        error = ApiError(503, message, code="instance_failed", headers=RETRY)
        for state in list(self._states.values()):
            self._deliver_last(state, RequestOutput(state, finish_reason="error", error=error))


class _Connection(asyncio.Protocol):
    """Bytes of the core's messages."""

    def __init__(self, take: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        self._reader = FrameReader()
        self._take = take
        self._on_end = on_end

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            self._take(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end()
