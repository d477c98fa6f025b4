"""Copies over the link from host memory: order, priority, sharing, and shards of tensor parallelism."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import simulate
from capplan._jit import jit
from capplan.spec import Trace
from capplan.twin.cluster import Instance, simulate_cluster
from capplan.twin.cluster._scenario import build_cluster
from capplan.twin.instance._clock import (
    HostLink,
    copy_ahead,
    copy_on_demand,
    new_link,
    prefetched_ns,
    promote,
)
from tests.oracle.host_link import Prefetch, ReferenceLink
from tests.twin.cluster.workloads import PROFILE, even

INSTANCES = 3
LOAD, AHEAD, NEED, LOOK = range(4)


@jit
def replay(link: HostLink, calls: np.ndarray, ends_ns: np.ndarray) -> None:
    """Make the calls (kind, place, time, duration), and record the end of each one's copy."""
    for i in range(calls.shape[0]):
        kind, place, now_ns, copy_ns = calls[i, 0], calls[i, 1], calls[i, 2], calls[i, 3]
        if kind == LOAD:
            ends_ns[i] = copy_on_demand(link, now_ns, copy_ns)
        elif kind == AHEAD:
            copy_ahead(link, place, now_ns, copy_ns)
            ends_ns[i] = prefetched_ns(link, place)
        elif kind == NEED:
            ends_ns[i] = promote(link, place, now_ns)
        else:
            ends_ns[i] = prefetched_ns(link, place)


@st.composite
def calls(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Return calls in the order of time; no instance has two prefetches at once."""
    link, ahead, now_ns, made = ReferenceLink(), dict[int, Prefetch](), 0, []
    for _ in range(draw(st.integers(1, 30))):
        now_ns += draw(st.integers(0, 4))
        kind, place = draw(st.integers(LOAD, LOOK)), draw(st.integers(0, INSTANCES - 1))
        copy_ns = draw(st.integers(1, 6))
        if kind == AHEAD:
            if place in ahead and link.expected_ns(ahead[place]) > now_ns:
                continue
            ahead[place] = link.prefetch(place, now_ns, copy_ns)
        elif kind == LOAD:
            link.load(now_ns, copy_ns)
        elif place not in ahead:
            continue
        elif kind == NEED:
            link.promote(ahead[place], now_ns)
        made.append((kind, place, now_ns, copy_ns))
    return made


@given(calls())
def test_the_compiled_link_copies_as_the_reference(made) -> None:
    link, ahead, expected = ReferenceLink(), dict[int, Prefetch](), []
    for kind, place, now_ns, copy_ns in made:
        if kind == LOAD:
            expected.append(link.load(now_ns, copy_ns))
            continue
        if kind == AHEAD:
            ahead[place] = link.prefetch(place, now_ns, copy_ns)
        elif kind == NEED:
            link.promote(ahead[place], now_ns)
        expected.append(link.expected_ns(ahead[place]))
    compiled, ends_ns = new_link(INSTANCES), np.zeros(len(made), np.int64)
    replay(compiled, np.array(made, np.int64).reshape(-1, 4), ends_ns)
    assert ends_ns.tolist() == expected
    assert compiled.at.busy_ns == link.busy_ns
    assert compiled.at.free_ns == link.free_ns


def test_a_load_on_demand_overtakes_a_prefetch_that_has_not_begun() -> None:
    link = ReferenceLink()
    assert link.load(0, 10) == 10
    waiting = link.prefetch(place=1, now_ns=2, copy_ns=5)
    assert link.expected_ns(waiting) == 15
    assert link.load(4, 10) == 20
    assert link.expected_ns(waiting) == 25
    begun = link.load(21, 10)
    assert (link.expected_ns(waiting), begun) == (25, 35)


def cold_requests_s(gpus_per_link: int) -> tuple[float, float, float]:
    """Return the TTFT of two requests at once at two engines without their adapters, and a load's seconds."""
    trace = Trace.from_arrays([0.0, 0.0], ["a0", "a1"], [64, 64], [4, 4], duration_s=60.0)
    workload = even(2, 1.0).model_copy(update={"trace": trace})
    engines = [
        Instance(PROFILE, a_max=1, s_max=8, adapters={name: 1.0}, rules="capplan") for name in ("a0", "a1")
    ]
    result = simulate_cluster(workload, engines, duration_s=60.0, gpus_per_link=gpus_per_link)
    load_ns = build_cluster(workload, engines, 60.0, 0).engines[0].costs.load_ns[1]
    return *result.requests.ttft_s.tolist(), load_ns / 1e9


def test_instances_of_one_link_wait_for_each_other_s_copies() -> None:
    alone_s, other_s, load_s = cold_requests_s(gpus_per_link=1)
    first_s, second_s, _ = cold_requests_s(gpus_per_link=2)
    assert alone_s == other_s == first_s
    assert second_s == pytest.approx(first_s + load_s, abs=1e-9)


def test_shards_for_gpus_of_one_link_are_copied_one_after_the_other() -> None:
    sharded = PROFILE.model_copy(update={"tp": 4})
    settings = {"a_max": 2, "s_max": 8, "duration_s": 120.0}
    one, shared, all_shared = (
        simulate(even(8, 0.5), sharded, gpus_per_link=gpus, **settings) for gpus in (1, 2, 8)
    )
    per_load = [run.load_s / run.adapter_loads for run in (one, shared, all_shared)]
    assert per_load[1] == pytest.approx(2 * per_load[0], rel=0.05)
    assert per_load[2] == pytest.approx(4 * per_load[0], rel=0.05)


def test_gpus_fill_one_link_after_the_other() -> None:
    engines = [Instance(PROFILE.model_copy(update={"tp": tp}), a_max=1, s_max=8) for tp in (1, 1, 4, 2, 1, 1)]
    cluster = build_cluster(even(2, 1.0), engines, 60.0, 0, gpus_per_link=2)
    assert cluster.link.tolist() == [0, 0, 1, 2, 3, 3]
