"""Assisted loading: outputs wherever a layer ran, faults of cores and copies, nothing left behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.engine import Engine
from capplan.engine._affinity import allowed_cpus
from capplan.engine.assist import Crew
from capplan.engine.assist._board import BoardShape, Task
from capplan.engine.assist._crew import start_crew
from capplan.engine.lora._manager import LoRAManager
from capplan.errors import InputError
from capplan.serving.pooled import LayerTimes, layer_groups
from tests.engine.engines import TINY_MODEL

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.process

LAYERS = 4
MODEL = TINY_MODEL.replace(
    name="small", layers=LAYERS, hidden_size=48, heads=6, kv_heads=2, intermediate_size=80
)
RANKS = {"a0": 1, "a1": 4, "a2": 8, "a3": 16}


def engine_with(loading: str, adapters: dict[str, Any] = RANKS, **more: Any) -> Engine:
    cache: dict[str, Any] = {"policy": "none", "loading": loading}
    if loading not in ("resident", "cached"):
        cache["prefetch"] = "none"
    if loading == "assisted":
        cache["cpu_workers"] = more.pop("cpu_workers", 2)
    sizes = {"num_kv_blocks": 400, "block_size": 8, "max_model_len": 100, "max_num_batched_tokens": 100}
    return Engine(MODEL, adapters, **sizes, scheduler="fifo", cache=cache, **more)


def crew_of(engine: Engine) -> Crew:
    runner: Any = engine.worker.runner
    return runner.assistance.crew  # type: ignore[no-any-return]


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 300, rng.integers(1, 40)).tolist() for _ in range(count)]


def logits(engine: Engine, asked: list[list[int]], names: list[str | None], tokens: int) -> torch.Tensor:
    answers = engine.generate(asked, names, max_tokens=tokens, ignore_eos=True, keep_logits=True)
    return torch.stack([answer.logits for answer in answers if answer.logits is not None])


def copied_from(first: int) -> Callable[[LoRAManager, int, int], bool]:
    """Return what tells that the layers from `first` on are on the device, once they are."""

    def is_copied(lora: LoRAManager, number: int, layer: int) -> bool:
        if layer >= first:
            lora.wait_for_layer(number, layer)
        return layer >= first

    return is_copied


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_outputs_are_those_of_one_device_for_every_split(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    close = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 3e-2}[dtype]
    tokens = 3 if dtype == "float32" else 1  # in half precision the next token may be another one
    with engine_with("resident", dtype=dtype) as whole, engine_with("assisted", dtype=dtype) as split:
        crew = crew_of(split)
        for on_cpu in range(LAYERS + 1):
            monkeypatch.setattr(LoRAManager, "is_copying", lambda _, number: number > 0)
            monkeypatch.setattr(LoRAManager, "is_copied", copied_from(on_cpu))
            rounds = crew.board.round()
            for seed, names in enumerate(([*RANKS, None], ["a3"], ["a0", "a0", "a2", None])):
                asked = prompts(seed, len(names))
                expected = logits(whole, asked, names, tokens)
                found = logits(split, asked, names, tokens)
                assert float((found - expected).abs().max() / expected.abs().max()) < close
            assert (crew.board.round() > rounds) == (on_cpu > 0)
        assert crew.failed_rounds == 0


def test_slow_copies_move_layers_to_the_cores() -> None:
    """The engine decides by itself: at a low bandwidth the cores compute all layers, at a high one few."""
    rounds = []
    for gb_per_s in (2e-4, 5.0):
        with engine_with("assisted", copy_gb_per_s=gb_per_s) as engine:
            crew = crew_of(engine)
            before = crew.board.round()
            engine.generate(prompts(0, 4), list(RANKS), max_tokens=1)
            rounds.append(crew.board.round() - before)
    assert rounds[0] >= 4 * LAYERS > rounds[1]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 90), *(st.integers(1, 10**7) for _ in range(3)))
def test_groups_of_layers(layers: int, cpu_ns: int, gpu_ns: int, copy_ns: int) -> None:
    """Each layer is in one group; each group but the first is copied while the one before is computed."""
    groups = layer_groups(layers, LayerTimes(max(cpu_ns, gpu_ns), gpu_ns, copy_ns))
    assert [layer for group in groups for layer in group] == list(range(layers))
    computing_ns = [len(groups[0]) * max(cpu_ns, gpu_ns), *(len(group) * gpu_ns for group in groups[1:])]
    for ready_ns, group in zip(computing_ns, groups[1:], strict=False):
        assert len(group) * copy_ns <= ready_ns


# -- faults --


def is_answered_right(engine: Engine, expected: dict[str, tuple[int, ...]]) -> bool:
    names: list[str | None] = list(expected)
    answers = engine.generate([[5, 6, 7, 8] * 6] * len(names), names, max_tokens=5, temperature=0.0)
    return all(tuple(each.token_ids) == expected[str(each.adapter)] for each in answers)


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[int, ...]]:
    with engine_with("resident") as engine:
        answers = engine.generate([[5, 6, 7, 8] * 6] * 4, list(RANKS), max_tokens=5, temperature=0.0)
        return {str(each.adapter): tuple(each.token_ids) for each in answers}


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_cores_that_are_killed_or_stopped_cost_no_answer(
    fault: signal.Signals, expected: dict[str, tuple[int, ...]]
) -> None:
    with engine_with("assisted", copy_gb_per_s=1e-3) as engine:
        crew = crew_of(engine)
        stop = threading.Event()

        def strike() -> None:
            rng = np.random.default_rng(0)
            while not stop.wait(0.2):
                with suppress(ProcessLookupError):
                    os.kill(int(rng.choice(crew.pids)), fault)

        striker = threading.Thread(target=strike)
        striker.start()
        try:
            for _ in range(12):
                assert is_answered_right(engine, expected)
        finally:
            stop.set()
            striker.join()
        assert crew.failed_rounds + crew.restarts > 0
        rounds = crew.board.round()
        until_s = time.monotonic() + 60
        while crew.board.round() == rounds:  # those started again assist again
            assert is_answered_right(engine, expected)
            assert time.monotonic() < until_s


def test_without_cores_or_shared_memory_prompts_wait_for_copies(
    expected: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capplan.engine.assist._crew.allowed_cpus", lambda: (0,))
    with engine_with("assisted", copy_gb_per_s=1e-3) as engine:
        assert len(crew_of(engine)) == 0
        assert is_answered_right(engine, expected)
    monkeypatch.undo()
    monkeypatch.setattr("capplan.engine.assist._board.SharedMemory.reserve", lambda *_: False)
    with engine_with("assisted", copy_gb_per_s=1e-3) as engine:
        assert is_answered_right(engine, expected)
        assert crew_of(engine).failed_rounds == 0


def test_a_stalled_copy_and_one_that_fails(
    expected: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from capplan.engine.lora._memory import AdapterPlacement

    copy = AdapterPlacement.copy_layers

    def slow(self: AdapterPlacement, adapter: Any, layers: range) -> None:
        time.sleep(0.3)
        copy(self, adapter, layers)

    def broken(self: AdapterPlacement, adapter: Any, layers: range) -> None:
        raise RuntimeError("the copy engine has failed")

    with engine_with("assisted") as engine:
        monkeypatch.setattr(AdapterPlacement, "copy_layers", slow)
        assert is_answered_right(engine, expected)
        monkeypatch.setattr(AdapterPlacement, "copy_layers", broken)
        (answer,) = engine.generate([[1, 2, 3]], ["a2"], max_tokens=4)
        assert answer.finish_reason == "error"
        monkeypatch.setattr(AdapterPlacement, "copy_layers", copy)
        assert is_answered_right(engine, expected)


def test_an_adapter_removed_and_added_again_during_traffic(expected: dict[str, tuple[int, ...]]) -> None:
    with engine_with("assisted", copy_gb_per_s=1e-3, max_adapters=5, max_lora_rank=16) as engine:
        for _ in range(3):
            engine.add_adapter("extra", 8)
            request = engine.new_request([1, 2, 3, 4], "extra", _params(30))
            assert engine.submit(request)
            engine.step()
            engine.abort(request)
            engine.remove_adapter("extra")
            assert is_answered_right(engine, expected)


def _params(tokens: int) -> Any:
    from capplan.engine import SamplingParams

    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


@pytest.fixture
def nothing_left() -> Callable[[], None]:
    gc.collect()  # what earlier tests left in circles of references
    before = len(os.listdir("/proc/self/fd")), children()  # noqa: PTH208

    def check() -> None:
        assert len(os.listdir("/proc/self/fd")) <= before[0]  # noqa: PTH208
        assert children() <= before[1]

    return check


def test_nothing_is_left_after_an_engine(nothing_left: Callable[[], None]) -> None:
    def serve() -> None:
        with engine_with("assisted") as engine:
            engine.generate([[1, 2, 3]], ["a1"], max_tokens=2)
            os.kill(crew_of(engine).pids[0], signal.SIGKILL)
            engine.generate([[1, 2, 3]], ["a2"], max_tokens=2)

    for _ in range(3):
        serve()
    gc.collect()
    nothing_left()


@pytest.mark.parametrize("rows", [(1,), (3, 5), (200, 1, 64)])
def test_a_kernel_gives_activations_to_the_cores_and_begins_the_round(rows: tuple[int, ...]) -> None:
    """Triton's interpreter takes the GPU's place; programs of 2,048 elements each."""
    pytest.importorskip("triton", reason="the kernel needs triton (extra `engine`)")
    inputs, outputs, rank, tokens = 48, 32, 4, sum(rows)
    shape = BoardShape(cores=1, tasks=8, tokens=tokens, inputs=inputs, outputs=outputs, itemsize=4)
    crew = start_crew(shape, allowed_cpus()[:1], capacity=1, elements=10_000, dtype=torch.float32)
    flat = torch.rand(rank * (inputs + outputs))
    crew.adapters.store(1, flat)
    first, a, b = crew.adapters.first(1), flat[: rank * inputs], flat[rank * inputs :]
    task = Task(0, 0, tokens, inputs, first, first + a.numel(), rank, outputs, 0)
    for _ in range(3):
        activations = [torch.rand(each, inputs) for each in rows]
        with crew.working() as cores:
            assert crew.finish(crew.post_from(activations, [task]), cores, timeout_s=30.0) == []
        expected = torch.cat(activations) @ a.view(rank, inputs).t() @ b.view(rank, outputs)
        torch.testing.assert_close(crew.board.out(tokens, outputs), expected)
    crew.close()


SERVED = """
import time
from tests.engine.test_assist import crew_of, engine_with
engine = engine_with("assisted")
print(*crew_of(engine).pids, flush=True)
time.sleep(60)
"""


def test_cores_end_with_an_engine_that_is_killed() -> None:
    words = [sys.executable, "-c", SERVED]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = process.stdout.readline().split()
        assert len(pids) == 2
        process.kill()
    until_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until_s, "a core goes on without its engine"
        time.sleep(0.05)


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(InputError, match="tensor parallelism"):
        engine_with("assisted", tensor_parallel_size=2)
    with pytest.raises(InputError, match="goes with loading assisted"):
        Engine(MODEL, RANKS, scheduler="fifo", cache={"policy": "none", "cpu_workers": 2})
    with pytest.raises(InputError, match="chunked"):
        Engine(
            MODEL,
            RANKS,
            scheduler={"policy": "fifo", "chunked": True},
            cache={"policy": "lru", "loading": "assisted"},
        )
