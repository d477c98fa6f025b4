"""`capplan profile compose`: a profile of any dense model, or one line that says what exists."""

import json
from pathlib import Path

import pytest

from capplan import load_profile
from tests.cli.conftest import Run, error_line

OWN = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


def config(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(OWN | changes))
    return path


def test_a_config_becomes_a_profile_that_says_its_error(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    given = ("--model-config", config(tmp_path), "--base-model", "someone/own", "--engine-version", "0.15.1")
    result = run("profile", "compose", "--gpu", "h100_sxm", *given, "--tp", "2", "-o", path)
    profile = load_profile(path)
    assert f"error on measured engines: {profile.step_latency.fit.error:.1f} %" in result.stdout
    assert 0.0 < profile.step_latency.fit.error < 4.0
    assert (profile.name, profile.tp) == ("h100-80g/own/vllm-0.15.1-tp2", 2)
    assert profile.provenance.kind == "composed"
    assert "compose --gpu h100_sxm" in profile.provenance.command
    assert "left out" in run("profiles", path).stdout


def test_the_id_of_a_config_is_that_of_its_file_or_folder(run: Run, tmp_path: Path) -> None:
    for named, changes in ((tmp_path.name, {}), ("org/named", {"_name_or_path": "org/named"})):
        path = tmp_path / "out.json"
        given = ("--gpu", "h200", "--model-config", config(tmp_path, **changes), "--tp", "2")
        assert run("profile", "compose", *given, "--engine-version", "0.15.1", "-o", path).exit_code == 0
        assert load_profile(path).model.hf_ids == (named,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "v100"), "--gpu: must be a GPU with measured operators: a100-80g (a100_sxm)"),
        (("--gpu", "mi350y"), "`capplan profile server URL -o DIR` measures a running server"),
        (("--gpu", "l4"), "`capplan profile roofline --gpu l4 --model NAME -o profile.json`"),
        (("--gpu", "h200", "--tp", "3"), "--tp: must be one of 1, 2, 4, 8"),
        (
            ("--gpu", "h200", "--dtype", "int3"),
            "--dtype: must be one of bfloat16, float16, fp8, fp8_block, int4",
        ),
        (("--gpu", "h200", "--kv-cache-dtype", "int8"), "--kv-cache-dtype: must be auto or fp8"),
        (("--gpu", "a100-80g", "--kv-cache-dtype", "fp8"), "--kv-cache-dtype: must be that of the model"),
        (
            ("--gpu", "a100-80g", "--dtype", "fp8"),
            "--dtype: must be a dtype with measured products on this GPU",
        ),
        (("--gpu", "h200", "--engine-version", "0.1"), "--engine-version: must be a version of vLLM"),
        (("--gpu", "rtx-4090", "--layers", "nowhere"), "nowhere/dense.csv: cannot be read"),
    ],
)
def test_what_does_not_exist_is_one_line(
    run: Run, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    output = tmp_path / "out.json"
    result = run("profile", "compose", "--model", "llama-3.1-8b", *options, "-o", output)
    assert message in error_line(result)
    assert not output.exists()


def test_a_mixture_of_experts_is_read_whole_or_refused_by_key(run: Run, tmp_path: Path) -> None:
    path = config(tmp_path, architectures=["Qwen3MoeForCausalLM"], num_experts=128)
    given = ("--model-config", path, "--base-model", "Qwen/Qwen3-30B-A3B")
    line = error_line(run("profile", "compose", "--gpu", "h200", *given, "-o", tmp_path / "x.json"))
    assert "num_experts_per_tok: must be a whole number above 0" in line
    path = config(tmp_path, n_routed_experts=64)
    line = error_line(run("profile", "compose", "--gpu", "h200", *given, "-o", tmp_path / "x.json"))
    assert "n_routed_experts" in line


def test_an_unknown_architecture_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    path = config(tmp_path, architectures=["MambaForCausalLM"])
    given = ("--model-config", path, "--base-model", "a/b")
    line = error_line(run("profile", "compose", "--gpu", "h200", *given, "-o", tmp_path / "x.json"))
    assert "architectures: must name one of LlamaForCausalLM" in line
    assert "MambaForCausalLM" in line


def test_accuracy_lists_the_rows_of_a_kind_nearest_first(run: Run) -> None:
    listed = json.loads(run("profile", "accuracy", "h100-80g/qwen3-14b/vllm-0.15.1", "--json").stdout)
    assert (listed[0]["model"], listed[0]["gpu"]) == ("Qwen3-14B", "h100-80g")
    text = run("profile", "accuracy", "h100-80g/qwen3-14b/vllm-0.15.1").stdout
    assert f"{listed[0]['error_percent']:.1f} %" in text
    assert "benchmarks.accuracy" in text
    line = error_line(run("profile", "accuracy", "h100-64g/llama-3.1-8b/vllm-0.8.5"))
    assert "must be composed or a roofline" in line
