"""What is asked of the engine and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.errors import InputError

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen, and when it ends.

    Parameters
    ----------
    max_tokens
        Tokens to generate at most.
    temperature
        0 is greedy.
    top_p
        Sample among the fewest tokens whose probabilities reach this sum.
    seed
        The same seed gives the same tokens; None: one derived from the engine's and the request's number.
    logprobs
        How many of the likeliest tokens to report with each token; None: no log-probabilities at all.
    ignore_eos
        Go on to `max_tokens` whatever is sampled.
    stop_token_ids
        Tokens that end the request, beside the model's own.
    keep_logits
        Report the logits of every token, too.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    keep_logits: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError("must be >= 1", self.max_tokens, "max_tokens")
        if not 0.0 <= self.temperature < float("inf"):
            raise InputError("must be a finite number >= 0", self.temperature, "temperature")
        if not 0.0 < self.top_p <= 1.0:
            raise InputError("must be a number above 0 and at most 1", self.top_p, "top_p")
        if self.logprobs is not None and self.logprobs < 0:
            raise InputError("must be >= 0", self.logprobs, "logprobs")
        if self.seed is not None and self.seed < 0:
            raise InputError("must be >= 0", self.seed, "seed")


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of probabilities, before temperature and top_p.

    Attributes
    ----------
    logprob
        Of the token itself.
    top
        The likeliest tokens and theirs, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Request:
    """A request in the engine. Times in ns by the engine's clock.

    Attributes
    ----------
    adapter, adapter_name, adapter_entry
        Its adapter: number, name, and what `Registry.entry` says of it.
    running
        Whether it has been admitted and not preempted since.
    finish_reason
        ``error``: see `error`. None while it is in flight.
    """

    number: int
    adapter: int
    adapter_name: str | None
    adapter_entry: int
    prompt: NDArray[np.int32]
    params: SamplingParams
    stop_ids: frozenset[int]
    arrival_ns: int
    rng: np.random.Generator | None = None
    row: int = -1
    running: bool = False
    output: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    admitted_ns: int | None = None
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    plain: bool = field(init=False)
    """Whether the likeliest tokens are all that is asked for."""

    def __post_init__(self) -> None:
        asked = self.params
        self.plain = asked.temperature == 0 and asked.logprobs is None and not asked.keep_logits


@dataclass(frozen=True)
class Timing:
    """When things happened to a request; seconds since the engine started."""

    arrival_s: float
    admitted_s: float
    first_token_s: float
    finish_s: float
    token_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first; 0 where there is none."""
        gaps = len(self.token_s) - 1
        return (self.finish_s - self.first_token_s) * 1e3 / gaps if gaps else 0.0


@dataclass(frozen=True)
class Completion:
    """An answer."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    adapter: str | None
    finish_reason: FinishReason
    timing: Timing
    preemptions: int
    error: str | None = None
    """What went wrong where `finish_reason` is ``error``: an adapter that cannot be loaded, or overflows."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    logits: torch.Tensor | None = None
    """Shape (tokens, vocabulary), float32; only where `keep_logits` asked for them."""
