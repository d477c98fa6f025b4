"""Refresh of queues: what becomes of waiting and running requests, quotas, and windows with few requests."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.serving import Limits, State, adapter_loaded, commit, new_state, schedule, submit
from capplan.serving.pooled import QUEUES, RequestSample, refresh
from capplan.serving.pooled._queue_design import classify, request_sizes
from capplan.serving.pooled._refresh import LEAST_REQUESTS
from capplan.serving.state import POOLED
from capplan.spec import QueueConfig, Scheduler, Wrs
from capplan.testing._integrity import running_rows
from tests.serving.pooled_worlds import queue_rows

NS_PER_S = 10**9
PERIOD_NS = 300 * NS_PER_S
RANKS = np.array([8, 32, 128])
CHAMELEON = Scheduler(policy="chameleon")


def engine(blocks: int = 4000, **switches: int) -> tuple[State, Limits]:
    """Return an idle engine with adapters of three ranks, resident pages included in the pool."""
    settings: dict[str, int] = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "max_model_len": 8192,
        "max_loras": RANKS.size,
        "max_cpu_loras": RANKS.size,
        "block_size": 16,
        "watermark_blocks": 0,
        "long_prefill_tokens": 0,
        "reserve_full_sequence": 0,
    }
    limits = Limits(**settings, policy=POOLED, order=QUEUES, load_beside=1, **switches)
    state = new_state(20_000, RANKS.size, blocks, limits)
    state.pooled.adapters.bytes[:] = np.append(RANKS.min(), RANKS) * 1000
    state.pooled.adapters.tokens[:] = np.append(0, RANKS) * 4
    state.adapters.pages[:] = np.append(0, RANKS) // 4
    return state, limits


def fill(state: State, limits: Limits, requests: int, seed: int, until_ns: int) -> None:
    """Submit requests evenly up to a time, with a step after every third."""
    random = np.random.default_rng(seed)
    is_long = random.random(requests) < 0.4
    prompt = np.where(is_long, 900, 60) + random.integers(0, 60, requests)
    output = np.where(is_long, 200, 20) + random.integers(0, 20, requests)
    adapter = random.integers(0, RANKS.size + 1, requests)
    arrival_ns = np.linspace(until_ns - PERIOD_NS, until_ns - 1, requests).astype(np.int64)
    for number in range(requests):
        at_ns = int(arrival_ns[number])
        lengths = int(prompt[number]), int(output[number])
        submit(state, limits, number, int(adapter[number]), *lengths, 0, 0, 0, at_ns)
        if number % 3 == 0:
            step(state, limits, at_ns)


def step(state: State, limits: Limits, now_ns: int) -> None:
    """Decide and apply one step; loads end at once."""
    state.counters.now_ns = now_ns
    schedule(state, limits)
    loads = state.adapters.loads[: state.counters.n_loads].tolist()
    commit(state, limits)
    for adapter in loads:
        adapter_loaded(state, adapter)


def waiting(state: State) -> list[list[int]]:
    return [queue_rows(state, queue) for queue in range(int(state.pooled.counts.n_queues))]


def expected_queues(state: State, rows: list[int]) -> np.ndarray:
    """Return the queue of rows by their sizes, computed with the maths of the design."""
    w, pooled = state.pooled.wrs, state.pooled
    wrs = Wrs(
        form="degree2",
        a=float(w.a),
        b=float(w.b),
        max_prompt_tokens=int(w.max_prompt),
        max_output_tokens=int(w.max_output),
        max_adapter_bytes=int(w.max_bytes),
    )
    sample = RequestSample(
        state.rows.prompt[rows],
        pooled.rows.predicted[rows],
        state.rows.adapter[rows],
        np.ones(len(rows)),
        pooled.adapters.bytes,
        pooled.adapters.tokens,
    )
    return classify(request_sizes(wrs, sample), pooled.cuts[: pooled.counts.n_queues - 1])


@given(st.integers(0, 10**6), st.integers(900, 1200), st.integers(400, 4000))
def test_a_refresh_moves_every_request_to_the_queue_of_its_size(
    seed: int, requests: int, blocks: int
) -> None:
    state, limits = engine(blocks)
    fill(state, limits, requests, seed, PERIOD_NS)
    before = {row for queue in waiting(state) for row in queue}
    total = int(state.pooled.queues.quota.sum())
    refresh(state, limits, CHAMELEON, PERIOD_NS)
    pooled = state.pooled
    assert pooled.counts.refreshes == 1
    assert pooled.counts.n_queues > 1
    assert pooled.queues.quota.sum() == total
    queues = waiting(state)
    assert {row for queue in queues for row in queue} == before
    for number, rows in enumerate(queues):
        arrivals = pooled.rows.arrival[rows].tolist()
        assert arrivals == sorted(arrivals)
        assert set(expected_queues(state, rows)) <= {number}
        assert pooled.queues.n[number] == len(rows)
    rows = running_rows(state)
    own = expected_queues(state, rows)
    charges = pooled.rows.charge[rows]
    book = np.zeros((len(rows), 4), np.int64)
    book[np.arange(len(rows)), own] = charges
    assert np.array_equal(pooled.book[rows], book)
    assert np.array_equal(pooled.queues.outstanding, book.sum(axis=0))
    assert np.array_equal(pooled.queues.running, np.bincount(own, minlength=4))


def snapshot(state: State) -> list[Any]:
    pooled = state.pooled
    arrays = (pooled.queues, pooled.cuts, pooled.book, pooled.rows, pooled.wrs)
    return [np.array(each).tobytes() for each in arrays]


@pytest.mark.parametrize("requests", [0, LEAST_REQUESTS - 1])
def test_too_few_requests_keep_the_queues_as_they_are(requests: int) -> None:
    state, limits = engine()
    fill(state, limits, 900, 1, PERIOD_NS)
    refresh(state, limits, CHAMELEON, PERIOD_NS)
    fill(state, limits, requests, 2, 2 * PERIOD_NS)
    before = snapshot(state)
    refresh(state, limits, CHAMELEON, 2 * PERIOD_NS)
    assert snapshot(state) == before
    assert (state.pooled.counts.refreshes, state.pooled.counts.kept_queues) == (1, 1)


def test_a_thin_queue_keeps_the_queues_as_they_are() -> None:
    state, limits = engine()
    for number in range(400):
        length = 4000 if number % 40 == 0 else 50
        submit(state, limits, number, 1, length, 20, 0, 0, 0, 1 + number)
        step(state, limits, 1 + number)
    before = snapshot(state)
    refresh(state, limits, CHAMELEON, PERIOD_NS)
    assert snapshot(state) == before
    assert state.pooled.counts.kept_queues == 1


@pytest.mark.parametrize("execution_ns", [-1, 0])
def test_executions_of_no_known_length_keep_the_queues_as_they_are(execution_ns: int) -> None:
    """Requests of one token end within the step of their admission."""
    state, limits = engine()
    fill(state, limits, 400, seed=0, until_ns=PERIOD_NS)
    state.pooled.window.execution_ns[:] = execution_ns
    refresh(state, limits, CHAMELEON, PERIOD_NS)
    assert (state.pooled.counts.refreshes, state.pooled.counts.kept_queues) == (0, 1)


def test_requests_of_other_windows_do_not_count() -> None:
    """Those that arrive after the time of the refresh belong to the next one."""
    state, limits = engine()
    fill(state, limits, 900, 3, 2 * PERIOD_NS)
    refresh(state, limits, CHAMELEON, PERIOD_NS)
    assert state.pooled.counts.kept_queues == 1
    refresh(state, limits, CHAMELEON, 2 * PERIOD_NS)
    assert state.pooled.counts.refreshes == 1
    refresh(state, limits, CHAMELEON, 3 * PERIOD_NS)
    assert (state.pooled.counts.refreshes, state.pooled.counts.kept_queues) == (1, 2)


def test_one_refresh_stands_for_those_of_an_idle_time() -> None:
    """The engine does the first after its last requests, and the last."""
    ends = []
    for periods in (range(1, 7), (1, 6)):
        state, limits = engine()
        fill(state, limits, 900, 8, PERIOD_NS)
        for period in periods:
            refresh(state, limits, CHAMELEON, period * PERIOD_NS)
        ends.append([*snapshot(state), state.pooled.adapters.tobytes(), state.pooled.counts.window_start_ns])
    assert ends[0] == ends[1]


def test_minima_beyond_the_pool_are_scaled_down_and_counted() -> None:
    state, limits = engine(blocks=250)
    fill(state, limits, 800, 4, PERIOD_NS)
    state.pooled.window.execution_ns[:800] = 60 * NS_PER_S
    refresh(state, limits, CHAMELEON, PERIOD_NS)
    quotas = state.pooled.queues.quota
    assert state.pooled.counts.scaled_quotas == 1
    assert quotas.sum() == 250 * 16
    queues = expected_queues(state, list(range(800)))
    assert all(quotas[queue] > 0 for queue in np.unique(queues))


def test_static_queues_are_made_once() -> None:
    state, limits = engine()
    static = Scheduler(policy="static")
    fill(state, limits, 900, 5, PERIOD_NS)
    refresh(state, limits, static, PERIOD_NS)
    pooled = state.pooled
    assert pooled.counts.n_queues == 4
    assert np.allclose(np.diff(pooled.cuts[:3], 2), 0.0)
    assert pooled.queues.quota.max() - pooled.queues.quota.min() <= 1
    fill(state, limits, 900, 6, 2 * PERIOD_NS)
    cuts = pooled.cuts.copy()
    refresh(state, limits, static, 2 * PERIOD_NS)
    assert np.array_equal(pooled.cuts, cuts)


@pytest.mark.parametrize("policy", ["fifo", "sjf", "chameleon", "static"])
def test_uses_of_adapters_move_to_the_window_before(policy: str) -> None:
    state, limits = engine()
    state.pooled.adapters.uses[:] = [0, 5, 6, 7]
    refresh(state, limits, Scheduler(policy=policy), PERIOD_NS)  # type: ignore[arg-type]
    assert state.pooled.adapters.uses.tolist() == [0, 0, 0, 0]
    assert state.pooled.adapters.uses_before.tolist() == [0, 5, 6, 7]
    assert state.pooled.counts.window_start_ns == PERIOD_NS
    assert state.pooled.counts.n_queues == 1


def test_the_form_of_sizes_is_that_of_the_configuration() -> None:
    state, limits = engine()
    fill(state, limits, 900, 7, PERIOD_NS)
    by_output = CHAMELEON.replace(queues=QueueConfig(size="output_only", clusters="wcss", max_queues=2))
    refresh(state, limits, by_output, PERIOD_NS)
    assert state.pooled.counts.n_queues == 2
    assert (state.pooled.wrs.a, state.pooled.wrs.b) == (0.0, 1.0)
