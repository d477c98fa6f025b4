from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from capplan.serving import Limits, State, new_state
from capplan.serving.vllm import release_adapter
from capplan.serving.vllm._adapter_slots import acquire_adapter

ADAPTERS = 6


def limits(max_loras: int, max_cpu_loras: int) -> Limits:
    return Limits(8, 64, 64, max_loras, max_cpu_loras, 4, 0, 0, 0)


def engine(max_loras: int, max_cpu_loras: int) -> tuple[State, Limits]:
    bounds = limits(max_loras, max_cpu_loras)
    return new_state(8, ADAPTERS, 64, bounds), bounds


def use(state: State, bounds: Limits, adapter: int) -> list[tuple[int, bool]]:
    """Run a request of this adapter to its end; return the loads that it took."""
    state.counters.n_loads = 0
    acquire_adapter(state, bounds, adapter)
    release_adapter(state, adapter)
    n = int(state.counters.n_loads)
    return [(int(state.adapters.loads[i]), bool(state.adapters.load_from_disk[i])) for i in range(n)]


def resident(state: State) -> set[int]:
    return {a for a in range(ADAPTERS + 1) if state.adapters.resident[a]}


def on_host(state: State) -> set[int]:
    return {a for a in range(ADAPTERS + 1) if state.adapters.on_host[a]}


def test_the_host_starts_with_the_adapters_named_last() -> None:
    state, _ = engine(2, 4)
    assert on_host(state) == {3, 4, 5, 6}
    assert resident(state) == set()


def test_the_least_recently_used_adapter_is_evicted() -> None:
    state, bounds = engine(2, ADAPTERS)
    for adapter in (1, 2, 1, 3):
        use(state, bounds, adapter)
    assert resident(state) == {1, 3}
    assert use(state, bounds, 1) == []
    assert use(state, bounds, 2) == [(2, False)]
    assert resident(state) == {1, 2}


def test_an_adapter_that_leaves_the_host_loses_its_slot() -> None:
    state, bounds = engine(2, 2)
    use(state, bounds, 5)
    use(state, bounds, 6)
    assert use(state, bounds, 1) == [(1, True)]
    assert on_host(state) == {6, 1}
    assert resident(state) == {6, 1}
    # The host's victim is 6, whose slot is thereby free: the copy of 1 stays.
    assert use(state, bounds, 2) == [(2, True)]
    assert resident(state) == {1, 2}


def test_several_users_share_one_copy() -> None:
    state, bounds = engine(1, 1)
    acquire_adapter(state, bounds, 6)
    acquire_adapter(state, bounds, 6)
    release_adapter(state, 6)
    assert state.counters.n_active == 1
    release_adapter(state, 6)
    assert state.counters.n_active == 0
    assert state.counters.n_loads == 1


@given(st.integers(1, 4), st.integers(0, 4), st.lists(st.integers(0, ADAPTERS), max_size=60))
def test_slots_and_host_stay_bounded_and_active_adapters_resident(
    slots: int, spare: int, touches: list[int]
) -> None:
    state, bounds = engine(slots, slots + spare)
    active: Counter[int] = Counter()
    for adapter in touches:
        # A second mention ends what the first began; a new adapter waits until a slot can be had.
        if active[adapter]:
            release_adapter(state, adapter)
            del active[adapter]
        elif adapter == 0 or len(set(active) - {0}) < slots:
            state.counters.n_loads = 0
            acquire_adapter(state, bounds, adapter)
            active[adapter] += 1
        in_use = set(active) - {0}
        assert in_use <= resident(state) <= on_host(state)
        assert len(resident(state)) == state.counters.n_resident <= bounds.max_loras
        assert len(on_host(state)) == state.counters.n_on_host <= bounds.max_cpu_loras
