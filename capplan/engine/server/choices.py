"""One choice of an answer as it grows: text, stop strings, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from capplan.engine.request import TokenLogprobs
from capplan.engine.server.text import StopStrings, text_stream
from capplan.engine.server.tickets import News, Ticket
from capplan.engine.tokenizer import Tokenizer


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

    def __init__(self, ticket: Ticket, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.ticket = ticket
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self._texts: list[str] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._stream = text_stream(tokenizer)
        self._stops = StopStrings(stops)

    @property
    def text(self) -> str:
        """All that has been shown."""
        return "".join(self._texts)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that were given."""
        return len(self.ticket.prompt)

    def feed(self, news: News) -> Delta:
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

    def _feed_singly(self, news: News) -> Delta:
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
