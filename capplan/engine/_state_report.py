"""State of an engine for routers: what the rules of `capplan.serving.routers` read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from capplan.serving import NONE
from capplan.serving.routers import ACTIVE, AWAITED, RESIDENT
from capplan.serving.state import LOADING, NO_CLAIM, POOLED

if TYPE_CHECKING:
    from capplan.engine._engine_core import EngineCore
    from capplan.engine._request import Request


class StateReport(NamedTuple):
    """State of an engine between two steps; counts as in `capplan.serving.routers._fleet`."""

    running: int
    queued: int
    """Waiting requests, also those that the scheduler has not seen."""
    free_blocks: int
    """Free KV blocks, and those of cached adapters that no running request uses."""
    blocks: int
    block_size: int
    max_num_seqs: int
    max_loras: int
    active_adapters: int
    queued_adapters: int
    running_tokens: int
    partial_tokens: int
    by_rank: Mapping[str, tuple[int, int, int]]
    """Requests, waiting ones, and their prompt tokens, by the rank of their adapter; 0: base model."""
    adapters: Mapping[str, int]
    """Bits ACTIVE, AWAITED and RESIDENT of the adapters that have any."""


def state_report(core: EngineCore, names: Mapping[int, str]) -> StateReport:
    """Return the state of an engine; `names`: of its adapters, by number."""
    state, limits, counters = core.state, core.limits, core.state.counters
    claim, queue_head = state.adapters.claim, state.adapters.queue_head
    is_pool = limits.policy == POOLED
    idle_pages = counters.adapter_pages - state.pooled.counts.pinned_pages if is_pool else 0
    bits = np.where((state.adapters.users > 0) & (claim == NO_CLAIM), ACTIVE, 0)
    bits |= np.where(queue_head != NONE, AWAITED, 0)
    bits |= np.where((state.adapters.resident == 1) & (claim != LOADING), RESIDENT, 0)
    awaited = (queue_head != NONE) | (claim == LOADING)
    partial = state.lists.partial[: counters.n_partial]
    left = np.maximum(0, state.rows.prompt[partial] - state.rows.computed[partial])
    partial_tokens = int(left.sum())
    return StateReport(
        running=int(counters.n_running - counters.n_ending),
        queued=int(counters.n_waiting - counters.n_gone) + core.unseen,
        free_blocks=int(counters.free_blocks + idle_pages),
        blocks=int(counters.capacity),
        block_size=limits.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_loras=limits.max_loras,
        active_adapters=int(counters.n_active - counters.n_claimed),
        queued_adapters=int(np.count_nonzero(awaited[1:])),
        running_tokens=int(counters.kv_tokens) + partial_tokens,
        partial_tokens=partial_tokens,
        by_rank=_by_rank(core.requests.values(), core.lora.rank_of.tolist()),
        adapters={name: int(bits[number]) for number, name in names.items() if bits[number]},
    )


def _by_rank(requests: Iterable[Request], rank_of: list[int]) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for request in requests:
        rank = str(rank_of[request.adapter])
        present, waiting, tokens = found.get(rank, (0, 0, 0))
        if request.running:
            found[rank] = present + 1, waiting, tokens
        else:
            found[rank] = present + 1, waiting + 1, tokens + request.prompt.size
    return found
