"""Engine steps from client-side events.

Every running request gets one token per step, so a gap between its tokens is a step. Each decoding request
gives a step rate: one over its current gap. Their mean, integrated over a window, is the number of steps in
it. Tokens, prompts and adapters of the window are counted by the same events, so a row of a step table
follows without access to the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.profiling.load.record import FINISHED, RequestOutcome
from capplan.profiling.server.closed_loop import ClosedLoopRequest

_MS_PER_S: Final = 1e3
_LEAST_STEPS: Final = 8.0
_APART: Final = 0.25
"""Share of the median gap that separates the tokens of two steps."""
_LEAST_COVERED: Final = 0.5
"""Minimum share of a window with decoding."""


class _Gaps(NamedTuple):
    """Gaps between the tokens of requests."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    tokens: NDArray[np.float64]
    """Tokens at the end."""
    kv_tokens: NDArray[np.float64]
    """Of the request."""
    model: NDArray[np.int64]


class _Prompts(NamedTuple):
    """Prompts with an observed step; `parts` are the steps of each."""

    first_s: NDArray[np.float64]
    tokens: NDArray[np.float64]
    parts: NDArray[np.float64]
    rank: NDArray[np.float64]


class _Tokens(NamedTuple):
    """Tokens after the first of each request; `weight` is their number at a time."""

    time_s: NDArray[np.float64]
    weight: NDArray[np.float64]
    rank: NDArray[np.float64]


class _Cells(NamedTuple):
    """Time cells between two changes; `steps` and `seconds` are 0 without decoding."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    steps: NDArray[np.float64]
    seconds: NDArray[np.float64]
    kv_tokens: NDArray[np.float64]
    adapters: NDArray[np.float64]


def window_rows(
    answered: Sequence[ClosedLoopRequest],
    edges_s: NDArray[np.float64],
    ranks: Mapping[int, int],
    budget: int | None,
) -> list[dict[str, float]]:
    """Return a row of a step table for each window in which enough steps ran.

    Parameters
    ----------
    answered
        Requests of a closed loop, including those in flight at its end.
    edges_s
        Edges of the windows, in order. Each is moved to the nearest end of a step, so that the time and the
        tokens of a step, and of its prompts, are in the same window.
    ranks
        Rank of each adapter by model position.
    budget
        Limit on the tokens of a step: a longer prompt takes several. None: unknown.
    """
    answered = [each for each in answered if each.outcome.times_s]
    if not answered:
        return []
    gaps = _gaps(answered)
    edges_s = _at_step_ends(edges_s, answered, gaps)
    cells = _cells(gaps, edges_s, ranks)
    prompts = _prompts(answered, cells, ranks, budget)
    rank = np.array([ranks.get(model, 0) for model in gaps.model.tolist()], float)
    tokens = _Tokens(gaps.end_s, gaps.tokens, rank)
    windows = zip(edges_s[:-1].tolist(), edges_s[1:].tolist(), strict=True)
    rows = [_row(low, high, cells, prompts, tokens) for low, high in windows]
    return [row for row in rows if row]


def _row(low: float, high: float, cells: _Cells, prompts: _Prompts, tokens: _Tokens) -> dict[str, float]:
    """Return means per step over a window; empty if too little was observed."""
    inside = (cells.start_s >= low) & (cells.end_s <= high)
    count, covered_s = float(cells.steps[inside].sum()), float(cells.seconds[inside].sum())
    if count < _LEAST_STEPS or covered_s < _LEAST_COVERED * (high - low):
        return {}
    prompt = _Prompts(*(each[(prompts.first_s > low) & (prompts.first_s <= high)] for each in prompts))
    token = _Tokens(*(each[(tokens.time_s > low) & (tokens.time_s <= high)] for each in tokens))
    lora_prompt, lora_token = prompt.rank > 0, token.rank > 0
    in_a_step = prompt.tokens / np.maximum(prompt.parts, 1.0)
    sums = {
        "decodes": token.weight,
        "prefills": prompt.parts,
        "lora_decodes": token.weight[lora_token],
        "lora_prefills": prompt.parts[lora_prompt],
        "lora_prefill_tokens": prompt.tokens[lora_prompt],
        "decode_rank_sum": token.weight * token.rank,
        "prefill_rank_sum": prompt.parts * prompt.rank,
        "prefill_rank_tokens": prompt.tokens * prompt.rank,
    }
    means = {name: float(values.sum()) / count for name, values in sums.items()}
    share = cells.steps[inside] / count
    return {
        "step_ms": _MS_PER_S * covered_s / count,
        "steps": count,
        "tokens": means["decodes"] + float(prompt.tokens.sum()) / count,
        "requests": means["decodes"] + means["prefills"],
        "kv_tokens": float((cells.kv_tokens[inside] * share).sum()),
        "adapters": float((cells.adapters[inside] * share).sum()),
        **means,
        "prompt_std": float(in_a_step.std()) if in_a_step.size else 0.0,
        "max_rank": float(np.max(np.concatenate([[0.0], prompt.rank, token.rank]))),
    }


def _cells(gaps: _Gaps, edges_s: NDArray[np.float64], ranks: Mapping[int, int]) -> _Cells:
    grid = np.unique(np.concatenate([gaps.start_s, gaps.end_s, edges_s]))
    starts, ends = np.searchsorted(grid, gaps.start_s), np.searchsorted(grid, gaps.end_s)

    def level(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of the weights of all gaps over each cell."""
        changes = np.zeros(grid.size)
        np.add.at(changes, starts, weights)
        np.add.at(changes, ends, -weights)
        return np.cumsum(changes)[:-1]

    busy = level(np.ones(starts.size))
    covered = busy > 0.5
    lengths = np.diff(grid)
    adapters = np.zeros(lengths.size)
    for model in set(gaps.model.tolist()) & set(ranks):
        adapters += level((gaps.model == model).astype(float)) > 0.5
    rates = level(gaps.tokens / (gaps.end_s - gaps.start_s))
    return _Cells(
        start_s=grid[:-1],
        end_s=grid[1:],
        steps=np.where(covered, rates / np.maximum(busy, 1.0), 0.0) * lengths,
        seconds=np.where(covered, lengths, 0.0),
        kv_tokens=level(gaps.kv_tokens),
        adapters=adapters,
    )


def _prompts(
    answered: Sequence[ClosedLoopRequest], cells: _Cells, ranks: Mapping[int, int], budget: int | None
) -> _Prompts:
    """Return the prompts that ended during decoding; others have no step time."""
    first_s = np.array([each.outcome.times_s[0] for each in answered])
    tokens = np.array([_prompt_tokens(each) for each in answered], float)
    at = np.clip(np.searchsorted(cells.end_s, first_s, side="left"), 0, cells.end_s.size - 1)
    parts = np.ones(tokens.size) if budget is None else np.ceil(tokens / budget)
    rank = np.array([ranks.get(each.model, 0) for each in answered], float)
    seen = cells.seconds[at] > 0.0
    return _Prompts(first_s[seen], tokens[seen], parts[seen], rank[seen])


def _prompt_tokens(answered: ClosedLoopRequest) -> int:
    """Return prompt tokens as the server counted them, otherwise as requested."""
    counted = answered.outcome.prompt_tokens
    return answered.prompt_tokens if counted is None else counted


def _gaps(answered: Sequence[ClosedLoopRequest]) -> _Gaps:
    """Return the gaps of all requests.

    If a server puts several tokens into an event, each event counts as their mean number.
    """
    typical = _tokens_per_event([each.outcome for each in answered], 1.0)
    parts = []
    for each in answered:
        times, counts = np.unique(np.array(each.outcome.times_s), return_counts=True)
        tokens = counts[1:].astype(float) * max(_tokens_per_event([each.outcome], typical), 1e-9)
        kv_tokens = np.cumsum(tokens) - tokens + (1.0 + _prompt_tokens(each))
        parts.append((times[:-1], times[1:], tokens, kv_tokens, np.full(tokens.size, each.model)))
    return _Gaps(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _tokens_per_event(outcomes: Sequence[RequestOutcome], default: float) -> float:
    """Return the mean tokens per event after the first, over complete requests with known tokens."""
    tokens = events = 0
    for each in outcomes:
        if each.kind == FINISHED and each.output_tokens is not None:
            tokens += each.output_tokens - 1 if len(each.times_s) > 1 else 0
            events += len(each.times_s) - 1
    return tokens / events if events else default


def _at_step_ends(
    edges_s: NDArray[np.float64], answered: Sequence[ClosedLoopRequest], gaps: _Gaps
) -> NDArray[np.float64]:
    """Return the edges moved to ends of steps."""
    times = np.unique(np.concatenate([each.outcome.times_s for each in answered]))
    typical_s = np.median(np.concatenate([[np.inf], gaps.end_s - gaps.start_s]))
    ends = times[np.append(np.diff(times) > _APART * typical_s, True)]
    after = np.minimum(np.searchsorted(ends, edges_s), ends.size - 1)
    before = np.maximum(after - 1, 0)
    return np.unique(np.where(edges_s - ends[before] <= ends[after] - edges_s, ends[before], ends[after]))
