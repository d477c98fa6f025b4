"""The plan's queues by request size, before an instance: who goes on to it, and who waits here.

Sizes are those of `capplan.spec.Wrs` (Chameleon, section 4.3.1). A request takes the tokens of prompt and
answer, and those that its adapter's weights would be, from the quota of its queue until it has been answered,
and waits in order of arrival while there are not enough. Quotas are not lent from one queue to another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from capplan.spec import Queues


class Ask(NamedTuple):
    """A request as queues see it: its adapter, None for the base model, and its lengths.

    `output_tokens` is the most that the answer may have, a router's only prediction of it; None: not said.
    """

    adapter: str | None
    prompt_tokens: int
    output_tokens: int | None


class QueueFullError(Exception):
    """So many requests wait that no further one can."""


class GoneError(Exception):
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
    async def turn(self, ask: Ask) -> AsyncIterator[None]:
        """Wait until a request may go on, and take its tokens from the quota while it runs.

        Raises
        ------
        QueueFullError
            When too many wait.
        GoneError
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
                    turn.set_exception(GoneError())
            queue.waiting.clear()

    def charge(self, ask: Ask) -> int:
        """Return the tokens that a request takes from a quota."""
        tokens = ask.prompt_tokens + self._output_tokens(ask)
        if self._queues.adapter_charge == "none" or ask.adapter is None:
            return tokens
        return tokens + int(-(-self._ranks[ask.adapter] * self._tokens_per_rank // 1))

    def class_of(self, ask: Ask) -> int:
        """Return the queue of a request; a size equal to a cut-off goes up."""
        size = self.size(ask)
        uppers = [each.upper_wrs for each in self._queues.classes]
        return next(i for i, upper in enumerate(uppers) if upper is None or size < upper)

    def size(self, ask: Ask) -> float:
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

    def _output_tokens(self, ask: Ask) -> int:
        return self._queues.wrs.max_output_tokens if ask.output_tokens is None else ask.output_tokens
