"""Demand by adapter: tokens of the requests that arrived in a window (LoRAServe, section IV-A)."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

_USAGE: Final = re.compile(
    rb'"usage":\s*\{[^{}]*?"prompt_tokens":\s*(\d{1,9})\b[^{}]*?"completion_tokens":\s*(\d{1,9})\b'
)
_END_OF_EVENT: Final = b"\n\n"
_LAST_EVENT: Final = b"data: [DONE]\n\n"
_TAIL_BYTES: Final = 4096
"""Of a whole response: token counts are at its end."""
_MEMORY: Final = 0.5
"""Weight of the answers of earlier windows in the mean output, per window."""


class DemandWindow(NamedTuple):
    """Demand of a window.

    Attributes
    ----------
    tok_s
        Prompt and output tokens per second of the requests that arrived, by adapter; None is the base model.
    duration_s
        Length of the window.
    requests
        Number of these requests, by adapter.
    unfinished
        Those that had no complete answer at its end.
    """

    tok_s: dict[str | None, float]
    duration_s: float
    requests: dict[str | None, int]
    unfinished: int


class CountedRequest:
    """A request that has arrived, and its tokens so far."""

    __slots__ = ("_meter", "adapter", "output_tokens", "prompt_tokens")

    def __init__(self, meter: DemandMeter, adapter: str | None, prompt_tokens: int) -> None:
        self._meter = meter
        self.adapter = adapter
        self.prompt_tokens = prompt_tokens
        self.output_tokens = 0

    def stream(self, events: bytes) -> None:
        """Count whole events of a stream, one token each, or take the counts that it ends with."""
        self.output_tokens += events.count(_END_OF_EVENT) - events.endswith(_LAST_EVENT)
        self._take_usage(events)

    def answer(self, body: bytes) -> None:
        """Take the counts of a whole response."""
        self._take_usage(body[-_TAIL_BYTES:])

    def _take_usage(self, text: bytes) -> None:
        if found := _USAGE.search(text):
            self.prompt_tokens, self.output_tokens = map(int, found.groups())

    def finish(self) -> None:
        """End the request, whose answer is complete."""
        self._meter.finish(self)

    def drop(self) -> None:
        """Do not count the request: it is invalid."""
        self._meter.drop(self)


class DemandMeter:
    """Tokens of the requests that arrive, by adapter and window.

    Tokens of requests that are refused, or fail, count as well: served tokens would hide an overload.
    A request without a complete answer at the end of its window counts with the mean output, or with the
    tokens that it has, if there are more.

    Parameters
    ----------
    adapters
        All that are served; None is the base model.
    prior_output_tokens
        Mean output tokens assumed before any answer; it counts as one answer of each window.

    Attributes
    ----------
    adapters
        Those of the next window that is closed; requests of others are not in it.
    """

    def __init__(self, adapters: Iterable[str | None], prior_output_tokens: float) -> None:
        self.adapters = tuple(adapters)
        self._prior_output_tokens = prior_output_tokens
        self._answers = self._answer_tokens = 0.0
        self._open: dict[CountedRequest, None] = {}
        self._tokens: dict[str | None, float] = {}
        self._requests: Counter[str | None] = Counter()
        self._begin_s = time.monotonic()

    @property
    def mean_output_tokens(self) -> float:
        """Mean output tokens of the complete answers, recent windows with more weight."""
        return (self._prior_output_tokens + self._answer_tokens) / (1.0 + self._answers)

    def arrive(self, adapter: str | None, prompt_tokens: int) -> CountedRequest:
        """Count a request of the current window.

        Parameters
        ----------
        prompt_tokens
            Estimate, until the response has the number.
        """
        request = CountedRequest(self, adapter, prompt_tokens)
        self._open[request] = None
        self._requests[adapter] += 1
        return request

    def finish(self, request: CountedRequest) -> None:
        """Count a complete answer; requests of former windows have been counted."""
        self._answers += 1.0
        self._answer_tokens += request.output_tokens
        if request in self._open:
            del self._open[request]
            self._add(request, request.output_tokens)

    def drop(self, request: CountedRequest) -> None:
        """Do not count a request of the current window."""
        if request in self._open:
            del self._open[request]
            self._requests[request.adapter] -= 1

    def _add(self, request: CountedRequest, output_tokens: float) -> None:
        tokens = request.prompt_tokens + output_tokens
        self._tokens[request.adapter] = self._tokens.get(request.adapter, 0.0) + tokens

    def close_window(self, now_s: float | None = None) -> DemandWindow:
        """Return the demand of the current window, and begin the next one."""
        end_s = time.monotonic() if now_s is None else now_s
        for request in self._open:
            self._add(request, max(self.mean_output_tokens, request.output_tokens))
        duration_s = max(end_s - self._begin_s, 1e-9)
        tok_s = {name: self._tokens.get(name, 0.0) / duration_s for name in self.adapters}
        requests = {name: self._requests[name] for name in self.adapters}
        window = DemandWindow(tok_s, duration_s, requests, len(self._open))
        self._open, self._tokens, self._requests, self._begin_s = {}, {}, Counter(), end_s
        self._answers, self._answer_tokens = self._answers * _MEMORY, self._answer_tokens * _MEMORY
        return window
