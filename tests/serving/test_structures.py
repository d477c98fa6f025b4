import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from capplan.serving import heap_push, heap_remove, links_append, links_remove, new_heap, new_links
from capplan.serving._structures import links_first

CAPACITY = 12
# Each number says what to do with one member: add it where it is missing, take it out where it is there.
touches = st.lists(st.integers(0, CAPACITY - 1), max_size=80)


@given(st.lists(st.integers(-(2**62), 2**62), unique=True, max_size=60))
def test_a_heap_returns_its_members_sorted_by_key(keys: list[int]) -> None:
    heap = new_heap(max(1, len(keys)))
    for member, key in enumerate(keys):
        heap_push(heap, member, key)
    out = []
    while heap.size[0] > 0:
        first = int(heap.items.ids[0])
        out.append(int(heap.items.key[first]))
        heap_remove(heap, first)
    assert out == sorted(keys)


@given(touches, st.randoms(use_true_random=False))
def test_a_heap_keeps_the_smallest_first_after_removals(touches: list[int], random: object) -> None:
    heap, kept = new_heap(CAPACITY), {}
    for number, member in enumerate(touches):
        if member in kept:
            heap_remove(heap, member)
            del kept[member]
        else:
            kept[member] = random.randrange(1000) * 1000 + number  # type: ignore[attr-defined]
            heap_push(heap, member, kept[member])
        assert {int(i) for i in heap.items.ids[: heap.size[0]]} == set(kept)
        assert {int(i) for i in np.flatnonzero(heap.items.position > 0)} == set(kept)
        if kept:
            assert int(heap.items.ids[0]) == min(kept, key=kept.__getitem__)


@given(touches)
def test_links_keep_the_order_of_arrival_after_removals(touches: list[int]) -> None:
    links, kept = new_links(CAPACITY), []
    for member in touches:
        if member in kept:
            links_remove(links, member)
            kept.remove(member)
        else:
            links_append(links, member)
            kept.append(member)
        assert links_first(links) == (kept[0] if kept else -1)
    out = []
    while links_first(links) != -1:
        out.append(links_first(links))
        links_remove(links, out[-1])
    assert out == kept
