"""Engine steps seen from outside: every running request gets one token in each, so a gap is a step.

In a closed loop someone always decodes. At any moment each decoding request says how many steps pass per
second: one over the gap it is in. Their mean, added up over a window, is the number of steps in it, whatever
requests come and go; the tokens, prompts and adapters of the window are counted by the same events. So a row
of a step table follows without a look inside the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.profiling.load.outcome import FINISHED
from capplan.profiling.server.closed_loop import Answered

_MS_PER_S: Final = 1e3
_LEAST_STEPS: Final = 8.0
_LEAST_COVERED: Final = 0.5
"""Share of a window in which someone must decode for it to say something."""


class _Spans(NamedTuple):
    """Stretches of time with a weight each."""

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    weight: NDArray[np.float64]


def window_rows(
    answered: Sequence[Answered], edges_s: NDArray[np.float64], ranks: Mapping[int, int], budget: int | None
) -> list[dict[str, float]]:
    """Return a row of a step table for each window in which enough steps ran.

    Parameters
    ----------
    answered
        Requests of a closed loop, those under way at its end among them.
    edges_s
        Edges of the windows, in order.
    ranks
        Rank of each model by its position; those that are missing are no adapters.
    budget
        Tokens that the engine computes in a step at most: a longer prompt takes several; None: not known.
    """
    answered = [each for each in answered if each.outcome.times_s]
    if not answered:
        return []
    gaps = [_gaps(each) for each in answered]
    rates = _joined([_Spans(g.start, g.end, g.weight / (g.end - g.start)) for g in gaps])
    decoding = _joined([_Spans(g.start, g.end, np.ones(g.start.size)) for g in gaps])
    held = _joined([_held(each, g) for each, g in zip(answered, gaps, strict=True)])
    models = np.array([each.model for each in answered])
    grid = np.unique(np.concatenate([rates.start, rates.end, edges_s]))
    lengths = np.diff(grid)
    busy = _level(decoding, grid)
    covered = busy > 0.5
    steps = np.where(covered, _level(rates, grid) / np.maximum(busy, 1.0), 0.0) * lengths
    seconds = np.where(covered, lengths, 0.0)
    distinct = np.zeros(lengths.size)
    for model in set(models.tolist()) & set(ranks):
        own = _joined([g for g, each in zip(gaps, answered, strict=True) if each.model == model])
        distinct += _level(_Spans(own.start, own.end, np.ones(own.start.size)), grid) > 0.5
    kv = _level(held, grid)
    first_s = np.array([each.outcome.times_s[0] for each in answered])
    prompt = np.array([each.prompt_tokens for each in answered], float)
    rank = np.array([ranks.get(each.model, 0) for each in answered], float)
    token_s = np.concatenate([g.end for g in gaps])
    token_weight = np.concatenate([g.weight for g in gaps])
    token_rank = np.concatenate([np.full(g.end.size, r) for g, r in zip(gaps, rank, strict=True)])
    # A prompt counts only where its step was seen, by others' decoding at that moment.
    first_seen = covered[np.clip(np.searchsorted(grid, first_s, side="left") - 1, 0, lengths.size - 1)]
    rows = []
    for low, high in zip(edges_s[:-1].tolist(), edges_s[1:].tolist(), strict=True):
        inside = (grid[:-1] >= low) & (grid[1:] <= high)
        count, covered_s = float(steps[inside].sum()), float(seconds[inside].sum())
        if count < _LEAST_STEPS or covered_s < _LEAST_COVERED * (high - low):
            continue
        prompts = first_seen & (first_s > low) & (first_s <= high)
        tokens = (token_s > low) & (token_s <= high)
        own = prompt[prompts]
        parts = np.ones(own.size) if budget is None else np.ceil(own / budget)
        decodes = float(token_weight[tokens].sum()) / count
        weights = steps[inside] / count
        rows.append(
            {
                "step_ms": _MS_PER_S * covered_s / count,
                "steps": count,
                "tokens": decodes + float(own.sum()) / count,
                "requests": decodes + float(parts.sum()) / count,
                "kv_tokens": float((kv[inside] * weights).sum()),
                "adapters": float((distinct[inside] * weights).sum()),
                "decodes": decodes,
                "prefills": float(parts.sum()) / count,
                "prompt_std": float((own / np.maximum(parts, 1.0)).std()) if own.size else 0.0,
                **_ranks(rank[prompts], own, parts, token_rank[tokens], token_weight[tokens], count),
            }
        )
    return rows


def _ranks(
    prompt_rank: NDArray[np.float64],
    prompt_tokens: NDArray[np.float64],
    parts: NDArray[np.float64],
    token_rank: NDArray[np.float64],
    token_weight: NDArray[np.float64],
    steps: float,
) -> dict[str, float]:
    """Return what the rank terms of step models ask for, as means per step."""
    lora_prompts, lora_tokens = prompt_rank > 0, token_rank > 0
    highest = max([0.0, *prompt_rank.tolist(), *np.unique(token_rank).tolist()])
    return {
        "lora_decodes": float(token_weight[lora_tokens].sum()) / steps,
        "lora_prefills": float(parts[lora_prompts].sum()) / steps,
        "lora_prefill_tokens": float(prompt_tokens[lora_prompts].sum()) / steps,
        "max_rank": highest,
        "decode_rank_sum": float((token_weight * token_rank).sum()) / steps,
        "prefill_rank_sum": float((parts * prompt_rank).sum()) / steps,
        "prefill_rank_tokens": float((prompt_tokens * prompt_rank).sum()) / steps,
    }


def _gaps(answered: Answered) -> _Spans:
    """Return the gaps between a request's tokens; the weight is how many tokens ended each.

    Where a server put several tokens into some of its events, each event stands for their mean number.
    """
    outcome = answered.outcome
    times, counts = np.unique(np.array(outcome.times_s), return_counts=True)
    events = len(outcome.times_s)
    several = outcome.kind == FINISHED and outcome.output_tokens is not None and events > 1
    per_event = ((outcome.output_tokens or 1) - 1) / (events - 1) if several else 1.0
    return _Spans(times[:-1], times[1:], counts[1:].astype(np.float64) * max(per_event, 1e-9))


def _held(answered: Answered, gaps: _Spans) -> _Spans:
    """Return how many tokens a request holds in the KV cache during each of its gaps."""
    held: NDArray[np.float64] = np.cumsum(gaps.weight) - gaps.weight + (1.0 + answered.prompt_tokens)
    return _Spans(gaps.start, gaps.end, held)


def _joined(spans: Sequence[_Spans]) -> _Spans:
    return _Spans(*(np.concatenate([np.empty(0), *parts]) for parts in zip(*spans, strict=True)))


def _level(spans: _Spans, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of the weights of the spans over each cell of a grid that has all their ends."""
    changes = np.zeros(grid.size)
    np.add.at(changes, np.searchsorted(grid, spans.start), spans.weight)
    np.add.at(changes, np.searchsorted(grid, spans.end), -spans.weight)
    return np.cumsum(changes)[:-1]
