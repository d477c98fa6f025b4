"""Small inputs of every kind, for the tests of rules."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import yaml

from capplan import Plan
from tests.cli.examples import MODEL, group, plan_of
from tests.conftest import http_server, reply
from tests.spec.test_registry import peft_folder


def write(folder: Path, text: str, name: str = "input") -> Path:
    """Write a file, whose name says nothing, and return its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def documents(folder: Path, *objects: Mapping[str, Any]) -> Path:
    """Write documents of YAML."""
    return write(folder, "---\n".join(yaml.safe_dump(each, sort_keys=False) for each in objects))


def one_group(*adapters: tuple[str, int, str | None], **args: Any) -> Plan:
    """Return a plan of one group; an adapter is (name, rank, path)."""
    return plan_of(group("g", tuple((name, rank, 1.0, path) for name, rank, path in adapters), **args))


def serve(*words: str) -> str:
    """Return a script that starts vLLM."""
    return " ".join(["#!/bin/sh\nexec vllm serve", MODEL, *words]) + "\n"


def sglang(*words: str) -> str:
    """Return a script that starts SGLang."""
    return " ".join(["python3 -m sglang.launch_server --model-path", MODEL, "--enable-lora", *words]) + "\n"


def pod(*args: str, image: str = "vllm/vllm-openai:v0.19.0", gpus: int = 1, **labels: str) -> dict[str, Any]:
    """Return a Deployment of vLLM."""
    container = {
        "name": "vllm",
        "image": image,
        "args": [MODEL, *args],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
    }
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": template}}


def crd(api: str, kind: str, **spec: Any) -> dict[str, Any]:
    """Return an object of a controller."""
    return {"apiVersion": api, "kind": kind, "metadata": {"name": "x"}, "spec": spec}


def kserve(**maxima: int) -> dict[str, Any]:
    """Return an LLMInferenceService with two adapters."""
    adapters = [{"name": name, "uri": f"s3://bucket/{name}"} for name in ("a", "b")]
    model = {"uri": f"hf://{MODEL}", "lora": {"adapters": adapters, **maxima}}
    template = {"containers": [{"name": "main"}]}
    return crd("serving.kserve.io/v1alpha2", "LLMInferenceService", model=model, template=template)


def lora_adapter(base_model: str, name: str = "a") -> dict[str, Any]:
    """Return a LoraAdapter of the production-stack."""
    source = {"type": "local", "adapterName": name, "adapterPath": f"/adapters/{name}"}
    api = "production-stack.vllm.ai/v1alpha1"
    return crd(api, "LoraAdapter", baseModel=base_model, adapterSource=source)


def chart(**changes: Any) -> dict[str, Any]:
    """Return values of the production-stack's chart."""
    model = {
        "name": "base",
        "repository": "vllm/vllm-openai",
        "tag": "v0.19.0",
        "modelURL": MODEL,
        "requestGPU": 1,
        "enableLoRA": True,
        "vllmConfig": {"enablePrefixCaching": True, "maxLoras": 2},
        "env": [{"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"}],
    }
    return {
        "servingEngineSpec": {"modelSpec": [model | changes]},
        "loraController": {"enableLoraController": True},
    }


def ray(**lora: Any) -> dict[str, Any]:
    """Return an application of Ray Serve LLM."""
    config = {
        "model_loading_config": {"model_id": "g", "model_source": MODEL},
        "engine_kwargs": {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16},
        "lora_config": {"dynamic_lora_loading_path": "s3://bucket/adapters", **lora},
    }
    return {"applications": [{"name": "llm", "args": {"llm_configs": [config]}}]}


def dynamo(*args: str) -> list[dict[str, Any]]:
    """Return a graph of Dynamo with three adapters."""
    container = {
        "name": "main",
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": ["--model", MODEL, "--enable-lora", *args],
    }
    component = {"name": "g", "podTemplate": {"spec": {"containers": [container]}}}
    fields = {"baseModelName": MODEL, "modelType": "lora"}
    models = [crd("nvidia.com/v1alpha1", "DynamoModel", modelName=name, **fields) for name in "abc"]
    return [crd("nvidia.com/v1beta1", "DynamoGraphDeployment", components=[component]), *models]


def workload(slo: str = "slo: {ttft_p99_s: 5}", adapters: str = "", rest: str = "") -> str:
    """Return a workload file."""
    return f"""\
base_model: {MODEL}
profile: h100-64g/llama-3.1-8b/vllm-0.8.5
{slo}
{rest}
requests: {{prompt_tokens: {{mean: 120}}, output_tokens: {{mean: 40}}}}
adapters:
  - {{name: a, rank: 8, rate_rps: 0.5}}
{adapters}"""


def adapter(folder: Path, name: str = "a", rank: int = 4, **config: Any) -> Path:
    """Write a PEFT folder."""
    return peft_folder(folder / name, rank, **{"base_model_name_or_path": MODEL, **config})


def running(
    *adapters: str, base_model: str = MODEL, max_loras: int | None = None, models: Any = None
) -> AbstractContextManager[str]:
    """Return the context of a server that lists models, at the URL of its value."""
    entries = [{"id": base_model, "root": base_model, "parent": None}]
    entries += [{"id": name, "root": f"/adapters/{name}", "parent": base_model} for name in adapters]
    answers = {"/v1/models": json.dumps({"data": entries} if models is None else models)}
    if max_loras is not None:
        labels = f'max_lora="{max_loras}",running_lora_adapters="",waiting_lora_adapters=""'
        answers["/metrics"] = (
            f"# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{{{labels}}} 1.0\n"
        )

    def respond(handler: BaseHTTPRequestHandler) -> None:
        answer = answers.get(handler.path)
        reply(handler, (answer or "").encode(), status=404 if answer is None else 200)

    return http_server(respond)
