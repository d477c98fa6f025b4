import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from capplan import InputError, Plan
from capplan.deploy import EXPORTERS, export
from capplan.spec import PlanBase, PlanEngine
from tests.cli.examples import MODEL, group, plan_of, small_plan

HERE = Path(__file__).parent
STORE = {"adapters-path": "s3://bucket/adapters"}
ONE = (("a", 8, 1.0, "/p/a"),)


def configs(plan: Plan, settings: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the LLMs of a plan."""
    text = export(plan, "ray", settings=STORE if settings is None else settings)["serve.yaml"]
    (application,) = yaml.safe_load(text)["applications"]
    assert application["import_path"] == "ray.serve.llm:build_openai_app"
    return list(application["args"]["llm_configs"])


def test_a_group_is_an_llm_with_the_flags_of_vllm_as_arguments() -> None:
    first, second = configs(small_plan())
    args = small_plan().groups[0].engine_args
    assert first == {
        "model_loading_config": {"model_id": "g0", "model_source": MODEL},
        "engine_kwargs": {
            "tensor_parallel_size": 1,
            "enable_lora": True,
            "max_loras": args.max_loras,
            "max_lora_rank": args.max_lora_rank,
            "max_cpu_loras": 2,
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "gpu_memory_utilization": 0.9,
            "max_model_len": args.max_model_len,
        },
        "deployment_config": {"num_replicas": 2},
        "lora_config": {
            "dynamic_lora_loading_path": "s3://bucket/adapters",
            "max_num_adapters_per_replica": 2,
        },
    }
    assert second["model_loading_config"]["model_id"] == "g1"
    assert second["deployment_config"] == {"num_replicas": 1}


def test_switches_and_lists_are_those_of_python() -> None:
    engine = PlanEngine(
        name="vllm",
        version="0.32.0",
        rules="vllm-0.32-sync",
        target_modules=("q_proj", "down_proj"),
        fully_sharded_loras=True,
        kv_cache_dtype="fp8",
    )
    (config,) = configs(plan_of(group("g", adapters=ONE, enable_prefix_caching=False), engine=engine))
    kwargs = config["engine_kwargs"]
    assert kwargs["async_scheduling"] is False
    assert kwargs["enable_prefix_caching"] is False
    assert kwargs["fully_sharded_loras"] is True
    assert kwargs["lora_target_modules"] == ["qkv_proj", "down_proj"]
    assert kwargs["kv_cache_dtype"] == "fp8"


def test_the_folder_of_adapters_is_required_if_there_are_any() -> None:
    for settings in ({}, {"adapters-path": "/srv/adapters"}, {"adapters-path": "http://x/y"}):
        with pytest.raises(InputError, match=r"set: adapters-path: must begin with s3://, gs://"):
            configs(small_plan(), settings)
    base = PlanBase(rate_rps=1.0, share=1.0)
    part = group("g", adapters=ONE, max_loras=2).replace(adapters=(), base=base)
    args = part.engine_args.replace(max_loras=0, max_lora_rank=0)
    (config,) = configs(plan_of(part.replace(engine_args=args)), {})
    assert "lora_config" not in config
    assert not [name for name in config["engine_kwargs"] if "lora" in name]


def test_models_have_different_names_without_what_ray_reads_in_them() -> None:
    names = ("a:b", "a/b", "a.b", "A-b", "é")
    groups = [group(name, adapters=((f"on-{i}", 8, 1.0, "p"),)) for i, name in enumerate(names)]
    found = [config["model_loading_config"]["model_id"] for config in configs(plan_of(*groups))]
    assert found == ["a-b", "a-b-2", "a-b-3", "A-b-4", "group"]


def test_routing_names_the_models_of_each_adapter_with_their_shares() -> None:
    files = export(small_plan(), "ray", settings=STORE)
    assert set(files) == {"serve.yaml", "routing.json", "plan.json"} == EXPORTERS["ray"].top_names
    routing = json.loads(files["routing.json"])
    assert routing["adapters"]["shared"] == [
        {"model": "g0:shared", "share": 0.25},
        {"model": "g1:shared", "share": 0.75},
    ]
    assert "base" not in routing
    assert routing["plan_sha256"] in files["serve.yaml"]


@pytest.mark.parametrize(
    ("gpu", "accelerator"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA H1000", None),
        ("Test GPU", None),
    ],
)
def test_a_kind_of_gpu_is_named_if_ray_knows_it(gpu: str, accelerator: str | None) -> None:
    (config,) = configs(plan_of(group("g", adapters=ONE).replace(gpu=gpu)))
    assert config.get("accelerator_type") == accelerator


def test_accelerators_are_those_of_ray_and_of_the_names_that_it_gives_nodes() -> None:
    known = pytest.importorskip("ray.util.accelerators.accelerators", reason="needs ray (extra `ray`)")
    nvidia = pytest.importorskip("ray._private.accelerators.nvidia_gpu").NvidiaGPUAcceleratorManager
    names = {value for key, value in vars(known).items() if key.isupper()}
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA B200", "Tesla T4"):
        (config,) = configs(plan_of(group("g", adapters=ONE).replace(gpu=gpu)))
        assert config["accelerator_type"] in names
        assert config["accelerator_type"] == nvidia._gpu_name_to_accelerator_type(gpu)


def test_losses_are_what_concerns_the_plan_and_in_the_file() -> None:
    losses = EXPORTERS["ray"].losses
    text = export(small_plan(), "ray", settings=STORE)["serve.yaml"]
    assert [loss.router for loss in losses(small_plan())] == [None, None, "plan-shares", "two-choices"]
    for loss in losses(small_plan()):
        assert f"# Differs from the plan: {loss.text}.\n" in text
    assert [loss.router for loss in losses(plan_of(group("g", adapters=ONE)))] == [None, None]


def test_a_note_says_what_the_folder_of_adapters_must_hold() -> None:
    (note,) = EXPORTERS["ray"].notes(small_plan())
    assert note == "note: adapters-path must hold 3 adapters, a folder each by its name, such as a"


@pytest.mark.oracle
def test_ray_reads_the_configuration_as_it_is_meant(tmp_path: Path) -> None:
    """By Ray's and vLLM's own classes, and a local Ray that builds the application: no GPU starts it."""
    python = os.environ.get("CAPPLAN_RAY_PYTHON")
    if not python:
        pytest.skip("CAPPLAN_RAY_PYTHON names no Python that has ray and vllm (tests/deploy/README.md)")
    first, second = small_plan().groups
    plan = small_plan(
        groups=(first.replace(gpu="NVIDIA H100 80GB HBM3"), second),
        engine=PlanEngine(name="vllm", version="0.32.0", rules="vllm-0.32-sync", target_modules=("q_proj",)),
    )
    (tmp_path / "serve.yaml").write_text(export(plan, "ray", settings=STORE)["serve.yaml"])
    done = subprocess.run(
        [python, HERE / "read_ray.py", tmp_path / "serve.yaml"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *_, h100, other = done.stdout.splitlines()
    kwargs = configs(plan)[0]["engine_kwargs"]
    assert json.loads(h100) == {
        "import_path": "ray.serve.llm:build_openai_app",
        "model_id": "g0",
        "model_source": MODEL,
        "accelerator_type": "H100",
        "replicas": 2,
        "adapters_path": "s3://bucket/adapters",
        "adapters": 2,
        "engine": kwargs,
    }
    assert kwargs["lora_target_modules"] == ["qkv_proj"]
    assert json.loads(other)["accelerator_type"] is None
