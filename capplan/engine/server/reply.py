"""The answer to one HTTP request: waits for news of its prompts, and lets them go when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.types import Receive

from capplan.engine.request import SamplingParams
from capplan.engine.server.api_error import ApiError, bad_request
from capplan.engine.server.choices import Choice, Delta
from capplan.engine.server.driver import Driver
from capplan.engine.server.tickets import EngineFailed, EngineFull, News, Ticket
from capplan.engine.tokenizer import Tokenizer


class ClientGoneError(Exception):
    """Nobody is there to be answered."""


class Reply:
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
        driver: Driver,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        adapter: str | None,
        params: SamplingParams,
        stops: Sequence[str],
        stream: bool,
    ) -> None:
        self._driver = driver
        self._news: list[News] = []
        self._waiter: asyncio.Future[None] | None = None
        self._running = len(prompts)
        self._gone = False
        arrival_ns = driver.now_ns()
        whole = not stream and not stops  # a stop string must be seen when it comes
        self.choices = [
            Choice(Ticket(self, index, prompt, adapter, params, arrival_ns, whole), tokenizer, stops)
            for index, prompt in enumerate(prompts)
        ]

    @property
    def ended(self) -> bool:
        """Whether all prompts have been answered."""
        return self._running == 0

    def hear(self, news: News) -> None:
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

    def _drain(self) -> list[News]:
        """Return the news, one for each prompt."""
        news, self._news = self._news, []
        if len(news) > 1 and len(self.choices) == 1:  # the usual backlog: one chunk for all of it
            tokens: list[Any] = [token for each in news for token in each.tokens]
            logprobs = [logprob for each in news for logprob in each.logprobs]
            return [news[-1]._replace(tokens=tokens, logprobs=logprobs)]
        return news

    def _delta(self, news: News) -> Delta | None:
        choice = self.choices[news.ticket.index]
        if choice.finish_reason is not None:  # by a stop string; the rest was under way
            return None
        if news.finish in ("abort", "error"):
            raise _refusal(news)
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


def _refusal(news: News) -> ApiError:
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
