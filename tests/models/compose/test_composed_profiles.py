"""Composed profiles: any dense model on any measured GPU, by sizes alone, with sources and errors."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.interpolate import RegularGridInterpolator

from capplan import InputError, Lengths, Workload, load_profile, simulate
from capplan.datasets import hf_config
from capplan.datasets._catalog import model_archs
from capplan.models.compose import (
    SYSTEMS,
    compose_profile,
    decoder_of,
    layer_times,
    operator_tables,
    profile_of_times,
)
from capplan.models.compose._forward import forward_pass
from capplan.models.compose._profile import CAPTURED, fitted_terms, host_terms, step_tables
from capplan.serving import rules_of_version, serving_rules, weight_bytes

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
LARGE = "meta-llama/Llama-3.1-70B-Instruct"
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def composed(gpu: str = "h100-80g", model: str = LLAMA, version: str = "0.15.1", **options: object):
    decoder = decoder_of(hf_config(model) or {}, model)
    return compose_profile(gpu, decoder, rules_of_version(version), version, **options)


def test_every_known_model_fits_some_gpus() -> None:
    for arch in model_archs():
        decoder = decoder_of(hf_config(arch.hf_ids[0]) or {}, arch.hf_ids[0])
        tp = 1 if weight_bytes(arch) < 8e10 else 4
        tables = step_tables(forward_pass(operator_tables("b200"), decoder, tp))
        step_ms = sum(float(table.grid_ms.min()) for table in tables.values())
        starts_ms = 0.0
        if arch.experts is not None:  # one token passes some of them, beside which kernels' starts weigh
            arch = arch.replace(experts=arch.experts.replace(number=arch.experts.per_token))
            starts_ms = 0.05 * arch.layers
        weights_ms = 1e3 * weight_bytes(arch, tp) / operator_tables("b200").system.sheet.bytes_per_s
        assert 0.9 * weights_ms < step_ms < 6 * weights_ms + starts_ms


def test_the_tables_are_the_forward_pass_between_their_points() -> None:
    forward = forward_pass(operator_tables("l40s"), decoder_of(hf_config(LARGE) or {}, LARGE), 4)
    tables = step_tables(forward)
    rng = np.random.default_rng(0)
    requests = np.round(np.exp(rng.uniform(0, np.log(512), 500)))
    kv_tokens = requests * np.exp(rng.uniform(np.log(16), np.log(4000), 500))
    grid, line = tables["requests_ms"], tables["tokens_ms"]
    between = RegularGridInterpolator([axis.points for axis in grid.axes], grid.grid_ms)
    by_table = between(np.stack([requests, kv_tokens], axis=1)) + np.interp(
        requests, line.axes[0].points, line.grid_ms
    )
    held = np.array(CAPTURED)[np.searchsorted(CAPTURED, requests)]
    direct = forward.requests_ms(requests, kv_tokens) + forward.tokens_ms(held)
    assert np.mean(np.abs(by_table / direct - 1)) < 0.007


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda each: each.sheet_key)
def test_a_gpu_serves_faster_with_more_bandwidth(system) -> None:
    profile = composed(system.sheet_key)
    lengths = {"prompt_tokens": Lengths(mean=200), "output_tokens": Lengths(mean=100)}
    load = Workload(base_model=LLAMA, adapters=[], base_rate_rps=2.0, **lengths)
    itl_ms = simulate(load, profile, a_max=0, s_max=0, duration_s=60.0).itl_ms_mean
    read_ms = 1e3 * weight_bytes(profile.model) / system.sheet.bytes_per_s
    assert read_ms < itl_ms < 2.2 * read_ms


def test_a_profile_names_its_sources_and_errors() -> None:
    profile = composed(version="0.23.0")
    fit = profile.step_latency.fit
    assert fit.samples > 0
    assert fit.cross_validated_error is not None
    assert "aiconfigurator-core" in profile.provenance.source
    assert "lm_head: 128256 outputs, 1.96 times the largest measured" in profile.provenance.notes
    assert "carried over" in profile.provenance.notes


def test_errors_are_stated_only_for_the_dtype_and_hardware_that_were_compared() -> None:
    fp8 = decoder_of(hf_config(LLAMA) or {}, LLAMA, "fp8")
    profile = compose_profile("h100-80g", fp8, rules_of_version("0.15.1"), "0.15.1")
    assert profile.step_latency.fit.samples == 0
    assert profile.step_latency.uncertainty.scatter == 0.10
    assert "Mean TPOT of models in fp8" in profile.provenance.notes
    int4 = decoder_of(hf_config(LLAMA) or {}, LLAMA, "int4")
    notes = compose_profile("h100-80g", int4, rules_of_version("0.15.1"), "0.15.1").provenance.notes
    assert "No measured engine of this dtype or hardware was compared" in notes


def test_weights_that_the_files_do_not_have_are_quantized_on_loading() -> None:
    def quantization(name: str) -> str | None:
        return load_profile(name).engine.quantization

    assert quantization("h100-80g/llama-3.1-8b/vllm-0.15.1") is None
    assert quantization("h100-80g/llama-3.1-8b/vllm-0.15.1-fp8") == "fp8"
    assert quantization("b200/minimax-m2/vllm-0.19.0-tp4-fp8_block") is None
    assert quantization("h200/gpt-oss-120b/vllm-0.19.0") is None


def test_carried_terms_err_together() -> None:
    uncertainty = composed().step_latency.uncertainty
    at = {name: i for i, name in enumerate(uncertainty.names)}
    covariance = np.array(uncertainty.covariance)
    std_errors = np.sqrt(np.diag(covariance))
    correlation = covariance / np.outer(std_errors, std_errors)
    assert correlation[at["ms_per_slot"], at["ms_per_lora_ktoken"]] == pytest.approx(1.0)
    assert correlation[at["ms_per_slot"], at["base_ms"]] == 0.0


def test_a_layer_with_a_window_reads_no_more_than_it() -> None:
    windowed = SMALL | {"architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    whole, part = (
        forward_pass(operator_tables("h100-80g"), decoder_of(config, "a/b")) for config in (SMALL, windowed)
    )
    requests = np.array([16.0, 16.0])
    kv_tokens = requests * np.array([512.0, 8192.0])
    inside, beyond = part.requests_ms(requests, kv_tokens) / whole.requests_ms(requests, kv_tokens)
    assert inside == pytest.approx(1.0)
    assert beyond < 0.7
    assert any("window of 1024 tokens" in words for words in part.beyond(2048))


def test_tensor_parallelism_shards_products_and_replicates_kv_heads() -> None:
    decoder = decoder_of(SMALL | {"num_key_value_heads": 2}, "a/b")
    qkv, o, gate_up, down = decoder.products(4)
    assert qkv == ((8 + 2) * 128, 4096)
    assert (o, gate_up, down) == ((4096, 1024), (2 * 3584, 4096), (4096, 3584))
    assert decoder.heads(4).kv == 1


def test_another_engine_than_vllm_is_refused() -> None:
    with pytest.raises(InputError, match="must be rules of vLLM"):
        compose_profile("h200", decoder_of(SMALL, "a/b"), serving_rules("slora"), "0.15.1")


def test_measured_layers_need_no_operators(tmp_path: Path) -> None:
    kinds = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")
    dense = [
        (kind, tokens, 10.0 + tokens)
        for kind in (*kinds, "embedding", "final_layernorm")
        for tokens in (1, 64)
    ]
    pd.DataFrame(dense, columns=["layer", "tokens", "time_us"]).to_csv(tmp_path / "dense.csv", index=False)
    decode = [(0, 0, n, kv, 5.0 + 0.01 * n * kv) for n in (1, 256) for kv in (16, 1024, 16384)]
    prefill = [(n, 0, 0, 0, 5.0 + n * n / 1e3) for n in (256, 1024, 2048)]
    columns = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    pd.DataFrame([*decode, *prefill], columns=columns).to_csv(tmp_path / "attention.csv", index=False)
    sequences = [(layer, n, 100.0) for layer in ("lm_head", "sampler") for n in (1, 256)]
    pd.DataFrame(sequences, columns=["layer", "sequences", "time_us"]).to_csv(
        tmp_path / "per_sequence.csv", index=False
    )
    times = layer_times(tmp_path, "rtx-4090", decoder_of(hf_config(LLAMA) or {}, LLAMA))
    # Eight layers of 11 us, norms counted twice, in 32 layers; embedding and last norm once.
    assert times.tokens_ms(np.array([1.0]))[0] == pytest.approx((32 * 8 + 2) * 0.011)
    assert times.requests_ms(np.array([1.0]), np.array([1024.0]))[0] == pytest.approx(
        0.2 + 32 * 0.01524, rel=0.01
    )
    assert times.ms_per_prefill_mpair == pytest.approx(32 * 2.0, rel=0.02)
    profile = profile_of_times(times, rules_of_version("0.19.0"), "0.19.0")
    assert profile.step_latency.value("base_ms") == 0.0
    assert "dense layers: 16384 rows, 256.00 times the largest measured" in profile.provenance.notes
    (tmp_path / "dense.csv").write_text("layer,tokens\n")
    with pytest.raises(InputError, match="time_us: column is missing"):
        layer_times(tmp_path, "rtx-4090", times.decoder)
    normed = decoder_of(SMALL | {"architectures": ["Qwen3ForCausalLM"]}, "a/b")
    with pytest.raises(InputError, match="without QK norm"):
        layer_times(tmp_path, "rtx-4090", normed)


def test_host_terms_are_of_the_nearest_version_with_the_same_scheduling() -> None:
    versions = {each.engine_version for each in fitted_terms() if each.parts == "operators"}
    for version in versions:
        assert host_terms(version, "bfloat16").engine_version == version
    assert host_terms("0.11.0", "bfloat16").engine_version == "0.12.0"
    assert host_terms("0.14.0", "bfloat16").engine_version == "0.15.1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "architectures: must name one of LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, "bits: must be 4 or 8"),
        ({"hidden_size": 0}, "hidden_size: must be a whole number above 0"),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention"]},
            "must name the 32 layers",
        ),
        ({"architectures": 5}, "architectures: must be a list of names"),
        ({"sliding_window": 64, "layer_types": 5}, "layer_types: must be a list of names"),
        ({"sliding_window": 64, "sliding_window_pattern": "x"}, "pattern: must be a whole number above 0"),
    ],
)
def test_unknown_architectures_are_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decoder_of(SMALL | change, "a/b")


def test_a_quantization_may_be_a_name() -> None:
    named = decoder_of(SMALL | {"quantization_config": "fp8"}, "a/b")
    assert named == decoder_of(SMALL | {"quantization_config": {"quant_method": "fp8"}}, "a/b")


def test_tensor_parallelism_must_have_been_measured_and_divide_the_heads() -> None:
    with pytest.raises(InputError, match="must be one of 1, 2, 4, 8, whose all-reduces were measured"):
        composed(tp=3)
    with pytest.raises(InputError, match="of weights per GPU do not fit"):
        composed("l40s", "meta-llama/Llama-3.1-70B-Instruct")


def test_quantized_weights_take_half_the_memory_and_keep_16_bit_keys_and_values() -> None:
    plain, fp8 = (decoder_of(hf_config(LLAMA) or {}, LLAMA, dtype).arch for dtype in ("bfloat16", "fp8"))
    embeddings = 2 * 2 * plain.vocab_size * plain.hidden_size
    assert 2 * (weight_bytes(fp8) - embeddings) == weight_bytes(plain) - embeddings
    assert fp8.dtype_bytes == 2
