"""Several ranks compute what one does, and none outlives the others."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from capplan import InputError
from capplan.engine import Completion, CoreProcess, CoreSettings, Engine, ModelConfig
from capplan.engine.lora import AdapterLayout
from capplan.engine.lora._adapter import RandomAdapter
from capplan.engine.models import ModelShard, random_weights, require_shardable
from capplan.engine.parallel._group import WorkerEndedError
from capplan.serving import lora_elements_per_rank
from tests.engine.engines import check_engine
from tests.engine.live import TINY
from tests.engine.test_core_process import Server
from tests.engine.test_generate import write_adapter

pytestmark = pytest.mark.process

LLAMA = TINY.replace(name="llama", vocab_size=301, max_positions=128)  # the last rank has fewer tokens
QWEN2 = LLAMA.replace(name="qwen2", kv_heads=1, qkv_bias=True, tied_embeddings=True)
ADAPTERS = {"a": 3, "b": 8, "c": 5}
PROMPTS = [[1, 2, 3], list(range(40)), [7, 8], [300, 299], [5] * 20]
NAMES = ["a", "b", None, "c", "a"]
SMALL = {"num_kv_blocks": 100, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 48}


def answers(engine: Engine, new: Path) -> list[Completion]:
    """Return the completions of several adapters, one of which comes and goes."""
    sampling: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "keep_logits": True}
    sampling["prompt_logprobs"] = True
    found = engine.generate(PROMPTS, NAMES, **sampling)
    for _ in range(2):
        engine.add_adapter("new", new)
        found += engine.generate([[9, 8, 7], [6]], ["new", "b"], **sampling)
        engine.remove_adapter("new")
    check_engine(engine)
    return found


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA, {"rules": "capplan", "max_loras": 2, "max_cpu_loras": 2}),
        (QWEN2, {"rules": "slora"}),  # both ranks hold the only KV head, and adapters are in its pages
    ],
    ids=["llama", "qwen2"],
)
def test_ranks_compute_what_one_does(tmp_path: Path, config: ModelConfig, settings: dict[str, Any]) -> None:
    found = []
    for ranks in (1, 2):
        adapters: dict[str, Any] = ADAPTERS
        options = {**SMALL, **settings, "tensor_parallel_size": ranks, "max_adapters": 4}
        with Engine(config, adapters, **options) as engine:
            write_adapter(tmp_path / "new", engine)
            found.append(answers(engine, tmp_path / "new"))
            processes = [psutil.Process(pid) for pid in children()]
        assert len(processes) == ranks - 1
        assert not any(process.is_running() for process in processes)
    for alone, together in zip(*found, strict=True):
        assert together.token_ids == alone.token_ids
        likelihoods = [[each.logprob for each in done.prompt_logprobs] for done in (together, alone)]
        assert len(likelihoods[0]) == len(alone.prompt_token_ids) - 1
        assert likelihoods[0] == pytest.approx(likelihoods[1], abs=1e-4)
        assert together.logits is not None
        assert alone.logits is not None
        error = float((together.logits - alone.logits).abs().max())
        assert error < 1e-5 * min(1.0, float(alone.logits.abs().max()))


def children() -> list[int]:
    """Return the numbers of the workers of this process."""
    found = psutil.Process().children()
    return [each.pid for each in found if any("parallel._ranks" in word for word in each.cmdline())]


@pytest.mark.parametrize("config", [LLAMA, QWEN2, LLAMA.replace(o_bias=True, mlp_bias=True)])
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_a_layer_add_up_to_the_layer(config: ModelConfig, size: int) -> None:
    """The MLP and the projections of attention, from random weights of the whole model."""
    device = torch.device("cpu")
    [whole, *parts] = (
        random_weights(config, torch.float32, device, 5, shard)
        for shard in (ModelShard(), *(ModelShard(rank, size) for rank in range(size)))
    )
    x = torch.randn(7, config.hidden_size)
    for at, layer in enumerate(whole.layers):
        own = [part.layers[at] for part in parts]

        def mlp(each: Any) -> torch.Tensor:
            gate, up = each.gate_up(x).chunk(2, dim=-1)
            result: torch.Tensor = each.down(torch.sigmoid(gate) * up)
            return result

        torch.testing.assert_close(sum(map(mlp, own)), mlp(layer))
        query, kv = config.query_size // size, max(config.head_dim, config.kv_size // size)
        split = [each.qkv(x).split([query, kv, kv], 1) for each in own]
        q, k, v = (torch.cat(each, 1) for each in zip(*split, strict=True))
        heads = torch.cat([q, *(shared(each, config, size) for each in (k, v))], 1)
        torch.testing.assert_close(heads, layer.qkv(x))
        mixed = torch.randn(7, config.query_size)
        out = sum(o.o(part) for o, part in zip(own, mixed.chunk(size, 1), strict=True))
        torch.testing.assert_close(out, layer.o(mixed))
    logits = torch.cat([part.head(x) for part in parts], 1)[:, : config.vocab_size]
    torch.testing.assert_close(logits, whole.head(x))


def shared(heads: torch.Tensor, config: ModelConfig, size: int) -> torch.Tensor:
    """Return every KV head once; ranks share them if there are more ranks."""
    copies = max(1, size // config.kv_heads)
    return torch.cat(heads.split(config.head_dim, 1)[::copies], 1)


@given(rank=st.integers(1, 9), size=st.sampled_from([1, 2, 4]), kv_heads=st.sampled_from([1, 2, 4]))
def test_adapter_parts_have_the_sizes_of_vllm(rank: int, size: int, kv_heads: int) -> None:
    """Those of the twin's memory model; the rows of one rank are in the order of the layout."""
    config = LLAMA.replace(kv_heads=kv_heads)
    elements = rank * lora_elements_per_rank(config.arch(4), size)
    for shard in (ModelShard(at, size) for at in range(size)):
        layout = AdapterLayout(config, shard)
        assert layout.elements(layout.ranks(rank)) == elements
        adapter = RandomAdapter(rank, 3).read(layout, torch.float32, False, rank)
        assert adapter.flat.numel() == elements


@pytest.mark.parametrize(
    ("change", "size", "rule"),
    [
        ({}, 3, "must divide the 4 heads"),
        ({"heads": 12, "kv_heads": 3}, 2, "must divide the 3 KV heads"),
        ({"intermediate_size": 33}, 2, "must divide the 33 MLP"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(change: dict[str, int], size: int, rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        require_shardable(LLAMA.replace(**change), size)


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs here")
def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="needs 2 GPUs from cuda on"):
        Engine(LLAMA, device="cuda", tensor_parallel_size=2)
    assert children() == []


def test_errors_of_a_rank_are_those_of_the_engine(tmp_path: Path) -> None:
    """A broken number in its part of an adapter, and its end."""
    with Engine(LLAMA, ADAPTERS, **SMALL, max_adapters=4, tensor_parallel_size=2) as engine:
        write_adapter(tmp_path, engine)
        file = tmp_path / "adapter_model.safetensors"
        tensors = load_file(file)
        next(value for name, value in tensors.items() if "q_proj.lora_B" in name)[-1] = torch.nan
        save_file(tensors, file)
        engine.add_adapter("broken", tmp_path)
        good, broken = engine.generate([[1], [2]], ["a", "broken"], max_tokens=2, ignore_eos=True)
        assert (good.finish_reason, broken.finish_reason) == ("length", "error")
        assert broken.error is not None
        assert "finite" in broken.error
        check_engine(engine)
        [pid] = children()
        os.kill(pid, signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(WorkerEndedError, match="the worker of rank 1 ended by SIGKILL"):
            engine.generate(PROMPTS, NAMES, max_tokens=40)
        assert time.monotonic() - began_s < 10.0
    assert children() == []


def test_a_killed_rank_ends_an_idle_server() -> None:
    server = Server("--tensor-parallel-size", 2)
    [worker] = server.core.children()
    worker.send_signal(signal.SIGKILL)
    status, errors = server.end()
    assert status == 1
    assert errors.splitlines() == [
        "error: the worker of rank 1 ended by SIGKILL; its process ended with status 1"
    ]
    assert server.gone()


def test_ranks_end_with_a_killed_core() -> None:
    options = {"num_kv_blocks": 20, "tensor_parallel_size": 2}
    with CoreProcess(CoreSettings("tiny-llama", {}, options)) as core:
        [worker] = psutil.Process(core.pid).children()
        os.kill(core.pid, signal.SIGKILL)
        worker.wait(timeout=20)
