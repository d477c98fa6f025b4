"""Set-up of an engine with one pool for adapters and KV: sizes of its adapters, weights, first queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from capplan.serving.memory import adapter_bytes, adapter_tokens
from capplan.serving.pooled.queue_design import base_model_bytes
from capplan.serving.pooled.refresh import set_queues
from capplan.serving.state import Limits, State
from capplan.spec.lora_modules import TargetModules
from capplan.spec.profile import ModelArch
from capplan.spec.queues import Queues, require_room
from capplan.spec.scheduling import Cache, Scheduler

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PoolSetup:
    """Facts of an engine that the rules for one pool read; arrays by adapter, the base model first."""

    adapter_pages: Ints
    """KV blocks that each adapter takes."""
    adapter_bytes: Ints
    """Size of each adapter in request sizes and scores; of the base model: of the smallest adapter."""
    adapter_tokens: Ints
    """KV tokens in the same memory, which requests take from quotas; 0 for the base model."""
    load_ns: Ints
    """Time of a load."""
    weights: tuple[float, float, float]
    """Weights of frequency, recency and size."""
    queues: Queues | None = None
    """Queues at the start; None: one queue with all tokens."""


def pool_setup(
    arch: ModelArch,
    tp: int,
    adapters: Sequence[tuple[int, TargetModules | None]],
    *,
    pages: Ints,
    load_ns: Ints,
    scheduler: Scheduler,
    cache: Cache,
    queues: Queues | None = None,
) -> PoolSetup:
    """Return the set-up of an engine.

    Parameters
    ----------
    arch, tp
        The model, and the GPUs that share one copy of it.
    adapters
        Rank and linear layers of each adapter; None: all layers.
    pages, load_ns
        KV blocks and load time of each adapter, shape (adapters + 1,); entry 0 is the base model.
    scheduler, cache
        For the charge of adapters, and the weights of scores.
    queues
        Queues at the start.

    Raises
    ------
    InputError
        For more queues than an engine has room for.
    """
    if queues is not None:
        require_room(queues, "queues.classes")
    charge = scheduler.queues.adapter_charge if queues is None else queues.adapter_charge
    sizes = [adapter_bytes(arch, rank, modules) for rank, modules in adapters]
    tokens = [
        0 if charge == "none" else adapter_tokens(arch, rank, tp, modules) for rank, modules in adapters
    ]
    return PoolSetup(
        adapter_pages=pages,
        adapter_bytes=np.array([base_model_bytes(np.array(sizes)), *sizes], np.int64),
        adapter_tokens=np.array([0, *tokens], np.int64),
        load_ns=load_ns,
        weights=cache.score_weights,
        queues=queues,
    )


def set_up(state: State, limits: Limits, setup: PoolSetup) -> None:
    """Write the set-up into the state of an idle engine."""
    pooled = state.pooled
    state.adapters.pages[:] = setup.adapter_pages
    pooled.adapters.bytes[:] = setup.adapter_bytes
    pooled.adapters.tokens[:] = setup.adapter_tokens
    pooled.adapters.cost_ns[:] = setup.load_ns
    set_up_policies(state, limits, setup.weights, setup.queues)


def set_up_policies(
    state: State, limits: Limits, weights: tuple[float, float, float], queues: Queues | None
) -> None:
    """Write the weights of the adapter cache and the first queues into the state of an idle engine."""
    state.pooled.weights[:] = weights
    if queues is not None:
        cuts = np.array([each.upper_wrs for each in queues.classes if each.upper_wrs is not None])
        set_queues(state, limits, queues.wrs, cuts, [each.quota_tokens for each in queues.classes])
