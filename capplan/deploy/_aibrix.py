"""Manifests for AIBrix: a Deployment per group, and a ModelAdapter per adapter that selects its groups' pods.

Checked against vllm-project/aibrix e3e10f9.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from capplan.deploy import _kubernetes as k8s
from capplan.deploy._servers import require_servable, source_kind, unused_name
from capplan.deploy._target import PLAN, Exporter, Loss
from capplan.spec import Group, Plan, PlanAdapter

_MODEL_LABEL: Final = "model.aibrix.ai/name"
_ENV: Final = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
_SERVICE_NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

_BETWEEN: Final = Loss(
    "the gateway sends the requests of an adapter to any pod of its groups, without shares", "random"
)
_WITHIN: Final = Loss("the gateway draws the replica of a group at random", "random")
_BASE: Final = Loss("requests for the base model go to the pods of all groups, without shares", "random")


def aibrix_losses(plan: Plan) -> tuple[Loss, ...]:
    """Return what AIBrix does not do as the plan says."""
    based = {group.base is not None for group in plan.groups}
    return (
        *k8s.routing_losses(plan, between=_BETWEEN, within=_WITHIN),
        *([_BASE] if based == {True, False} else []),
    )


def aibrix_files(plan: Plan, *, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the manifests, and the plan."""
    require_servable(plan)
    adapters = plan.adapters
    for name in adapters:
        if not _SERVICE_NAME.fullmatch(name):
            raise k8s.refused_name(
                name, "must be a DNS label of at most 63 characters: AIBrix names a Service by it"
            )
    names, model = k8s.object_names(plan), _model_name(plan)
    documents: list[tuple[list[str], dict[str, Any]]] = [
        (k8s.header_of(plan, group), _deployment(plan, group, names[group.id], model, settings))
        for group in plan.groups
    ]
    documents.append(([], k8s.service(model, settings, {_MODEL_LABEL: model})))
    documents += [
        (
            [],
            _model_adapter(each, [names[group] for group in _groups_of(plan, each)], model, settings),
        )
        for each in adapters.values()
    ]
    top = [
        *k8s.top_comment(plan, aibrix_losses(plan)),
        f"Requests for the base model name {model}.",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING: AIBrix loads adapters into running servers.",
    ]
    return {"aibrix.yaml": k8s.yaml_documents(documents, top), PLAN: plan.to_json()}


def _model_name(plan: Plan) -> str:
    """Return the label and Service of the base model, which no adapter has as its name."""
    return unused_name(k8s.dns_label(plan.base_model.rpartition("/")[2]), set(plan.adapters), "-")


def _groups_of(plan: Plan, adapter: PlanAdapter) -> list[str]:
    """Return the ids of the groups of an adapter."""
    return [group.id for group in plan.groups if any(each.name == adapter.name for each in group.adapters)]


def _deployment(
    plan: Plan, group: Group, name: str, model: str, settings: Mapping[str, str]
) -> dict[str, Any]:
    labels = {_MODEL_LABEL: model, "model.aibrix.ai/port": str(k8s.PORT)}
    if group.adapters:
        labels["adapter.model.aibrix.ai/enabled"] = "true"
    env = _ENV if group.adapters else {}
    document = k8s.deployment(plan, group, name, settings, labels=labels, with_adapters=False, env=env)
    container = document["spec"]["template"]["spec"]["containers"][0]
    container["args"] += ["--served-model-name", model, plan.base_model]
    return document


def _model_adapter(
    adapter: PlanAdapter, groups: list[str], model: str, settings: Mapping[str, str]
) -> dict[str, Any]:
    """Return the ModelAdapter of an adapter, which loads it into all pods of its groups.

    `replicas` is left out, because 1 is its only value, and would load the adapter into a single pod.
    """
    selector: dict[str, Any] = {"matchLabels": {k8s.GROUP_LABEL: groups[0]}}
    if len(groups) > 1:
        selector = {"matchExpressions": [{"key": k8s.GROUP_LABEL, "operator": "In", "values": groups}]}
    scheme = "huggingface://" if source_kind(adapter) == "hub" else ""
    return {
        "apiVersion": "model.aibrix.ai/v1alpha1",
        "kind": "ModelAdapter",
        "metadata": {**k8s.metadata(adapter.name, settings), "labels": {_MODEL_LABEL: adapter.name}},
        "spec": {
            "baseModel": model,
            "podSelector": selector,
            "artifactURL": f"{scheme}{k8s.adapter_path(adapter)}",
        },
    }


EXPORTER: Final = Exporter(
    aibrix_files,
    frozenset({"aibrix.yaml", PLAN}),
    serves=True,
    settings=k8s.POD_SETTINGS,
    losses=aibrix_losses,
    notes=k8s.folder_notes,
)
