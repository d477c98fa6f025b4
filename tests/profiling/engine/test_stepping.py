"""Operating points of a tiny engine and their rows."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan import EngineArgs
from capplan.engine import Engine, StepRecord
from capplan.profiling.engine._profiler import grouped, recorded_rows
from capplan.profiling.engine._stepping import (
    GROWTH,
    MIXED,
    EngineBounds,
    EnginePoint,
    Stepper,
    candidates,
    most_informative,
)
from tests.engine.engines import check_engine


def bounds(
    a_max: int,
    ranks: tuple[int, ...],
    max_num_seqs: int,
    budget: int = 512,
    model_len: int = 512,
    kv_tokens: int = 10**5,
) -> EngineBounds:
    args = EngineArgs(
        max_loras=a_max,
        max_lora_rank=max(ranks),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=model_len,
        gpu_memory_utilization=0.9,
    )
    return EngineBounds(args, ranks, kv_tokens)


@settings(max_examples=15, deadline=None)
@given(
    a_max=st.integers(1, 40),
    max_num_seqs=st.integers(2, 100),
    budget=st.integers(64, 4096),
    model_len=st.integers(64, 4096),
    kv_tokens=st.integers(2048, 10**6),
)
def test_candidates_are_within_the_bounds(
    a_max: int, max_num_seqs: int, budget: int, model_len: int, kv_tokens: int
) -> None:
    found = candidates(bounds(a_max, (8, 32), max_num_seqs, budget, model_len, kv_tokens), seed=0)
    assert len({point.name for point in found}) == len(found)
    for point in found:
        assert point.adapters <= min(a_max, point.batch)
        assert point.batch <= max_num_seqs
        assert point.batch + point.prompt <= budget
        assert point.context + GROWTH < model_len
        assert point.rank in (MIXED, 8, 32)


def test_queues_are_measured_behind_full_batches_only() -> None:
    found = candidates(bounds(4, (8,), 8), seed=0)
    assert {point.batch for point in found if point.waiting} == {8}


def test_the_next_point_differs_most_from_the_measured_ones() -> None:
    small, alike, large = (
        EnginePoint(1, 16, 16, 0),
        EnginePoint(2, 16, 16, 0),
        EnginePoint(64, 512, 256, 16, 8),
    )
    seen = [(small, 1.0, 1.5)] * 3
    assert most_informative([alike, large], seen, 16.0) == 1


def test_measured_points_span_batches_and_queues() -> None:
    every = candidates(bounds(8, (8, 16), 16), seed=1)
    rng = np.random.default_rng(0)
    left, seen = list(every), []
    for _ in range(12):
        point = left.pop(most_informative(left, seen, 12.0))
        seen.append((point, 1.0 + 0.1 * point.batch, 1.0 + 0.1 * point.batch + 0.01 * point.prompt))
    batches = [point.batch for point, _, _ in seen]
    drawn = [every[at].batch for at in rng.permutation(len(every))[:12].tolist()]
    assert min(batches) == 1
    assert max(batches) >= max(drawn)
    assert any(point.waiting for point, _, _ in seen)


RANKS = {"r8-0": 8, "r8-1": 8, "r16-0": 16, "r16-1": 16}


@pytest.fixture(scope="module")
def stepper() -> Iterator[Stepper]:
    fields = {
        "max_loras": 2,
        "max_lora_rank": 16,
        "num_kv_blocks": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
    }
    with Engine("tiny-llama", RANKS, virtual_time=True, max_in_flight=64, **fields) as engine:
        yield Stepper(engine, RANKS, seed=0)


def test_a_point_gives_a_decode_step_and_a_mixed_step(stepper: Stepper) -> None:
    rows = stepper.measure(EnginePoint(batch=4, context=16, prompt=32, adapters=2, rank=16))
    decode = next(row for row in rows if row["prefills"] == 0)
    mixed = next(row for row in rows if row["prefills"] and row["decodes"])
    assert (decode["requests"], decode["decodes"], decode["tokens"]) == (4, 4, 4)
    assert (decode["adapters"], decode["max_rank"], decode["decode_rank_sum"]) == (2, 16, 64)
    assert 4 * 16 < decode["kv_tokens"] < 4 * 40
    assert (mixed["tokens"], mixed["prefills"], mixed["lora_prefill_tokens"]) == (36, 1, 32)
    assert (mixed["prefill_rank_tokens"], mixed["decode_rank_sum"]) == (32 * 16, 64)
    assert (decode["prefill_mpairs"], mixed["prefill_mpairs"]) == (0.0, 32 * 33 / 2 * 1e-6)
    assert all(row["step_ms"] > 0 for row in rows)


def test_points_without_adapters_with_mixed_ranks_and_with_a_queue(stepper: Stepper) -> None:
    base = stepper.measure(EnginePoint(batch=2, context=16, prompt=16, adapters=0))
    assert {row["adapters"] for row in base} == {0}
    assert {row["max_rank"] for row in base} == {0}
    mixed = stepper.measure(EnginePoint(batch=2, context=16, prompt=16, adapters=2, rank=MIXED))
    assert next(row for row in mixed if not row["prefills"])["decode_rank_sum"] == 8 + 16
    full = stepper.measure(EnginePoint(batch=8, context=16, prompt=16, adapters=2, rank=8, waiting=16))
    assert next(row for row in full if not row["prefills"])["waiting"] == 16
    assert stepper.measure(EnginePoint(batch=1, context=16, prompt=16, adapters=1, rank=8))[0]["waiting"] == 0


def test_a_measurement_leaves_the_engine_empty(stepper: Stepper) -> None:
    stepper.measure(EnginePoint(batch=3, context=16, prompt=16, adapters=1, rank=8))
    assert stepper.engine.core.requests == {}
    check_engine(stepper.engine)


def test_whole_iterations_take_time(stepper: Stepper) -> None:
    prefill_ms, decode_ms = stepper.iteration_ms(["r8-0", "r16-0"], prompt=16, decodes=2, repeats=2)
    assert prefill_ms > 0
    assert decode_ms > 0


def record(at_ms: float, **fields: int) -> StepRecord:
    empty = dict.fromkeys(StepRecord._fields, 0) | {"requests": 2, "decode_requests": 2, "rank_sum": 16}
    return StepRecord(**(empty | {"begin_ns": round(at_ms * 1e6)} | fields))


def table(*records: StepRecord) -> pd.DataFrame:
    return pd.DataFrame(records, columns=StepRecord._fields)


def test_a_served_step_lasts_until_the_next_starts() -> None:
    rows = recorded_rows(
        table(
            record(0.0),
            record(5.0, finished=2),  # nothing runs afterwards
            record(50.0, loads=1),  # waits for an adapter
            record(60.0),
            record(1000.0),  # a pause before it
            record(1004.0),
        ),
        pause_s=0.3,
    )
    assert rows["begin_ms"].tolist() == [0.0, 1000.0]
    assert rows["step_ms"].tolist() == [5.0, 4.0]
    assert rows["decode_rank_sum"].tolist() == [16.0, 16.0]


def test_steps_without_a_speed_probe_have_none() -> None:
    records = table(record(0.0), record(5.0)._replace(probe_ms=0.05), record(9.0), record(12.0))
    rows = recorded_rows(records, pause_s=0.3)
    assert rows["probe_ms"].isna().tolist() == [True, False, True]
    assert rows["probe_ms"].mean() == 0.05


def test_means_over_groups_keep_the_sum_of_times() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 60, 60) * (np.arange(60) % 3 == 0)
    steps = [
        record(10.0 * at, prefill_requests=int(n > 0), tokens=2 + int(n), prefill_pairs=int(n * (n + 1) // 2))
        for at, n in enumerate(prompts.tolist())
    ]
    rows = recorded_rows(table(*steps), pause_s=0.3)
    means = grouped(rows)
    assert len(means) == 4
    assert sum(row["seen"] for row in means) == len(rows)
    for name in ("step_ms", "tokens", "prefill_mpairs"):
        assert sum(row["seen"] * row[name] for row in means) == pytest.approx(rows[name].sum())
