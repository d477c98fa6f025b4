import pytest

from capplan.datasets import arch_of, gpu_sheet, model_arch
from capplan.datasets._catalog import gpu_sheets, model_archs
from capplan.errors import InputError
from capplan.serving import weight_bytes

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
    with pytest.raises(InputError, match=r"org/moe is a mixture of 8 experts.*local expert") as caught:
        arch_of({key: 8}, "org/moe", "config.json")
    assert key in str(caught.value)


def test_a_language_model_within_another_is_refused_with_the_next_step() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    with pytest.raises(InputError, match="text_config: is read as a file of its own") as caught:
        arch_of({"text_config": sizes}, "org/gemma-3", "config.json")
    assert "--model-config" in str(caught.value)
    with pytest.raises(InputError, match="text_config: num_experts: must be a dense model"):
        arch_of({"text_config": {**sizes, "num_experts": 16}}, "org/moe", "config.json")


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
