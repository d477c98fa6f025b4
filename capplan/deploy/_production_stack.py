"""Helm values for the vLLM production-stack, with a model per group, and LoraAdapter objects.

Checked against vllm-project/production-stack a6c01db (chart 0.1.12).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from capplan.deploy import _kubernetes as k8s
from capplan.deploy._servers import engine_flags, lora_module, require_servable, source_kind
from capplan.deploy._target import PLAN, Exporter, Loss, Setting
from capplan.errors import InputError
from capplan.spec import Group, Plan, PlanAdapter

CPU: Final = Setting("cpu", "4", "CPU cores of a pod, which the chart requires")
MEMORY: Final = Setting("memory", "32Gi", "memory of a pod, which the chart requires")
STORAGE: Final = Setting("storage", "50Gi", "size of the claim of a group that downloads adapters")
STORAGE_CLASS: Final = Setting("storage-class", "", "class of that claim; by default the cluster's")

_LONGEST_NAME: Final = 30
"""The chart makes a host name of it, with the release and suffixes, of at most 63 characters."""

_FIELDS: Final = {
    "--tensor-parallel-size": ("tensorParallelSize", int),
    "--max-loras": ("maxLoras", int),
    "--max-num-seqs": ("maxNumSeqs", int),
    "--gpu-memory-utilization": ("gpuMemoryUtilization", float),
}
"""Fields of `vllmConfig` by flag. `maxModelLen` is not among them: Helm writes numbers from 1e6 as floats."""

_BETWEEN: Final = Loss(
    "the router sends the requests of an adapter to its pods in turn, without shares", "round-robin"
)
_WITHIN: Final = Loss("the router sends requests to the replicas in turn", "round-robin")

_losses: Final = partial(k8s.routing_losses, between=_BETWEEN, within=_WITHIN)


def production_stack_files(plan: Plan, *, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the Helm chart, the LoraAdapters, and the plan."""
    require_servable(plan)
    for adapter in plan.adapters.values():
        if source_kind(adapter) in ("s3", "url"):
            rule = (
                "must be a folder or an id of the Hugging Face Hub: the stack has no download from elsewhere"
            )
            raise k8s.refused_path(adapter, rule)
    names = k8s.object_names(plan, _LONGEST_NAME)
    models = [_model_spec(plan, group, names[group.id], settings) for group in plan.groups]
    comment = [
        *k8s.top_comment(plan, _losses(plan)),
        f"helm install vllm vllm/vllm-stack --namespace {settings[k8s.NAMESPACE.name]} --values values.yaml",
        "enablePrefixCaching: the chart turns it off unless it is true.",
        "--lora-modules: adapters of several groups, which a LoraAdapter would unload from all but one.",
        *(line for group in plan.groups for line in k8s.header_of(plan, group)),
    ]
    files = {"values.yaml": k8s.yaml_documents([(comment, _values(models))])}
    if adapters := [
        ([f"Adapter {each.name} of group {group.id}."], _lora_adapter(plan, each, names[group.id], settings))
        for group in plan.groups
        for each in _loaded_later(plan, group)
    ]:
        files["lora-adapters.yaml"] = k8s.yaml_documents(adapters)
    return {**files, PLAN: plan.to_json()}


def _values(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    probe = {"path": "/health", "port": k8s.PORT}
    return {
        "servingEngineSpec": {
            "containerPort": k8s.PORT,
            "strategy": k8s.STRATEGY,  # the chart's doubles the GPUs during an update
            # Loading weights and capturing graphs takes minutes.
            "startupProbe": {"httpGet": probe, "periodSeconds": 10, "failureThreshold": 180},
            "readinessProbe": {"httpGet": probe, "periodSeconds": 5, "failureThreshold": 2},
            "livenessProbe": {"httpGet": probe, "periodSeconds": 10, "failureThreshold": 6},
            "modelSpec": list(models),
        },
        "routerSpec": {"routingLogic": "roundrobin"},
        "loraController": {"enableLoraController": True},
    }


def _model_spec(plan: Plan, group: Group, name: str, settings: Mapping[str, str]) -> dict[str, Any]:
    repository, tag = _repository_and_tag(k8s.image_of(plan, group, settings))
    env: list[dict[str, Any]] = [k8s.HF_TOKEN]
    if _loaded_later(plan, group):
        env += k8s.variables({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"})
    return {
        "name": name,
        "repository": repository,
        "tag": tag,
        "modelURL": plan.base_model,
        "replicaCount": group.replicas,
        "requestCPU": _whole(settings[CPU.name]),
        "requestMemory": settings[MEMORY.name],
        "requestGPU": group.tp,
        "enableLoRA": bool(group.engine_args.max_loras),
        "vllmConfig": _vllm_config(plan, group),
        "env": env,
        **_nodes(plan, group, settings),
        **_storage(plan, group, settings),
    }


def _nodes(plan: Plan, group: Group, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the nodes of a group as a field of its model; empty where any node with a GPU will do."""
    terms = [
        {"matchExpressions": [{"key": label, "operator": "In", "values": [value]}]}
        for label, value in k8s.node_labels(plan, group, settings).items()
    ]
    return {"nodeSelectorTerms": terms} if terms else {}


def _repository_and_tag(image: str) -> tuple[str, str]:
    repository, colon, tag = image.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (image, "latest")


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise InputError("must be a whole number", text, f"set: {CPU.name}")
    return int(text)


def _vllm_config(plan: Plan, group: Group) -> dict[str, Any]:
    config: dict[str, Any] = {"enablePrefixCaching": True}
    extra: list[str] = []
    for flag in engine_flags(plan, group):
        if flag.name in _FIELDS:
            field, kind = _FIELDS[flag.name]
            config[field] = kind(flag.values[0])
        elif flag.name.endswith("enable-prefix-caching"):
            config["enablePrefixCaching"] = not flag.name.startswith("--no-")
        elif flag.name != "--enable-lora":
            extra += flag.words
    if shared := [each for each in group.adapters if _is_shared(plan, each)]:
        extra += ["--lora-modules", *(lora_module(each.name, k8s.adapter_path(each)) for each in shared)]
    return {**config, "extraArgs": k8s.literal(extra)}


def _is_shared(plan: Plan, adapter: PlanAdapter) -> bool:
    return sum(each.name == adapter.name for group in plan.groups for each in group.adapters) > 1


def _loaded_later(plan: Plan, group: Group) -> list[PlanAdapter]:
    """Return the adapters of a group that the controller loads.

    Each LoraAdapter is on the pods of one model, and its controller unloads adapters of the same name from
    all others.
    """
    return [each for each in group.adapters if not _is_shared(plan, each)]


def _storage(plan: Plan, group: Group, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the volumes of a group: folders of adapters, and space for those that a side-car downloads."""
    fields: dict[str, Any] = {}
    if any(source_kind(each) in k8s.FOLDERS for each in group.adapters):
        fields = {"extraVolumes": [k8s.claim_volume(settings)], "extraVolumeMounts": [k8s.CLAIM_MOUNT]}
    if any(source_kind(each) == "hub" for each in _loaded_later(plan, group)):
        access = "ReadWriteMany" if group.replicas > 1 else "ReadWriteOnce"
        fields |= {"pvcStorage": settings[STORAGE.name], "pvcAccessMode": [access]}
        if settings[STORAGE_CLASS.name]:
            fields["storageClass"] = settings[STORAGE_CLASS.name]
    return fields


def _lora_adapter(
    plan: Plan, adapter: PlanAdapter, model: str, settings: Mapping[str, str]
) -> dict[str, Any]:
    """Return the LoraAdapter of an adapter; its `baseModel` is that of the chart, by which it finds pods."""
    source: dict[str, Any] = {
        "type": "local",
        "adapterName": adapter.name,
        "adapterPath": k8s.adapter_path(adapter),
    }
    if source_kind(adapter) == "hub":
        source = {
            "type": "huggingface",
            "adapterName": adapter.name,
            "repository": adapter.path,
            "credentialsSecretRef": k8s.HF_SECRET,  # the controller requires it for public ones too
        }
    return {
        "apiVersion": "production-stack.vllm.ai/v1alpha1",
        "kind": "LoraAdapter",
        "metadata": k8s.metadata(k8s.adapter_names(plan)[adapter.name], settings),
        "spec": {
            "baseModel": model,
            "adapterSource": source,
            "loraAdapterDeploymentConfig": {"algorithm": "default"},
        },
    }


EXPORTER: Final = Exporter(
    production_stack_files,
    frozenset({"values.yaml", "lora-adapters.yaml", PLAN}),
    serves=True,
    settings=(*k8s.ENGINE_SETTINGS, CPU, MEMORY, STORAGE, STORAGE_CLASS),
    losses=_losses,
    notes=k8s.folder_notes,
)
