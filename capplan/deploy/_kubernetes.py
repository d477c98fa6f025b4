"""Parts of Kubernetes manifests that several targets share: names, pods of vLLM, and documents of YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import yaml

from capplan.deploy._servers import (
    engine_flags,
    lora_module,
    notes_of,
    require_flags,
    source_kind,
    unused_name,
    vllm_version,
)
from capplan.deploy._target import Setting
from capplan.errors import InputError
from capplan.serving import RELEASES
from capplan.spec import Group, Plan, PlanAdapter

PORT: Final = 8000
"""Port of vLLM in every pod."""

IMAGE: Final = Setting("image", "", "image of vLLM; by default vllm/vllm-openai of the plan's version")
NAMESPACE: Final = Setting("namespace", "default", "namespace of all objects")
CLAIM: Final = Setting(
    "adapters-claim", "adapters", "PersistentVolumeClaim with a folder per adapter, by its name"
)
FETCH_IMAGE: Final = Setting(
    "fetch-image",
    "amazon/aws-cli:2.31.0",
    "image with `aws`, which copies adapters from s3:// before vLLM starts",
)

_FOLDER: Final = "/adapters"
_FETCHED: Final = "/fetched-adapters"
_LONGEST_NAME: Final = 50
"""Labels have at most 63 characters, and controllers add to names."""


def object_names(plan: Plan) -> dict[str, str]:
    """Return the name of each group's objects: a DNS label, different ones for different groups."""
    taken: set[str] = set()
    return {group.id: unused_name(dns_label(group.id), taken, "-") for group in plan.groups}


def dns_label(text: str) -> str:
    """Return a DNS label (RFC 1123) for any text, beginning with a letter."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST_NAME].strip("-")
    return label if label[:1].isalpha() else f"g-{label}".rstrip("-")


def image_of(plan: Plan, group: Group, settings: Mapping[str, str]) -> str:
    """Return the image of a group's engine: that of the settings, or vLLM's of the plan's version."""
    version = vllm_version(plan.engine_of(group)) or RELEASES[-1].last
    return settings[IMAGE.name] or f"vllm/vllm-openai:v{version.partition('+')[0]}"


def adapter_path(adapter: PlanAdapter) -> str:
    """Return the path, or the id of the Hugging Face Hub, from which a pod loads an adapter.

    Raises
    ------
    InputError
        For an address that no pod fetches.
    """
    kind = source_kind(adapter)
    if kind == "url":
        rule = "must be a folder, an id of the Hugging Face Hub or s3://, from which a pod fetches it"
        raise InputError(rule, adapter.path, f"plan: adapter {adapter.name}: path")
    if kind == "hub":
        return adapter.path or ""
    return f"{_FETCHED if kind == 's3' else _FOLDER}/{adapter.name}"


def serve_arguments(plan: Plan, group: Group, *, with_adapters: bool = True) -> list[str]:
    """Return the arguments of ``vllm serve`` in a pod, the model first."""
    words = [word for flag in engine_flags(plan, group) for word in flag.words]
    arguments = [plan.base_model, f"--port={PORT}", *words]
    if with_adapters and group.adapters:
        require_flags(["--lora-modules"], group, plan.engine_of(group))
        modules = (lora_module(each.name, adapter_path(each)) for each in group.adapters)
        arguments += ["--lora-modules", *modules]
    return arguments


def pod_spec(
    plan: Plan,
    group: Group,
    settings: Mapping[str, str],
    *,
    with_adapters: bool = True,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the ``spec`` of a pod that runs one server of a group.

    Parameters
    ----------
    settings
        Values of `IMAGE`, `CLAIM` and `FETCH_IMAGE`.
    with_adapters
        Whether the server starts with its adapters, or the target loads them later.
    env
        Variables of the environment.
    """
    container: dict[str, Any] = {
        "name": "vllm",
        "image": image_of(plan, group, settings),
        "command": ["vllm", "serve"],
        "args": serve_arguments(plan, group, with_adapters=with_adapters),
        "env": [
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}},
            },
            *({"name": name, "value": value} for name, value in (env or {}).items()),
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": group.tp}},
        # Loading weights and capturing graphs takes minutes; the pod gets traffic when it answers.
        "startupProbe": _probe(period_s=10, failures=180),
        "readinessProbe": _probe(period_s=5, failures=2),
        "livenessProbe": _probe(period_s=10, failures=6),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108 - NCCL's shared memory
    }
    spec: dict[str, Any] = {
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}],
    }
    if with_adapters:
        _add_adapters(spec, container, group.adapters, settings)
    return spec


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
    if kinds & {"root", "folder"}:
        claim = {"claimName": settings[CLAIM.name], "readOnly": True}
        spec["volumes"].append({"name": "adapters", "persistentVolumeClaim": claim})
        container["volumeMounts"].append({"name": "adapters", "mountPath": _FOLDER, "readOnly": True})
    fetched = [adapter for adapter in adapters if source_kind(adapter) == "s3"]
    if fetched:
        mount = {"name": "fetched-adapters", "mountPath": _FETCHED}
        spec["volumes"].append({"name": "fetched-adapters", "emptyDir": {}})
        container["volumeMounts"].append({**mount, "readOnly": True})
        spec["initContainers"] = [
            {
                "name": f"fetch-{number}",
                "image": settings[FETCH_IMAGE.name],
                "args": ["s3", "cp", "--recursive", adapter.path, adapter_path(adapter)],
                "envFrom": [{"secretRef": {"name": "s3-credentials", "optional": True}}],
                "volumeMounts": [mount],
            }
            for number, adapter in enumerate(fetched)
        ]


def header_of(plan: Plan, group: Group) -> list[str]:
    """Return the comment above the objects of a group: what it is, and why each flag is set."""
    return [
        f"Group {group.id}: {group.replicas} x {group.tp} GPU(s), {group.gpu}; profile {group.profile}.",
        *notes_of(plan, group),
        *(f"{' '.join(flag.words)}: {flag.reason}" for flag in engine_flags(plan, group)),
    ]


def claim_notes(plan: Plan) -> tuple[str, ...]:
    """Return a line on the folders that the claim of adapters must hold."""
    adapters = {each.name: each for group in plan.groups for each in group.adapters}.values()
    folders = [each for each in adapters if source_kind(each) in ("root", "folder")]
    if not folders:
        return ()
    first = folders[0]
    of = f", such as {first.path} as {first.name}" if first.path else f", such as {first.name}"
    return (
        f"note: the PersistentVolumeClaim must hold {len(folders)} adapters, a folder each by its name{of}",
    )


def yaml_documents(documents: Iterable[tuple[Iterable[str], Mapping[str, Any]]]) -> str:
    """Return documents of YAML in one text, each below the lines of its comment."""
    parts = []
    for comment, document in documents:
        lines = "".join(f"# {_one_line(line)}\n" for line in comment)
        parts.append(lines + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=2**16))
    return "---\n".join(parts)


def _one_line(text: str) -> str:
    """Return text without line breaks and other control characters, which would end a comment."""
    return "".join(char if char.isprintable() else " " for char in text)
