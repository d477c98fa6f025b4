"""Experts of mixtures: their times, memory and adapters, and which models are known."""

from typing import Any

import numpy as np
import pytest

from capplan.datasets import arch_of, model_arch
from capplan.errors import InputError
from capplan.models.compose import decoder_of, known_decoder, operator_tables, operator_times
from capplan.models.compose._operators import expert_times
from capplan.serving import lora_elements_per_rank, weight_bytes
from capplan.spec import Experts, ModelArch

pytest.importorskip("aiconfigurator_core", reason="needs the operator tables (extra `measured`)")

TOKENS = np.array([1.0, 4.0, 64.0, 1024.0, 16384.0])
PARAMETERS = {
    "qwen3-30b-a3b": 30.5e9,
    "qwen3-235b-a22b": 235.1e9,
    "gpt-oss-120b": 116.8e9,
    "gpt-oss-20b": 20.9e9,
    "minimax-m2": 228.7e9,
    "mixtral-8x7b": 46.7e9,
}
"""As published."""
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 1000,
}


def plain(arch: ModelArch) -> ModelArch:
    """Return the model with weights of 16 bits."""
    assert arch.experts is not None
    return arch.replace(linear_dtype_bytes=None, experts=arch.experts.replace(dtype_bytes=None))


@pytest.mark.parametrize("name", PARAMETERS)
def test_mixtures_have_as_many_parameters_as_published(name: str) -> None:
    assert weight_bytes(plain(model_arch(name))) / 2 == pytest.approx(PARAMETERS[name], rel=0.003)


def test_experts_of_4_bits_fit_where_those_of_16_do_not() -> None:
    """The files of gpt-oss-120b have 60.8 GiB."""
    assert weight_bytes(model_arch("gpt-oss-120b")) / 2**30 == pytest.approx(60.8, rel=0.01)


def test_measured_experts_are_met_and_others_lie_between_them() -> None:
    table = operator_tables("h100-80g").experts
    experts = Experts(number=128, per_token=8, intermediate_size=768)
    times = expert_times(table, experts, 2048, "bfloat16", tp=1)
    rows = table[
        (table["hidden_size"] == 2048)
        & (table["inter_size"] == 768)
        & (table["num_experts"] == 128)
        & (table["moe_dtype"] == "bfloat16")
        & (table["moe_tp_size"] == 1)
        & (table["moe_ep_size"] == 1)
        & (table["distribution"] == "power_law_1.01")
    ]
    measured = rows.groupby("num_tokens")["latency"].min()
    at = times.ms(measured.index.to_numpy(float))
    assert (at >= measured.to_numpy() - 1e-9).all()
    assert np.median(at / measured.to_numpy()) == pytest.approx(1.0)
    assert (np.diff(times.ms(np.arange(1.0, 5000.0))) >= 0.0).all()
    assert times.ms(np.array([32768.0])) == pytest.approx(2.0 * times.ms(np.array([16384.0])))


def test_more_gpus_take_less_whether_they_share_experts_or_each_of_them() -> None:
    decoder = known_decoder("minimax-m2")
    one = operator_times("h200", decoder, 2)
    for expert_parallel in (False, True):
        other = operator_times("h200", decoder, 4, expert_parallel=expert_parallel)
        assert one.experts is not None
        assert other.experts is not None
        assert (other.experts.ms(TOKENS) < one.experts.ms(TOKENS)).all()


def test_fewer_different_experts_cost_less_until_all_are_in_use() -> None:
    table = operator_tables("h100-80g").experts
    experts = Experts(number=128, per_token=4, intermediate_size=2880)
    even, few = (expert_times(table, experts, 2880, "mxfp4", 1, spread=spread) for spread in (1.0, 0.45))
    ratio = few.ms(TOKENS) / even.ms(TOKENS)
    assert (ratio[1:3] < 0.9).all()
    assert ratio[-1] == pytest.approx(1.0)


def test_a_slot_holds_matrices_of_every_expert() -> None:
    arch = model_arch("qwen3-30b-a3b")
    assert arch.experts is not None
    modules = ("gate_proj", "up_proj", "down_proj")
    per_expert = 3 * (arch.hidden_size + arch.experts.intermediate_size)
    assert lora_elements_per_rank(arch, modules=modules) == arch.layers * 128 * per_expert
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    dense = arch.replace(experts=None)
    assert lora_elements_per_rank(arch, modules=attention) == lora_elements_per_rank(dense, modules=attention)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "num_experts: must be a dense model or one of Qwen3Moe"),
        ({"kv_lora_rank": 512}, "kv_lora_rank: must be absent: the multi-head latent attention of a/b"),
        ({"decoder_sparse_step": 2}, "must have experts in every layer"),
        ({"mlp_only_layers": [0]}, "must have experts in every layer"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok: must be a whole number above 0"),
    ],
)
def test_other_mixtures_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        arch_of(CONFIG | change, "a/b", "config.json")


def test_experts_that_were_not_measured_are_refused() -> None:
    with pytest.raises(InputError, match="must have experts of a shape with measured products"):
        operator_times("h100-80g", decoder_of(CONFIG | {"num_experts": 100}, "a/b"))
    with pytest.raises(InputError, match="must be a dtype with measured experts on this GPU: bfloat16, fp8"):
        operator_times("h100-80g", decoder_of(CONFIG, "a/b", "int4"))
    with pytest.raises(InputError, match="goes with experts of MXFP4"):
        decoder_of(CONFIG, "a/b", "mxfp4_mxfp8")


def test_keys_and_values_of_8_bits_take_about_half_the_time_of_long_contexts() -> None:
    times = [
        operator_times("h100-80g", known_decoder("llama-3.1-70b", "fp8", kv), 2) for kv in ("auto", "fp8")
    ]
    requests, context = np.array([32.0]), np.array([32.0 * 16_000])
    wide, narrow = (each.requests_ms(requests, context) for each in times)
    assert 0.4 < narrow / wide < 0.75


def test_weights_of_4_bits_are_faster_for_few_tokens_and_no_slower_for_many() -> None:
    plain_times, int4 = (
        operator_times("l40s", known_decoder("qwen3-14b", dtype)) for dtype in (None, "int4")
    )
    few, many = np.array([1.0]), np.array([8192.0])
    assert int4.tokens_ms(few) < 0.5 * plain_times.tokens_ms(few)
    assert int4.tokens_ms(many) == pytest.approx(plain_times.tokens_ms(many), rel=0.02)
    assert any("int4 weights have the efficiency of bfloat16" in words for words in int4.beyond(8192))
