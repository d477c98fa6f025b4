"""Stored adapters and transfers: order on the links, faults, removal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import InputError
from capplan.twin.cluster import Crash, Faults, TransferLink
from capplan.twin.cluster._rebalancing import LOCATION, AdapterStorage

LINK = TransferLink(latency_s=0.0, bytes_per_s=1e9, location_latency_s=0.0, location_bytes_per_s=1e8)
"""1 ns per byte between instances, 10 ns from the location."""
SIZES = np.array([0, 100, 100, 300])


def storage(*rows: tuple[int, int, int], failure: float = 0.0) -> AdapterStorage:
    """Return instances that store these of three adapters."""
    return AdapterStorage(np.array([(1, *row) for row in rows], np.int8), SIZES, LINK, failure)


def ends(store: AdapterStorage) -> list[tuple[int, int, int]]:
    """End all transfers; return their times, adapters and receivers."""
    found = []
    while store.under_way:
        found.append((store.next_ns, *store.first))
        store.end_first()
    return found


def test_requests_for_an_adapter_share_one_transfer() -> None:
    store = storage((1, 0, 0), (0, 1, 1))
    for request in (7, 8, 9):
        store.fetch(1, 1, request, 5)
    assert len(store.under_way) == 1
    assert store.next_ns == 105
    assert store.end_first() == [7, 8, 9]
    assert store.stored[1, 1] == 1


def test_a_link_carries_one_transfer_at_a_time_in_each_direction() -> None:
    store = storage((1, 1, 1), (0, 0, 0), (0, 0, 0))
    store.fetch(1, 1, 0, 0)
    store.fetch(2, 1, 1, 0)  # one sender, one receiver
    store.fetch(3, 2, 2, 0)  # the sender is busy until 200
    assert ends(store) == [(100, 1, 1), (200, 2, 1), (500, 3, 2)]


def test_the_holder_that_ends_first_sends() -> None:
    store = storage((1, 1, 0), (1, 0, 1), (0, 0, 0), (0, 0, 0))
    store.fetch(2, 2, 0, 0)  # from 0
    store.fetch(1, 3, 1, 0)  # 0 is busy
    assert [each.source for each in store.under_way] == [0, 1]
    assert ends(store) == [(100, 2, 2), (100, 1, 3)]


def test_a_failed_transfer_is_tried_at_the_next_holder_then_at_the_location() -> None:
    store = storage((1, 1, 1), (1, 0, 0), (0, 0, 0), failure=1.0)
    store.fetch(1, 2, 4, 0)
    assert store.end_first() == []
    assert store.stored[2, 1] == 0
    assert store.end_first() == []
    assert store.end_first() == [4]
    sources = [event.source for event in store.events if event.kind == "start"]
    assert sources == [0, 1, LOCATION]
    assert store.events[-1].at_ns == 100 + 100 + 1000


def test_a_crash_of_the_source_goes_on_with_another_holder() -> None:
    store = storage((1, 1, 1), (1, 0, 0), (0, 0, 0))
    store.fetch(1, 2, 4, 0)
    store.take_down(0, 60)
    assert (store.under_way[0].source, store.next_ns) == (1, 200), "the receiver's link is taken until 100"
    assert store.end_first() == [4]
    assert store.stored[0, 1] == 1


def test_a_crash_of_the_receiver_returns_its_requests() -> None:
    store = storage((1, 1, 1), (0, 0, 0))
    store.fetch(1, 1, 4, 0)
    store.fetch(2, 1, 3, 0)
    store.take_down(1, 60)
    assert store.under_way == []
    assert store.waiting == {}


def test_without_a_holder_that_is_up_the_location_sends() -> None:
    store = storage((1, 1, 1), (0, 0, 0))
    store.take_down(0, 0)
    store.fetch(1, 1, 4, 0)
    assert (store.under_way[0].source, store.next_ns) == (LOCATION, 1000)


def test_unused_copies_go_but_for_the_last_of_instances_that_are_up() -> None:
    store = storage((1, 1, 1), (1, 1, 0), (1, 0, 0))
    store.take_down(1, 0)
    nothing = np.zeros(store.stored.shape, np.bool_)
    store.remove_unused(nothing, 9)
    assert store.stored[:, 1:].tolist() == [[0, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert [(event.kind, event.adapter, event.instance) for event in store.events] == [("removed", 1, 0)]


def test_a_copy_that_is_read_or_used_stays() -> None:
    store = storage((1, 1, 0), (1, 1, 0), (0, 0, 1))
    used = np.zeros(store.stored.shape, np.bool_)
    used[0, 1] = True
    store.fetch(2, 2, 4, 0)  # from instance 0
    store.remove_unused(used, 9)
    assert store.stored[:2, 1:].tolist() == [[1, 1, 0], [0, 0, 0]]


@given(st.integers(1, 10**12), st.floats(0.0, 1.0), st.floats(1e3, 1e12))
def test_a_transfer_takes_latency_and_bytes_over_bandwidth(size: int, latency_s: float, rate: float) -> None:
    link = TransferLink(latency_s, rate, 2 * latency_s, rate / 2)
    assert link.duration_ns(size, 0) == pytest.approx((latency_s + size / rate) * 1e9, abs=1)
    assert link.duration_ns(size, LOCATION) == pytest.approx(2 * (latency_s + size / rate) * 1e9, abs=1)


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(InputError, match="bytes_per_s"):
        TransferLink(bytes_per_s=0.0)
    with pytest.raises(InputError, match="crash"):
        Crash(0, -1.0, 1.0)
    with pytest.raises(InputError, match="transfer_failure"):
        Faults(transfer_failure=1.5)
