"""Manifests for KServe: an LLMInferenceService per group.

Checked against kserve/kserve aaac4e2 (0.21).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from capplan.deploy import _kubernetes as k8s
from capplan.deploy._servers import engine_flags, require_servable, source_kind
from capplan.deploy._target import PLAN, Exporter, Loss
from capplan.spec import Group, Plan, PlanAdapter

_MAXIMA: Final = {
    "--max-lora-rank": "maxRank",
    "--max-loras": "maxAdapters",
    "--max-cpu-loras": "maxCpuAdapters",
}
"""Fields by flag. KServe passes those alone that are set, and vLLM's defaults are 16, 1 and 1."""

_BETWEEN: Final = Loss(
    "each group is a service with a URL of its own: clients choose the group of an adapter's requests, "
    "without shares",
    "random",
)
_WITHIN: Final = Loss(
    "the inference scheduler picks the replica of a group by queue, KV cache and adapters",
    "inference-gateway",
)

_losses: Final = partial(k8s.routing_losses, between=_BETWEEN, within=_WITHIN)


def kserve_files(plan: Plan, *, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the manifests, and the plan."""
    require_servable(plan)
    names = k8s.object_names(plan)
    documents = [
        (k8s.header_of(plan, group), _service(plan, group, names[group.id], settings))
        for group in plan.groups
    ]
    top = [
        *k8s.top_comment(plan, _losses(plan)),
        "Probes are those of KServe's template. A gated base model needs a token of the storage initializer.",
        "runAsNonRoot: the template's true would refuse the image of vLLM, which runs as root.",
        "KServe registers each adapter under a second name, too. Both take a place of maxCpuAdapters at the "
        "start, so the first request of some adapters loads them again.",
    ]
    return {"kserve.yaml": k8s.yaml_documents(documents, top), PLAN: plan.to_json()}


def _service(plan: Plan, group: Group, name: str, settings: Mapping[str, str]) -> dict[str, Any]:
    model: dict[str, Any] = {"uri": f"hf://{plan.base_model}", "name": plan.base_model}
    if group.adapters:
        model["lora"] = _lora(plan, group, settings)
    set_by_fields = {"--enable-lora", *_MAXIMA} if group.adapters else set()
    flags = [flag for flag in engine_flags(plan, group) if flag.name not in set_by_fields]
    arguments = shlex.join(word for flag in flags for word in flag.words)  # its template evaluates them
    container = {
        "name": "main",
        "image": k8s.image_of(plan, group, settings),
        "env": k8s.variables({"VLLM_ADDITIONAL_ARGS": arguments}),
        "resources": {"limits": {"nvidia.com/gpu": str(group.tp)}},
        # The image of vLLM runs as root, which KServe's template forbids.
        "securityContext": {"runAsNonRoot": False},
    }
    return {
        "apiVersion": "serving.kserve.io/v1alpha2",
        "kind": "LLMInferenceService",
        "metadata": k8s.metadata(name, settings),
        "spec": {
            "model": model,
            "replicas": group.replicas,
            "parallelism": {"tensor": group.tp},
            "template": {**k8s.node_selector(plan, group, settings), "containers": [container]},
            "router": {"route": {}, "gateway": {}, "scheduler": {}},
        },
    }


def _lora(plan: Plan, group: Group, settings: Mapping[str, str]) -> dict[str, Any]:
    maxima = {
        _MAXIMA[flag.name]: int(flag.values[0]) for flag in engine_flags(plan, group) if flag.name in _MAXIMA
    }
    folders: set[str] = set()
    for adapter in group.adapters:
        _require_name(plan, adapter, folders)
    adapters = [{"name": each.name, "uri": _uri(each, settings)} for each in group.adapters]
    return {"adapters": adapters, **maxima}


def _require_name(plan: Plan, adapter: PlanAdapter, folders: set[str]) -> None:
    """Check the name of an adapter, and add its folder in the pods to those of its group."""
    if "'" in adapter.name or "$(" in adapter.name:
        raise k8s.refused_name(adapter.name, "must be without ' and $(: KServe passes it to a shell in a pod")
    if adapter.name == plan.base_model:
        raise k8s.refused_name(adapter.name, "must differ from that of the base model")
    folder = re.sub(r"[^a-zA-Z0-9._-]", "-", adapter.name)
    if folder in folders:
        rule = f"must differ in more than special characters: KServe mounts two adapters as {folder}"
        raise k8s.refused_name(adapter.name, rule)
    folders.add(folder)


def _uri(adapter: PlanAdapter, settings: Mapping[str, str]) -> str:
    """Return where KServe fetches an adapter."""
    kind = source_kind(adapter)
    if kind == "hub":
        return f"hf://{adapter.path}"
    if kind == "s3":
        return adapter.path or ""
    if kind == "url":
        raise k8s.refused_path(adapter, "must be a folder, an id of the Hugging Face Hub or s3:// for KServe")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", adapter.name):
        rule = "must be of lower-case letters, digits and -: KServe names the volume of the folder by it"
        raise k8s.refused_name(adapter.name, rule)
    return f"pvc://{settings[k8s.CLAIM.name]}/{adapter.name}"


EXPORTER: Final = Exporter(
    kserve_files,
    frozenset({"kserve.yaml", PLAN}),
    serves=True,
    settings=k8s.ENGINE_SETTINGS,
    losses=_losses,
    notes=k8s.folder_notes,
)
