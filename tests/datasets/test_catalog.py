import pytest

from capplan.datasets import arch_of, gpu_sheet, model_arch, weight_format
from capplan.datasets._catalog import gpu_sheets, model_archs
from capplan.errors import InputError
from capplan.serving import kv_bytes_per_token, weight_bytes

PARAMETERS = {
    "llama-30b": 32.53e9,
    "llama-65b": 65.29e9,
    "llama-2-70b": 68.98e9,
    "qwen3-14b": 14.77e9,
    "qwen3-32b": 32.76e9,
    "mistral-7b": 7.25e9,
    "phi-4": 14.66e9,
    "gemma-2-9b": 9.24e9,
    "gemma-2-27b": 27.23e9,
}
"""Parameters as published, embeddings counted once where they are tied."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_architectures_have_as_many_parameters_as_published(name: str) -> None:
    assert weight_bytes(model_arch(name)) / 2 == pytest.approx(PARAMETERS[name], rel=0.003)


def test_names_and_ids_of_architectures_are_distinct() -> None:
    assert len({arch.name.lower() for arch in model_archs()}) == len(model_archs())
    ids = [each for arch in model_archs() for each in arch.hf_ids]
    assert len(set(ids)) == len(ids)


def test_a_window_that_the_config_turns_off_is_none() -> None:
    config = {
        "num_attention_heads": 4,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
        "sliding_window": 32,
    }
    assert arch_of(config, "org/any", "c").sliding_window == 32
    assert arch_of(config | {"use_sliding_window": False}, "org/any", "c").sliding_window is None


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_mixtures_of_experts_are_refused_by_name_with_the_reason(key: str) -> None:
    with pytest.raises(InputError, match=r"org/moe is another mixture of 8 experts") as caught:
        arch_of({key: 8}, "org/moe", "config.json")
    assert key in str(caught.value)


SIZES = {
    "num_attention_heads": 4,
    "hidden_size": 64,
    "num_hidden_layers": 12,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def test_a_language_model_within_another_is_read_with_the_weights_of_the_vision_tower() -> None:
    inner = SIZES | {"model_type": "gemma3_text", "sliding_window": 32}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 8, "intermediate_size": 16}
    vision |= {"num_hidden_layers": 3, "patch_size": 2, "image_size": 8}
    found = arch_of({"text_config": inner, "vision_config": vision}, "org/gemma-3", "config.json")
    assert (found.hidden_size, found.tied_embeddings, found.max_positions) == (64, True, 131_072)
    assert (found.sliding_window, found.window_layers) == (32, 10)
    layers, patches, positions, projector = 3 * (4 * 64 + 2 * 8 * 16), 3 * 4 * 8, 16 * 8, 8 * 64
    assert found.other_weight_bytes == 2 * (layers + patches + positions + projector)
    with pytest.raises(InputError, match=r"text_config.model_type: must be one of gemma3_text, llama"):
        arch_of({"text_config": SIZES | {"model_type": "bert"}}, "a/b", "config.json")
    with pytest.raises(InputError, match=r"vision_config.model_type: must be one of siglip"):
        arch_of({"text_config": inner, "vision_config": {"model_type": "x"}}, "a/b", "config.json")
    with pytest.raises(InputError, match="num_experts: must be a dense model"):
        arch_of({"text_config": inner | {"num_experts": 16}}, "org/moe", "config.json")


FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


@pytest.mark.parametrize(
    ("given", "dtype", "bytes_per_weight"),
    [
        (None, "bfloat16", None),
        ("fp8", "fp8", 1.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block", 1.0 + 4 / 16384),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4", 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, "int4", 0.5 + 2.0 / 32),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, "int8", 1.0),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 1.0),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": FP8}}}, "fp8", 1.0),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": INT4}}},
            "int4",
            0.5 + 2.0 / 128,
        ),
    ],
)
def test_formats_of_weights(given: object, dtype: str, bytes_per_weight: float | None) -> None:
    found = weight_format({"quantization_config": given}, "c")
    assert (found.dtype, found.bytes_per_weight) == (dtype, bytes_per_weight)
    assert arch_of(SIZES | {"quantization_config": given}, "a/b", "c").linear_dtype_bytes == bytes_per_weight


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method: must be one of fp8, compressed-tensors, modelopt"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo: must be FP8"),
        ({"quant_method": "awq", "bits": 3}, "bits: must be 4 or 8"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups: must have one format"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": FP8}, "b": {"weights": INT4}},
            },
            "config_groups: must have one format",
        ),
        (
            {"quant_method": "fp8", "ignored_layers": ["model.layers.0.self_attn.q_proj"]},
            "ignored_layers: must not name linear layers",
        ),
    ],
)
def test_unknown_formats_of_weights_are_refused(given: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        weight_format({"quantization_config": given}, "c")


def test_a_checkpoint_says_that_keys_and_values_have_8_bits() -> None:
    scheme = {"num_bits": 8, "type": "float"}
    groups = {"config_groups": {"g": {"weights": FP8}}, "kv_cache_scheme": scheme}
    config = SIZES | {"quantization_config": {"quant_method": "compressed-tensors"} | groups}
    arch = arch_of(config, "a/b", "c")
    assert 2 * kv_bytes_per_token(arch) == kv_bytes_per_token(arch.replace(kv_dtype_bytes=None))


def test_fields_that_a_family_leaves_out_have_its_defaults() -> None:
    sizes = {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 1000,
        "sliding_window": 128,
    }
    gemma, qwen, mistral = (
        arch_of(sizes | {"architectures": [name]}, "a/b", "config.json")
        for name in ("Gemma2ForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM")
    )
    assert (gemma.tied_embeddings, qwen.tied_embeddings, mistral.tied_embeddings) == (True, False, False)
    assert (gemma.sliding_window, qwen.sliding_window, mistral.sliding_window) == (128, None, 128)


@pytest.mark.parametrize(
    ("names", "key"),
    [
        ("h200_sxm, NVIDIA H200, H200-141GB", "h200"),
        ("A100-80GB, A100-SXM4-80GB", "a100-80g"),
        ("A100-PCIE-80GB, NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("NVIDIA H100 80GB HBM3, H100-SXM5-80GB", "h100-80g"),
        ("NVIDIA H100 PCIe", "h100-80g-pcie"),
        ("RTX4090, NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("RTXPRO6000, rtx_pro_6000_server", "rtx-pro-6000"),
    ],
)
def test_a_gpu_is_found_by_the_spellings_of_drivers_clouds_and_tables(names: str, key: str) -> None:
    assert {gpu_sheet(name).key for name in names.split(", ")} == {key}


def test_every_data_sheet_is_found_by_its_key_and_name_alone() -> None:
    for sheet in gpu_sheets():
        assert gpu_sheet(sheet.key) is gpu_sheet(sheet.name) is sheet


@pytest.mark.parametrize("name", ["H100", "A100", "H200-80GB", "GB200", "NVIDIA", ""])
def test_a_name_of_several_gpus_or_of_another_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="must be one of"):
        gpu_sheet(name)
