"""The adapter cache: victims, tiers, references, prefetches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from capplan.serving import State, adapter_loaded, commit, finish, schedule, submit
from capplan.serving.pooled import _state as p
from capplan.serving.state import LOADING
from capplan.testing import check_integrity
from tests.oracle.caches import ReferenceCache
from tests.serving.pooled_worlds import MS, Arrival, PooledWorld, last_of, make_pooled_world, replay
from tests.serving.test_chameleon_batch import world_of
from tests.serving.worlds import seeded


def brute_force(
    cache: ReferenceCache, now_ns: int, wanted: set[int], weights: tuple[float, float, float]
) -> dict[int, float]:
    """Return the scores of the adapters that may go, from arrays over all adapters."""
    adapters = cache.adapters
    pinned = np.array([a.users > 0 or a.loading for a in adapters])
    resident = np.array([a.resident for a in adapters])
    kept = np.array([i in wanted or now_ns < a.protected_ns for i, a in enumerate(adapters)])
    idle = resident & ~pinned
    left = max(0.0, 1 - (now_ns - cache.window_start_ns) / cache.limits.refresh_ns)
    uses = np.array([a.uses + a.uses_before * left for a in adapters])
    age = np.where(pinned, 0, now_ns - np.array([a.last_used_ns for a in adapters]))
    size = np.array([a.size_bytes for a in adapters])
    parts = (
        uses / (uses[resident].max(initial=0) or 1),
        1 - age / (age[resident].max(initial=0) or 1),
        size / (size[resident].max(initial=0) or 1),
    )
    scores = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    return {a: scores[a] for a in np.flatnonzero(idle & ~kept if (idle & ~kept).any() else idle)}


@pytest.mark.parametrize("policy", [p.SCORE, p.FAIRSHARE])
def test_victims_have_the_lowest_score_of_their_tier(policy: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core evicts what the reference does, whose victims are compared with a brute-force search."""
    weights = (0.45, 0.10, 0.45) if policy == p.SCORE else (1 / 3, 1 / 3, 1 / 3)
    evicted = 0
    evict = ReferenceCache.evict

    def checked(cache: ReferenceCache, now_ns: int, wanted: set[int], first_tier_only: bool = False) -> bool:
        nonlocal evicted
        scores = brute_force(cache, now_ns, wanted, weights)
        done = evict(cache, now_ns, wanted, first_tier_only)
        if done:
            assert scores[cache.victims[-1]] < min(scores.values()) + 1e-9
            evicted += 1
        return done

    monkeypatch.setattr(ReferenceCache, "evict", checked)
    for seed in range(12):
        last_of(replace(make_pooled_world(seeded(seed), cache=policy), weights=(0.45, 0.10, 0.45)))
    assert evicted > 25


COLUMNS = {
    "uses": (4, 1, 2),
    "last_used_ns": (20, 10, 30),
    "bytes": (100, 400, 100),
    "cost_ns": (100, 4000, 400),
}


NO_ARRIVAL = Arrival(0, 0, 1, 1, 1)


def full_cache(cache: int, **limits: int) -> tuple[PooledWorld, State]:
    """Return an engine whose memory is full of adapters 1 to 3 without users, 10 pages each.

    At 40 ns their shares of the largest use are 1, 1/4, 1/2; their recency is 1/3, 0, 2/3; their size 1/4, 1,
    1/4; uses times cost per byte 4, 10, 8.
    """
    world = world_of([], [100], [], num_blocks=34, cache=cache, **limits)
    world = replace(world, pages=(0, 10, 10, 10, 8), size_bytes=(0, 100, 400, 100, 100))
    world = replace(world, tokens=(0,) * 5, cost_ns=(0, 100, 4000, 400, 100))
    world = replace(
        world, limits=world.limits._replace(max_loras=4, max_cpu_loras=4), arrivals=(NO_ARRIVAL,) * 9
    )
    state = world.new_state()
    for name in ("uses", "last_used_ns"):
        state.pooled.adapters[name][1:4] = COLUMNS[name]
    state.adapters.resident[1:4] = 1
    state.counters.n_resident = 3
    state.counters.adapter_pages = 30
    state.counters.free_blocks = 4
    state.counters.now_ns = 40
    check_integrity(state, world.limits, world.num_blocks)
    return world, state


def residents(state: State) -> list[int]:
    return np.flatnonzero(state.adapters.resident).tolist()


@pytest.mark.parametrize(
    ("cache", "left"),
    [
        pytest.param(p.LRU, [1, 3, 4], id="lru: 20, 10, 30"),
        pytest.param(p.SCORE, [1, 2, 4], id="chameleon: .596, .5625, .404"),
        pytest.param(p.FAIRSHARE, [1, 3, 4], id="fairshare: .528, .417, .472"),
        pytest.param(p.GDSF, [2, 3, 4], id="gdsf: 4, 10, 8"),
    ],
)
def test_each_policy_evicts_its_lowest_score(cache: int, left: list[int]) -> None:
    world, state = full_cache(cache)
    submit(state, world.limits, 0, 4, 2, 1)
    schedule(state, world.limits)
    assert residents(state) == left
    check_integrity(state, world.limits, world.num_blocks)


def test_adapters_of_waiting_requests_go_last_and_those_in_use_never() -> None:
    world, state = full_cache(p.LRU, max_num_seqs=2)
    submit(state, world.limits, 0, 1, 1, 2)  # runs
    submit(state, world.limits, 1, 4, 1, 2)  # is loaded in place of 3
    submit(state, world.limits, 2, 2, 1, 2)  # waits
    schedule(state, world.limits)
    assert residents(state) == [1, 2, 4]
    commit(state, world.limits)
    check_integrity(state, world.limits, world.num_blocks)


def test_an_adapter_that_is_wanted_goes_if_nothing_else_can() -> None:
    world, state = full_cache(p.LRU, max_num_seqs=1)
    submit(state, world.limits, 0, 4, 10, 8)
    for number, adapter in enumerate((1, 2, 3), start=1):
        submit(state, world.limits, number, adapter, 1, 1)
    schedule(state, world.limits)
    assert residents(state) == [1, 3, 4]  # the least recently used of the wanted ones is gone


def test_without_a_cache_an_adapter_leaves_with_its_last_user() -> None:
    world = make_pooled_world(seeded(3), cache=p.NO_CACHE, prefetch=p.NO_PREFETCH)
    for seen in replay(world):
        in_use = seen.replay.reference.adapters_in_use()
        assert in_use <= seen.replay.reference.residents()
        loading = np.flatnonzero(seen.replay.state.adapters.claim == LOADING).tolist()
        assert seen.replay.reference.residents() <= in_use | set(loading)


def test_the_first_absent_adapter_of_the_queue_is_loaded_ahead_one_at_a_time() -> None:
    arrivals = [Arrival(0, 0, 4, 9, 9), Arrival(0, 2, 4, 3, 3), Arrival(0, 1, 4, 3, 3)]
    world = world_of(arrivals, [100], [], max_num_seqs=1, prefetch=p.BY_QUEUE)
    seen = list(replay(replace(world, cost_ns=(0, 15 * MS, 15 * MS, 0))))
    assert [each.step.prefetch for each in seen[:4]] == [2, None, 1, None]
    counts = seen[-1].replay.reference.counts
    assert (counts["hits"], counts["misses"], counts["useful_prefetches"]) == (2, 0, 2)


def test_a_prefetch_evicts_no_adapter_that_a_waiting_request_wants() -> None:
    world, state = full_cache(p.LRU, max_num_seqs=1, prefetch=p.BY_QUEUE)
    submit(state, world.limits, 0, 0, 2, 2)
    for number, adapter in enumerate((1, 2, 3, 4), start=1):
        submit(state, world.limits, number, adapter, 1, 1)
    schedule(state, world.limits)
    assert residents(state) == [1, 2, 3]
    assert state.pooled.counts.n_prefetches == 0


def test_regular_idle_times_load_an_adapter_before_its_next_request() -> None:
    """Requests of adapter 1 come every 5.5 s, others 5.2 s after them; without a cache it is gone by then."""
    regular = [Arrival(i * 5500 * MS, 1, 2, 1, 1) for i in range(14)]
    others = [Arrival(i * 5500 * MS + 5200 * MS, 0, 2, 1, 1) for i in range(13)]
    world = world_of(sorted(regular + others), [100], [], cache=p.NO_CACHE, prefetch=p.BY_HISTOGRAM)
    seen = list(replay(world))
    counts = seen[-1].replay.reference.counts
    assert counts["prefetches_by_histogram"] == counts["useful_prefetches"] == 3
    assert counts["misses"] == 11


def test_a_load_whose_request_was_cancelled_leaves_an_idle_adapter() -> None:
    world, state = full_cache(p.LRU)
    row = submit(state, world.limits, 0, 4, 2, 1)
    schedule(state, world.limits)
    commit(state, world.limits)
    finish(state, world.limits, row)
    check_integrity(state, world.limits, world.num_blocks)
    adapter_loaded(state, 4)
    check_integrity(state, world.limits, world.num_blocks)
    assert 4 in residents(state)
