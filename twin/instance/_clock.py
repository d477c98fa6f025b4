"""The twin's clock: durations of steps, and asynchronous copies of adapters over the link from host memory.

The link has one copy at a time, loads on demand before prefetches. Instances may share a link. Copies are
queued in the order of time over all of them; a copy that has begun is not interrupted. An instance has at
most one prefetch at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from capplan._jit import by_reference, inner, inner_once, jit
from capplan.models import KvLine, StepFeatures, StepRanks, rank_ms, step_line, step_ms, with_line_ms
from capplan.serving import NONE, Limits, Records, State, adapter_loaded, int_fields, new_record
from capplan.serving.pooled import ASSISTED, ASYNCHRONOUS, ON_DEMAND, with_pool
from capplan.serving.routers import PRESENT, QUEUED, QUEUED_TOKENS
from capplan.serving.state import ENDING, LOADING, SLORA
from capplan.twin.instance._assist import assisted_ns, layers_on_cpu
from capplan.twin.instance._scenario import Costs
from capplan.twin.instance._trace import TwinTrace, record_load

NEVER_NS = 2**62

_LINK = int_fields(
    "free_ns",  # end of the copies that have begun or are on demand
    "busy_ns",  # their time
)
_PREFETCH = int_fields(
    "asked_ns",  # start of the wait of a prefetch that has not begun; NEVER_NS without one
    "copy_ns",  # its duration
    "ready_ns",  # end of the last prefetch that has begun
)


@by_reference
class HostLink(NamedTuple):
    """State of a link."""

    at: np.record
    """Fields as in `_LINK`."""
    prefetches: Records
    """Last prefetch of each instance on the link, shape (instances,); fields as in `_PREFETCH`."""


def new_link(instances: int = 1) -> HostLink:
    """Return an idle link."""
    prefetches = np.zeros(instances, _PREFETCH).view(np.recarray)
    prefetches.asked_ns = NEVER_NS
    return HostLink(at=new_record(_LINK), prefetches=prefetches)


@inner
def copy_on_demand(link: HostLink, now_ns: int, copy_ns: int) -> int:
    """Queue a load on demand and return its end."""
    _begin_prefetches(link, now_ns)
    return _append(link, now_ns, copy_ns)


@inner
def copy_ahead(link: HostLink, place: int, now_ns: int, copy_ns: int) -> None:
    """Queue a prefetch of the instance at `place`."""
    _begin_prefetches(link, now_ns)
    link.prefetches.asked_ns[place] = now_ns
    link.prefetches.copy_ns[place] = copy_ns


@inner
def promote(link: HostLink, place: int, now_ns: int) -> int:
    """Make the prefetch of an instance a load on demand unless it has begun, and return its end."""
    _begin_prefetches(link, now_ns)
    record = link.prefetches[place]
    if record.asked_ns != NEVER_NS:
        record.asked_ns = NEVER_NS
        record.ready_ns = _append(link, now_ns, record.copy_ns)
    return int(link.prefetches.ready_ns[place])


@inner
def prefetched_ns(link: HostLink, place: int) -> int:
    """Return the end of the last prefetch of an instance, unless further loads on demand delay it."""
    asked_ns = link.prefetches.asked_ns[place]
    if asked_ns == NEVER_NS:
        return int(link.prefetches.ready_ns[place])
    free_ns = link.at.free_ns
    earlier = _next_prefetch(link, -1, -1)
    while True:
        record = link.prefetches[earlier]
        free_ns = max(free_ns, record.asked_ns) + record.copy_ns
        if earlier == place:
            return int(free_ns)
        earlier = _next_prefetch(link, record.asked_ns, earlier)


@inner
def _append(link: HostLink, now_ns: int, copy_ns: int) -> int:
    ready_ns: int = max(link.at.free_ns, now_ns) + copy_ns
    link.at.free_ns = ready_ns
    link.at.busy_ns += copy_ns
    return ready_ns


@inner
def _begin_prefetches(link: HostLink, now_ns: int) -> None:
    """Move the prefetches that have begun before `now_ns` to the copies that cannot be overtaken."""
    place = _next_prefetch(link, -1, -1)
    while place >= 0:
        record = link.prefetches[place]
        if max(link.at.free_ns, record.asked_ns) >= now_ns:
            break
        record.ready_ns = _append(link, record.asked_ns, record.copy_ns)
        record.asked_ns = NEVER_NS
        place = _next_prefetch(link, -1, -1)


@inner
def _next_prefetch(link: HostLink, asked_ns: int, place: int) -> int:
    """Return the place of the first waiting prefetch behind (asked_ns, place), or -1."""
    chosen = -1
    least_ns = NEVER_NS
    for other in range(link.prefetches.size):
        other_ns = link.prefetches.asked_ns[other]
        behind = other_ns > asked_ns or (other_ns == asked_ns and other > place)
        if behind and other_ns < least_ns:
            chosen, least_ns = other, other_ns
    return chosen


_AT = int_fields(
    "visible_ns",  # arrivals up to this time are known when the next step is decided
    "first_copy",  # asynchronous copies: position of the oldest load on demand in `copies`
    "n_copies",  # and their number
    "prefetched",  # adapter of a prefetch in progress; 0: none
    "idle",  # 1: nothing can run before the next event
    "place",  # of this instance among those that share its link
    "paused_ns",  # time for which decoding rows have paused
    "paused_rows",  # and their number
    "decoded_ns",  # rules for one pool: end of the last step with decodes
)
_ANSWERED = int_fields("answers", "answer_tokens")


@by_reference
class TwinClock(NamedTuple):
    """State of the twin in addition to the state of the engine."""

    at: np.record
    """Fields as in `_AT`."""
    ready_ns: NDArray[np.int64]
    """End of the last copy of each adapter, shape (adapters + 1,)."""
    begun_ns: NDArray[np.int64]
    """Start of that copy, or of its wait for the link."""
    copies: NDArray[np.int64]
    """Ring of the adapters that are loaded on demand asynchronously, of the same length."""
    on_cpu: NDArray[np.int64]
    """Layers of each adapter that CPU cores compute while it is copied, of the same length."""
    link: HostLink
    """Link from host memory, which instances of a cluster may share."""
    # -- instances of a cluster only; otherwise empty --
    following: NDArray[np.int64]
    """The request after each request at this instance, shape (requests,); empty: the next number."""
    rank_stats: NDArray[np.int64]
    """What routers ask that is not in the state, by rank; see `capplan.twin.instance._clock`."""
    answered: np.record
    """Finished requests of the whole cluster, and their output tokens."""


def new_clock(adapters: int) -> TwinClock:
    """Return a clock at 0, with a link of its own."""
    return TwinClock(
        at=new_record(_AT),
        ready_ns=np.full(adapters + 1, -1, np.int64),
        begun_ns=np.zeros(adapters + 1, np.int64),
        copies=np.zeros(adapters + 1, np.int64),
        on_cpu=np.zeros(adapters + 1, np.int64),
        link=new_link(),
        following=np.zeros(0, np.int64),
        rank_stats=np.zeros((3, 0), np.int64),
        answered=new_answered(),
    )


def new_answered() -> np.record:
    """Return the count of finished requests, at 0."""
    return new_record(_ANSWERED)


@inner
def compute_ns(c: np.record, costs: Costs, tokens: int, line: KvLine, ranks_ms: float) -> int:
    """Return the nanoseconds of the step without waits for adapters; `c` are the state's counters."""
    milliseconds = with_line_ms(costs.form, costs.coefficients, _features(c, costs, tokens), line)
    return round((milliseconds + ranks_ms) * 1e6)


@inner
def tables_line(c: np.record, costs: Costs, tokens: int) -> KvLine:
    """Return the part of the step's time by tables over KV tokens."""
    return step_line(costs.form, costs.coefficients, _features(c, costs, tokens))


@inner
def prompts_ns(state: State, costs: Costs, tokens: int, ranks_ms: float) -> int:
    """Return the nanoseconds of a batch of whole prompts, in which decoding requests have no part."""
    c, partial = state.counters, state.lists.partial
    requests = adapters = 0
    for i in range(c.n_partial):
        if state.rows.tokens[partial[i]] == 0:
            continue
        requests += 1
        adapter = state.rows.adapter[partial[i]]
        first = adapter != 0
        for j in range(i):
            is_other = state.rows.adapter[partial[j]] != adapter or state.rows.tokens[partial[j]] == 0
            first = first and is_other
        adapters += first
    features = _batch(c, costs, tokens, requests, 0, adapters)
    return round((step_ms(costs.form, costs.coefficients, features) + ranks_ms) * 1e6)


@inner
def _features(c: np.record, costs: Costs, tokens: int) -> StepFeatures:
    requests = c.n_running - c.n_ending - c.n_absent
    return _batch(c, costs, tokens, requests, c.kv_tokens, c.n_active - c.n_claimed)


@inner
def _batch(
    c: np.record, costs: Costs, tokens: int, requests: int, kv_tokens: int, adapters: int
) -> StepFeatures:
    return StepFeatures(
        tokens=float(tokens),
        requests=float(requests),
        kv_tokens=float(kv_tokens),
        adapters=0.0 if c.merged else float(adapters),
        a_max=0.0 if c.merged else float(costs.a_max),
        s_max=float(costs.s_max),
        waiting=float(c.n_waiting),
        slots_per_adapter=costs.slots_per_adapter,
        adapters_served=float(costs.adapters_served),
    )


@inner
def ranks_ms(state: State, costs: Costs) -> float:
    """Return the milliseconds of the step that depend on its `StepRanks`."""
    c = state.counters
    if not costs.uses_ranks or c.merged or (c.n_partial == 0 and not costs.uses_decode_ranks):
        return 0.0
    return rank_ms(costs.form, costs.coefficients, float(costs.s_max), _ranks(state, costs))


@inner
def _ranks(state: State, costs: Costs) -> StepRanks:
    """Count the ranks of the requests in the step, or those of its partial rows alone if that suffices."""
    c = state.counters
    decodes = prefills = lora_decodes = lora_prefills = lora_prefill_tokens = 0
    max_rank = decode_ranks = prefill_ranks = prefill_rank_tokens = prefill_pairs = 0
    row = c.run_head
    for i in range(c.n_running if costs.uses_decode_ranks else c.n_partial):
        if not costs.uses_decode_ranks:
            row = state.lists.partial[i]
        rank = costs.rank[state.rows.adapter[row]]
        tokens = 0
        if state.rows.since[row] >= 0:
            tokens = 1 if c.step_decodes > 0 else 0
        elif state.rows.since[row] == NONE:
            tokens = state.rows.tokens[row]
        if tokens == 1 and state.rows.output[row] > 0:
            decodes += 1
            lora_decodes += rank > 0
            decode_ranks += rank
        elif tokens > 0:
            prefills += 1
            lora_prefills += rank > 0
            lora_prefill_tokens += tokens * (rank > 0)
            prefill_ranks += rank
            prefill_rank_tokens += tokens * rank
            prefill_pairs += tokens * (2 * state.rows.computed[row] + tokens + 1) // 2
        if tokens > 0:
            max_rank = max(max_rank, rank)
        row = state.rows.following[row]
    return StepRanks(
        decodes=float(decodes),
        prefills=float(prefills),
        lora_decodes=float(lora_decodes),
        lora_prefills=float(lora_prefills),
        lora_prefill_tokens=float(lora_prefill_tokens),
        max_rank=float(max_rank),
        decode_rank_sum=float(decode_ranks),
        prefill_rank_sum=float(prefill_ranks),
        prefill_rank_tokens=float(prefill_rank_tokens),
        prefill_mpairs=prefill_pairs / 1e6,
    )


@inner_once
def loads_ns(
    state: State, limits: Limits, costs: Costs, clock: TwinClock, trace: TwinTrace, begin_ns: int
) -> int:
    """Start the loads of a step and return the time that it waits for adapters."""
    c = state.counters
    beside = limits.load_beside != 0
    through_copier = beside or limits.policy == SLORA
    in_step_ns = 0
    for i in range(c.n_loads):
        adapter = state.adapters.loads[i]
        load_ns = costs.load_ns[adapter]
        if state.adapters.load_from_disk[i]:
            load_ns += costs.disk_ns[adapter]
            trace.counts.disk_loads += 1
        record_load(trace, adapter, load_ns)
        if _is_ahead(state, adapter):
            copy_ahead(clock.link, clock.at.place, begin_ns, load_ns)
            clock.at.prefetched = adapter
        elif through_copier:
            _begin_copy(clock, adapter, begin_ns, load_ns, beside)
        else:
            in_step_ns += load_ns
    trace.counts.adapter_loads += c.n_loads
    if in_step_ns > 0:
        in_step_ns = with_reloads_ns(in_step_ns, c.n_active - c.n_claimed, limits.max_loras)
        in_step_ns = copy_on_demand(clock.link, begin_ns, in_step_ns) - begin_ns
    if limits.policy == SLORA:  # a batch of prompts waits for all of its adapters
        for i in range(c.n_admitted):
            ready_ns = clock.ready_ns[state.rows.adapter[state.lists.admitted[i]]]
            in_step_ns = max(in_step_ns, ready_ns - begin_ns)
    if limits.loading == ON_DEMAND or limits.loading == ASSISTED:
        in_step_ns = max(in_step_ns, _wait_of_step_ns(state, limits, clock, begin_ns))
    return in_step_ns


@with_pool(0)
def _wait_of_step_ns(state: State, limits: Limits, clock: TwinClock, begin_ns: int) -> int:
    """Return the wait of prompts for loads on demand, or of decodes after assisted prompts."""
    c = state.counters
    longest_ns = 0
    if limits.loading == ON_DEMAND and c.step_decodes == 0:
        for i in range(c.n_partial):
            row = state.lists.partial[i]
            if state.rows.tokens[row] > 0:
                longest_ns = max(longest_ns, wait_for_load_ns(clock, state.rows.adapter[row], begin_ns))
    if limits.loading == ASSISTED and c.step_decodes > 0 and state.pooled.counts.n_loading > 0:
        row = c.run_head
        while row != NONE:
            adapter = state.rows.adapter[row]
            if state.rows.since[row] >= 0 and state.adapters.claim[adapter] == LOADING:
                longest_ns = max(longest_ns, wait_for_load_ns(clock, adapter, begin_ns))
            row = state.rows.following[row]
    return longest_ns


@inner
def waits_in_step(limits: Limits, c: np.record) -> bool:
    """Return whether a step may begin loads or wait for some; `c` are the state's counters."""
    return bool(c.n_loads > 0 or limits.policy == SLORA or limits.loading != ASYNCHRONOUS)


@with_pool(0)
def assisted_prompts_ns(state: State, costs: Costs, clock: TwinClock, begin_ns: int, step_ns: int) -> int:
    """Return the duration of a batch of prompts, while CPU cores compute for adapters that are copied."""
    cold = False
    for i in range(state.counters.n_partial):
        row = state.lists.partial[i]
        adapter, tokens = state.rows.adapter[row], state.rows.tokens[row]
        if tokens > 0 and state.adapters.claim[adapter] == LOADING:
            cold = True
            clock.ready_ns[adapter] = begin_ns + wait_for_load_ns(clock, adapter, begin_ns)
            load_ns = costs.load_ns[adapter]
            clock.on_cpu[adapter] = layers_on_cpu(costs.assist, adapter, tokens, load_ns, step_ns)
    if not cold:
        return step_ns
    return assisted_ns(state, costs.assist, costs.load_ns, clock.ready_ns, clock.on_cpu, begin_ns, step_ns)


@with_pool(False)
def _is_ahead(state: State, adapter: int) -> bool:
    """Return whether an adapter is loaded ahead of its first request."""
    return bool(state.pooled.adapters.prefetched[adapter])


@jit
def with_reloads_ns(load_ns: int, active: int, max_loras: int) -> int:
    """Return the time of a step's loads, with the reloads that they cause while every slot is in use.

    vLLM's worker makes the adapters of a step resident one by one, in the order of a set, and evicts the
    least recently touched one. With every slot in use, a new adapter usually takes the slot of one that the
    same step still needs, which takes the next one's, and so on up to the free slot. The free slot comes
    later in the order with probability 1/2, on average after a third of the adapters.
    """
    if active < max_loras:
        return load_ns
    return load_ns + load_ns * active // 6


@inner
def _begin_copy(clock: TwinClock, adapter: int, begin_ns: int, load_ns: int, announced: bool) -> None:
    """Queue a load on demand; `announced`: add it to `copies`."""
    at = clock.at
    clock.ready_ns[adapter] = copy_on_demand(clock.link, begin_ns, load_ns)
    clock.begun_ns[adapter] = begin_ns
    if announced:
        clock.copies[(at.first_copy + at.n_copies) % clock.copies.size] = adapter
        at.n_copies += 1


@inner
def _next_on_demand_ns(clock: TwinClock) -> int:
    if clock.at.n_copies == 0:
        return NEVER_NS
    return int(clock.ready_ns[clock.copies[clock.at.first_copy]])


@inner
def _next_ahead_ns(clock: TwinClock) -> int:
    return NEVER_NS if clock.at.prefetched == 0 else prefetched_ns(clock.link, clock.at.place)


@inner
def next_copy_ns(clock: TwinClock) -> int:
    """Return the end of the next asynchronous copy; NEVER_NS without any."""
    return min(_next_on_demand_ns(clock), _next_ahead_ns(clock))


@inner
def take_copies(state: State, clock: TwinClock) -> None:
    """Notify the scheduler of completed copies."""
    at = clock.at
    while True:
        on_demand_ns, ahead_ns = _next_on_demand_ns(clock), _next_ahead_ns(clock)
        if min(on_demand_ns, ahead_ns) > at.visible_ns:
            break
        if on_demand_ns <= ahead_ns:
            adapter = clock.copies[at.first_copy]
            at.first_copy = (at.first_copy + 1) % clock.copies.size
            at.n_copies -= 1
        else:
            adapter = at.prefetched
            clock.ready_ns[adapter] = ahead_ns
            at.prefetched = 0
        adapter_loaded(state, adapter)


@inner
def wait_for_load_ns(clock: TwinClock, adapter: int, now_ns: int) -> int:
    """Return the time until an adapter that a request needs is loaded; a prefetch of it is then on demand."""
    ready_ns = clock.ready_ns[adapter]
    if adapter != 0 and adapter == clock.at.prefetched:
        ready_ns = promote(clock.link, clock.at.place, now_ns)
    return int(max(0, ready_ns - now_ns))


@inner
def keeps_stats(clock: TwinClock) -> bool:
    """Return whether a router reads the counts by rank."""
    return bool(clock.rank_stats.shape[1] > 0)


@inner
def count_queued(clock: TwinClock, rank: int, requests: int, tokens: int) -> None:
    """Count requests that join the queue; a negative number leaves it."""
    clock.rank_stats[QUEUED, rank] += requests
    clock.rank_stats[QUEUED_TOKENS, rank] += tokens


@inner
def count_present(clock: TwinClock, rank: int, requests: int) -> None:
    """Count requests that arrive at the instance; a negative number leaves it."""
    clock.rank_stats[PRESENT, rank] += requests


@inner
def count_step(state: State, costs: Costs, clock: TwinClock) -> None:
    """Count the admissions and preemptions of a decided step."""
    for i in range(state.counters.n_admitted):
        row = state.lists.admitted[i]
        count_queued(clock, costs.rank[state.rows.adapter[row]], -1, -state.rows.prompt[row])
    for i in range(state.counters.n_preempted):
        row = state.lists.preempted[i]
        if state.rows.since[row] != ENDING:  # else it has ended: its last token is in flight
            count_queued(clock, costs.rank[state.rows.adapter[row]], 1, state.rows.prompt[row])


@inner
def count_finished(state: State, costs: Costs, clock: TwinClock) -> None:
    """Count the requests that ended in a committed step."""
    for i in range(state.counters.n_finished):
        row = state.lists.finished[i]
        count_present(clock, costs.rank[state.rows.adapter[row]], -1)
        clock.answered.answers += 1
        clock.answered.answer_tokens += state.rows.target[row]
