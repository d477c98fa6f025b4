"""`capplan profile roofline`, and that plans, reports and simulations say what they rest on."""

import json
from pathlib import Path

import pytest

from capplan import load_profile
from tests.cli.conftest import Run, error_line

H200 = ("profile", "roofline", "--gpu", "h200", "--model", "llama-3.1-8b")
LINE = "profile roofline/h200/llama-3.1-8b/vllm-0.32.0 is an analytic roofline, not measured"
WORKLOAD = """
base_model: meta-llama/Llama-3.1-8B-Instruct
profile: {profile}
gpus: {{count: 1}}
requests: {{prompt_tokens: {{mean: 100}}, output_tokens: {{mean: 50}}}}
adapters:
  - {{name: "a-{{i}}", count: 3, rank: 8, rate_rps: 0.2}}
"""


@pytest.fixture
def profile(run: Run, tmp_path: Path) -> Path:
    path = tmp_path / "h200.json"
    assert run(*H200, "-o", path).exit_code == 0
    return path


def test_the_file_is_a_profile_and_the_command_says_what_it_is(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    result = run(*H200, "-o", path)
    assert LINE in result.stdout
    assert load_profile(path).provenance.kind == "roofline"
    assert json.loads(run(*H200, "-o", path, "--json").stdout) == json.loads(path.read_text())
    assert run(*H200, "-o", path, "--quiet").stdout == ""


def test_assumptions_can_be_stated(run: Run, tmp_path: Path) -> None:
    values = []
    for number, extra in enumerate([(), ("--step-overhead-ms", "3"), ("--bandwidth-efficiency", "0.46")]):
        path = tmp_path / f"{number}.json"
        run(*H200, "-o", path, *extra)
        values.append(load_profile(path).step_latency.value("base_ms"))
    assert values[1] == pytest.approx(values[0] + 3.0)
    assert values[2] > 1.3 * values[0]


def test_any_model_with_a_config_will_do(run: Run, tmp_path: Path) -> None:
    sizes = {
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 8192,
        "vocab_size": 32000,
        "architectures": ["LlamaForCausalLM"],
    }
    config, path = tmp_path / "config.json", tmp_path / "own.json"
    config.write_text(json.dumps(sizes))
    given = ("profile", "roofline", "--gpu", "l4", "--model-config", config)
    assert run(*given, "--base-model", "own/model", "-o", path).exit_code == 0
    loaded = load_profile(path)
    assert loaded.model.hf_ids == ("own/model",)
    assert loaded.model.lora_on_embeddings
    assert "--base-model" in error_line(run(*given, "-o", path))


def test_a_plan_and_all_that_is_made_of_it_say_so(run: Run, tmp_path: Path, profile: Path) -> None:
    workload, plan = tmp_path / "w.yaml", tmp_path / "plan.json"
    workload.write_text(WORKLOAD.format(profile=profile))
    assert LINE in run("plan", workload, "-o", plan, "--no-verify").stdout
    assert json.loads(plan.read_text())["provenance"]["profile_kind"] == "roofline"
    assert LINE in run("explain", plan).stdout
    assert run("report", plan, "-o", tmp_path / "plan.html").exit_code == 0
    assert LINE in (tmp_path / "plan.html").read_text()
    assert LINE in run("simulate", workload, "--max-loras", "3", "--duration", "20").stdout


def test_a_measured_profile_is_not_called_analytic(run: Run, tmp_path: Path) -> None:
    workload = tmp_path / "w.yaml"
    workload.write_text(WORKLOAD.format(profile="h100-64g/llama-3.1-8b/vllm-0.8.5"))
    assert "analytic" not in run("simulate", workload, "--max-loras", "3", "--duration", "20").stdout


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--gpu", "v100", "--model", "llama-3.1-8b"), "must be one of a10"),
        (("--gpu", "h200", "--model", "gpt-2"), "must be one of llama-2-7b"),
        (("--gpu", "h200"), "--model: is required"),
        (("--gpu", "l4", "--model", "llama-3.1-70b"), "do not fit"),
        (("--gpu", "h200", "--model", "llama-3.1-8b", "--dtype", "int3"), "--dtype: must be one of"),
        (("--gpu", "h200", "--model", "llama-3.1-8b", "--kernel", "x"), "bgmv, mbgmv, vllm"),
        (("--gpu", "h200", "--model", "llama-3.1-8b", "--rules", "x"), "rules"),
        (("--gpu", "h200", "--model", "llama-3.1-8b", "--compute-efficiency", "2"), "share above 0"),
        (("--gpu", "h200", "--model", "llama-3.1-8b", "--base-model", "x"), "goes with --model-config"),
    ],
)
def test_mistakes_are_one_line(run: Run, tmp_path: Path, arguments: tuple[str, ...], rule: str) -> None:
    path = tmp_path / "out.json"
    assert rule in error_line(run("profile", "roofline", "-o", path, *arguments))
    assert not path.exists()


def test_the_version_of_the_engine_chooses_its_rules_and_the_record_repeats_the_command(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "h200.json"
    assert run(*H200, "-o", path, "--engine-version", "0.11.0", "--step-overhead-ms", 3).exit_code == 0
    made = load_profile(path)
    assert made.name == "roofline/h200/llama-3.1-8b/vllm-0.11.0"
    assert (made.engine.version, made.engine.rules, made.engine.lora_extra_vocab) == (
        "0.11.0",
        "vllm-0.11",
        256,
    )
    assert made.provenance.command == (
        f"capplan profile roofline --gpu h200 --output {path} --model llama-3.1-8b --engine-version 0.11.0"
        " --step-overhead-ms 3.0"
    )
    refused = error_line(run(*H200, "-o", path, "--engine-version", "0.25.0"))
    assert "0.19.0 to 0.23 (vllm-0.20-async) and 0.27.0 to 0.32 (vllm-0.32-async)" in refused
    assert "must be vllm-0.11 for vLLM 0.11.0" in error_line(
        run(*H200, "-o", path, "--engine-version", "0.11.0", "--rules", "vllm-0.8")
    )
    assert "--engine-version: is that of vLLM and does not go with rules slora" in error_line(
        run(*H200, "-o", path, "--engine-version", "0.11.0", "--rules", "slora")
    )


def test_plans_name_the_engine_of_their_rules(run: Run, tmp_path: Path) -> None:
    profile, workload, plan = (tmp_path / name for name in ("slora.json", "w.yaml", "plan.json"))
    run(*H200, "-o", profile, "--rules", "slora", "--kernel", "mbgmv")
    workload.write_text(WORKLOAD.format(profile=profile))
    assert run("plan", workload, "-o", plan, "--seeds", 1, "--no-verify").exit_code == 0
    engine = json.loads(plan.read_text())["engine"]
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert engine == {"name": "s-lora", "version": "c1ddf48", "rules": "slora", "target_modules": modules}
    exported = run("export", plan, "--target", "vllm", "-o", tmp_path / "out", "--unverified")
    assert "must be an engine with adapter slots" in error_line(exported)
