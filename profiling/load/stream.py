"""Server-sent events, counted rather than parsed: JSON is read of the last events of an answer only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

_EVENT: Final = b"\ndata:"
_DONE: Final = b"[DONE]"
_TAIL_BYTES: Final = 2048
_READ: Final = 3  # the last token, the usage, [DONE]
_MOST_TOKENS: Final = 1 << 30
"""No answer is as long; what counts more is no count."""


@dataclass(frozen=True)
class Ending:
    """What the last events of an answer say.

    Attributes
    ----------
    complete : bool
        Whether the answer ended as answers do: with a usage, a reason, or ``[DONE]``.
    without_token : int
        Events that carry no token.
    prompt_tokens, output_tokens : int, optional
        As the server counted them.
    error : str
        What went wrong inside the stream; empty when nothing did.
    """

    complete: bool
    without_token: int
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: str = ""


class EventCounter:
    """Counts the events of one answer as its bytes come in, however they are cut.

    Attributes
    ----------
    times : list of float
        When each event arrived.
    """

    __slots__ = ("_tail", "times")

    def __init__(self) -> None:
        self._tail = b"\n"
        self.times: list[float] = []

    def feed(self, data: bytes, now: float) -> None:
        """Note the arrival of bytes: one time for each event that begins in them."""
        tail = self._tail
        # A line break inside JSON is escaped, so the pattern is found only where an event begins; what is
        # kept of earlier bytes is too short to hold it a second time.
        count = (tail[1 - len(_EVENT) :] + data).count(_EVENT)
        if count == 1:
            self.times.append(now)
        elif count:
            self.times.extend([now] * count)
        self._tail = (tail + data)[-_TAIL_BYTES:]

    def ending(self) -> Ending:
        """Read the last events."""
        complete, without_token = False, 0
        usage: Any = None
        for text in self._tail.split(_EVENT)[1:][-_READ:]:
            # What follows the line is no data: names of events, comments that keep a connection alive.
            line = text.partition(b"\n")[0].strip()
            if line == _DONE:
                complete, without_token = True, without_token + 1
                continue
            event = _event(line)
            if event is None:
                return Ending(False, without_token, error=f"no answer to a completion: {_shown(line)}")
            if event.get("error") is not None:
                return Ending(False, without_token, error=_shown(line))
            choices = event.get("choices")
            complete |= bool(choices and choices[0].get("finish_reason"))
            without_token += not choices
            usage = event.get("usage") or usage
        if not isinstance(usage, dict):
            return Ending(complete, without_token)
        prompt, output = (_count(usage, key) for key in ("prompt_tokens", "completion_tokens"))
        if max(prompt or 0, output or 0) > _MOST_TOKENS:
            return Ending(False, without_token, error="an answer with an absurd number of tokens")
        return Ending(True, without_token, prompt, output)


def _event(line: bytes) -> dict[str, Any] | None:
    """Return an event of a completion; None for anything else."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    choices = event.get("choices")
    sound = choices is None or (isinstance(choices, list) and all(isinstance(each, dict) for each in choices))
    return event if sound else None


def _count(usage: dict[str, Any], key: str) -> int | None:
    value = usage.get(key)
    return value if isinstance(value, int) and value >= 0 else None


def _shown(line: bytes) -> str:
    return line[:200].decode("utf-8", "replace")
