"""Requests and completions of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from capplan.spec import Count, Natural, NonNegative, SeedNumber, Share, SpecModel

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(SpecModel):
    """Sampling parameters of a request.

    Parameters
    ----------
    max_tokens
        Maximum number of output tokens.
    temperature
        0 is greedy.
    min_tokens
        Minimum number of output tokens: before it no stop token is sampled.
    top_p
        Sample from the smallest set of tokens whose probabilities reach this sum.
    top_k
        Sample from this many most likely tokens; 0: all.
    min_p
        Sample from tokens whose probability is at least this share of the highest one. As in vLLM it comes
        before top_k, and both before top_p.
    seed
        Random seed; None: derived from the engine's seed and the request's number.
    logprobs
        Number of most likely tokens to report with each token; None: no log-probabilities.
    prompt_logprobs
        Report the log-probabilities of the prompt's tokens, too.
    ignore_eos
        Do not stop before `max_tokens`.
    stop_token_ids
        Tokens that end the request, in addition to the model's.
    keep_logits
        Report the logits of every token.
    """

    max_tokens: Count = 16
    min_tokens: Natural = 0
    temperature: NonNegative = 0.0
    top_p: Share = 1.0
    top_k: Natural = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: SeedNumber | None = None
    logprobs: Natural | None = None
    prompt_logprobs: bool = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    keep_logits: bool = False


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probabilities, before temperature and top_p.

    Attributes
    ----------
    logprob
        Of the token.
    top
        (token, log-probability) of the most likely tokens, in decreasing order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(eq=False)
class Request:
    """A request in the engine, with times of the engine's clock.

    Attributes
    ----------
    adapter, adapter_name, adapter_entry
        Number, name and `AdapterNumbers.entry` of the adapter.
    running
        Whether it is admitted and not preempted.
    finish_reason
        None while it is in flight.
    greedy
        Whether only the most likely tokens are needed.
    prompt_logprobs
        Of the prompt's tokens after the first one, as far as the prompt is computed.
    predicted_tokens
        Predicted length of the output; 0: `max_tokens`.
    tag
        Number of the prompt at the server.
    """

    number: int
    adapter: int
    adapter_name: str | None
    adapter_entry: int
    prompt: NDArray[np.int32]
    params: SamplingParams
    stop_ids: frozenset[int]
    arrival_ns: int
    predicted_tokens: int = 0
    rng: np.random.Generator | None = None
    row: int = -1
    running: bool = False
    output: list[int] = field(default_factory=list)
    token_ns: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    admitted_ns: int | None = None
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    tag: int = 0
    greedy: bool = field(init=False)
    has_minimum: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self.has_minimum = params.min_tokens > 0 and bool(self.stop_ids)
        self.greedy = params.temperature == 0 and params.logprobs is None and not params.keep_logits

    def is_short(self, tokens: int) -> bool:
        """Return whether it must not end yet, with so many tokens of prompt and output."""
        return tokens - self.prompt.size < self.params.min_tokens


@dataclass(frozen=True)
class Timing:
    """Timestamps of a request, in seconds since the engine started."""

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
        """Mean time per output token after the first; 0 if there is none."""
        gaps = len(self.token_s) - 1
        return (self.finish_s - self.first_token_s) * 1e3 / gaps if gaps else 0.0


@dataclass(frozen=True)
class Completion:
    """Completion of a prompt."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    adapter: str | None
    finish_reason: FinishReason
    timing: Timing
    preemptions: int
    error: str | None = None
    """Error message if `finish_reason` is ``error``: the adapter failed to load, or overflows."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens after the first one; only with `prompt_logprobs`."""
    logits: torch.Tensor | None = None
    """Shape (tokens, vocabulary), float32; only with `keep_logits`."""
