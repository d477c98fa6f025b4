"""Memory of the largest step: counted as it is allocated, and not exceeded by any other step."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from capplan.engine import Engine
from capplan.engine import _engine as setup
from capplan.engine._worker import LiveBytes, MeasuredMemory, Worker, held_bytes, peak_bytes
from capplan.spec import EngineArgs
from tests.engine.engines import TINY_MODEL

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
TINY = TINY_MODEL.replace(layers=2)
ADAPTERS = {"a": 3, "b": 8, "c": 5}
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "max_model_len": 100}


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=12))
def test_live_bytes_are_those_of_referenced_tensors(steps: list[tuple[int, bool]]) -> None:
    old = torch.zeros(1000)
    live, peak = 0, 0
    kept: list[torch.Tensor] = []
    with LiveBytes() as counted:
        for size, keeps in steps:
            tensor = torch.empty(size).add_(old[0])  # in place, and a view of an older tensor
            live, peak = live + 4 * size, max(peak, live + 4 * size)
            kept.append(tensor.view(-1)[:1])  # keeps the whole storage
            del tensor
            if not keeps:
                live -= kept.pop().untyped_storage().nbytes()
            assert counted.live_bytes == live
    assert counted.peak_bytes == peak
    kept.clear()
    assert counted.live_bytes == 0


def test_bytes_held_are_those_left_behind() -> None:
    kept = []
    assert held_bytes(CPU, lambda: kept.append(torch.empty(10) + 1)) == 40
    assert peak_bytes(CPU, lambda: torch.empty(10) + 1) == 80


@pytest.mark.parametrize("settings", [{}, {"memory": "unified"}, {"lora_kernel": "grouped"}])
def test_no_step_takes_more_than_the_largest(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    peaks, found = [], []
    options = {**LIMITS, "num_kv_blocks": 80, "max_lora_rank": 8, "block_size": 8, **settings}
    with Engine(TINY, ADAPTERS, **options) as engine:
        found.append(engine.worker.measure(engine.args))
    with Engine(TINY, ADAPTERS, **options) as engine:
        run = engine.core.runner.run

        def counted(step: Any) -> torch.Tensor:
            logits: list[torch.Tensor] = []
            peaks.append(peak_bytes(CPU, lambda: logits.append(run(step))))
            return logits[0]

        monkeypatch.setattr(engine.core.runner, "run", counted)
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 300, size).tolist() for size in (40, 3, 7, 1, 1, 90, 20, 2, 5, 30)]
        names = [None, *"abcabcabc"]
        engine.generate(prompts, names, max_tokens=8)
    assert len(peaks) > 4
    assert max(peaks) <= found[0].step_bytes
    assert found[0].graph_bytes == 0


def test_nothing_refers_to_the_memory_of_a_closed_engine() -> None:
    """Otherwise the next engine of the process would have no room on a GPU."""
    with Engine(TINY, ADAPTERS, num_kv_blocks=40) as engine:
        engine.generate([[1, 2]], ["a"], max_tokens=2)
        tensors = [weakref.ref(engine.worker.pool.tensor), weakref.ref(engine.worker.model.weights.embed)]
    del engine
    gc.collect()
    assert [each() for each in tensors] == [None, None]


def test_the_step_grows_with_its_limits_and_with_adapters() -> None:
    def measured(tokens: int, rank: int) -> int:
        options = {"max_num_seqs": 2, "max_num_batched_tokens": tokens, "max_loras": 1, "max_lora_rank": rank}
        with Engine(TINY, num_kv_blocks=40, max_adapters=1, lora_kernel="grouped", **options) as engine:
            return engine.worker.measure(engine.args).step_bytes

    assert measured(16, 8) < measured(96, 8) < measured(96, 512)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, and no interpreter")
def test_ranks_measure_and_then_serve_as_if_they_had_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is built as on a GPU, by two ranks: it measures, with graphs, and allocates again."""
    config = TINY_MODEL.replace(heads=4, kv_heads=2, head_dim=4)
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 24, "max_loras": 1}
    graphs = {"lora_kernel": "mbgmv", "attention_kernel": "triton", "cuda_graphs": True, "block_size": 8}
    measured: list[MeasuredMemory] = []

    def answer(**settings: Any) -> list[tuple[int, ...]]:
        with Engine(config, {"a": 3}, **options, **settings) as engine:
            done = engine.generate([[1, 2], [3]], ["a", None], max_tokens=3, ignore_eos=True)
        return [each.token_ids for each in done]

    def blocks(worker: Worker, args: EngineArgs, page_bytes: int, adapters_bytes: int) -> int:
        measured.append(worker.measure(args))
        return 20

    expected = answer(num_kv_blocks=20)
    monkeypatch.setattr(setup, "_blocks_that_fit", blocks)
    assert answer(tensor_parallel_size=2, **graphs) == expected
    [found] = measured
    assert found.step_bytes > 0
    assert found.graph_bytes > 0
