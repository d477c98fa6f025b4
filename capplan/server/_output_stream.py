"""Request states, outputs and the output stream of one HTTP request.

A `RequestState` follows one prompt through the engine. Its outputs are `RequestOutput`. An `OutputStream`
collects the outputs of all prompts of an HTTP request, and adds their text.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from capplan.engine import ByteTokenizer, Ended, FinishReason, SamplingParams, Tokenizer, TokenLogprobs
from capplan.server._protocol import ApiError, aborted

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
        """Return the rest of the text."""
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
        """Return the rest of the text."""
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
        """Return the text held back."""
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
    """State of one prompt of an HTTP request.

    Attributes
    ----------
    index
        Of the choice in its HTTP request: every prompt has as many as the request's `n`.
    params
        Sampling parameters of the choice.
    tag
        Number of the prompt at the server.
    first_token_ns, last_token_ns
        On the engine's clock; None before the first token.
    token_count
        Tokens of the engine so far.
    prompt_logprobs
        Of the prompt's tokens after the first one, if the request wants them.
    tokens, logprobs, finish_reason, stop_reason
        Output so far, up to a stop string.
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


class PromptQueue(Protocol):
    """What takes the prompts of a stream: an `AsyncEngine`."""

    def submit(self, states: Iterable[RequestState]) -> None:
        """Queue prompts; their streams receive outputs until each has finished."""

    def cancel(self, states: Iterable[RequestState], reason: FinishReason = "abort") -> None:
        """Cancel the unfinished ones of some prompts."""

    def now_ns(self) -> int:
        """Return the time of the engine's clock."""
        ...


class OutputStream:
    """Outputs of all prompts of one HTTP request.

    Parameters
    ----------
    stops
        Stop strings.
    stream
        Return outputs token by token; otherwise one per prompt.
    choices
        Outputs of every prompt; with a seed, the second one has the next one, and so on.
    """

    def __init__(
        self,
        engine: PromptQueue,
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
        """Whether all prompts have finished."""
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

        Raises
        ------
        ApiError
            If a prompt is refused, or its request fails.
        ClientGoneError
            If the client has disconnected.
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
