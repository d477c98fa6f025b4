"""`Engine.generate`: text, sampling, stop tokens, errors and records."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from capplan import InfeasibleError, InputError
from capplan.engine import Engine, ModelConfig, RecordFile, Request, SamplingParams
from capplan.engine._sampler import sample
from capplan.engine.models._config import config_from_hf
from tests.engine.engines import TINY_MODEL, TimedRequest, check_engine, replay

TINY = TINY_MODEL.replace(layers=2, eos_token_ids=(7,))
ADAPTERS = {"a": 3, "b": 8, "c": 5}


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Of the kernels that run on a GPU; on a CPU they run in Triton's interpreter."""


def tiny(depth: int = 1, **settings: Any) -> Engine:
    """Return an engine that launches `depth` steps before it completes the first one, as on a GPU."""
    engine = Engine(TINY, ADAPTERS, **({"num_kv_blocks": 40, "block_size": 4, "max_num_seqs": 8} | settings))
    engine.core.depth = depth
    return engine


def answers(engine: Engine, **sampling: Any) -> list[tuple[int, ...]]:
    """Return the tokens of six requests; with async scheduling the last ones leave at the next decision."""
    prompts = [list(range(3 + 2 * i)) for i in range(6)]
    with engine:
        done = engine.generate(prompts, ["a", "b", None, "c", "a", "b"], **sampling)
        assert engine.step() is None
        check_engine(engine)
    return [answer.token_ids for answer in done]


def test_prompts_and_completions_are_text() -> None:
    with tiny() as engine:
        [answer] = engine.generate("Grüße", "a", max_tokens=5, ignore_eos=True)
    assert bytes(answer.prompt_token_ids).decode() == "Grüße"
    assert answer.text == bytes(t for t in answer.token_ids if t < 256).decode(errors="replace")
    assert answer.adapter == "a"
    assert answer.finish_reason == "length"


def test_the_tokenizer_of_the_model_folder_is_used(tmp_path: Path) -> None:
    with tiny() as engine:
        save_model(engine, tmp_path)
    words = Tokenizer(models.WordLevel({"hello": 5, "world": 6, "?": 7}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    with Engine(tmp_path, num_kv_blocks=20) as engine:
        [answer] = engine.generate("world hello", max_tokens=1)
    assert answer.prompt_token_ids == (6, 5)


def save_model(engine: Engine, folder: Path) -> None:
    """Write an engine's random model in Hugging Face's format."""
    from capplan.engine.models import random_weights
    from capplan.engine.models._weights import _targets

    weights = random_weights(engine.config, torch.float32, torch.device("cpu"))
    tensors = {name: target.tensor.clone() for name, target in _targets(engine.config, weights).items()}
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "llama",
        "num_hidden_layers": TINY.layers,
        "hidden_size": TINY.hidden_size,
        "num_attention_heads": TINY.heads,
        "num_key_value_heads": TINY.kv_heads,
        "head_dim": TINY.head_dim,
        "intermediate_size": TINY.intermediate_size,
        "vocab_size": TINY.vocab_size,
        "max_position_embeddings": TINY.max_positions,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_a_stop_token_ends_a_request_and_frees_its_resources() -> None:
    with tiny() as engine:
        [free] = engine.generate([[1, 2, 3]], "a", max_tokens=30, ignore_eos=True)
        stop = free.token_ids[10]
        first = free.token_ids.index(stop)
        [answer] = engine.generate([[1, 2, 3]], "a", max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
        assert answer.token_ids == free.token_ids[: first + 1]
        assert answer.finish_reason == "stop"
        check_engine(engine)
        assert engine.core.requests == {}


@pytest.mark.parametrize(
    "rules", ["slora", "vllm-0.8", "vllm-0.32-async", "vllm-0.33-async", "capplan", "chameleon"]
)
def test_stop_tokens_free_everything_in_a_small_engine(rules: str) -> None:
    """Unused adapters free the pages that they share with KV."""
    memory = "unified" if rules in ("slora", "chameleon") else "slots"
    prompts = [[i, i + 1, i + 2] for i in range(24)]
    names = ["abc"[i % 3] for i in range(24)]
    with tiny(rules=rules, memory=memory, num_kv_blocks=45, max_num_seqs=3) as engine:
        done = engine.generate(prompts, names, max_tokens=12, stop_token_ids=tuple(range(0, 300, 5)))
        assert len(done) == 24
        assert engine.step() is None
        check_engine(engine)


@pytest.mark.parametrize("chunked", [False, True])
def test_requests_that_outgrow_their_predictions_give_the_same_tokens(chunked: bool) -> None:
    """Adapters, prompts and growth take the whole memory, so that requests are preempted and recomputed."""
    expected = answers(tiny(), max_tokens=40)
    scheduler = {"policy": "chameleon", "chunked": chunked}
    engine = tiny(scheduler=scheduler, cache="chameleon", num_kv_blocks=45, max_model_len=60)
    engine.predictor.predict = lambda *_: 1  # type: ignore[method-assign]
    assert answers(engine, max_tokens=40) == expected
    counts = engine.core.state.pooled.counts
    assert min(counts.overruns, counts.recomputes, counts.evictions) > 0


asynchronous = pytest.mark.parametrize(
    ("rules", "depth"), [("vllm-0.32-async", 1), ("vllm-0.32-async", 2), ("vllm-0.33-async", 2)]
)


@asynchronous
def test_async_scheduling_changes_no_answers(rules: str, depth: int) -> None:
    """With every way of sampling, stop tokens, chunks, adapter loads, preemptions and an abort."""
    kinds: tuple[dict[str, Any], ...] = (
        {"logprobs": 2},
        {"temperature": 1.5, "top_p": 0.9, "stop_token_ids": tuple(range(0, 300, 9))},
        {"temperature": 0.7, "logprobs": 1, "keep_logits": True, "prompt_logprobs": True},
        {"min_tokens": 9, "stop_token_ids": tuple(range(0, 300, 3))},
    )
    small = {"num_kv_blocks": 20, "max_loras": 2, "max_num_batched_tokens": 12, "rules": rules}
    found = []
    for settings in ({}, {**small, "depth": depth}):
        with tiny(device=DEVICE, virtual_time=True, **settings) as engine:
            requests = [
                engine.new_request(
                    list(range(1, 4 + i)),
                    [*ADAPTERS, None][i % 4],
                    SamplingParams(max_tokens=20 + i, **kinds[i % 4]),
                )
                for i in range(12)
            ]
            assert all(engine.submit(request) for request in requests)
            for step in range(1000):
                if step == 9:
                    engine.abort(requests[0])
                if engine.step() is None and not engine.wait_for_adapter():
                    break
            check_engine(engine)
            found.append([engine.completion(request) for request in requests])
            records = engine.records
    assert sum(record.preemptions for record in records) > 2
    assert sum(record.loads for record in records) > 3
    assert found[1][0].finish_reason == "abort"
    assert {each.finish_reason for each in found[1][1:]} == {"stop", "length"}
    for right, each in list(zip(*found, strict=True))[1:]:
        assert (each.token_ids, each.finish_reason) == (right.token_ids, right.finish_reason)
        for name in ("logprobs", "prompt_logprobs"):
            own, others = (getattr(answer, name) or () for answer in (each, right))
            assert [own.logprob for own in own] == pytest.approx([one.logprob for one in others], abs=1e-4)
        assert (each.logits is None) == (right.logits is None)
        assert each.logits is None or torch.allclose(each.logits, right.logits, atol=1e-4)
    for record, following in pairwise(records):
        assert record.begin_ns + record.duration_ns <= following.begin_ns
        phases = sum(
            getattr(record, f"{name}_ms")
            for name in ("schedule", "load", "prepare", "forward", "sample", "commit")
        )
        assert record.duration_ns == pytest.approx(1e6 * phases)


@asynchronous
def test_async_scheduling_ends_requests_that_no_decision_has_seen(rules: str, depth: int) -> None:
    with tiny(rules=rules, depth=depth, max_in_flight=2) as engine:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        first, second, third = (engine.new_request([1, 2, 3], "a", params) for _ in range(3))
        assert engine.submit(first)
        assert engine.submit(second)
        assert not engine.submit(third)  # there is room for two
        engine.abort(second)
        engine.step()
        assert engine.submit(third)
        engine.abort(third)
        while engine.step() is not None:
            pass
        check_engine(engine)
        assert engine.core.requests == {}
        reasons = [request.finish_reason for request in (first, second, third)]
        assert reasons == ["length", "abort", "abort"]


def test_the_end_token_of_the_model_ends_a_request_unless_ignored() -> None:
    config = TINY
    with tiny() as engine:
        [free] = engine.generate([[1, 2, 3]], max_tokens=9, ignore_eos=True)
    ending = ModelConfig(**(config.__dict__ | {"eos_token_ids": (free.token_ids[4],)}))
    with Engine(ending, num_kv_blocks=40, block_size=4) as engine:
        [answer] = engine.generate([[1, 2, 3]], max_tokens=9)
        assert answer.finish_reason == "stop"
        assert len(answer.token_ids) <= 5
        [ignoring] = engine.generate([[1, 2, 3]], max_tokens=9, ignore_eos=True)
        assert ignoring.token_ids == free.token_ids


def test_sampling_with_a_seed_is_independent_of_the_batch() -> None:
    sampling: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": 3, "ignore_eos": True}
    together = answers(tiny(), **sampling)
    assert together == answers(tiny(max_num_seqs=1), **sampling)
    assert together != answers(tiny(), **(sampling | {"seed": 4}))
    assert together != answers(tiny(), max_tokens=12, ignore_eos=True)


def test_a_small_top_p_is_greedy() -> None:
    greedy = answers(tiny(), max_tokens=12, ignore_eos=True)
    assert greedy == answers(tiny(), max_tokens=12, ignore_eos=True, temperature=5.0, top_p=1e-9)
    assert greedy == answers(tiny(), max_tokens=12, ignore_eos=True, temperature=1e-30)


def test_sampled_tokens_follow_their_probabilities() -> None:
    with tiny(max_num_seqs=64, max_in_flight=2000) as engine:
        draws = engine.generate([[5, 6]] * 1500, max_tokens=1, temperature=2.0, top_p=0.6, logprobs=300)
    assert draws[0].logprobs is not None
    logits = np.array([logprob for _, logprob in draws[0].logprobs[0].top]) / 2.0
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    kept = np.cumsum(shares) - shares < 0.6
    expected = np.where(kept, shares, 0.0) / shares[kept].sum()
    rank = {token: at for at, (token, _) in enumerate(draws[0].logprobs[0].top)}
    counts = np.bincount([rank[draw.token_ids[0]] for draw in draws], minlength=len(rank))
    assert counts[~kept].sum() == 0
    deviation = (counts - 1500 * expected)[kept] / np.sqrt(1500 * expected[kept])
    assert abs((deviation**2).sum() - kept.sum()) < 6 * math.sqrt(2 * kept.sum())


def test_log_probabilities_equal_those_of_the_logits() -> None:
    with tiny() as engine:
        [answer] = engine.generate(
            [[1, 2, 3]], "b", max_tokens=4, logprobs=2, keep_logits=True, temperature=1.0
        )
    assert answer.logits is not None
    assert answer.logprobs is not None
    for token, logits, reported in zip(answer.token_ids, answer.logits, answer.logprobs, strict=True):
        right = torch.log_softmax(logits.double(), dim=-1)
        assert reported.logprob == pytest.approx(float(right[token]), abs=1e-5)
        best = right.topk(2)
        assert [t for t, _ in reported.top] == best.indices.tolist()
        assert [p for _, p in reported.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_timings_are_ordered_and_cover_every_token() -> None:
    with tiny() as engine:
        for answer in engine.generate([[1, 2]] * 5, "a", max_tokens=6, ignore_eos=True):
            times = answer.timing
            stamps = [times.arrival_s, times.admitted_s, *times.token_s]
            assert stamps == sorted(stamps)
            assert len(times.token_s) == 6
            assert times.ttft_s > 0
            assert times.tpot_ms > 0


@pytest.mark.parametrize(
    ("kernel", "memory"),
    [("padded", "slots"), ("triton", "unified"), ("bgmv", "slots"), ("mbgmv", "unified"), ("sgmv", "slots")],
)
def test_every_kernel_gives_the_same_tokens(kernel: str, memory: str) -> None:
    if kernel != "padded":
        pytest.importorskip("triton", reason="the kernels need triton (extra `engine`)")
    attention = "triton" if kernel == "sgmv" else "torch"
    other = {
        "lora_kernel": kernel,
        "attention_kernel": attention,
        "memory": memory,
        "block_size": 8,
        "max_loras": 2,
    }
    tokens = []
    for settings in ({}, other):
        with tiny(device=DEVICE, **settings) as engine:
            done = engine.generate([[1, 2], [3], [4], [5, 6]], ["a", "b", None, "c"], max_tokens=2)
            tokens.append([answer.token_ids for answer in done])
    assert tokens[0] == tokens[1]


@pytest.mark.long
@pytest.mark.parametrize(("memory", "kernel"), [("slots", "mbgmv"), ("unified", "sgmv"), ("slots", "triton")])
def test_padded_decode_steps_give_the_same_tokens(memory: str, kernel: str) -> None:
    """Steps are padded as for CUDA graphs; nothing is captured on a CPU."""
    pytest.importorskip("triton", reason="the kernels need triton (extra `engine`)")
    kernels = {"lora_kernel": kernel, "attention_kernel": "triton", "cuda_graphs": True}
    prompts, names = [[1, 2], [3], [4], [5, 6], [7]], ["a", "b", None, "c", "a"]
    tokens = []
    for settings in ({}, {**kernels, "memory": memory, "block_size": 8, "max_loras": 2, "rules": "vllm-0.8"}):
        with tiny(device=DEVICE, **settings) as engine:
            params = [SamplingParams(max_tokens=2 + i, ignore_eos=True) for i in range(5)]
            requests = [engine.new_request(*each) for each in zip(prompts, names, params, strict=True)]
            assert all(engine.submit(request) for request in requests)
            while engine.core.requests:
                if engine.step() is None:
                    engine.wait_for_adapter()
            tokens.append([request.output for request in requests])
    assert tokens[0] == tokens[1]


@pytest.mark.long
def test_steps_with_prompts_as_graphs_give_the_same_tokens() -> None:
    """Prompts in chunks beside decodes, padded to 64 tokens; a step of 64 has no padding, and no graph."""
    pytest.importorskip("triton", reason="the kernels need triton (extra `engine`)")
    kernels = {"lora_kernel": "triton", "attention_kernel": "triton", "cuda_graphs": True}
    prompts, names = [[9], list(range(70)), list(range(30)), [1, 2, 3]], ["a", "b", "c", None]
    tokens = []
    for settings in ({}, kernels):
        with tiny(device=DEVICE, max_num_batched_tokens=64, **settings) as engine:
            done = engine.generate(prompts, names, max_tokens=3, ignore_eos=True)
            tokens.append([answer.token_ids for answer in done])
            graphs = engine.worker.runner.graphs
    assert tokens[0] == tokens[1]
    assert graphs is not None
    assert "sgmv" in {key.kind for key in graphs.captured if key.has_prompts}


@pytest.mark.parametrize("settings", [{"lora_kernel": "bgmv"}, {"attention_kernel": "triton"}])
def test_kernels_of_a_gpu_are_refused_without_one(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (name,) = settings
    with pytest.raises(InputError, match=f"{name}: is a kernel of Triton: it runs on a GPU"):
        tiny(**settings)


def test_more_prompts_than_rows_are_all_completed() -> None:
    with tiny(max_in_flight=3) as engine:
        assert len(engine.generate([[1, 2]] * 20, "a", max_tokens=2)) == 20


def test_replay_with_concurrent_adapter_loads_gives_the_same_tokens() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    arrivals = [
        TimedRequest(i * 1_000_000, [1, 2, 3 + i], name, params) for i, name in enumerate([*"abcabcab", None])
    ]
    with tiny(max_loras=1, rules="capplan", max_cpu_loras=1) as engine:
        replayed = replay(engine, arrivals)
        assert {record.disk_loads for record in engine.records} >= {0}
        check_engine(engine)
    with tiny() as engine:
        for arrival, answer in zip(arrivals, replayed, strict=True):
            assert answer is not None
            [alone] = engine.generate([arrival.prompt], arrival.adapter, max_tokens=8, ignore_eos=True)
            assert answer.token_ids == alone.token_ids


def test_an_overflowing_adapter_does_not_affect_other_requests(tmp_path: Path) -> None:
    with tiny() as engine:
        healthy = engine.generate([[1, 2, 3, 4, 5]] * 4, max_tokens=20, ignore_eos=True)
        write_adapter(tmp_path, engine, scale=1e30)
    with Engine(TINY, {"wild": tmp_path, "a": 3}, num_kv_blocks=24, block_size=4) as engine:
        prompts = [[1, 2, 3, 4, 5]] * 8
        for _ in range(3):
            mixed = engine.generate(prompts, ["wild", None] * 4, max_tokens=20, ignore_eos=True)
            assert [answer.token_ids for answer in mixed[1::2]] == [answer.token_ids for answer in healthy]


@pytest.mark.parametrize(("rules", "depth"), [("capplan", 1), ("vllm-0.32-async", 2), ("vllm-0.33-async", 2)])
def test_non_finite_logits_end_only_their_request(rules: str, depth: int, tmp_path: Path) -> None:
    drawn = {"max_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 7, "logprobs": 2}
    with tiny() as engine:
        [healthy] = engine.generate([[1, 2, 3, 4, 5]], **drawn)
        write_adapter(tmp_path, engine, scale=5e37)
    with Engine(TINY, {"wild": tmp_path}, num_kv_blocks=24, block_size=4, rules=rules) as engine:
        engine.core.depth = depth
        mixed = engine.generate([[1, 2, 3, 4, 5]] * 4, ["wild", None] * 2, **drawn)
        check_engine(engine)
    for broken in mixed[::2]:
        assert broken.finish_reason == "error"
        assert len(broken.token_ids) < 12
        assert "not finite" in str(broken.error)
    assert [answer.token_ids for answer in mixed[1::2]] == [healthy.token_ids] * 2


def write_adapter(folder: Path, engine: Engine, scale: float = 1.0, **config: Any) -> None:
    """Write an adapter of rank 4 on q_proj and down_proj."""
    folder.mkdir(exist_ok=True)
    rng = torch.Generator().manual_seed(0)
    sizes = engine.config
    tensors = {}
    for layer in range(sizes.layers):
        for module, width_in, width_out in (
            ("self_attn.q_proj", sizes.hidden_size, sizes.query_size),
            ("mlp.down_proj", sizes.intermediate_size, sizes.hidden_size),
        ):
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(4, width_in, generator=rng) * scale
            tensors[f"{name}.lora_B.weight"] = torch.randn(width_out, 4, generator=rng)
    save_file(tensors, folder / "adapter_model.safetensors")
    text = json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config)
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def spoil_shape(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(name for name in tensors if "lora_A" in name)
    tensors[name] = tensors[name][:, :-1].clone()
    save_file(tensors, folder / "adapter_model.safetensors")


def spoil_number(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = math.nan
    save_file(tensors, folder / "adapter_model.safetensors")


def lose_half(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({n: t for n, t in tensors.items() if "lora_B" not in n}, folder / "adapter_model.safetensors")


def cut_off(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def rename(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    renamed = {n.replace("down_proj", "lm_head"): t for n, t in tensors.items()}
    save_file(renamed, folder / "adapter_model.safetensors")


def edit(**fields: Any) -> Any:
    def edited(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields), encoding="utf-8")

    return edited


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_shape, "dimensions as the model"),
        (spoil_number, "finite numbers"),
        (lose_half, "both lora_A and lora_B"),
        (cut_off, "cannot be read"),
        (rename, "of q_proj, k_proj"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "cannot be read"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "must be JSON"),
        (edit(peft_type="IA3"), "must be a LoRA adapter"),
        (edit(use_dora=True), "use_dora"),
        (edit(bias="all"), "bias"),
        (edit(r=5), "rank 5"),
        (edit(lora_alpha="much"), "finite numbers"),
    ],
)
def test_a_broken_adapter_is_a_one_line_error(spoil: Any, message: str, tmp_path: Path) -> None:
    with tiny() as engine:
        write_adapter(tmp_path, engine)
    with Engine(TINY, {"good": tmp_path}, num_kv_blocks=20):
        pass
    spoil(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        Engine(TINY, {"broken": tmp_path}, num_kv_blocks=20)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_lora": 3}, "did you mean 'max_loras'"),
        ({"max_loras": 0}, "max_loras: must be a whole number >= 1"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"max_lora_rank": 4}, "at most max_lora_rank, 4"),
        ({"dtype": "int8"}, "dtype"),
        ({"rules": "vllm"}, "rules: must be one of"),
        ({"cuda_graphs": True}, "must be off unless"),
        ({"lora_kernel": "compiled", "dtype": "bfloat16"}, "must be float32"),
        ({"rules": "slora", "memory": "slots"}, "must be unified"),
        ({"rules": "slora", "enable_prefix_caching": True}, "must be off"),
        ({"max_model_len": 4096}, "at most the model's 128"),
        ({"max_cpu_loras": 1, "max_loras": 2}, "at least max_loras, 2"),
        ({"rules": "slora", "max_cpu_loras": 2}, "at least the 3 adapters"),
        ({"rules": "slora", "scheduler": "fifo"}, "rules: does not go with scheduler, cache or queues"),
        ({"memory": "unified", "block_size": 1, "max_model_len": 16}, None),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str | None) -> None:
    if message is None:
        tiny(**settings).close()
        return
    with pytest.raises(InputError, match=message):
        tiny(**settings)


def test_an_engine_too_small_for_one_request_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match="max_model_len 100"):
        tiny(num_kv_blocks=20, max_model_len=100)


@pytest.mark.parametrize(
    ("prompts", "names", "sampling", "message"),
    [
        ([[1]], "d", {}, "must be one of a, b, c"),
        ([[1]], ["a", "b"], {}, "one per prompt, 1"),
        ([[]], None, {}, "not empty"),
        ([[300]], None, {}, "below 300"),
        ([[-1]], None, {}, "below 300"),
        ([[1] * 128], None, {}, "max_model_len"),
        ([[1]], None, {"max_tokens": 0}, "max_tokens"),
        ([[1]], None, {"top_p": 0.0}, "top_p"),
        ([[1]], None, {"temperature": math.nan}, "temperature"),
        ([[1]], None, {"temprature": 1.0}, "did you mean 'temperature'"),
    ],
)
def test_requests_are_checked(prompts: Any, names: Any, sampling: dict[str, Any], message: str) -> None:
    with tiny() as engine, pytest.raises(InputError, match=message):
        engine.generate(prompts, names, **sampling)


@pytest.mark.parametrize("budget", [3, 4, 64])
def test_the_attention_pairs_of_a_prompt_do_not_depend_on_its_chunks(budget: int) -> None:
    with tiny(max_num_batched_tokens=budget, enable_prefix_caching=False) as engine:
        engine.generate([list(range(10)), list(range(20, 27))], max_tokens=3, ignore_eos=True)
        pairs = sum(record.prefill_pairs for record in engine.records)
    assert pairs == 10 * 11 / 2 + 7 * 8 / 2


def test_every_step_leaves_a_record(tmp_path: Path) -> None:
    with tiny() as engine, RecordFile(tmp_path / "steps.parquet") as file:
        done = engine.generate([[1, 2, 3, 4, 5]] * 4, ["a", "b", None, "a"], max_tokens=6, ignore_eos=True)
        for record in engine.records:
            file.add(record)
    table = pq.read_table(tmp_path / "steps.parquet").to_pydict()
    assert sum(table["tokens"]) == sum(len(a.prompt_token_ids) + len(a.token_ids) - 1 for a in done)
    assert sum(table["prefill_tokens"]) == 20
    assert sum(table["loads"]) == 2
    assert table["max_rank"][-1] == 8
    assert sum(table["finished"]) == 4
    phases = [name for name in table if name.endswith("_ms")]
    for row in range(len(table["step"])):
        assert table["duration_ns"][row] * 1e-6 >= sum(table[name][row] for name in phases) * 0.99


def test_old_and_new_rope_fields_are_equivalent() -> None:
    older = {"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    newer = {"rope_parameters": {"rope_theta": 9.0, "rope_type": "linear", "factor": 2.0}}
    fields = {
        "model_type": "qwen2",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    assert config_from_hf(fields | older) == config_from_hf(fields | newer)
    assert config_from_hf(fields | newer).rope.factor == 2.0
    for unknown in ({"hidden_act": "gelu"}, {"use_sliding_window": True}, {"rope_scaling": {"type": "yarn"}}):
        with pytest.raises(InputError):
            config_from_hf(fields | unknown)


def test_top_k_and_min_p_leave_the_tokens_out_that_they_should() -> None:
    """Samples come from exactly the tokens that the definitions keep, in the right proportions."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 50, generator=generator) * 2
    probabilities = torch.softmax(logits[0].double() / 0.8, dim=-1)
    ranked = probabilities.argsort(descending=True).tolist()

    def drawn(**settings: float) -> set[int]:
        params = SamplingParams(temperature=0.8, **settings)
        rng = np.random.default_rng(1)
        prompt = np.zeros(1, np.int32)
        request = Request(0, 0, None, 0, prompt, params, frozenset(), arrival_ns=0, rng=rng)
        batch = logits.repeat(64, 1), [request] * 64, np.ones(64, np.int64)
        return {token for _ in range(40) for token in sample(*batch).tokens.tolist()}

    assert drawn(top_k=1) == {ranked[0]}
    assert drawn(top_k=4) == set(ranked[:4])
    assert drawn(top_k=50) == drawn()
    share = float(probabilities[ranked[2]] / probabilities[ranked[0]]) * 0.999
    assert drawn(min_p=share) == set(ranked[:3])
    assert drawn(min_p=share, top_k=2) == set(ranked[:2])
    two = float(probabilities[ranked[:2]].sum() / probabilities[ranked[:4]].sum())
    assert drawn(top_k=4, top_p=two * 0.999) == set(ranked[:2])  # of the four, as in vLLM


def test_no_stop_token_comes_before_the_minimum() -> None:
    with Engine(TINY_MODEL, num_kv_blocks=64) as engine:
        [free] = engine.generate([[1, 2, 3]], max_tokens=12, ignore_eos=True)
        stops = free.token_ids[2], 299, 10**6
        [short] = engine.generate([[1, 2, 3]], max_tokens=12, stop_token_ids=stops)
        assert len(short.token_ids) == free.token_ids.index(stops[0]) + 1
        [long] = engine.generate([[1, 2, 3]], max_tokens=12, stop_token_ids=stops, min_tokens=6, logprobs=2)
        assert len(long.token_ids) >= 6
        assert not {*long.token_ids[:6]} & {*stops}
        assert long.logprobs is not None
        assert long.logprobs[2].top[0][0] == stops[0]  # log-probabilities are the model's own
