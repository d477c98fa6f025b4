"""Parts of Kubernetes manifests that several targets share: names, pods of vLLM, and documents of YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from capplan import serving  # loads the rules, and numba, when a plan is exported
from capplan.deploy._servers import (
    engine_flags,
    lora_module,
    notes_of,
    one_line,
    require_flags,
    source_kind,
    unused_name,
    vllm_version,
)
from capplan.deploy._target import Loss, Setting
from capplan.errors import InputError
from capplan.spec import PLAN_ROUTER, Group, Plan, PlanAdapter, yaml_text

PORT: Final = 8000
"""Port of vLLM in every pod."""

GROUP_LABEL: Final = "capplan.io/group"
"""Label of pods, by which services and controllers find those of a group."""

IMAGE: Final = Setting("image", "", "image of vLLM; by default vllm/vllm-openai of the plan's version")
NAMESPACE: Final = Setting("namespace", "default", "namespace of all objects")
CLAIM: Final = Setting(
    "adapters-claim", "adapters", "PersistentVolumeClaim with a folder per adapter, by its name"
)
MODEL_CLAIM: Final = Setting(
    "model-claim",
    "",
    "PersistentVolumeClaim in which pods keep what they download of the Hugging Face Hub; without one each "
    "start downloads the base model",
)
FETCH_IMAGE: Final = Setting(
    "fetch-image",
    "amazon/aws-cli:2.31.0",
    "image with `aws`, which copies adapters from s3:// before vLLM starts",
)

GPU_LABEL: Final = Setting(
    "gpu-label",
    "",
    "label of nodes with the name of their GPUs, by which pods choose nodes; by default "
    "nvidia.com/gpu.product where a plan has several kinds of GPUs, and none else",
)

ENGINE_SETTINGS: Final = (NAMESPACE, IMAGE, GPU_LABEL, CLAIM)
POD_SETTINGS: Final = (*ENGINE_SETTINGS, MODEL_CLAIM, FETCH_IMAGE)
"""Settings of `deployment`."""

HF_SECRET: Final = {"name": "hf-token", "key": "token"}
"""Secret with the token of the Hugging Face Hub, and its key."""
HF_TOKEN: Final = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {**HF_SECRET, "optional": True}}}
S3_CREDENTIALS: Final = [{"secretRef": {"name": "s3-credentials", "optional": True}}]
"""``envFrom`` of what copies from S3."""

FOLDER: Final = "/adapters"
"""Folder of a container with the adapters of a claim or a host."""
_MODELS: Final = "/models"
"""Folder of a container for downloads of the Hugging Face Hub."""
FETCHED: Final = "/fetched-adapters"
"""Folder of a container with the adapters that were copied from S3."""

FOLDERS: Final = frozenset({"root", "folder"})
"""Sources of adapters that are folders of the claim."""
CLAIM_MOUNT: Final = {"name": "adapters", "mountPath": FOLDER, "readOnly": True}
_LONGEST_NAME: Final = 50
"""Labels have at most 63 characters, and controllers add to names."""
_NUMBER_LENGTH: Final = 5
"""Length of a number that tells equal names apart."""
_YAML_WORDS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Words that YAML 1.1 does not read as text where a template of a controller leaves out the quotes."""
STRATEGY: Final = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
"""Strategy of updates, which must not wait for GPUs that they have yet to free."""
_GPU_PRODUCT: Final = "nvidia.com/gpu.product"
"""Label of nodes by NVIDIA's GPU feature discovery: the name of the driver, with ``-`` for spaces."""


def object_names(plan: Plan, longest: int = _LONGEST_NAME, taken: Iterable[str] = ()) -> dict[str, str]:
    """Return the name of each group's objects: a DNS label, different ones for different groups."""
    return _labels((group.id for group in plan.groups), longest, taken)


def adapter_names(plan: Plan) -> dict[str, str]:
    """Return the name of each adapter's objects: a DNS label, different ones for different adapters."""
    return _labels(plan.adapters, _LONGEST_NAME)


def _labels(texts: Iterable[str], longest: int, taken: Iterable[str] = ()) -> dict[str, str]:
    used = set(taken)
    return {text: unused_name(dns_label(text, longest - _NUMBER_LENGTH), used, "-") for text in texts}


def dns_label(text: str, longest: int = _LONGEST_NAME) -> str:
    """Return a DNS label (RFC 1123) for any text, beginning with a letter."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:longest].strip("-")
    return label if label[:1].isalpha() and label not in _YAML_WORDS else f"g-{label}".rstrip("-")


def node_labels(plan: Plan, group: Group, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of the nodes on which a group must run; empty where any node with a GPU will do."""
    kinds = {each.gpu for each in plan.groups}
    label = settings[GPU_LABEL.name] or (_GPU_PRODUCT if len(kinds) > 1 else "")
    return {label: re.sub(r"[^A-Za-z0-9._-]+", "-", group.gpu)} if label else {}


def image_of(plan: Plan, group: Group, settings: Mapping[str, str]) -> str:
    """Return the image of a group's engine: that of the settings, or vLLM's of the plan's version."""
    version = vllm_version(plan.engine_of(group)) or serving.RELEASES[-1].last
    return settings[IMAGE.name] or f"vllm/vllm-openai:v{version.partition('+')[0]}"


def adapter_path(adapter: PlanAdapter) -> str:
    """Return the path, or the id of the Hugging Face Hub, from which a pod loads an adapter."""
    kind = source_kind(adapter)
    if kind == "url":
        rule = "must be a folder, an id of the Hugging Face Hub or s3://, from which a pod fetches it"
        raise refused_path(adapter, rule)
    if kind == "hub":
        return adapter.path or ""
    return f"{FETCHED if kind == 's3' else FOLDER}/{adapter.name}"


def serve_arguments(plan: Plan, group: Group, *, with_adapters: bool = True) -> list[str]:
    """Return the arguments of ``vllm serve`` in a pod, the model first."""
    words = [word for flag in engine_flags(plan, group) for word in flag.words]
    arguments = [plan.base_model, f"--port={PORT}", *words]
    if with_adapters and group.adapters:
        require_flags(["--lora-modules"], group, plan.engine_of(group))
        modules = (lora_module(each.name, adapter_path(each)) for each in group.adapters)
        arguments += ["--lora-modules", *modules]
    return arguments


def literal(arguments: Iterable[str]) -> list[str]:
    """Return arguments of a container in which Kubernetes replaces no ``$(VARIABLE)``."""
    return [word.replace("$(", "$$(") for word in arguments]


def _pod_spec(
    plan: Plan, group: Group, settings: Mapping[str, str], env: Mapping[str, str], *, with_adapters: bool
) -> dict[str, Any]:
    """Return the ``spec`` of a pod that runs one server of a group."""
    container: dict[str, Any] = {
        "name": "vllm",
        "image": image_of(plan, group, settings),
        "command": ["vllm", "serve"],
        "args": literal(serve_arguments(plan, group, with_adapters=with_adapters)),
        "env": [HF_TOKEN, *variables(env)],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": group.tp}},
        # Loading weights and capturing graphs takes minutes; the pod gets traffic when it answers.
        "startupProbe": _probe(period_s=10, failures=180),
        "readinessProbe": _probe(period_s=5, failures=2),
        "livenessProbe": _probe(period_s=10, failures=6),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - NCCL's shared memory
    }
    spec: dict[str, Any] = {
        **node_selector(plan, group, settings),
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
    }
    if settings[MODEL_CLAIM.name]:
        claim = {"claimName": settings[MODEL_CLAIM.name]}
        spec["volumes"].append({"name": "models", "persistentVolumeClaim": claim})
        container["volumeMounts"].append({"name": "models", "mountPath": _MODELS})
        container["env"] += variables({"HF_HOME": _MODELS})
    _add_adapters(spec, container, group.adapters, settings)
    return spec


def node_selector(plan: Plan, group: Group, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the ``nodeSelector`` of the pods of a group, as a field; empty without one."""
    labels = node_labels(plan, group, settings)
    return {"nodeSelector": labels} if labels else {}


def variables(env: Mapping[str, str]) -> list[dict[str, str]]:
    """Return variables of the environment as entries of ``env``."""
    return [{"name": name, "value": value} for name, value in env.items()]


def _probe(period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": 5,
    }


def _add_adapters(
    spec: dict[str, Any],
    container: dict[str, Any],
    adapters: Sequence[PlanAdapter],
    settings: Mapping[str, str],
) -> None:
    """Add the volumes of adapters to a pod, and what fetches those of S3."""
    kinds = {source_kind(adapter) for adapter in adapters}
    if kinds & FOLDERS:
        spec["volumes"].append(claim_volume(settings))
        container["volumeMounts"].append(CLAIM_MOUNT)
    fetched = [adapter for adapter in adapters if source_kind(adapter) == "s3"]
    if fetched:
        mount = {"name": "fetched-adapters", "mountPath": FETCHED}
        spec["volumes"].append({"name": "fetched-adapters", "emptyDir": {}})
        container["volumeMounts"].append({**mount, "readOnly": True})
        spec["initContainers"] = [
            {
                "name": f"fetch-{number}",
                "image": settings[FETCH_IMAGE.name],
                "args": literal(["s3", "cp", "--recursive", adapter.path or "", adapter_path(adapter)]),
                "envFrom": S3_CREDENTIALS,
                "volumeMounts": [mount],
            }
            for number, adapter in enumerate(fetched)
        ]


def deployment(
    plan: Plan,
    group: Group,
    name: str,
    settings: Mapping[str, str],
    *,
    labels: Mapping[str, str] | None = None,
    with_adapters: bool = True,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the Deployment of a group, a pod per replica, with a name of `object_names`.

    `labels` are further ones of the Deployment and its pods, and `env` variables of their environment.
    Servers start `with_adapters`, or the target loads them later from the same paths.
    """
    pod = _pod_spec(plan, group, settings, env or {}, with_adapters=with_adapters)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {**metadata(name, settings), "labels": {GROUP_LABEL: name, **(labels or {})}},
        "spec": {
            "replicas": group.replicas,
            "strategy": STRATEGY,
            "selector": {"matchLabels": {GROUP_LABEL: name}},
            "template": {"metadata": {"labels": {GROUP_LABEL: name, **(labels or {})}}, "spec": pod},
        },
    }


def service(
    name: str, settings: Mapping[str, str], selector: Mapping[str, str] | None = None, port: int = PORT
) -> dict[str, Any]:
    """Return a Service of pods, by default of those of the group whose objects have the name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(name, settings),
        "spec": {
            "selector": dict(selector or {GROUP_LABEL: name}),
            "ports": [{"name": "http", "port": port, "targetPort": "http"}],
        },
    }


def metadata(name: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the ``metadata`` of an object in the namespace of the settings."""
    namespace = settings[NAMESPACE.name]
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", namespace):
        raise InputError("must be a DNS label", namespace, f"set: {NAMESPACE.name}")
    return {"name": name, "namespace": namespace}


def claim_volume(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the volume of the claim of adapters."""
    claim = {"claimName": settings[CLAIM.name], "readOnly": True}
    return {"name": "adapters", "persistentVolumeClaim": claim}


def splits_of(plan: Plan, total: int) -> dict[tuple[tuple[str, int], ...], list[str]]:
    """Return the names of models by their split over groups, in pairs of group id and weight.

    Weights are whole and at least 1, and about `total` in sum; the base model is under its own name. Groups
    that only store an adapter are left out.
    """
    parts: dict[str, list[tuple[str, int]]] = {}
    for group in plan.groups:
        for name, share in plan.shares_of(group).items():
            if share > 0:
                parts.setdefault(name, []).append((group.id, max(1, round(share * total))))
    splits: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for name, pairs in parts.items():
        alone = len(pairs) == 1
        splits.setdefault(((pairs[0][0], total),) if alone else tuple(pairs), []).append(name)
    return splits


def parts_of(names: Sequence[str], most: int) -> Iterator[Sequence[str]]:
    """Yield names in order, at most so many at a time."""
    return (names[start : start + most] for start in range(0, len(names), most))


def routing_losses(plan: Plan, *, between: Loss, within: Loss) -> tuple[Loss, ...]:
    """Return the losses of a target's router that concern a plan, unless its router is the plan's.

    `between` is the loss if a model is served by several groups, `within` that if a group has several
    replicas.
    """
    shared = any(len(split) > 1 for split in splits_of(plan, 1))
    replicated = any(group.replicas > 1 for group in plan.groups)
    found = (*([between] if shared else []), *([within] if replicated else []))
    return tuple(loss for loss in found if loss.router != (plan.router or PLAN_ROUTER))


def top_comment(plan: Plan, losses: Iterable[Loss]) -> list[str]:
    """Return the comment at the top of a file: the plan, and what differs from it."""
    return [
        f"Plan for {plan.base_model}, by {plan.created_by}.",
        *(f"Differs from the plan: {loss.text}." for loss in losses),
    ]


def refused_path(adapter: PlanAdapter, rule: str) -> InputError:
    """Return the error for an adapter that a target does not fetch."""
    return InputError(rule, adapter.path or adapter.name, f"plan: adapter {adapter.name}: path")


def refused_name(name: str, rule: str) -> InputError:
    """Return the error for an adapter whose name a target does not allow."""
    return InputError(rule, name, f"plan: adapter {name}: name")


def header_of(plan: Plan, group: Group) -> list[str]:
    """Return the comment above the objects of a group: what it is, and why each flag is set."""
    return [
        f"Group {group.id}: {group.replicas} x {group.tp} GPU(s), {group.gpu}; profile {group.profile}.",
        *notes_of(plan, group),
        *(f"{' '.join(flag.words)}: {flag.reason}" for flag in engine_flags(plan, group)),
    ]


def folder_notes(plan: Plan, place: str = "the PersistentVolumeClaim") -> tuple[str, ...]:
    """Return a line on the folders of adapters that a place must hold; none without any."""
    return notes_on(place, [each for each in plan.adapters.values() if source_kind(each) in FOLDERS])


def notes_on(place: str, folders: Sequence[PlanAdapter]) -> tuple[str, ...]:
    """Return a line on the adapters whose folders a place must hold; none without any."""
    if not folders:
        return ()
    first = folders[0]
    example = f"{first.path} as {first.name}" if first.path else first.name
    return (f"note: {place} must hold {len(folders)} adapters, a folder each by its name, such as {example}",)


def yaml_documents(
    documents: Iterable[tuple[Iterable[str], Mapping[str, Any]]], top: Iterable[str] = ()
) -> str:
    """Return documents of YAML in one text, each below the lines of its comment, all below those of `top`."""
    parts = []
    for comment, document in documents:
        parts.append(_comment(comment) + yaml_text(document))
    return _comment(top) + "---\n".join(parts)


def _comment(lines: Iterable[str]) -> str:
    return "".join(f"# {one_line(line)}\n" for line in lines)
