"""Logits and greedy tokens are those of transformers and peft, whatever the batch, memory and rules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine needs torch (extra `engine`)")

from capplan.engine import Completion, Engine
from tests.engine.oracle import Oracle, llama, lora, make_oracle, qwen2

RANKS = (4, 8, 16, 32, 4, 8, 16, 32)


def eight() -> dict[str, Any]:
    """Return adapters of different ranks."""
    return {f"a{i}": lora(rank) for i, rank in enumerate(RANKS)}


MODELS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llama": lambda: (llama(), eight()),
    "qwen2": lambda: (qwen2(), eight()),
    "llama-3": lambda: (
        llama(
            head_dim=20,  # not hidden_size / heads
            num_attention_heads=6,
            num_key_value_heads=1,
            max_position_embeddings=256,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
        {
            "attention": lora(3, 7.0, target_modules=["q_proj", "v_proj"]),
            "mlp": lora(5, target_modules=["gate_proj", "down_proj"]),
            "rs": lora(6, use_rslora=True),
            "mixed": lora(2, rank_pattern={"layers.1.self_attn.k_proj": 9}, alpha_pattern={"up_proj": 3}),
            "late": lora(7, layers_to_transform=[1]),
        },
    ),
    "biased": lambda: (
        llama(attention_bias=True, mlp_bias=True, num_key_value_heads=4, tie_word_embeddings=True),
        {"a": lora(12, 5.0), "b": lora(1)},
    ),
    "wide": lambda: (  # wide enough for packed matrices
        qwen2(hidden_size=384, intermediate_size=352, initializer_range=0.05),
        {"a": lora(8), "b": lora(16)},
    ),
    "qwen2-tied": lambda: (
        qwen2(tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=3, hidden_size=42),
        {"a": lora(10), "o": lora(8, target_modules=["o_proj"])},
    ),
}
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"rules": "vllm-0.32-sync", "num_kv_blocks": 400},
    "tight": {"rules": "vllm-0.8", "num_kv_blocks": 30, "max_num_batched_tokens": 16, "max_loras": 3},
    "beside": {"rules": "capplan", "num_kv_blocks": 30, "max_num_batched_tokens": 24, "max_loras": 2},
    "counted": {
        "rules": "vllm-0.11",
        "num_kv_blocks": 40,
        "enable_prefix_caching": False,
        "max_cpu_loras": 3,
        "max_loras": 2,
    },
    "pages": {"rules": "capplan", "num_kv_blocks": 30, "memory": "unified", "max_num_batched_tokens": 20},
    "slora": {"rules": "slora", "num_kv_blocks": 900, "memory": "unified", "max_num_batched_tokens": 100},
    "pool": {"scheduler": "chameleon", "cache": "gdsf", "num_kv_blocks": 120, "max_num_batched_tokens": 50},
    "chunks": {
        "scheduler": {"policy": "sjf", "chunked": True},
        "num_kv_blocks": 120,
        "max_num_batched_tokens": 20,
    },
    "assisted": {
        "scheduler": "fifo",
        "cache": {"policy": "none", "loading": "assisted", "cpu_workers": 2, "prefetch": "none"},
        "num_kv_blocks": 900,
        "copy_gb_per_s": 0.002,
    },
    "padded": {"rules": "vllm-0.8", "num_kv_blocks": 60, "lora_kernel": "padded", "memory": "unified"},
    "torch": {"rules": "capplan", "num_kv_blocks": 60, "lora_kernel": "grouped", "attention_kernel": "torch"},
}
ODD_ONES = ("tight", "pages")
CASES = [
    (model, engine)
    for model in MODELS
    for engine in ENGINES
    if model in ("llama", "qwen2") or engine in ODD_ONES
]
PREEMPTING = ("tight", "beside", "counted", "pages")
STEPS = 64


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Oracle]:
    pytest.importorskip("transformers", reason="the oracle needs transformers (extra `oracle-hf`)")
    pytest.importorskip("peft", reason="the oracle needs peft (extra `oracle-hf`)")
    folder: Path = tmp_path_factory.mktemp("models")
    return {name: make_oracle(*model(), folder / name) for name, model in MODELS.items()}


def questions(oracle: Oracle, vocab: int = 300) -> tuple[list[list[int]], list[str | None]]:
    """One prompt per adapter, one for the base model, and one more of the first adapter."""
    rng = np.random.default_rng(1)
    names = [*oracle.adapters, None, next(iter(oracle.adapters))]
    return [rng.integers(0, vocab, rng.integers(1, 60)).tolist() for _ in names], names


def assert_equals(oracle: Oracle, answer: Completion) -> None:
    prompt = len(answer.prompt_token_ids)
    known = oracle.logits((*answer.prompt_token_ids, *answer.token_ids), answer.adapter)
    expected = known[prompt - 1 : -1]
    assert answer.logits is not None
    assert float((answer.logits - expected).abs().max() / expected.abs().max()) < 1e-4
    assert expected.argmax(dim=-1).tolist() == list(answer.token_ids)


@pytest.mark.long
@pytest.mark.parametrize(("model_name", "engine_name"), CASES)
def test_logits_and_tokens_equal_transformers_and_peft(
    model_name: str, engine_name: str, oracles: dict[str, Oracle]
) -> None:
    oracle = oracles[model_name]
    settings = {"block_size": 8, "max_model_len": 160} | ENGINES[engine_name]
    with Engine(oracle.folder, oracle.adapters, **settings) as engine:
        prompts, names = questions(oracle)
        answers = engine.generate(prompts, names, max_tokens=STEPS, keep_logits=True)
    assert [len(answer.token_ids) for answer in answers] == [STEPS] * len(prompts)
    for answer in answers:
        assert_equals(oracle, answer)
    if engine_name in PREEMPTING:
        assert sum(answer.preemptions for answer in answers) > 0


def test_prompts_with_a_common_prefix_share_its_kv(oracles: dict[str, Oracle]) -> None:
    oracle = oracles["qwen2"]
    rng = np.random.default_rng(2)
    beginning = rng.integers(0, 300, 32).tolist()
    prompts = [beginning + rng.integers(0, 300, n).tolist() for n in (0, 1, 9, 9, 30)]
    settings: dict[str, Any] = {"rules": "vllm-0.32-sync", "num_kv_blocks": 100, "block_size": 8}
    computed = []
    for shared in (0, 32):
        with Engine(oracle.folder, oracle.adapters, shared_prefix_tokens=shared, **settings) as engine:
            names = ["a0", "a0", "a1", "a0", "a1"]
            for answer in engine.generate(prompts, names, max_tokens=12, keep_logits=True):
                assert_equals(oracle, answer)
            computed.append(sum(record.prefill_tokens for record in engine.records))
    # A prompt that is only the prefix computes its last block itself.
    assert computed[0] - computed[1] == 3 * 32 - 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(dtype: str, oracles: dict[str, Oracle]) -> None:
    oracle = oracles["llama"]
    with Engine(oracle.folder, oracle.adapters, dtype=dtype, num_kv_blocks=100) as engine:
        prompts, names = questions(oracle)
        for answer in engine.generate(prompts, names, max_tokens=1, keep_logits=True):
            expected = oracle.logits(answer.prompt_token_ids, answer.adapter)[-1]
            assert answer.logits is not None
            assert float((answer.logits[0] - expected).abs().max() / expected.abs().max()) < 0.2
