"""Configuration of Ray Serve LLM: an application with an LLM per group.

The fields are those of ``ray.serve.llm.LLMConfig`` in Ray 2.60. Ray starts vLLM with ``engine_kwargs``, and
loads an adapter at its first request from a folder of a cloud storage.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import yaml

from capplan.deploy import _kubernetes as k8s
from capplan.deploy._servers import Flag, engine_flags, require_servable, unused_name
from capplan.deploy._target import PLAN, Exporter, Loss, Setting
from capplan.errors import InputError
from capplan.spec import Group, Plan

ADAPTERS_PATH: Final = Setting(
    "adapters-path", "", "folder of a cloud storage with a folder per adapter, by its name; such as s3://..."
)

CONFIG: Final = "serve.yaml"
ROUTING: Final = "routing.json"

STORAGES: Final = ("s3://", "gs://", "abfss://", "azure://")
"""Addresses from which Ray loads adapters."""

_ACCELERATORS: Final = frozenset(
    {
        *("V100", "P100", "T4", "P4", "K80", "A10G", "L4", "L40S", "A100", "H100", "H200", "H20"),
        *("B200", "B300", "GB200", "GB300", "RTX-PRO-6000"),
    }
)
"""NVIDIA's of ``ray.util.accelerators``; a node has the name that Ray finds in that of its driver."""

_BETWEEN: Final = Loss(
    "clients or a gateway choose the group of an adapter's requests, by the shares in routing.json",
    "plan-shares",
)
_WITHIN: Final = Loss(
    "Ray sends a request to the less loaded of two replicas, of those with the adapter if there are any",
    "two-choices",
)


def ray_files(plan: Plan, *, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the configuration for ``serve deploy``, the models of each adapter, and the plan."""
    require_servable(plan)
    adapters_path = _adapters_path(plan, settings[ADAPTERS_PATH.name])
    models = model_ids(plan)
    text = plan.to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()
    config = {
        "applications": [
            {
                "name": "capplan",
                "route_prefix": "/",
                "import_path": "ray.serve.llm:build_openai_app",
                "args": {
                    "llm_configs": [
                        _llm_config(plan, group, models[group.id], adapters_path) for group in plan.groups
                    ]
                },
            }
        ]
    }
    comment = [
        *k8s.top_comment(plan, ray_losses(plan)),
        f"Plan: sha256 {digest}. Start: serve deploy {CONFIG}",
        *(line for group in plan.groups for line in k8s.header_of(plan, group)),
    ]
    return {
        CONFIG: k8s.yaml_documents([(comment, config)]),
        ROUTING: _routing(plan, models, digest),
        PLAN: text,
    }


def ray_losses(plan: Plan) -> tuple[Loss, ...]:
    """Return what Ray does not do as the plan says."""
    names = Loss("requests name an adapter as model GROUP:ADAPTER, by routing.json, not ADAPTER")
    loading = Loss("a server loads an adapter from the cloud storage at its first request, not at its start")
    always = (names, loading) if plan.adapters else ()
    return (*always, *k8s.routing_losses(plan, between=_BETWEEN, within=_WITHIN))


def ray_notes(plan: Plan) -> tuple[str, ...]:
    """Return a line on what the folder of adapters must hold."""
    return k8s.notes_on(ADAPTERS_PATH.name, list(plan.adapters.values()))


def _adapters_path(plan: Plan, path: str) -> str:
    if plan.adapters and not path.startswith(STORAGES):
        rule = f"must begin with {', '.join(STORAGES)}: Ray loads adapters from there alone"
        raise InputError(rule, path, f"set: {ADAPTERS_PATH.name}")
    return path


def model_ids(plan: Plan) -> dict[str, str]:
    """Return the model of each group: without ``:``, which separates the adapter, or what Ray replaces."""
    taken: set[str] = set()
    return {
        group.id: unused_name(re.sub(r"[^A-Za-z0-9_-]+", "-", group.id).strip("-") or "group", taken, "-")
        for group in plan.groups
    }


def _llm_config(plan: Plan, group: Group, model: str, adapters_path: str) -> dict[str, Any]:
    """Return the ``LLMConfig`` of a group."""
    kwargs = _engine_kwargs(engine_flags(plan, group))
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": model, "model_source": plan.base_model},
        "engine_kwargs": kwargs,
        "deployment_config": {"num_replicas": group.replicas},
    }
    if group.adapters:
        config["lora_config"] = {
            "dynamic_lora_loading_path": adapters_path,
            # A replica forgets the least recently used one beyond these; vLLM holds as many.
            "max_num_adapters_per_replica": kwargs["max_cpu_loras"],
        }
    if (accelerator := _accelerator(group.gpu)) is not None:
        config["accelerator_type"] = accelerator
    return config


def _engine_kwargs(flags: Iterable[Flag]) -> dict[str, Any]:
    """Return flags of ``vllm serve`` as arguments of its engine."""
    kwargs: dict[str, Any] = {}
    for flag in flags:
        name = flag.name.removeprefix("--").replace("-", "_")
        if not flag.values:
            kwargs[name.removeprefix("no_")] = not name.startswith("no_")
        elif name == "lora_target_modules":
            kwargs[name] = list(flag.values)
        else:
            kwargs[name] = yaml.safe_load(flag.values[0])
    return kwargs


def _accelerator(gpu: str) -> str | None:
    """Return Ray's name of a kind of GPU, from that of its driver; None if Ray has none."""
    found = re.match(r"(?:NVIDIA|Tesla) ((?:[A-Z]+ )*[A-Z]*\d+[A-Z]*)\b", gpu)
    name = None if found is None else found[1].replace(" ", "-")
    return name if name in _ACCELERATORS else None


def _routing(plan: Plan, models: Mapping[str, str], digest: str) -> str:
    """Return the models of each adapter, with the share of its requests that each must get."""
    adapters: dict[str, list[dict[str, Any]]] = {}
    for group in plan.groups:
        for each in group.adapters:
            entry = {"model": f"{models[group.id]}:{each.name}", "share": each.share}
            adapters.setdefault(each.name, []).append(entry)
    document: dict[str, Any] = {
        "plan_sha256": digest,
        "base_model": plan.base_model,
        "adapters": adapters,
    }
    base = [{"model": models[g.id], "share": g.base.share} for g in plan.groups if g.base is not None]
    if base:  # requests that name the base model; otherwise any group may take one
        document["base"] = base
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


EXPORTER: Final = Exporter(
    ray_files,
    frozenset({CONFIG, ROUTING, PLAN}),
    serves=True,
    settings=(ADAPTERS_PATH,),
    losses=ray_losses,
    notes=ray_notes,
)
