"""Chameleon's batch: both phases as printed, the example of the paper's figure 10, bypass and squash."""

from __future__ import annotations

from dataclasses import replace

import pytest

from capplan.serving import Limits
from capplan.serving.pooled import QUEUES
from capplan.serving.pooled._state import OUTPUT_ONLY
from capplan.serving.state import POOLED
from tests.oracle.size_queues import SizeQueues
from tests.serving.algorithm_1 import compare_batches, make_ample_world
from tests.serving.pooled_worlds import (
    MS,
    Arrival,
    PooledWorld,
    Seen,
    replay,
)


@pytest.mark.parametrize("queues", [None, 1], ids=["queues", "one queue"])
def test_both_phases_admit_what_the_algorithm_does(queues: int | None) -> None:
    """With one queue that is arrival order under a limit on tokens."""
    batches = loans = 0
    for seed in range(25):
        found = compare_batches(make_ample_world(seed, queues))
        batches, loans = batches + found[0], loans + found[1]
    assert batches > 150
    assert queues == 1 or loans > 15


LIMITS = Limits(
    max_num_seqs=20,
    max_num_batched_tokens=1000,
    max_model_len=1000,
    max_loras=3,
    max_cpu_loras=3,
    block_size=1,
    watermark_blocks=0,
    long_prefill_tokens=0,
    reserve_full_sequence=0,
    load_beside=1,
    policy=POOLED,
    order=QUEUES,
    bypass=1,
    cache=1,
    refresh_ns=1000 * MS,
)


def world_of(
    arrivals: list[Arrival], quotas: list[int], cuts: list[float], num_blocks: int = 10_000, **limits: int
) -> PooledWorld:
    """Return a world whose sizes are the shares of prompts in 100 tokens; adapters have 1, 4 and 10 pages."""
    queues = SizeQueues(quotas, cuts, prompt_weight=1.0, output_weight=0.0, form=OUTPUT_ONLY, max_prompt=100)
    return PooledWorld(
        limits=LIMITS._replace(**limits),
        num_blocks=num_blocks,
        pages=(0, 1, 4, 10),
        size_bytes=(0, 100, 400, 1000),
        tokens=(0, 0, 0, 0),
        cost_ns=(0, 0, 0, 0),
        queues=queues,
        weights=(0.45, 0.10, 0.45),
        arrivals=tuple(arrivals),
    )


def first_batch(small: int, medium: int, large: int) -> list[int]:
    """Return the number of admitted requests of 10, 20 and 50 tokens, of quotas for 3, 2 and 1 of them."""
    prompts = [9] * small + [19] * medium + [49] * large
    arrivals = [Arrival(0, 0, prompt, 1, 1) for prompt in prompts]
    step = next(replay(world_of(arrivals, [30, 40, 50], [0.15, 0.35]))).step
    admitted = [prompts[number] for number in step.admitted]
    return [admitted.count(prompt) for prompt in (9, 19, 49)]


def test_full_queues_admit_within_their_quotas_as_in_figure_10a() -> None:
    assert first_batch(small=4, medium=3, large=2) == [3, 2, 1]


def test_the_spare_tokens_of_a_queue_go_to_small_requests_first_as_in_figure_10b() -> None:
    """The medium queue has 20 tokens left: enough for the small request, not for the large one after it."""
    assert first_batch(small=4, medium=1, large=2) == [4, 1, 1]


def test_a_request_larger_than_its_quota_runs_alone_of_its_queue() -> None:
    arrivals = [Arrival(0, 0, 39, 1, 1), Arrival(0, 0, 29, 1, 1), Arrival(0, 0, 4, 1, 1)]
    admitted = [seen.step.admitted for seen in replay(world_of(arrivals, [30, 20], [0.2]))]
    assert admitted[:2] == [[2, 0], [1]]


def test_a_request_that_others_would_starve_comes_first_after_a_refresh_period() -> None:
    """Request 0 needs more than its quota; some small request always holds the tokens that it lacks."""
    arrivals = [Arrival(10 * i * MS, 0, 40, 20, 20) for i in range(3)]
    arrivals += [Arrival(35 * MS, 0, 139, 10, 10)]
    arrivals += [Arrival((40 + 10 * i) * MS, 0, 40, 20, 20) for i in range(20)]
    steps = [seen.step for seen in replay(world_of(arrivals, [100, 100], [0.5]))]
    order = [number for step in steps for number in step.admitted]
    assert 3 < order.index(3) < 12
    assert sorted(order) == list(range(len(arrivals)))


def bypassing(predicted: int, first_output: int = 20, bypass: int = 1) -> list[Seen]:
    """Replay requests 0 (adapter 3), 1 (adapter 2, which does not fit beside it) and 2 (small).

    Decode steps take 10 ms, and prompts 1 ms a token. When request 1 comes, request 0 has 17 tokens left, as
    predicted. Request 2 has a prompt of 10 tokens, and does not fit beside request 1 either.
    """
    arrivals = [
        Arrival(0, 3, 10, first_output, 20),
        Arrival(25 * MS, 2, 40, 2, 2),
        Arrival(25 * MS, 1, 10, predicted, predicted),
    ]
    return list(replay(world_of(arrivals, [200], [], num_blocks=70, bypass=bypass)))


@pytest.mark.parametrize(("predicted", "bypasses"), [(5, 1), (15, 1), (16, 0), (19, 0)])
def test_a_request_bypasses_another_only_if_it_ends_before_that_could_start(
    predicted: int, bypasses: int
) -> None:
    seen = bypassing(predicted)
    assert seen[-1].replay.reference.counts["bypasses"] == bypasses
    assert seen[-1].replay.reference.counts["squashes"] == 0
    order = [number for each in seen for number in each.step.admitted]
    assert order == ([0, 2, 1] if bypasses else [0, 1, 2])


def test_without_bypassing_requests_of_a_queue_keep_their_order() -> None:
    seen = bypassing(5, bypass=0)
    assert [number for each in seen for number in each.step.admitted] == [0, 1, 2]


def test_a_request_in_front_squashes_those_that_bypassed_it_once_it_fits() -> None:
    """Request 0 ends earlier than predicted; request 2 computes its known tokens again after request 1."""
    seen = bypassing(15, first_output=6)
    run = seen[-1].replay
    assert (run.reference.counts["bypasses"], run.reference.counts["squashes"]) == (1, 1)
    squash = next(each.step for each in seen if each.step.preempted)
    assert (squash.preempted, squash.admitted) == ([2], [1])
    assert [number for each in seen for number in each.step.admitted] == [0, 2, 1, 2]
    assert sorted(number for each in seen for number in each.output.first) == [0, 1, 2]
    again = next(dict(each.step.tokens)[2] for each in reversed(seen) if dict(each.step.tokens).get(2, 0) > 1)
    assert again > 10


def test_requests_of_one_adapter_pay_for_it_once() -> None:
    """Each has 41 tokens and their adapter 10: 92 together if they share its charge, else 102, of 95."""
    arrivals = [Arrival(0, 3, 40, 1, 1), Arrival(0, 3, 40, 1, 1)]
    each = replace(world_of(arrivals, [95], []), tokens=(0, 1, 4, 10))
    shared = replace(each, shares_charge=True)
    assert [next(replay(world)).step.admitted for world in (shared, each)] == [[0, 1], [0]]


def test_an_adapter_keeps_its_tokens_until_no_request_uses_it() -> None:
    """The request that brought it ends first."""
    arrivals = [Arrival(0, 3, 10, 1, 1), Arrival(0, 3, 10, 9, 9)]
    world = replace(world_of(arrivals, [60], []), tokens=(0, 1, 4, 10), shares_charge=True)
    held = [
        int(seen.replay.state.pooled.adapter_book[3, 0])
        for seen in replay(world)
        if 0 in seen.replay.finished
    ]
    assert held[0] == 10
    assert held[-1] == 0
