"""Small random engines under the rules for one pool, and their replay beside the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from capplan.engine._scheduler_output import cancel_waiting
from capplan.serving import NONE, Limits, State, adapter_loaded, commit, finish, new_state, schedule, submit
from capplan.serving.pooled import _state as p
from capplan.serving.pooled._caches import make_resident
from capplan.serving.pooled._refresh import set_queues
from capplan.serving.state import POOLED
from capplan.spec import MOST_QUEUES, Wrs
from capplan.testing import check_integrity
from capplan.testing._integrity import running_rows, same, snapshot
from tests.oracle.caches import CachedAdapter
from tests.oracle.pooled import ReferencePooled
from tests.oracle.scheduler import ReferenceOutput, ReferenceStep
from tests.oracle.size_queues import PooledRequest, SizeQueues
from tests.serving.worlds import Choose, scheduled

MS = 1_000_000


class Arrival(NamedTuple):
    """One request."""

    at_ns: int
    adapter: int
    prompt: int
    output: int
    predicted: int


@dataclass(frozen=True)
class PooledWorld:
    """An engine, its requests, and what else happens to it."""

    limits: Limits
    num_blocks: int
    pages: tuple[int, ...]
    """KV blocks by adapter; the first entry is the base model's."""
    size_bytes: tuple[int, ...]
    tokens: tuple[int, ...]
    cost_ns: tuple[int, ...]
    queues: SizeQueues
    weights: tuple[float, float, float]
    arrivals: tuple[Arrival, ...]
    refreshes: tuple[tuple[int, SizeQueues], ...] = ()
    """(time, new queues)"""
    aborts: tuple[tuple[int, int], ...] = ()
    """(step, request): aborted after the step if it is in flight."""
    shares_charge: bool = False
    """Whether an adapter in use takes its tokens from quotas once."""
    step_ns: tuple[int, ...] = (10 * MS,)
    """Durations of steps, in rotation."""

    def new_state(self) -> State:
        """Return the empty compiled engine."""
        state = new_state(max(1, len(self.arrivals)), len(self.pages) - 1, self.num_blocks, self.limits)
        state.adapters.pages[:] = self.pages
        own = state.pooled.adapters
        own.bytes[:] = self.size_bytes
        own.tokens[:], own.cost_ns[:] = self.tokens, self.cost_ns
        if self.limits.loading == p.RESIDENT:
            for adapter in range(1, len(self.pages)):
                make_resident(state, adapter)
        state.pooled.weights[:] = self.weights
        state.pooled.counts.shares_charge = self.shares_charge
        write_queues(state, self.limits, self.queues)
        return state

    def new_reference(self) -> ReferencePooled:
        """Return the empty reference."""
        columns = zip(self.pages, self.size_bytes, self.tokens, self.cost_ns, strict=True)
        adapters = [CachedAdapter(*column) for column in columns]
        if self.limits.loading == p.RESIDENT:
            adapters = [replace(each, resident=number > 0) for number, each in enumerate(adapters)]
        world = self.limits, self.num_blocks, adapters, self.queues, self.weights
        return ReferencePooled(*world, self.shares_charge)

    def takes(self, arrival: Arrival) -> bool:
        """Return whether a request fits into the empty pool."""
        limits = self.limits
        target = min(arrival.output, limits.max_model_len - arrival.prompt)
        tokens = arrival.prompt + target + limits.block_size - 1
        return target > 0 and tokens < (self.num_blocks - self.pages[arrival.adapter]) * limits.block_size


def write_queues(state: State, limits: Limits, queues: SizeQueues) -> None:
    """Replace the queues of a state, and move its requests."""
    wrs = Wrs(
        form=("degree2", "degree1", "output_only")[queues.form],
        a=queues.prompt_weight,
        b=queues.output_weight,
        max_prompt_tokens=queues.max_prompt,
        max_output_tokens=queues.max_output,
        max_adapter_bytes=queues.max_bytes,
    )
    set_queues(state, limits, wrs, np.array(queues.cuts), queues.quotas)


def queue_rows(state: State, queue: int) -> list[int]:
    """Return the waiting rows of a size queue in order."""
    rows, row = [], int(state.pooled.queues.head[queue])
    while row != NONE:
        rows.append(row)
        row = int(state.pooled.rows.later[row])
    return rows


def _refresh(run: Replay, at_ns: int, queues: SizeQueues) -> None:
    """Refresh both forms, with given queues instead of those of a window."""
    run.reference.refresh(queues, at_ns)
    write_queues(run.state, run.world.limits, queues)
    own = run.state.pooled.adapters
    own.uses_before[:], own.uses[:] = own.uses, 0
    run.state.pooled.counts.window_start_ns = at_ns
    run.events["refreshes with running requests"] += bool(run.reference.running)


def make_pooled_world(choose: Choose, max_requests: int = 24, **switches: int) -> PooledWorld:
    """Return a world; `switches` are fixed limits."""
    crowded = choose(0, 2) == 0  # large adapters that are not charged, so that memory is short, not quota
    adapters = choose(2, 7) if crowded else choose(1, 7)
    block_size = choose(1, 4)
    pages = (0, *(choose(3, 9) if crowded else choose(1, 6) for _ in range(adapters)))
    num_blocks = max(pages) + (choose(6, 16) if crowded else choose(4, 30))
    seqs = choose(4, 16) if crowded else choose(1, 9)
    tokens = choose(2, 6) if choose(0, 2) == 0 and not crowded else choose(7, 40)
    limits = make_pooled_limits(choose, adapters, block_size, num_blocks, (seqs, tokens))
    ageing_ns = choose(0, 1) * choose(1, 300) * MS
    limits = limits._replace(ageing_ns=ageing_ns, refresh_ns=choose(100, 2000) * MS)._replace(**switches)
    total = num_blocks * block_size
    size_bytes = tuple(each * 100 + choose(0, 99) for each in pages[1:])
    size_bytes = (min(size_bytes), *size_bytes)
    tokens_per_page = 0 if crowded or choose(0, 2) == 0 else block_size

    def queues() -> SizeQueues:
        most = (2 if crowded else MOST_QUEUES) if limits.order == p.QUEUES else 1
        return make_queues(choose, most, total, limits.max_model_len, max(size_bytes))

    seconds_apart = limits.prefetch == p.BY_HISTOGRAM and choose(0, 1)
    requests = choose(24, 40) if seconds_apart else choose(1, max_requests)
    arrivals = make_arrivals(choose, limits, adapters, requests, bool(seconds_apart))
    last_ns = arrivals[-1].at_ns + 300 * MS
    times = sorted({choose(0, last_ns // MS) * MS for _ in range(choose(0, 3))})
    if limits.loading == p.RESIDENT:
        pages, tokens_per_page = (0,) * len(pages), 0
    return PooledWorld(
        limits,
        num_blocks,
        pages,
        size_bytes,
        tuple(each * tokens_per_page for each in pages),
        (0, *(choose(0, 80) * MS for _ in range(adapters))),
        queues(),
        (0.45, 0.10, 0.45) if choose(0, 1) else (choose(0, 4) / 4, choose(0, 4) / 4, choose(0, 4) / 4),
        arrivals,
        tuple((t, queues()) for t in times),
        tuple((choose(0, 60), choose(0, len(arrivals) - 1)) for _ in range(choose(-2, 3))),
        bool(choose(0, 1)),
        tuple(choose(1, 40) * MS for _ in range(choose(1, 3))),
    )


def make_pooled_limits(
    choose: Choose, adapters: int, block_size: int, num_blocks: int, batch: tuple[int, int]
) -> Limits:
    """Return limits with any switches, without ageing and refreshes; `batch`: its requests and tokens."""
    limits = Limits(
        max_num_seqs=batch[0],
        max_num_batched_tokens=batch[1],
        max_model_len=choose(4, num_blocks * block_size),
        max_loras=adapters,
        max_cpu_loras=adapters,
        block_size=block_size,
        watermark_blocks=0,
        long_prefill_tokens=0,
        reserve_full_sequence=0,
        load_beside=1,
        policy=POOLED,
        order=p.QUEUES if choose(0, 2) else choose(p.FIFO, p.SJF),
        admit_every=(1, 1, 3, 10)[choose(0, 3)],
        cache=choose(p.NO_CACHE, p.SCORE),
        prefetch=choose(p.NO_PREFETCH, p.BY_HISTOGRAM),
        loading=choose(p.ASYNCHRONOUS, p.RESIDENT),
        chunked=choose(0, 1),
        bypass=int(choose(0, 3) > 0),
    )
    # Batches of prompts that wait for loads or are assisted are whole.
    return limits._replace(chunked=0) if limits.loading in (p.ON_DEMAND, p.ASSISTED) else limits


def make_queues(choose: Choose, most: int, total: int, longest: int, largest_bytes: int) -> SizeQueues:
    """Return queues that share all tokens."""
    n = choose(1, most)
    shares = np.array([choose(1, 10) for _ in range(n)])
    quotas = (shares * total // shares.sum()).tolist()
    quotas[-1] += total - sum(quotas)
    return SizeQueues(
        quotas=quotas,
        cuts=sorted(choose(1, 60) / 100 for _ in range(n - 1)),
        form=choose(0, 2),
        max_prompt=choose(1, longest),
        max_output=choose(1, longest),
        max_bytes=choose(1, largest_bytes),
    )


def make_arrivals(
    choose: Choose, limits: Limits, adapters: int, count: int, seconds_apart: bool
) -> tuple[Arrival, ...]:
    """Return requests in bursts; `seconds_apart`: of two adapters in turn, so that idle times repeat."""
    arrivals = []
    at_ns = 0
    bias = choose(0, 2)  # of predictions: none, too long, too short
    for i in range(count):
        if seconds_apart:
            at_ns += choose(1, 2) * 1000 * MS
        elif choose(0, 2):
            at_ns += choose(0, 60) * MS
        output = choose(1, 14) if bias < 2 else choose(1, 28)
        predicted = (0, output, choose(1, 14), choose(1, 30))[choose(0, 3)]
        if bias:
            predicted = output * choose(1, 5) if bias == 1 else choose(1, 2)
        adapter = 1 + i % min(2, adapters) if seconds_apart and choose(0, 7) else choose(0, adapters)
        prompt = choose(1, min(24, limits.max_model_len + 1) if choose(0, 1) else 4)
        arrivals.append(Arrival(at_ns, adapter, prompt, output, predicted))
    return tuple(arrivals)


@dataclass
class Replay:
    """The reference, the compiled engine beside it, and what happened."""

    world: PooledWorld
    reference: ReferencePooled
    state: State
    rows: dict[int, int] = field(default_factory=dict)
    """Rows of requests in flight."""
    events: Counter[str] = field(default_factory=Counter)
    now_ns: int = 0
    link_free_ns: int = 0
    loads: list[tuple[int, int]] = field(default_factory=list)
    """(end, adapter) of the loads in progress."""
    accepted: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    steps: int = 0


class Seen(NamedTuple):
    """One step of a replay, requests by number."""

    replay: Replay
    step: ReferenceStep
    output: ReferenceOutput


def replay(world: PooledWorld, max_steps: int = 5000) -> Iterator[Seen]:
    """Run a world to its end in both forms, and assert after every step that they agree; yields after it."""
    run = Replay(world, world.new_reference(), world.new_state())
    upcoming = 0
    refreshes = list(world.refreshes)
    for number in range(max_steps):
        while refreshes and refreshes[0][0] <= run.now_ns:
            _refresh(run, *refreshes.pop(0))
        while upcoming < len(world.arrivals) and world.arrivals[upcoming].at_ns <= run.now_ns:
            _submit(run, upcoming)
            upcoming += 1
        _complete_loads(run)
        step = _schedule(run)
        output = _commit(run)
        run.steps += 1
        run.finished += output.finished
        _abort(run, number)
        check_integrity(run.state, world.limits, world.num_blocks)
        yield Seen(run, step, output)
        if step.tokens:
            run.now_ns += world.step_ns[number % len(world.step_ns)]
            continue
        times = [end for end, _ in run.loads[:1]]
        times += [arrival.at_ns for arrival in world.arrivals[upcoming : upcoming + 1]]
        if not times:
            same("requests that starve", [*run.reference.running, *run.reference.waiting], [])
            return
        run.now_ns = max(run.now_ns, min(times))
    raise AssertionError("the world does not come to an end")


def last_of(world: PooledWorld) -> Replay:
    """Run a world as `replay` does; return its end."""
    for seen in replay(world):
        run = seen.replay
    return run


def _submit(run: Replay, number: int) -> None:
    arrival = run.world.arrivals[number]
    taken = run.reference.submit(number, *arrival[1:4], predicted=arrival.predicted, arrival_ns=arrival.at_ns)
    row = submit(run.state, run.world.limits, number, *arrival[1:4], 0, 0, arrival.predicted, arrival.at_ns)
    assert taken == (row != NONE) == run.world.takes(arrival)
    if taken:
        run.rows[number] = row
        run.accepted.append(number)


def _complete_loads(run: Replay) -> None:
    while run.loads and run.loads[0][0] <= run.now_ns:
        _, adapter = run.loads.pop(0)
        run.reference.adapter_loaded(adapter)
        adapter_loaded(run.state, adapter)


def _schedule(run: Replay) -> ReferenceStep:
    run.state.counters.now_ns = run.now_ns
    before = _cached(run.reference)
    step = run.reference.schedule(run.now_ns)
    total = schedule(run.state, run.world.limits)
    for adapter, _ in step.loads:
        run.link_free_ns = max(run.link_free_ns, run.now_ns) + run.world.cost_ns[adapter]
        run.loads.append((run.link_free_ns, adapter))
    assert total == sum(tokens for _, tokens in step.tokens), "tokens of the step"
    c, n_loads = run.state.counters, int(run.state.counters.n_loads)
    same("tokens", scheduled(run.state), step.tokens)
    same("admitted", _listed(run.state, "admitted"), step.admitted)
    same("preempted", _listed(run.state, "preempted"), step.preempted)
    same("loads", run.state.adapters.loads[:n_loads].tolist(), [adapter for adapter, _ in step.loads])
    same("prefetches", int(run.state.pooled.counts.n_prefetches), int(step.prefetch is not None))
    same("free blocks", int(c.free_blocks), step.free_blocks)
    compare(run.reference, run.state)
    if not step.preempted:
        _check_evictions(run.reference, before, step)
    _count_events(run, step)
    return step


class _Cached(NamedTuple):
    pinned: set[int]
    idle: set[int]
    wanted: set[int]


def _cached(reference: ReferencePooled) -> _Cached:
    pinned = reference.cache.pinned()
    wanted = {request.adapter for request in reference.waiting}
    return _Cached(pinned, reference.residents() - pinned, wanted)


def _check_evictions(reference: ReferencePooled, before: _Cached, step: ReferenceStep) -> None:
    """Assert that no adapter in use was evicted, and none that is wanted while another could go.

    Only adapters that were in the same state before and after the step count.
    """
    after = _cached(reference)
    reloaded = before.pinned & {adapter for adapter, _ in step.loads}
    same("evicted while in use", reloaded | (before.pinned - reference.residents()), set())
    if (
        reference.limits.cache != p.NO_CACHE
        and (before.idle - reference.residents()) & before.wanted & after.wanted
    ):
        adapters, now_ns = reference.cache.adapters, reference.now_ns
        spared = (before.idle & after.idle) - before.wanted - after.wanted
        same("kept although not wanted", {a for a in spared if adapters[a].protected_ns <= now_ns}, set())


def _commit(run: Replay) -> ReferenceOutput:
    output = run.reference.commit()
    commit(run.state, run.world.limits)
    same("first tokens", sorted(_listed(run.state, "first")), sorted(output.first))
    same("finished", sorted(_listed(run.state, "finished")), sorted(output.finished))
    for number in output.finished:
        del run.rows[number]
    return output


def _abort(run: Replay, step: int) -> None:
    for at, number in run.world.aborts:
        if at != step or number not in run.rows:
            continue
        row = run.rows.pop(number)
        if any(request.number == number for request in run.reference.running):
            finish(run.state, run.world.limits, row, False)
            run.events["aborts of running requests"] += 1
        else:
            cancel_waiting(run.state, run.world.limits, row)
        run.reference.abort(number)
        run.aborted.append(number)


def _listed(state: State, kind: str) -> list[int]:
    rows = state.lists[kind][: state.counters[f"n_{kind}"]]
    return [int(state.rows.request[row]) for row in rows]


def compare(reference: ReferencePooled, state: State) -> None:
    """Assert that a state holds what the reference computes by definition."""
    state = snapshot(state)
    pooled, c = state.pooled, state.counters
    running = running_rows(state)
    same("running", [int(state.rows.request[r]) for r in running], [r.number for r in reference.running])
    for row, request in zip(running, reference.running, strict=True):
        own = pooled.rows
        found = (own.predicted[row], own.charge[row], own.reserved[row], own.queue[row], own.squashed[row])
        expected = (request.predicted, request.charge, request.reserved, request.queue, request.squashed)
        same(f"request {request.number}", tuple(map(int, found)), tuple(map(int, expected)))
        if reference.limits.order == p.QUEUES:
            same(f"book of {request.number}", pooled.book[row, : len(request.book)].tolist(), request.book)
    booked = {int(a): pooled.adapter_book[a] for a in np.flatnonzero(pooled.adapter_book.any(axis=1))}
    books = {a: book[: len(reference.queues.quotas)].tolist() for a, book in booked.items()}
    same("books of adapters", books, reference.adapter_books)
    rows = [row for queue in range(int(pooled.counts.n_queues)) for row in queue_rows(state, queue)]
    waiting = [int(state.rows.request[row]) for row in rows]
    same("waiting", waiting, [request.number for request in reference.in_order()])
    absent = [r for r in running if state.rows.since[r] == NONE and state.rows.tokens[r] == 0]
    same("rows without tokens", int(c.n_absent), len(absent))
    same("number of waiting requests", int(c.n_waiting), len(waiting))
    cache = reference.cache
    same("residents", set(np.flatnonzero(state.adapters.resident).tolist()), cache.residents())
    same("users", state.adapters.users.tolist(), [adapter.users for adapter in cache.adapters])
    times = pooled.counts.decode_ns, pooled.counts.prefill_ns_per_token
    same("times of steps", times, (reference.decode_ns, reference.prefill_ns_per_token))
    counted = {name: getattr(pooled.counts, name) for name in COUNTERS}
    same("counters", counted, {name: reference.counts[name] for name in COUNTERS})


COUNTERS = (
    *("hits", "misses", "evictions", "useful_prefetches", "late_prefetches", "wasted_prefetches"),
    *("bypasses", "squashes", "overruns", "recomputes"),
)
"""Counters of both forms."""


EVENTS = (
    *(*COUNTERS, "evictions_of_wanted", "loans", "requests larger than their quota"),
    *("prefetches_by_histogram", "prompts in parts", "steps of prompts and decodes"),
    *("refreshes with running requests", "aborts of running requests", "steps with rows that wait"),
)
"""Events of a replay."""


def _count_events(run: Replay, step: ReferenceStep) -> None:
    reference, limits = run.reference, run.world.limits
    by_number = {request.number: request for request in reference.running}
    admitted = [by_number[number] for number in step.admitted if number in by_number]
    parts = [(by_number[number], tokens) for number, tokens in step.tokens]
    run.events["loans"] += sum(_is_loan(request) for request in admitted)
    run.events["requests larger than their quota"] += sum(
        limits.order == p.QUEUES
        and request.charge > reference.queues.quotas[request.queue]
        and not _is_loan(request)
        for request in admitted
    )
    run.events["prompts in parts"] += any(request.computed < request.known for request, _ in parts)
    decodes = sum(request.output > 0 and tokens == 1 for request, tokens in parts)
    run.events["steps of prompts and decodes"] += 0 < decodes < len(parts)
    waiting = any(not reference.cache.is_ready(request.adapter) for request in reference.running)
    run.events["steps with rows that wait"] += bool(step.tokens) and waiting


def _is_loan(request: PooledRequest) -> bool:
    return any(tokens > 0 for q, tokens in enumerate(request.book) if q != request.queue)


def events_of(run: Replay) -> Counter[str]:
    """Return how often each event occurred."""
    return run.events + run.reference.counts


def without_pressure(world: PooledWorld) -> PooledWorld:
    """Return the world with memory for everything at once."""
    return replace(world, num_blocks=10_000)
