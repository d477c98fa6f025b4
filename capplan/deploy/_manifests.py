"""Manifests of Kubernetes: a Deployment and a Service per group, behind the gateway."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from capplan.deploy import _kubernetes as k8s
from capplan.deploy._gateway import (
    COMMAND,
    FOLDER,
    GATEWAY_IMAGE,
    gateway_files,
    gateway_losses,
)
from capplan.deploy._servers import require_servable, unused_name
from capplan.deploy._target import PLAN, Exporter
from capplan.errors import InputError
from capplan.spec import Group, Plan

MANIFESTS: Final = "manifests.yaml"

_LABEL: Final = "app.kubernetes.io/name"
_TEMPLATE: Final = "resolver.conf.template"
_RESOLVER: Final = "resolver ${NGINX_LOCAL_RESOLVERS} valid=5s;\n"
"""Template of nginx's image, whose entry point inserts the DNS server of the pod."""
_INCLUDE: Final = "include /etc/nginx/conf.d/resolver.conf;"
_CONFIG_MAP_BYTES: Final = 2**20
_STARTUP_S: Final = 1800
"""Time that the startup probe of a pod allows."""

Document: TypeAlias = tuple[list[str], dict[str, Any]]
"""An object with the lines of its comment."""


def manifest_files(plan: Plan, *, port: int, settings: Mapping[str, str]) -> dict[str, str]:
    """Return ``manifests.yaml``, with the gateway on a port, and the plan."""
    require_servable(plan)
    names = k8s.object_names(plan)
    gateway = unused_name("gateway", set(names.values()), "-")
    config = _gateway_config(plan, names, port, settings)
    groups = [each for group in plan.groups for each in _group(plan, group, names[group.id], settings)]
    texts = [
        _config_map(plan, gateway, config, settings),
        k8s.yaml_documents(_gateway(gateway, config, port, settings)),
        k8s.yaml_documents(groups),
    ]
    return {MANIFESTS: "---\n".join(texts), PLAN: plan.to_json()}


def _group(plan: Plan, group: Group, name: str, settings: Mapping[str, str]) -> Iterator[Document]:
    made = k8s.deployment(plan, group, name, settings)
    made["spec"]["progressDeadlineSeconds"] = _STARTUP_S + 600
    yield k8s.header_of(plan, group), made
    headless = k8s.service(name, settings)
    headless["spec"]["clusterIP"] = "None"
    yield [f"Addresses of the pods of group {group.id}; the gateway balances them."], headless


def _gateway_config(
    plan: Plan, names: Mapping[str, str], port: int, settings: Mapping[str, str]
) -> dict[str, str]:
    """Return the files of the gateway, text by name."""
    domain = f"{settings[k8s.NAMESPACE.name]}.svc.cluster.local"
    addresses = {group: [f"{name}.{domain}:{k8s.PORT}"] for group, name in names.items()}
    files = {**gateway_files(plan, addresses, port, _INCLUDE), _TEMPLATE: _RESOLVER}
    if (size := sum(len(text.encode()) for text in files.values())) > _CONFIG_MAP_BYTES:
        rule = f"must need a gateway of at most {_CONFIG_MAP_BYTES} bytes, which a ConfigMap holds"
        raise InputError(rule, size, "plan: adapters")
    return files


def _config_map(plan: Plan, name: str, files: Mapping[str, str], settings: Mapping[str, str]) -> str:
    """Return the ConfigMap of the gateway, with the files as they are read."""
    comment = [
        *k8s.top_comment(plan, gateway_losses(plan)),
        "Configuration of the gateway, by which each request goes to a server of its model.",
    ]
    head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": k8s.metadata(name, settings)}
    parts = (f"  {name}: |\n{textwrap.indent(text, '    ')}" for name, text in files.items())
    return k8s.yaml_documents([(comment, head)]) + "data:\n" + "".join(parts)


def _gateway(
    name: str, config: Mapping[str, str], port: int, settings: Mapping[str, str]
) -> Iterator[Document]:
    digest = hashlib.sha256(json.dumps(config).encode()).hexdigest()
    yield ["The gateway."], _gateway_deployment(name, digest, port, settings)
    yield ["The entry of all requests."], k8s.service(name, settings, {_LABEL: name}, port)


def _gateway_deployment(name: str, digest: str, port: int, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return the Deployment of the gateway: one pod, because the turns of servers are in its memory."""
    container = {
        "name": "nginx",
        "image": settings[GATEWAY_IMAGE.name],
        "args": list(COMMAND),
        "env": [{"name": "NGINX_ENTRYPOINT_LOCAL_RESOLVERS", "value": "1"}],
        "ports": [{"name": "http", "containerPort": port}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 5},
        "volumeMounts": [
            {"name": "config", "mountPath": FOLDER, "readOnly": True},
            {"name": "config", "mountPath": f"/etc/nginx/templates/{_TEMPLATE}", "subPath": _TEMPLATE},
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": k8s.metadata(name, settings),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {_LABEL: name}},
            "template": {
                # A pod reads its configuration once; another digest makes another pod.
                "metadata": {"labels": {_LABEL: name}, "annotations": {"capplan.io/config": digest}},
                "spec": {
                    "containers": [container],
                    "volumes": [{"name": "config", "configMap": {"name": name}}],
                },
            },
        },
    }


EXPORTER: Final = Exporter(
    manifest_files,
    frozenset({MANIFESTS, PLAN}),
    serves=True,
    options=("port",),
    settings=(*k8s.POD_SETTINGS, GATEWAY_IMAGE),
    losses=gateway_losses,
    notes=k8s.folder_notes,
)
