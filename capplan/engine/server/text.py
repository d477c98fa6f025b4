"""Text that grows token by token, without characters that are still incomplete, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from capplan.engine.tokenizer import ByteTokenizer, Tokenizer

_MOST_HELD = 3
"""A character of UTF-8 has at most 4 bytes: where so many more tokens have not made one, none is coming."""


class TextStream(Protocol):
    """Turns tokens into text as they come."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Return the text that is certain now and was not before."""
        ...

    def finish(self) -> str:
        """Return what was held back."""
        ...


def text_stream(tokenizer: Tokenizer) -> TextStream:
    """Return a new stream; what it returns in all is what the tokenizer makes of all tokens at once.

    But for bytes that are no characters: what is shown in their place may differ.
    """
    return ByteText() if isinstance(tokenizer, ByteTokenizer) else WindowText(tokenizer)


class ByteText:
    """Text of a model whose tokens are bytes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        """See `TextStream`."""
        return self._decoder.decode(bytes([token for token in tokens if token < 256]))

    def finish(self) -> str:
        """See `TextStream`."""
        return self._decoder.decode(b"", final=True)


class WindowText:
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
        """See `TextStream`."""
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
        """See `TextStream`."""
        return self._tokenizer.decode(self._window)[len(self._known_text) :]


class StopStrings:
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
