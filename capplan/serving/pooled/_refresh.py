"""Refresh of the queues from the requests of the last window (Chameleon, sections 4.3.4 and 4.3.5).

Engine and twin call `refresh` at every multiple of the period, before the first step at or after that time,
once they have submitted what arrived before it.

Set-up of an engine with one pool for adapters and KV: sizes of its adapters, weights, first queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan.serving._memory import adapter_bytes, adapter_tokens
from capplan.serving.pooled._caches import make_resident
from capplan.serving.pooled._queue_design import (
    RequestSample,
    SizeClasses,
    allocate_quotas,
    base_model_bytes,
    cluster_sizes,
    clustered_classes,
    equal_quotas,
    equal_ranges,
)
from capplan.serving.pooled._size_queues import rebin
from capplan.serving.pooled._state import DEGREE_1, DEGREE_2, OUTPUT_ONLY, RESIDENT, WINDOW
from capplan.serving.state import NONE, Limits, State
from capplan.spec import (
    AdapterCharge,
    Cache,
    ModelArch,
    Queues,
    Scheduler,
    TargetModules,
    Wrs,
    require_room,
)

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
    shares_charge: bool = False
    """Whether an adapter in use takes its tokens from quotas once."""


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
        shares_charge=charge == "shared",
    )


def set_up(state: State, limits: Limits, setup: PoolSetup) -> None:
    """Write the set-up into the state of an idle engine."""
    pooled = state.pooled
    state.adapters.pages[:] = setup.adapter_pages
    pooled.adapters.bytes[:] = setup.adapter_bytes
    pooled.adapters.tokens[:] = setup.adapter_tokens
    pooled.adapters.cost_ns[:] = setup.load_ns
    if limits.loading == RESIDENT:
        for adapter in range(1, state.adapters.resident.size):
            make_resident(state, adapter)
    set_up_policies(state, limits, setup.weights, setup.queues, setup.shares_charge)


def set_up_policies(
    state: State,
    limits: Limits,
    weights: tuple[float, float, float],
    queues: Queues | None,
    shares_charge: bool,
) -> None:
    """Write the weights of the adapter cache, the first queues and how they charge into an idle engine."""
    state.pooled.weights[:] = weights
    state.pooled.counts.shares_charge = shares_charge
    if queues is not None:
        cuts = np.array([each.upper_wrs for each in queues.classes if each.upper_wrs is not None])
        set_queues(state, limits, queues.wrs, cuts, [each.quota_tokens for each in queues.classes])


LEAST_REQUESTS: Final = 50
"""Fewest requests of a window, and of each new queue, that new queues are made from."""
BOUND_OVER_EXECUTION: Final = 5.0
"""Bound on the time from arrival to last token, relative to the mean time in execution (section 5.1)."""
_FORMS: Final = {"degree2": DEGREE_2, "degree1": DEGREE_1, "output_only": OUTPUT_ONLY}
_NS_PER_S: Final = 1e9


def refresh(state: State, limits: Limits, scheduler: Scheduler, at_ns: int) -> None:
    """Begin a window of adapter uses, and make new queues from the requests of the last window.

    The queues stay as they are if the window or one of the new queues has too few requests. Static queues
    are made once. Waiting requests move to the queue of their size in order of arrival; the charge of a
    running one moves to its queue, and loans end.

    Parameters
    ----------
    state, limits
        Engine, changed in place.
    scheduler
        Settings of the queues.
    at_ns
        Time of the refresh, a multiple of the period.
    """
    pooled = state.pooled
    pooled.adapters.uses_before[:] = pooled.adapters.uses
    pooled.adapters.uses[:] = 0
    pooled.counts.window_start_ns = at_ns
    is_made = scheduler.policy == "static" and pooled.counts.n_queues > 1
    if not scheduler.has_queues or is_made:
        return
    sample, rate_rps = _window(state, at_ns, round(scheduler.refresh_s * _NS_PER_S))
    made = new_queues(sample, rate_rps, int(pooled.queues.quota.sum()), scheduler)
    if made is None:
        pooled.counts.kept_queues += 1
        return
    set_queues(state, limits, made.classes.wrs, made.classes.cuts, made.quotas)
    pooled.counts.scaled_quotas += made.is_scaled
    pooled.counts.refreshes += 1


def compile_refresh(state: State, limits: Limits) -> None:
    """Compile what a refresh of an idle engine runs, which would delay the first one; the queues stay."""
    rebin(state, limits, int(state.pooled.counts.n_queues))
    cluster_sizes(np.arange(3.0), 2)


def set_queues(
    state: State, limits: Limits, wrs: Wrs, cuts: NDArray[np.float64], quotas: Sequence[int]
) -> None:
    """Replace the queues of an engine in place, and move waiting and running requests to them.

    `cuts` are the borders between queues, ascending; `quotas` their tokens, one more than `cuts`.
    """
    pooled = state.pooled
    pooled.wrs.form = _FORMS[wrs.form]
    pooled.wrs.a, pooled.wrs.b = wrs.a, wrs.b
    pooled.wrs.max_prompt, pooled.wrs.max_output = wrs.max_prompt_tokens, wrs.max_output_tokens
    pooled.wrs.max_bytes = wrs.max_adapter_bytes
    pooled.cuts[:] = np.inf
    pooled.cuts[: cuts.size] = cuts
    pooled.queues.quota[:] = 0
    pooled.queues.quota[: len(quotas)] = quotas
    rebin(state, limits, len(quotas))


class NewQueues(NamedTuple):
    """Queues made from a window."""

    classes: SizeClasses
    quotas: tuple[int, ...]
    is_scaled: bool
    """Whether the minima exceeded the pool and were scaled down."""


def new_queues(sample: RequestSample, rate_rps: float, tokens: int, scheduler: Scheduler) -> NewQueues | None:
    """Return the queues by the requests of a window; None: too few requests.

    Parameters
    ----------
    sample
        Requests; tokens of adapters are 0 unless they are charged.
    rate_rps
        Rate of all requests.
    tokens
        Sum of the quotas.
    scheduler
        Settings of the queues.
    """
    if sample.adapter.size < LEAST_REQUESTS:
        return None
    if scheduler.policy == "static":
        classes = equal_ranges(sample, scheduler.queues)
        return NewQueues(classes, equal_quotas(tokens, classes.count), is_scaled=False)
    classes = clustered_classes(sample, scheduler.queues)
    is_thin = np.bincount(classes.queue).min() < LEAST_REQUESTS
    if is_thin or not np.nan_to_num(sample.execution_s).any():  # unknown, or a step each
        return None
    config = scheduler.queues
    # Tokens of adapters are 0 unless they are charged, as the queues of a plan may say.
    charge: AdapterCharge = "shared" if config.adapter_charge == "shared" else "per_request"
    loads = sample.loads(classes.queue, rate_rps, config.quota_size, charge)
    known = ~np.isnan(sample.execution_s)
    bound_s = BOUND_OVER_EXECUTION * float(sample.execution_s[known].mean())
    made = allocate_quotas(loads, tokens, bound_s, percentile=config.percentile, rest=config.rest)
    return NewQueues(classes, made.tokens, is_scaled=made.missing > 0)


def _window(state: State, at_ns: int, period_ns: int) -> tuple[RequestSample, float]:
    """Return the requests that arrived in the last period, as far as they are recorded, and their rate.

    A request that arrives at the time of a refresh belongs to the next period.
    """
    records, adapters = state.pooled.window, state.pooled.adapters
    begun_ns = at_ns - period_ns
    count = int(state.pooled.counts.n_window)
    arrival_ns = records.arrival_ns[:count]
    if count > WINDOW:
        begun_ns = max(begun_ns, int(arrival_ns[arrival_ns != NONE].min(initial=at_ns)))
    kept = np.flatnonzero((arrival_ns >= begun_ns) & (arrival_ns < at_ns))
    execution_ns = records.execution_ns[kept]
    sample = RequestSample(
        prompt_tokens=records.prompt[kept],
        output_tokens=records.predicted[kept],
        adapter=records.adapter[kept],
        execution_s=np.where(execution_ns < 0, np.nan, execution_ns / _NS_PER_S),
        adapter_bytes=adapters.bytes,
        adapter_tokens=adapters.tokens,
    )
    return sample, kept.size * _NS_PER_S / max(1, at_ns - begun_ns)
