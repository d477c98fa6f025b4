"""HTTP client of one instance, with the plan's queues by request size.

Sizes are those of `capplan.spec.Wrs` (Chameleon, section 4.3.1). A request takes the tokens of prompt and
output, and those equivalent to its adapter's weights, from the quota of its queue until it is answered.
Waiting requests are served in order of arrival. Queues do not lend quota to each other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp

from capplan.spec import Queues


class RequestSize(NamedTuple):
    """A request as queues see it: its adapter, None for the base model, and its lengths.

    `output_tokens` is the most that the answer may have, a router's only prediction of it; None: not said.
    """

    adapter: str | None
    prompt_tokens: int
    output_tokens: int | None


class QueueFullError(Exception):
    """So many requests wait that no further one can."""


class InstanceGoneError(Exception):
    """The instance has gone while a request waited for its turn."""


@dataclass
class _Class:
    quota_tokens: int
    used_tokens: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    def fits(self, tokens: int) -> bool:
        """Tell whether a request may go on; one that is larger than the quota goes alone."""
        return self.used_tokens == 0 or self.used_tokens + tokens <= self.quota_tokens

    def let_go_on(self) -> None:
        while self.waiting and self.fits(self.waiting[0][0]):
            tokens, turn = self.waiting.popleft()
            if not turn.done():
                self.used_tokens += tokens
                turn.set_result(None)


class SizeQueues:
    """Queues of one instance. Belongs to the event loop.

    Parameters
    ----------
    queues
        What the plan says.
    ranks
        Of the instance's adapters. The largest weighs `max_adapter_bytes`, as it did for the planner.
    adapter_tokens_per_rank
        KV tokens that take the memory of one rank of an adapter.
    most_waiting
        Most requests that wait here.
    """

    def __init__(
        self, queues: Queues, ranks: Mapping[str, int], adapter_tokens_per_rank: float, most_waiting: int
    ) -> None:
        self._queues = queues
        self._ranks = ranks
        self._tokens_per_rank = adapter_tokens_per_rank
        self._most_waiting = most_waiting
        self._classes = [_Class(each.quota_tokens) for each in queues.classes]

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(len(each.waiting) for each in self._classes)

    @contextlib.asynccontextmanager
    async def turn(self, ask: RequestSize) -> AsyncIterator[None]:
        """Wait until a request may go on, and take its tokens from the quota while it runs.

        Raises
        ------
        QueueFullError
            When too many wait.
        InstanceGoneError
            When `close` was called meanwhile.
        """
        queue = self._classes[self.class_of(ask)]
        tokens = self.charge(ask)
        if not queue.waiting and queue.fits(tokens):
            queue.used_tokens += tokens
        else:
            await self._wait(queue, tokens)
        try:
            yield
        finally:
            queue.used_tokens -= tokens
            queue.let_go_on()

    async def _wait(self, queue: _Class, tokens: int) -> None:
        if self.waiting >= self._most_waiting:
            raise QueueFullError
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.waiting.append((tokens, turn))
        try:
            await turn
        except asyncio.CancelledError:  # the client has gone
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                queue.used_tokens -= tokens
            turn.cancel()
            with contextlib.suppress(ValueError):
                queue.waiting.remove((tokens, turn))
            queue.let_go_on()
            raise

    def close(self) -> None:
        """Send everybody away who waits."""
        for queue in self._classes:
            for _, turn in queue.waiting:
                if not turn.done():
                    turn.set_exception(InstanceGoneError())
            queue.waiting.clear()

    def charge(self, ask: RequestSize) -> int:
        """Return the tokens that a request takes from a quota."""
        tokens = ask.prompt_tokens + self._output_tokens(ask)
        if self._queues.adapter_charge == "none" or ask.adapter is None:
            return tokens
        return tokens + int(-(-self._ranks[ask.adapter] * self._tokens_per_rank // 1))

    def class_of(self, ask: RequestSize) -> int:
        """Return the queue of a request; a size equal to a cut-off goes up."""
        size = self.size(ask)
        uppers = [each.upper_wrs for each in self._queues.classes]
        return next(i for i, upper in enumerate(uppers) if upper is None or size < upper)

    def size(self, ask: RequestSize) -> float:
        """Return the weighted size of a request, from 0 to 1."""
        wrs = self._queues.wrs
        prompt = min(ask.prompt_tokens / wrs.max_prompt_tokens, 1.0)
        output = min(self._output_tokens(ask) / wrs.max_output_tokens, 1.0)
        lengths = wrs.a * prompt + wrs.b * output
        rank = min(self._ranks.values()) if ask.adapter is None else self._ranks[ask.adapter]
        adapter = rank / max(self._ranks.values())
        if wrs.form == "degree2":
            return lengths * adapter
        return (lengths + adapter) / 2.0 if wrs.form == "degree1" else lengths

    def _output_tokens(self, ask: RequestSize) -> int:
        return self._queues.wrs.max_output_tokens if ask.output_tokens is None else ask.output_tokens


_CONNECT_S = 10.0


class InstanceClient:
    """Connections to an engine process, and the queues before it. Belongs to the event loop.

    Closing it ends all requests that are under way there: none waits for an answer that cannot come.

    Parameters
    ----------
    url, key
        Where the process listens, and what it asks for.
    queues
        Queues by request size; None: requests go straight on.
    """

    def __init__(self, url: str, key: str, queues: SizeQueues | None) -> None:
        self.url = url
        self.queues = queues
        self._session = aiohttp.ClientSession(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            connector=aiohttp.TCPConnector(limit=0),
            # Answers may take any time; whether the process still lives is found out by its supervisor.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
        )

    @contextlib.asynccontextmanager
    async def turn(self, ask: RequestSize) -> AsyncIterator[None]:
        """Wait for a request's turn; see `SizeQueues.turn`."""
        if self.queues is None:
            yield
            return
        async with self.queues.turn(ask):
            yield

    @contextlib.asynccontextmanager
    async def post(self, path: str, body: bytes, content_type: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request.

        Raises
        ------
        InstanceGoneError
            When the process cannot be reached, so that the request has not been sent.
        aiohttp.ClientError
            When the process or the connection breaks down after that.
        """
        if self._session.closed:
            raise InstanceGoneError
        sent = False
        try:
            async with self._session.post(path, data=body, headers={"Content-Type": content_type}) as answer:
                sent = True
                yield answer
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            if sent:
                raise
            raise InstanceGoneError from None

    async def get(self, path: str, timeout_s: float) -> bytes:
        """Return what the process answers.

        Raises
        ------
        aiohttp.ClientError, TimeoutError
            When it does not, or with an error.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.get(path, timeout=timeout) as answer:
            answer.raise_for_status()
            return await answer.read()

    async def close(self) -> None:
        """End all that is under way."""
        if self.queues is not None:
            self.queues.close()
        await self._session.close()
