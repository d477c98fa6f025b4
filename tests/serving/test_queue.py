import pytest
from hypothesis import given

from capplan.serving import NONE, Limits, State, commit, finish, new_state, schedule, submit
from capplan.testing import check_integrity
from capplan.testing._integrity import running_rows, waiting_rows
from tests.serving.worlds import World, play, scheduled, worlds

LIMITS = Limits(
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=64,
    max_loras=1,
    max_cpu_loras=4,
    block_size=4,
    watermark_blocks=0,
    long_prefill_tokens=0,
    reserve_full_sequence=0,
)


def engine(limits: Limits = LIMITS, blocks: int = 64) -> State:
    return new_state(16, 4, blocks, limits)


def step(state: State, limits: Limits = LIMITS) -> list[tuple[int, int]]:
    schedule(state, limits)
    tokens = scheduled(state)
    commit(state, limits)
    return tokens


def names(state: State, rows: list[int]) -> list[int]:
    return [int(state.rows.request[row]) for row in rows]


def test_a_lora_blocked_request_keeps_its_place_and_is_skipped() -> None:
    state = engine()
    for request, adapter in enumerate([1, 2, 1, 0, 2]):
        submit(state, LIMITS, request, adapter, 8, 3)
    step(state)
    assert names(state, running_rows(state)) == [
        0,
        2,
        3,
    ]  # adapter 1 holds the only slot; the base needs none
    assert names(state, waiting_rows(state)) == [1, 4]
    submit(state, LIMITS, 5, 3, 8, 3)
    step(state)
    step(state)  # the three that ran end here, and the slot is free
    step(state)
    assert names(state, running_rows(state)) == [1, 4]
    assert names(state, waiting_rows(state)) == [5]


def test_a_request_without_blocks_stops_the_scan() -> None:
    limits = LIMITS._replace(max_loras=4)
    state = engine(limits, blocks=5)
    for request, prompt in enumerate([12, 12, 4]):
        submit(state, limits, request, 1, prompt, 2)
    assert step(state, limits) == [(0, 12)]  # request 2 would fit, but stands behind request 1


def test_a_preempted_request_heads_the_queue() -> None:
    state = engine(blocks=4)
    for request in range(3):
        submit(state, LIMITS, request, 1, 8, 8)
    step(state)
    assert names(state, running_rows(state)) == [0, 1]
    step(state)  # both want a third block, and there is none
    assert state.counters.n_preempted == 1
    assert names(state, waiting_rows(state)) == [1, 2]
    check_integrity(state, LIMITS, 4)


def test_a_step_with_a_preemption_admits_no_request() -> None:
    state = engine(blocks=6)
    for request, prompt in enumerate([8, 12, 4]):
        submit(state, LIMITS, request, 1, prompt, 8)
    step(state)
    # The victim leaves three blocks free, of which request 0 takes one: two more than the next in line needs.
    assert step(state) == [(0, 1)]
    assert names(state, waiting_rows(state)) == [1, 2]


def test_the_request_admitted_last_is_preempted_first() -> None:
    state = engine(blocks=6)
    for request in range(3):
        submit(state, LIMITS, request, 0, 8, 8)
    step(state)
    assert step(state) == [(0, 1), (1, 1)]
    assert names(state, waiting_rows(state)) == [2]


def test_the_token_budget_goes_to_the_oldest() -> None:
    limits = LIMITS._replace(max_num_batched_tokens=5)
    state = engine(limits)
    for request in range(3):
        submit(state, limits, request, 0, 4, 8)
    assert step(state, limits) == [(0, 4), (1, 1)]
    assert step(state, limits) == [(0, 1), (1, 3), (2, 1)]
    assert step(state, limits) == [(0, 1), (1, 1), (2, 3)]


@pytest.mark.parametrize("prompt", [64, 65, 1000])
def test_a_prompt_without_room_for_a_token_is_refused(prompt: int) -> None:
    state = engine()
    assert submit(state, LIMITS, 0, 0, prompt, 1) == NONE
    assert submit(state, LIMITS, 1, 0, 63, 9) != NONE
    step(state)
    assert names(state, [int(row) for row in state.lists.finished[: state.counters.n_finished]]) == [1]


def test_a_full_table_refuses_requests() -> None:
    state = new_state(2, 1, 64, LIMITS)
    assert [submit(state, LIMITS, i, 0, 4, 4) != NONE for i in range(3)] == [True, True, False]


@pytest.mark.parametrize("after", [1, 2])
def test_a_request_can_be_ended_between_two_steps_in_prefill_and_in_decode(after: int) -> None:
    limits = LIMITS._replace(max_num_batched_tokens=6)
    state = engine(limits)
    submit(state, limits, 0, 1, 10, 9)
    submit(state, limits, 1, 2, 3, 2)
    for _ in range(after):
        step(state, limits)
    finish(state, limits, running_rows(state)[0])
    check_integrity(state, limits, 64)
    step(state, limits)
    check_integrity(state, limits, 64)
    assert names(state, running_rows(state)) == [1]


@given(worlds())
def test_running_requests_are_served_in_the_order_of_their_admission(world: World) -> None:
    admitted: list[int] = []
    for _, decision in play(world):
        admitted = [request for request in admitted if request not in decision.preempted]
        admitted += [request for request, _ in decision.tokens if request not in admitted]
        order = [request for request, _ in decision.tokens]
        assert order == [request for request in admitted if request in order]
        admitted = [request for request in admitted if request not in decision.finished]
