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


class _Spans(NamedTuple):
    """Weighted time spans."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    weight: NDArray[np.float64]


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
    typical = _per_event(answered)
    gaps = [_gaps(each, typical) for each in answered]
    edges_s = _at_step_ends(edges_s, answered, gaps)
    cells = _cells(answered, gaps, edges_s, ranks)
    prompts = _prompts(answered, cells, ranks, budget)
    rank = [ranks.get(each.model, 0) for each in answered]
    tokens = _Tokens(
        np.concatenate([g.end for g in gaps]),
        np.concatenate([g.weight for g in gaps]),
        np.concatenate([np.full(g.end.size, float(r)) for g, r in zip(gaps, rank, strict=True)]),
    )
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


def _cells(
    answered: Sequence[ClosedLoopRequest],
    gaps: Sequence[_Spans],
    edges_s: NDArray[np.float64],
    ranks: Mapping[int, int],
) -> _Cells:
    rates = _joined([_Spans(g.start, g.end, g.weight / (g.end - g.start)) for g in gaps])
    held = _joined([_held(each, g) for each, g in zip(answered, gaps, strict=True)])
    decoding = _ones(_joined(gaps))
    grid = np.unique(np.concatenate([rates.start, rates.end, edges_s]))
    busy = _level(decoding, grid)
    covered = busy > 0.5
    lengths = np.diff(grid)
    adapters = np.zeros(lengths.size)
    for model in {each.model for each in answered} & set(ranks):
        own = [g for g, each in zip(gaps, answered, strict=True) if each.model == model]
        adapters += _level(_ones(_joined(own)), grid) > 0.5
    return _Cells(
        start_s=grid[:-1],
        end_s=grid[1:],
        steps=np.where(covered, _level(rates, grid) / np.maximum(busy, 1.0), 0.0) * lengths,
        seconds=np.where(covered, lengths, 0.0),
        kv_tokens=_level(held, grid),
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


def _counted(outcome: RequestOutcome) -> bool:
    """Return whether the tokens per event of a request are known."""
    return outcome.kind == FINISHED and outcome.output_tokens is not None and len(outcome.times_s) > 1


def _per_event(answered: Sequence[ClosedLoopRequest]) -> float:
    """Return the mean tokens per event after the first, over requests with known tokens."""
    known = [each.outcome for each in answered if _counted(each.outcome)]
    events = sum(len(each.times_s) - 1 for each in known)
    return sum((each.output_tokens or 1) - 1 for each in known) / events if events else 1.0


def _gaps(answered: ClosedLoopRequest, typical: float) -> _Spans:
    """Return the gaps between a request's tokens, weighted by tokens.

    If a server puts several tokens into an event, each event counts as their mean number.
    """
    outcome = answered.outcome
    times, counts = np.unique(np.array(outcome.times_s), return_counts=True)
    per_event = typical
    if _counted(outcome):
        per_event = ((outcome.output_tokens or 1) - 1) / (len(outcome.times_s) - 1)
    return _Spans(times[:-1], times[1:], counts[1:].astype(np.float64) * max(per_event, 1e-9))


def _at_step_ends(
    edges_s: NDArray[np.float64], answered: Sequence[ClosedLoopRequest], gaps: Sequence[_Spans]
) -> NDArray[np.float64]:
    """Return the edges moved to ends of steps."""
    times = np.unique(np.concatenate([each.outcome.times_s for each in answered]))
    typical_s = np.median(np.concatenate([[np.inf], *(g.end - g.start for g in gaps)]))
    ends = times[np.append(np.diff(times) > _APART * typical_s, True)]
    after = np.minimum(np.searchsorted(ends, edges_s), ends.size - 1)
    before = np.maximum(after - 1, 0)
    moved = np.where(edges_s - ends[before] <= ends[after] - edges_s, ends[before], ends[after])
    return np.unique(moved)


def _held(answered: ClosedLoopRequest, gaps: _Spans) -> _Spans:
    """Return the KV tokens of a request during each gap."""
    held: NDArray[np.float64] = np.cumsum(gaps.weight) - gaps.weight + (1.0 + _prompt_tokens(answered))
    return _Spans(gaps.start, gaps.end, held)


def _joined(spans: Sequence[_Spans]) -> _Spans:
    return _Spans(*(np.concatenate([np.empty(0), *parts]) for parts in zip(*spans, strict=True)))


def _ones(spans: _Spans) -> _Spans:
    return _Spans(spans.start, spans.end, np.ones(spans.start.size))


def _level(spans: _Spans, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of span weights over each cell of a grid that contains all span ends."""
    changes = np.zeros(grid.size)
    np.add.at(changes, np.searchsorted(grid, spans.start), spans.weight)
    np.add.at(changes, np.searchsorted(grid, spans.end), -spans.weight)
    return np.cumsum(changes)[:-1]
