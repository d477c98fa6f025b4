"""Sampler: the next token of each request from its logits.

Each request has its own random generator: its tokens do not depend on the rest of the batch. Sampling queues
work on the device and waits for none of it; a stream beside the computation copies the tokens to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map_only

from capplan.engine._request import Request, SamplingParams, TokenLogprobs


class Logprobs(NamedTuple):
    """Log-probabilities of tokens, and those of the most likely tokens at their places."""

    own: torch.Tensor
    best: torch.Tensor
    """In decreasing order, shape (tokens, most likely ones)."""
    best_tokens: torch.Tensor

    def listed(self, tops: Sequence[int]) -> list[TokenLogprobs]:
        """Return them by token, each with so many of the most likely ones."""
        columns = zip(*(each.tolist() for each in self), tops, strict=True)
        return [
            TokenLogprobs(own, tuple(zip(tokens[:top], best[:top], strict=True)))
            for own, best, tokens, top in columns
        ]


class Sampled(NamedTuple):
    """Tokens of a step, on the device or on the host."""

    tokens: torch.Tensor | NDArray[np.int64]
    """Shape (requests,)."""
    finite: torch.Tensor | NDArray[np.bool_]
    """Whether each request has a token: its logits are finite."""
    logprobs: Logprobs | None = None
    """Of the requests that report any, in their order."""
    logits: dict[int, torch.Tensor] | None = None
    """Of the requests that keep them, by index."""

    def report(self, requests: Sequence[Request], kept: Container[int]) -> None:
        """Add log-probabilities and logits to the requests with an index in `kept`."""
        if self.logprobs is not None:
            scored = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
            tops = [requests[i].params.logprobs or 0 for i in scored]
            for i, logprobs in zip(scored, self.logprobs.listed(tops), strict=True):
                if i in kept:
                    requests[i].logprobs.append(logprobs)
        for i, logits in (self.logits or {}).items():
            if i in kept:
                requests[i].logits.append(logits)


class TokenCopies:
    """Copies of sampled tokens to the host; from a GPU to pinned memory, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def computed(self) -> Any:
        """Return the end of all computation so far; None: it has ended."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def begin(self, sampled: Sampled) -> Callable[[], Sampled]:
        """Queue a copy; the function returned waits for it."""
        stream = self._stream
        if stream is None:
            return lambda: sampled

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(stream)  # its memory is not reused before the copy has ended
            return tensor.to("cpu", non_blocking=True)

        stream.wait_event(self.computed())
        with torch.cuda.stream(stream):
            on_host: Sampled = tree_map_only(torch.Tensor, copied, sampled)
            end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            end.record(stream)

        def wait() -> Sampled:
            end.synchronize()
            return on_host

        return wait


def sample(logits: torch.Tensor, requests: Sequence[Request], lengths: NDArray[np.int64]) -> Sampled:
    """Sample one token per request, with the log-probabilities and logits that requests need.

    `logits` has the shape (requests, vocabulary); `lengths` are the tokens of each request so far. The last
    of them may still be on the device alone.
    """
    raw = logits
    too_early = [
        (i, token)
        for i, request in enumerate(requests)
        if request.has_minimum and request.is_short(lengths[i])
        for token in request.stop_ids
        if 0 <= token < logits.shape[1]
    ]
    if too_early:
        logits = logits.clone()
        logits[_on(logits.device, too_early).unbind(1)] = -torch.inf
    tokens, finite = _argmax(logits)
    special = [i for i, request in enumerate(requests) if not request.greedy]
    if not special:
        return Sampled(tokens, finite)
    tokens, finite = torch.as_tensor(tokens), torch.as_tensor(finite)
    drawn = [i for i in special if requests[i].params.temperature > 0]
    if drawn:
        rows = _on(logits.device, drawn)
        chosen = logits if len(drawn) == len(requests) else logits[rows]
        # Logits that are not finite give no token, and no index out of range.
        known = chosen.float().where(finite[rows, None], 0.0)
        tokens = tokens.index_copy(0, rows, _draw(known, [requests[i] for i in drawn]))
    kept = [i for i in special if requests[i].params.keep_logits]
    scored = [i for i in special if requests[i].params.logprobs is not None]
    logprobs = None
    if scored:  # as in vLLM log-probabilities are the model's own
        top = max(requests[i].params.logprobs or 0 for i in scored)
        rows = _on(logits.device, scored)
        logprobs = token_logprobs(raw[rows].float(), tokens[rows], top)
    return Sampled(tokens, finite, logprobs, {i: raw[i].to(torch.float32, copy=True) for i in kept})


def _on(device: torch.device, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers on a device, without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def _argmax(logits: torch.Tensor) -> tuple[Any, Any]:
    """Return the most likely tokens, and whether their logits are finite; NaN compares as largest."""
    if logits.device.type == "cpu":  # ten times as fast as PyTorch's
        values = logits.float().numpy()
        tokens = values.argmax(axis=1)
        return tokens, np.isfinite(values[np.arange(tokens.size), tokens])
    likeliest = logits.argmax(dim=1, keepdim=True)
    return likeliest[:, 0], logits.gather(1, likeliest).isfinite()[:, 0]


def _draw(logits: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Sample by inverting the cumulative distribution of the tokens to sample from, most likely first."""
    device, params = logits.device, [request.params for request in requests]
    drawn = [0.0 if request.rng is None else request.rng.random() for request in requests]
    uniform, temperature = _on(
        device, (drawn, [each.temperature for each in params]), torch.float64
    ).unsqueeze(2)
    exact = logits.double()
    # A tiny temperature must not overflow.
    shifted = exact - exact.amax(dim=-1, keepdim=True)
    probabilities, order = torch.softmax(shifted / temperature, dim=-1).sort(
        dim=-1, descending=True, stable=True
    )
    cumulative = probabilities.cumsum(dim=-1)
    last = _last_of_nucleus(probabilities, cumulative, params)
    total = cumulative[:, -1:] if last is None else cumulative.gather(1, last)
    at = torch.searchsorted(cumulative, uniform * total, right=True)
    at = at.clamp_max(logits.shape[1] - 1) if last is None else at.minimum(last)
    return order.gather(1, at).squeeze(1)


def _last_of_nucleus(
    probabilities: torch.Tensor, cumulative: torch.Tensor, params: Sequence[SamplingParams]
) -> torch.Tensor | None:
    """Return the place of the least likely token that each request allows; None if all allow all."""
    vocabulary = probabilities.shape[1]
    columns = [(each.top_p, each.min_p, each.top_k or vocabulary) for each in params]
    if all(column == (1.0, 0.0, vocabulary) for column in columns):
        return None
    table = _on(probabilities.device, columns, torch.float64).unsqueeze(2)
    top_p, min_p, top_k = table.unbind(1)
    allowed = (probabilities >= min_p * probabilities[:, :1]).sum(dim=-1, keepdim=True).minimum(top_k.long())
    sum_allowed = cumulative.gather(1, allowed - 1).where(allowed < vocabulary, 1.0)
    kept = (cumulative - probabilities < top_p * sum_allowed).sum(dim=-1, keepdim=True).minimum(allowed)
    return kept - 1


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> Logprobs:
    """Return the log-probabilities of tokens and of so many most likely ones at their places."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best = logprobs.topk(min(top, logprobs.shape[1]))
    return Logprobs(logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1), *best)
