"""Request state, engine outputs and the output stream of one HTTP request."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from starlette.types import Receive

from capplan.engine.request import Request, SamplingParams, TokenLogprobs
from capplan.engine.server.protocol import ApiError, bad_request
from capplan.engine.tokenizer import ByteTokenizer, Tokenizer
from capplan.errors import InputError

if TYPE_CHECKING:
    from capplan.engine.server.async_engine import AsyncEngine

_MOST_HELD = 3
"""A character of UTF-8 has at most 4 bytes: where so many more tokens have not made one, none is coming."""


class Detokenizer(Protocol):
    """Turns tokens into text as they come."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that is certain now and was not before."""
        ...

    def finish(self) -> str:
        """Return what was held back."""
        ...


def detokenizer_of(tokenizer: Tokenizer) -> Detokenizer:
    """Return a new stream; what it returns in all is what the tokenizer makes of all tokens at once.

    But for bytes that are no characters: what is shown in their place may differ.
    """
    return ByteDetokenizer() if isinstance(tokenizer, ByteTokenizer) else WindowDetokenizer(tokenizer)


class ByteDetokenizer:
    """Text of a model whose tokens are bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(bytes([token for token in tokens if token < 256]))

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Text of any tokenizer: decodes the last tokens with and without the new ones, and takes the difference.

    How a token is written can depend on the one before it (a space at the beginning of a word), so a token is
    never decoded alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._known = 0  # tokens of the window whose text has been returned ...
        self._known_text = ""  # ... and that text
        self._held = 0  # times in a row that nothing was returned

    def feed(self, tokens: Sequence[int]) -> str:
        """See `Detokenizer`."""
        self._window.extend(tokens)
        text = self._tokenizer.decode(self._window)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and self._held < _MOST_HELD:
            self._held += 1
            return ""
        self._held = 0
        new = text[len(self._known_text) :]
        del self._window[: self._known]
        self._known = len(self._window)
        self._known_text = self._tokenizer.decode(self._window)
        return new

    def finish(self) -> str:
        """See `Detokenizer`."""
        return self._tokenizer.decode(self._window)[len(self._known_text) :]


class StopChecker:
    """Looks for strings that end an answer, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._hold = max((len(stop) for stop in stops), default=1) - 1

    def __bool__(self) -> bool:
        return bool(self._stops)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be shown now, and the stop string that ends it, if it has come."""
        if not self._stops:
            return text, None
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            at, stop = min(found)
            return self._held[:at], stop
        shown = max(0, len(self._held) - self._hold)
        text, self._held = self._held[:shown], self._held[shown:]
        return text, None

    def finish(self) -> str:
        """Return what was held back."""
        held, self._held = self._held, ""
        return held


Finish = Literal["stop", "length", "abort", "error"]


class EngineFull(InputError):  # noqa: N818 - it is no defect
    """The engine has no row for a further request."""

    def __init__(self) -> None:
        super().__init__("must not be more than the engine takes", location="requests")


class EngineFailed(InputError):  # noqa: N818 - nothing that was asked for is wrong
    """The engine has broken down with the prompt in it."""

    def __init__(self) -> None:
        super().__init__("has failed", location="engine")


class Listener(Protocol):
    """Whoever waits for tokens, on the event loop."""

    def hear(self, news: RequestOutput) -> None:
        """Take news."""
        ...


class RequestState:
    """One prompt on its way through the engine.

    Parameters
    ----------
    listener
        Who is told.
    index
        Of the prompt among those of its HTTP request.
    prompt, adapter, params, arrival_ns
        As `Engine.new_request` takes them.
    whole
        Tell of all tokens at the end only.
    """

    def __init__(
        self,
        listener: Listener,
        index: int,
        prompt: Sequence[int],
        adapter: str | None,
        params: SamplingParams,
        arrival_ns: int,
        whole: bool,
    ) -> None:
        self.listener = listener
        self.index = index
        self.prompt = prompt
        self.adapter = adapter
        self.params = params
        self.arrival_ns = arrival_ns
        self.whole = whole
        # Of the engine's thread:
        self.request: Request | None = None
        self._told = 0

    def news(self, request: Request) -> RequestOutput:
        """Return what has not been told of the request yet."""
        first, self._told = self._told, len(request.output)
        logprobs = request.logprobs[first:] if request.logprobs else ()
        return RequestOutput(self, request.output[first:], logprobs, request.finish_reason, request.error)


class RequestOutput(NamedTuple):
    """What happened to one prompt."""

    ticket: RequestState
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish: Finish | None = None
    error: str | None = None
    refusal: InputError | None = None
    """Why the engine did not take it."""


class Delta(NamedTuple):
    """What is new in a choice."""

    choice: int
    text: str
    tokens: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The string or the token that the request asked to stop at."""


class Choice:
    """The answer to one prompt.

    Attributes
    ----------
    tokens, logprobs
        All that have come.
    finish_reason, stop_reason
        As in `Delta`, once it has ended.
    """

    def __init__(self, ticket: RequestState, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.ticket = ticket
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._texts: list[str] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._stream = detokenizer_of(tokenizer)
        self._stops = StopChecker(stops)

    @property
    def text(self) -> str:
        """All that has been shown."""
        return "".join(self._texts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that were given."""
        return len(self.ticket.prompt)

    def feed(self, news: RequestOutput) -> Delta:
        """Take news and return what is to be shown of it."""
        if self._stops and len(news.tokens) > 1:
            return self._feed_singly(news)
        self.tokens += news.tokens
        self.logprobs += news.logprobs
        if news.finish is None and not self._stops:  # the usual case, kept short
            text = self._stream.feed(news.tokens)
            self._texts.append(text)
            return Delta(self.ticket.index, text, news.tokens, news.logprobs)
        # A token at which the request ends has no text.
        ended_by_token = news.finish == "stop"
        text = self._stream.feed(news.tokens[:-1] if ended_by_token else news.tokens)
        if news.finish is not None:
            text += self._stream.finish()
        text, stop = self._stops.feed(text)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        elif news.finish is not None:
            text += self._stops.finish()
            self.finish_reason = news.finish
            if ended_by_token and self.tokens[-1] in self.ticket.params.stop_token_ids:
                self.stop_reason = self.tokens[-1]
        self._texts.append(text)
        return Delta(
            self.ticket.index, text, news.tokens, news.logprobs, self.finish_reason, self.stop_reason
        )

    def _feed_singly(self, news: RequestOutput) -> Delta:
        """Take tokens one by one up to the one that completes a stop string: the rest is not the answer's."""
        text, known = "", len(self.tokens)
        for at in range(len(news.tokens)):
            is_last = at + 1 == len(news.tokens)
            one = news._replace(
                tokens=news.tokens[at : at + 1],
                logprobs=news.logprobs[at : at + 1],
                finish=news.finish if is_last else None,
            )
            text += self.feed(one).text
            if self.finish_reason is not None:
                break
        taken = len(self.tokens) - known
        logprobs = news.logprobs[:taken]
        return Delta(
            self.ticket.index, text, news.tokens[:taken], logprobs, self.finish_reason, self.stop_reason
        )


class ClientGoneError(Exception):
    """Nobody is there to be answered."""


class OutputStream:
    """Prompts of one HTTP request in the engine, and what has come back.

    Parameters
    ----------
    driver, tokenizer
        The engine's.
    prompts, adapter, params
        What is asked.
    stops
        Strings that end an answer.
    stream
        Tell of every token at once.
    """

    def __init__(
        self,
        driver: AsyncEngine,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        adapter: str | None,
        params: SamplingParams,
        stops: Sequence[str],
        stream: bool,
    ) -> None:
        self._driver = driver
        self._news: list[RequestOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._running = len(prompts)
        self._gone = False
        arrival_ns = driver.now_ns()
        whole = not stream and not stops  # a stop string must be seen when it comes
        self.choices = [
            Choice(RequestState(self, index, prompt, adapter, params, arrival_ns, whole), tokenizer, stops)
            for index, prompt in enumerate(prompts)
        ]

    @property
    def ended(self) -> bool:
        """Whether all prompts have been answered."""
        return self._running == 0

    def hear(self, news: RequestOutput) -> None:
        """See `Listener`."""
        self._news.append(news)
        self._wake()

    @contextlib.asynccontextmanager
    async def running(self, receive: Receive) -> AsyncIterator[None]:
        """Have the prompts run while the client is there, and none of them afterwards."""
        tickets = [choice.ticket for choice in self.choices]
        self._driver.submit(tickets)
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            yield
        finally:
            watch.cancel()
            if not self.ended:
                self._driver.cancel(tickets)

    async def deltas(self) -> list[Delta]:
        """Wait for news and return what is to be shown.

        Raises
        ------
        ApiError
            When a prompt is refused, or its request fails.
        ClientGoneError
            When the client is gone.
        """
        while True:
            if not self._news and not self._gone:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if self._gone:
                raise ClientGoneError
            deltas = [delta for news in self._drain() if (delta := self._delta(news)) is not None]
            if deltas:
                return deltas

    def _drain(self) -> list[RequestOutput]:
        """Return the news, one for each prompt."""
        news, self._news = self._news, []
        if len(news) > 1 and len(self.choices) == 1:  # the usual backlog: one chunk for all of it
            tokens: list[Any] = [token for each in news for token in each.tokens]
            logprobs = [logprob for each in news for logprob in each.logprobs]
            return [news[-1]._replace(tokens=tokens, logprobs=logprobs)]
        return news

    def _delta(self, news: RequestOutput) -> Delta | None:
        choice = self.choices[news.ticket.index]
        if choice.finish_reason is not None:  # by a stop string; the rest was under way
            return None
        if news.finish in ("abort", "error"):
            raise _error_of(news)
        delta = choice.feed(news)
        if delta.finish_reason is not None:
            self._running -= 1
            if news.finish is None:  # by a stop string, of which the engine does not know
                self._driver.cancel([news.ticket], "stop")
        return delta

    async def _watch(self, receive: Receive) -> None:
        """Note when the client goes."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _error_of(news: RequestOutput) -> ApiError:
    if news.finish == "abort":
        return ApiError(503, "The server shuts down", code="shutting_down", headers={"Retry-After": "1"})
    if isinstance(news.refusal, EngineFull):
        return ApiError(429, "The queue is full", code="queue_full", headers={"Retry-After": "1"})
    if isinstance(news.refusal, EngineFailed):
        message = "The engine has failed; please try again"
        return ApiError(503, message, code="instance_failed", headers={"Retry-After": "1"})
    if news.refusal is not None:
        return bad_request(news.refusal)
    return ApiError(500, news.error or "The request failed", code="request_failed")
