"""Manifests for NVIDIA Dynamo, which loads every adapter on every server.

A DynamoGraphDeployment with a component per group, and a DynamoModel per adapter; checked against
ai-dynamo 1.6.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from capplan.deploy import _kubernetes as k8s
from capplan.deploy._servers import engine_flags, require_servable, source_kind
from capplan.deploy._target import PLAN, Exporter, Loss, Setting
from capplan.errors import InputError
from capplan.spec import Group, Plan, PlanAdapter

IMAGE: Final = Setting(
    "image", "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.6.1", "image of Dynamo with vLLM in it"
)

_FRONTEND: Final = "Frontend"
_MOST_COMPONENTS: Final = 25
_LONGEST_COMPONENT: Final = 24
_LONGEST_GRAPH: Final = 21
"""The names of a graph and of a component have at most 45 characters together."""

_ENV: Final = {
    "DYN_LORA_ENABLED": "true",
    "DYN_LORA_PATH": "/tmp/dynamo-loras",  # noqa: S108 - in the container
    # The operator loads adapters by the port of the system server.
    "DYN_SYSTEM_ENABLED": "true",
    "DYN_SYSTEM_PORT": "9090",
}

_EVERYWHERE: Final = Loss(
    "every adapter is loaded on the servers of all groups, and its requests go to all of them in turn: "
    "placement and shares are lost",
    "round-robin",
    everywhere=True,
)
_WITHIN: Final = Loss("the front end sends requests to the servers in turn", "round-robin")


def dynamo_losses(plan: Plan) -> tuple[Loss, ...]:
    """Return what Dynamo does not do as the plan says."""
    if len(plan.groups) > 1:
        return (_EVERYWHERE,)
    return k8s.routing_losses(plan, between=_WITHIN, within=_WITHIN)


def dynamo_files(plan: Plan, *, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the manifests, and the plan."""
    require_servable(plan)
    if len(plan.groups) >= _MOST_COMPONENTS:
        most = _MOST_COMPONENTS - 1
        rule = f"must be at most {most}: a DynamoGraphDeployment has no more components beside its front end"
        raise InputError(rule, len(plan.groups), "plan: groups")
    groups = [_with_all_adapters(plan, group) for group in plan.groups]
    comment = [
        *k8s.top_comment(plan, dynamo_losses(plan)),
        "Ranks are the largest of all adapters.",
        "The version of vLLM is that of Dynamo's image, and probes are those of its operator.",
        *(line for group in groups for line in k8s.header_of(plan, group)),
    ]
    names = k8s.adapter_names(plan)
    documents: list[tuple[list[str], dict[str, Any]]] = [(comment, _graph(plan, groups, settings))]
    documents += [([], _model(plan, each, names[each.name], settings)) for each in plan.adapters.values()]
    return {"dynamo.yaml": k8s.yaml_documents(documents), PLAN: plan.to_json()}


def _with_all_adapters(plan: Plan, group: Group) -> Group:
    """Return a group as Dynamo runs it; one without adapters has no slots, and is left as it is."""
    if not group.adapters:
        return group
    rank = max(each.engine_args.max_lora_rank for each in plan.groups)
    arguments = group.engine_args.replace(max_lora_rank=rank)
    return group.replace(adapters=tuple(plan.adapters.values()), engine_args=arguments)


def _graph(plan: Plan, groups: list[Group], settings: Mapping[str, str]) -> dict[str, Any]:
    names = k8s.object_names(plan, _LONGEST_COMPONENT, taken=[_FRONTEND.lower()])
    frontend = {"name": "main", "image": settings[IMAGE.name]}
    components = [
        {
            "name": _FRONTEND,
            "type": "frontend",
            "replicas": 1,
            "podTemplate": {"spec": {"containers": [frontend]}},
        },
        *(_component(plan, group, names[group.id], settings) for group in groups),
    ]
    return {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": k8s.metadata(k8s.dns_label(plan.base_model.rpartition("/")[2], _LONGEST_GRAPH), settings),
        "spec": {"components": components},
    }


def _component(plan: Plan, group: Group, name: str, settings: Mapping[str, str]) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "main",
        "image": settings[IMAGE.name],
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": [
            "--model",
            plan.base_model,
            *(word for flag in engine_flags(plan, group) for word in flag.words),
        ],
        "env": [k8s.HF_TOKEN, *(k8s.variables(_ENV) if group.adapters else [])],
        "resources": {"limits": {"nvidia.com/gpu": str(group.tp)}},
    }
    spec: dict[str, Any] = {**k8s.node_selector(plan, group, settings), "containers": [container]}
    kinds = {source_kind(adapter) for adapter in group.adapters}
    if "s3" in kinds:
        container["envFrom"] = k8s.S3_CREDENTIALS
    if kinds & k8s.FOLDERS:
        spec["volumes"] = [k8s.claim_volume(settings)]
        container["volumeMounts"] = [k8s.CLAIM_MOUNT]
    # Adapters are loaded where the reference is: not on servers without slots.
    reference = {"modelRef": {"name": plan.base_model}} if group.adapters else {}
    return {
        "name": name,
        "type": "decode",
        "replicas": group.replicas,
        **reference,
        "podTemplate": {"spec": spec},
    }


def _model(plan: Plan, adapter: PlanAdapter, name: str, settings: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoModel",
        "metadata": k8s.metadata(name, settings),
        "spec": {
            "modelName": adapter.name,
            "baseModelName": plan.base_model,
            "modelType": "lora",
            "source": {"uri": _uri(adapter)},
        },
    }


def _uri(adapter: PlanAdapter) -> str:
    """Return where Dynamo fetches an adapter."""
    kind = source_kind(adapter)
    if kind == "url":
        raise k8s.refused_path(adapter, "must be a folder, an id of the Hugging Face Hub or s3:// for Dynamo")
    if kind == "hub":
        return f"hf://{adapter.path}"
    return adapter.path or "" if kind == "s3" else f"file://{k8s.adapter_path(adapter)}"


EXPORTER: Final = Exporter(
    dynamo_files,
    frozenset({"dynamo.yaml", PLAN}),
    serves=True,
    settings=(k8s.NAMESPACE, IMAGE, k8s.GPU_LABEL, k8s.CLAIM),
    losses=dynamo_losses,
    notes=k8s.folder_notes,
)
