from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan import errors, load_profile
from capplan.datasets import gpu_sheet, model_arch, read_arch
from capplan.models import (
    EngineChoice,
    gpu_load_ms,
    load_share,
    require_kv_tokens,
    roofline_profile,
)
from capplan.models._memory import memory_model
from capplan.models.compose import with_weights
from capplan.serving import adapter_bytes, adapter_pages, kv_bytes_per_token, slot_bytes, weight_bytes
from capplan.spec import LORA_MODULES, EngineConfig, ModelArch, ProfileEngine
from tests.models.memory import kv_tokens

MIB = 2**20
TODAY = ProfileEngine(name="vllm", version="0.32.0", rules="vllm-0.8")
OLD = TODAY.replace(version="0.8.5", lora_extra_vocab=256)
PROFILES = ("h100-64g/llama-3.1-8b/vllm-0.8.5", "h100-64g/qwen2.5-7b/vllm-0.8.5")


def arch(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, **other: object
) -> ModelArch:
    return ModelArch(
        name="any",
        hf_ids=("org/any",),
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=vocab,
        **other,
    )


LLAMA_2_7B = arch(32, 4096, 32, 32, 11008, 32000, lora_on_embeddings=True)
LLAMA_31_8B = arch(32, 4096, 32, 8, 14336, 128256, lora_on_embeddings=True)
QWEN_25_7B = arch(28, 3584, 28, 4, 18944, 152064)
LLAMA_2_13B = arch(40, 5120, 40, 40, 13824, 32000, lora_on_embeddings=True)


@pytest.mark.parametrize(
    ("model", "mib", "kv_bytes"),
    [
        (LLAMA_2_7B, 78.5, 524288),
        (LLAMA_31_8B, 88.1, 131072),
        (QWEN_25_7B, 77.0, 57344),
        (LLAMA_2_13B, 121.6, 819200),
    ],
)
def test_slots_and_kv_take_what_vllm_allocates(model: ModelArch, mib: float, kv_bytes: int) -> None:
    assert slot_bytes(model, TODAY, 16) / MIB == pytest.approx(mib, abs=0.05)
    assert kv_bytes_per_token(model) == kv_bytes


def test_a_slot_as_measured_in_a_small_model() -> None:
    """Allocated by vLLM 0.32: hidden 256, inner 512, 4 layers, 4/2 heads of 64, vocabulary 512, fp32."""
    small = arch(4, 256, 4, 2, 512, 512, lora_on_embeddings=True).replace(head_dim=64, dtype_bytes=4)
    assert slot_bytes(small, TODAY, 32) == 2_293_760


def test_vllm_0_8_reserves_256_more_rows_of_both_vocabularies() -> None:
    assert slot_bytes(LLAMA_31_8B, OLD, 16) - slot_bytes(LLAMA_31_8B, TODAY, 16) == 16 * 2 * 2 * 256
    assert slot_bytes(QWEN_25_7B, OLD, 16) == slot_bytes(QWEN_25_7B, TODAY, 16)


def test_an_adapter_of_its_own_rank_takes_its_share_of_a_slot() -> None:
    assert adapter_bytes(QWEN_25_7B, 8) * 2 == slot_bytes(QWEN_25_7B, TODAY, 16)


def test_weights_of_a_model_of_known_size() -> None:
    assert weight_bytes(LLAMA_31_8B) / 2 == pytest.approx(8.03e9, rel=0.001)
    assert weight_bytes(LLAMA_2_7B) / 2 == pytest.approx(6.74e9, rel=0.001)


def test_two_gpus_halve_what_is_split() -> None:
    assert kv_bytes_per_token(LLAMA_31_8B, tp=2) * 2 == kv_bytes_per_token(LLAMA_31_8B)
    assert weight_bytes(LLAMA_31_8B, tp=2) * 2 == weight_bytes(LLAMA_31_8B)
    assert slot_bytes(QWEN_25_7B, TODAY, 16) / 2 < slot_bytes(QWEN_25_7B, TODAY, 16, tp=2)
    assert slot_bytes(QWEN_25_7B, TODAY, 16, tp=2) < slot_bytes(QWEN_25_7B, TODAY, 16)


def test_tensor_parallelism_shards_what_vllm_shards() -> None:
    """vLLM shards B of column-parallel layers and A of row-parallel ones, and heads are never split."""
    model, rank, bytes_each = LLAMA_31_8B.replace(lora_on_embeddings=False), 16, 2
    hidden, heads, kv, inner = 4096, 32 * 128, 8 * 128, 14336
    for tp in (1, 2, 4, 8, 16):
        kv_of_gpu = max(kv // tp, 128)
        column = [heads // tp, kv_of_gpu, kv_of_gpu, inner // tp, inner // tp]
        row = [heads // tp, inner // tp]
        elements = 32 * (sum(hidden + out for out in column) + sum(each + hidden for each in row))
        assert slot_bytes(model, TODAY, rank, tp) == rank * bytes_each * elements
        fully = TODAY.replace(fully_sharded_loras=True)
        saved = 7 * (hidden - hidden // tp)
        assert slot_bytes(model, fully, rank, tp) == rank * bytes_each * (elements - 32 * saved)


def test_slots_of_named_embeddings_are_those_that_vllm_holds_by_default() -> None:
    named = TODAY.replace(target_modules=(*LORA_MODULES, "embed_tokens", "lm_head"))
    assert slot_bytes(LLAMA_31_8B, named, 16, tp=2) == slot_bytes(LLAMA_31_8B, TODAY, 16, tp=2)
    outside = 16 * 2 * (128256 + 4096)
    assert adapter_bytes(LLAMA_31_8B, 16, ("lm_head",)) == outside
    assert adapter_bytes(LLAMA_31_8B, 16, ("q_proj", "embed_tokens")) == (
        adapter_bytes(LLAMA_31_8B, 16, ("q_proj",)) + outside
    )


def test_a_fused_layer_has_one_a_for_all_parts() -> None:
    phi = arch(32, 3072, 24, 24, 8192, 32064).replace(fused_layers=True)
    qkv, o, gate_up, down = 3072 + 3 * 3072, 3072 + 3072, 3072 + 2 * 8192, 8192 + 3072
    assert adapter_bytes(phi, 8) == 8 * 2 * 32 * (qkv + o + gate_up + down)
    assert adapter_bytes(phi, 8, ("q_proj", "k_proj", "v_proj")) == 8 * 2 * 32 * qkv
    assert slot_bytes(phi, TODAY.replace(target_modules=("q_proj",)), 8) == 8 * 2 * 32 * qkv


MODULES = st.sets(st.sampled_from(LORA_MODULES), min_size=1).map(tuple)


@given(modules=MODULES, rank=st.integers(1, 512))
def test_adapters_count_only_the_matrices_that_they_target(modules: tuple[str, ...], rank: int) -> None:
    parts = [adapter_bytes(QWEN_25_7B, rank, (name,)) for name in modules]
    assert adapter_bytes(QWEN_25_7B, rank, modules) == sum(parts)
    assert adapter_bytes(QWEN_25_7B, rank, LORA_MODULES) == adapter_bytes(QWEN_25_7B, rank)


@given(modules=MODULES)
def test_slots_hold_all_parts_of_the_layers_that_vllm_fuses(modules: tuple[str, ...]) -> None:
    engine = TODAY.replace(target_modules=modules)
    fused = {"q_proj", "k_proj", "v_proj"} & set(modules) and ("q_proj", "k_proj", "v_proj")
    gated = {"gate_proj", "up_proj"} & set(modules) and ("gate_proj", "up_proj")
    held = tuple({*modules, *fused, *gated})
    assert slot_bytes(LLAMA_31_8B, engine, 16) == adapter_bytes(LLAMA_31_8B, 16, held)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_an_adapter_of_s_lora_takes_four_pages_per_rank_on_every_gpu(tp: int) -> None:
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert adapter_pages(LLAMA_2_7B, 32, kv_bytes_per_token(LLAMA_2_7B, tp), tp, attention) == 4 * 32


def test_loads_copy_only_the_matrices_that_an_adapter_targets() -> None:
    profile = load_profile(PROFILES[0])
    shares = [load_share(profile, each) for each in (None, LORA_MODULES, ("q_proj", "v_proj"), ("q_proj",))]
    assert shares[0] == shares[1] == (1.0, 1.0)
    ms = [gpu_load_ms(profile.loading, 16, 16, share) for share in shares]
    assert ms[0] == gpu_load_ms(profile.loading, 16, 16)
    assert ms[2] / ms[0] == pytest.approx(2 / 7, rel=0.3)
    assert ms[3] < ms[2] < ms[1]


@pytest.mark.parametrize("name", PROFILES)
@given(
    a_max=st.integers(1, 400),
    s_max=st.sampled_from([8, 16, 32]),
    seqs=st.integers(1, 2048),
    use=st.floats(0.5, 0.95),
)
def test_more_slots_larger_slots_and_more_sequences_leave_less(
    name: str, a_max: int, s_max: int, seqs: int, use: float
) -> None:
    profile = load_profile(name)
    left = kv_tokens(profile, a_max, s_max, use, seqs)
    assert left >= 0
    assert left % profile.engine.block_size == 0
    assert kv_tokens(profile, a_max + 1, s_max, use, seqs) <= left
    assert kv_tokens(profile, a_max, 2 * s_max, use, seqs) <= left
    assert kv_tokens(profile, a_max, s_max, use, seqs + 64) <= left
    assert kv_tokens(profile, a_max, s_max, use + 0.05, seqs) >= left


@pytest.mark.parametrize("name", PROFILES)
def test_kv_sizes_that_vllm_printed_are_met_within_the_stated_error(name: str, reference_dir: Path) -> None:
    profile = load_profile(name)
    key = {"llama-3.1-8b": "llama-3.1-8b-instruct", "qwen2.5-7b": "qwen-2.5-7b-instruct"}[name.split("/")[1]]
    table = pd.read_csv(reference_dir / "vllm_h100" / "profiling_memory.csv")
    rows = table[
        (table.model == key)
        & (table.source == "v0.8.5_find_available_gpu_memory")
        & (table.kv_tokens_incl_crash_estimate > 0)
    ]
    measured = rows.kv_tokens_incl_crash_estimate.to_numpy(float)
    ours = np.array([kv_tokens(profile, int(r.a_max), int(r.s_max), 0.9, 2048) for r in rows.itertuples()])
    errors_percent = 100 * np.abs(ours / measured - 1)
    assert rows.shape[0] == profile.memory.fit.samples > 20
    # The table's numbers of tokens are whole blocks: an error of one block in the smallest of them.
    slack = 100 * profile.engine.block_size / measured.min()
    assert errors_percent.mean() <= profile.memory.fit.error + slack
    assert profile.memory.fit.max_error is not None
    assert errors_percent.max() <= profile.memory.fit.max_error + slack


@pytest.mark.parametrize(
    ("gpu", "name", "tp", "version", "settings", "measured"),
    [
        # Request logs of casys-kaist/LLMServingSim, commit 5daddb2: bytes and tokens as logged.
        ("rtx-4090", "llama-3.1-8b", 1, "0.19.0", (0.9, 256, 2048), 41_408),
        # inference-sim/residency-vllm, commit 2641b57: default flags; requests not recorded.
        ("h100-80g", "qwen3-14b", 1, "0.23.0", (0.92, 1024, 8192), 288_608),
        # llm-d-incubation/llm-d-planner, accuracy/results/v0.19.0.
        ("h100-80g", "llama-3.1-8b", 1, "0.19.0", (0.95, 1024, 8192), 476_016),
        ("h100-80g", "llama-3.1-8b", 2, "0.19.0", (0.95, 1024, 8192), 1_044_600),
        ("h100-80g", "llama-3.1-8b", 4, "0.19.0", (0.95, 1024, 8192), 2_209_900),
        ("h100-80g", "qwen2.5-7b", 1, "0.19.0", (0.95, 1024, 8192), 1_096_000),
    ],
)
def test_kv_tokens_of_later_versions_are_met_within_a_percent(
    gpu: str, name: str, tp: int, version: str, settings: tuple[float, int, int], measured: int
) -> None:
    profile = roofline_profile(gpu_sheet(gpu), model_arch(name), EngineChoice(version=version), tp)
    assert kv_tokens(profile, 0, 0, *settings) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(
    ("file", "model", "dtype", "tp", "measured", "error"),
    [
        ("08-kv-tokens-h100-tp/llama33-70b.json", "a/llama", "fp8", 2, 244_304, 0.015),
        ("09-kv-gemma3-27b/config.json", "a/gemma-3", None, 1, 36_560, 0.03),
        ("09-kv-gemma3-27b/gemma2-9b.json", "a/gemma-2", None, 1, 168_935, 0.03),
        ("09-kv-gemma3-27b/phi4.json", "a/phi-4", None, 1, 241_460, 0.03),
        ("17-hf-configs/llama31-8b-fp8-dynamic.json", "a/llama", None, 1, 529_285, 0.015),
    ],
)
def test_kv_tokens_of_a_config_are_met(
    file: str, model: str, dtype: str | None, tp: int, measured: int, error: float, cases_dir: Path
) -> None:
    """Quantized weights, layers with windows in padded groups, and a vision tower count."""
    arch = with_weights(read_arch(cases_dir / file, model), dtype)
    profile = roofline_profile(gpu_sheet("h100-80g"), arch, EngineChoice(version="0.19.0"), tp)
    assert kv_tokens(profile, 0, 0, 0.95, 1024, 8192) == pytest.approx(measured, rel=error)


def test_layers_with_windows_are_grouped_as_vllm_does() -> None:
    def layers(windowed: int, full: int) -> int:
        total = windowed + full
        arch = LLAMA_31_8B.replace(layers=total, sliding_window=64, window_layers=windowed)
        return arch.kv_layers

    assert layers(52, 10) == 70  # Gemma 3: seven groups of 10
    assert layers(21, 21) == 42
    assert layers(18, 15) == 36  # less than a quarter more: two groups of 18
    assert LLAMA_31_8B.kv_layers == LLAMA_31_8B.replace(sliding_window=64).kv_layers == 32


@given(tp=st.sampled_from([1, 2, 4, 8]), tokens=st.integers(1, 65536), seqs=st.integers(1, 4096))
def test_larger_batches_take_memory_from_the_kv_cache(tp: int, tokens: int, seqs: int) -> None:
    profile = load_profile(PROFILES[0]).replace(
        tp=tp, memory=memory_model(gpu_sheet("h100-80g"), LLAMA_31_8B, tp, "0.15.1")
    )
    left = kv_tokens(profile, 0, 0, 0.9, seqs, tokens)
    assert kv_tokens(profile, 0, 0, 0.9, seqs, 2 * tokens) <= left
    assert kv_tokens(profile, 0, 0, 0.9, 2 * seqs, tokens) <= left


def test_an_engine_that_cannot_hold_one_request_is_infeasible() -> None:
    profile = load_profile(PROFILES[0])
    tokens = kv_tokens(profile, 8, 16, 0.9, 256)
    args = EngineConfig(max_model_len=tokens).complete(max_loras=8, max_lora_rank=16)
    assert require_kv_tokens(profile, args, 8) == tokens
    with pytest.raises(errors.InfeasibleError) as caught:
        require_kv_tokens(profile, args.replace(max_model_len=tokens + 1), 8)
    assert caught.value.reason == "memory"
