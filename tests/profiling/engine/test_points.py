"""States that are measured: all can be held, and the next one is the one that is known least."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.profiling.engine.stepping import MIXED, EngineBounds, EnginePoint, candidates, most_telling


@settings(max_examples=15, deadline=None)
@given(
    a_max=st.integers(1, 40),
    max_num_seqs=st.integers(2, 100),
    budget=st.integers(64, 4096),
    model_len=st.integers(64, 4096),
    kv_tokens=st.integers(2048, 10**6),
)
def test_every_state_can_be_held(
    a_max: int, max_num_seqs: int, budget: int, model_len: int, kv_tokens: int
) -> None:
    bounds = EngineBounds(a_max, (8, 32), max_num_seqs, budget, model_len, kv_tokens, growth=20)
    found = candidates(bounds, seed=0)
    assert len({point.name for point in found}) == len(found)
    for point in found:
        assert point.adapters <= min(a_max, point.batch)
        assert point.batch <= max_num_seqs
        assert point.batch + point.prompt <= budget
        assert point.context + 20 < model_len
        assert point.rank in (MIXED, 8, 32)


def test_a_queue_stands_only_behind_a_full_batch() -> None:
    found = candidates(EngineBounds(4, (8,), 8, 512, 512, 10**5, 20), seed=0)
    assert {point.batch for point in found if point.waiting} == {8}


def test_the_next_state_is_unlike_those_that_were_seen() -> None:
    small, alike, large = (
        EnginePoint(1, 16, 16, 0),
        EnginePoint(2, 16, 16, 0),
        EnginePoint(64, 512, 256, 16, 8),
    )
    seen = [(small, 1.0, 1.5)] * 3
    assert most_telling([alike, large], seen, 16.0) == 1


def test_times_weigh_what_is_seen() -> None:
    every = candidates(EngineBounds(8, (8, 16), 16, 512, 512, 10**5, 20), seed=1)
    rng = np.random.default_rng(0)
    left, seen = list(every), []
    for _ in range(12):
        point = left.pop(most_telling(left, seen, 12.0))
        seen.append((point, 1.0 + 0.1 * point.batch, 1.0 + 0.1 * point.batch + 0.01 * point.prompt))
    batches = [point.batch for point, _, _ in seen]
    drawn = [every[at].batch for at in rng.permutation(len(every))[:12].tolist()]
    assert min(batches) == 1
    assert max(batches) >= max(drawn)
    assert any(point.waiting for point, _, _ in seen)
