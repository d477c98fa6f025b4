"""What passes between the event loop and the engine's thread: prompts one way, news of them the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from capplan.engine.request import Request, SamplingParams, TokenLogprobs
from capplan.errors import InputError

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

    def hear(self, news: News) -> None:
        """Take news."""
        ...


class Ticket:
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

    def news(self, request: Request) -> News:
        """Return what has not been told of the request yet."""
        first, self._told = self._told, len(request.output)
        logprobs = request.logprobs[first:] if request.logprobs else ()
        return News(self, request.output[first:], logprobs, request.finish_reason, request.error)


class News(NamedTuple):
    """What happened to one prompt."""

    ticket: Ticket
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish: Finish | None = None
    error: str | None = None
    refusal: InputError | None = None
    """Why the engine did not take it."""
