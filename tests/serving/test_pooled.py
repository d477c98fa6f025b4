"""The rules for one pool: the core decides as the reference does, and what always holds."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from capplan.serving import State
from capplan.serving.pooled import QUEUES, SJF
from capplan.serving.pooled._state import FIFO
from capplan.testing import check_integrity
from capplan.testing._integrity import running_rows
from tests.oracle.admission import QueueAdmission
from tests.oracle.caches import ReferenceCache
from tests.oracle.pooled import ReferencePooled
from tests.serving.pooled_worlds import (
    EVENTS,
    MS,
    Arrival,
    PooledWorld,
    Replay,
    events_of,
    last_of,
    make_pooled_world,
    replay,
)
from tests.serving.test_chameleon_batch import world_of
from tests.serving.worlds import seeded

pytestmark = pytest.mark.long

SEEDS = range(120)


def replay_all() -> list[Replay]:
    return [last_of(make_pooled_world(seeded(seed))) for seed in SEEDS]


@pytest.fixture(scope="module")
def replays() -> list[Replay]:
    """Return the ends of replays of random worlds, in which core and reference agreed after every step."""
    return replay_all()


def test_the_core_decides_as_the_reference_does(replays: list[Replay]) -> None:
    """Every rule takes part: each event occurs in some of the worlds."""
    events = sum((events_of(run) for run in replays), Counter())
    assert [name for name in EVENTS if events[name] < 3] == []


@pytest.mark.parametrize(
    ("owner", "rule"),
    [
        pytest.param(ReferencePooled, "_grow_reservations", id="growth"),
        pytest.param(QueueAdmission, "_bypass", id="bypass"),
        pytest.param(ReferenceCache, "rotate_uses", id="uses in windows"),
        pytest.param(ReferenceCache, "note_arrival", id="idle times"),
    ],
)
def test_the_comparison_detects_a_missing_rule(
    owner: type, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, rule, lambda *_: None)
    with pytest.raises(AssertionError):
        replay_all()


def test_every_accepted_request_ends_exactly_once(replays: list[Replay]) -> None:
    for run in replays:
        assert sorted(run.finished + run.aborted) == run.accepted


def test_an_engine_without_requests_has_all_its_tokens_and_blocks(replays: list[Replay]) -> None:
    for run in replays:
        assert not run.state.pooled.queues.outstanding.any()
        assert run.state.pooled.counts.reserved == 0
        resident = run.state.adapters.pages[run.state.adapters.resident == 1].sum()
        assert run.state.counters.free_blocks == run.world.num_blocks - resident


@pytest.mark.parametrize("chunked", [0, 1])
def test_a_prompt_takes_the_blocks_of_the_last_decoding_request(chunked: int) -> None:
    """Request 1 outgrows its prediction while the adapter of request 0 is loaded, and fills the memory."""
    arrivals = [Arrival(0, 3, 3, 1, 1), Arrival(0, 0, 4, 12, 1)]
    world = world_of(arrivals, [200], [], num_blocks=20, chunked=chunked)
    seen = list(replay(replace(world, cost_ns=(0, 0, 0, 65 * MS))))
    full = next(each.step for each in seen if each.step.preempted)
    assert (full.preempted, full.tokens) == ([1], [(0, 3)])
    assert seen[-1].replay.finished == [0, 1]


@pytest.mark.parametrize("order", [FIFO, SJF])
def test_the_look_ahead_leaves_memory_for_rows_that_start_late(order: int) -> None:
    """In the order of arrival or of outputs no row outgrows the memory, however late its adapter comes."""
    waited = 0
    for seed in SEEDS:
        for seen in replay(make_pooled_world(seeded(seed), order=order)):
            assert seen.step.preempted == []
            waited += seen.replay.state.pooled.counts.n_late > 0
    assert waited > 100


def test_a_row_that_waits_for_its_adapter_counts_in_full() -> None:
    """Request 1 would end before request 0 if it started now; later, it holds memory after that end."""
    arrivals = [Arrival(0, 0, 2, 9, 9), Arrival(0, 1, 2, 4, 4), Arrival(0, 0, 1, 5, 5)]
    world = world_of(arrivals, [200], [], num_blocks=20, order=FIFO)
    together = [
        next(
            step
            for step, seen in enumerate(replay(replace(world, cost_ns=(0, load_ns, 0, 0))))
            if 2 in seen.step.admitted
        )
        for load_ns in (0, 500 * MS)
    ]
    assert together[0] < together[1]


def _states_with_bypassers() -> Iterator[tuple[PooledWorld, State]]:
    for seed in SEEDS:
        world = make_pooled_world(seeded(seed), order=QUEUES, bypass=1)
        for seen in replay(world):
            if seen.replay.state.pooled.counts.n_bypassers > 0:
                yield world, seen.replay.state


def _first_outgrows(state: State) -> bool:
    """Return whether the first running row decodes and will generate more than predicted."""
    first = running_rows(state)[0]
    return bool(state.pooled.outgrow.items.position[first] > 0)


def test_the_counted_state_is_checked() -> None:
    world, state = next(found for found in _states_with_bypassers() if _first_outgrows(found[1]))
    check_integrity(state, world.limits, world.num_blocks)
    for records, names in (
        (state.counters, ("n_active", "n_claimed", "n_resident", "adapter_pages", "n_waiting")),
        (state.pooled.counts, ("reserved", "pinned_pages", "n_loading", "n_bypassers")),
        (state.pooled.queues[0], ("n", "running", "outstanding", "head")),
        (state.pooled.rows[running_rows(state)[0]], ("charge", "reserved", "predicted")),
    ):
        for name in names:
            records[name] += 1
            with pytest.raises(AssertionError):
                check_integrity(state, world.limits, world.num_blocks)
            records[name] -= 1
    check_integrity(state, world.limits, world.num_blocks)
