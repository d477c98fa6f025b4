"""Manifests for llm-d: a Deployment, InferencePool and endpoint picker per group, and routes with shares.

Checked against llm-d/llm-d-router ebab687 and kubernetes-sigs/gateway-api-inference-extension 84436a9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from capplan.deploy import _kubernetes as k8s
from capplan.deploy._servers import require_servable, unused_name
from capplan.deploy._target import PLAN, Exporter, Loss, Setting
from capplan.spec import Group, Plan, Queues

GATEWAY: Final = Setting("gateway", "inference-gateway", "Gateway that the routes belong to")

_POOL_GROUP: Final = "inference.networking.k8s.io"
_LONGEST_NAME: Final = 40
"""The chart of the endpoint picker cuts the name of its release to so many characters."""
_PICKER_PORT: Final = 9002
_WHOLE: Final = 1_000_000
"""Largest weight of a back end."""
_MOST_MATCHES: Final = 64
"""Matches of a rule."""
_MODEL_HEADER: Final = "X-Gateway-Model-Name"

_BETWEEN: Final = Loss("the gateway draws the group of each request at random, by shares", "plan-shares")
_WITHIN: Final = Loss(
    "the endpoint picker chooses the replica of a group by queue, KV cache and adapters", "inference-gateway"
)
_QUEUES: Final = Loss(
    "queues by size are priorities without quotas, and a client must name the queue of its request in the "
    "header x-llm-d-inference-objective"
)


def llm_d_losses(plan: Plan) -> tuple[Loss, ...]:
    """Return what llm-d does not do as the plan says."""
    queued = any(group.queues is not None for group in plan.groups)
    return (
        *k8s.routing_losses(plan, between=_BETWEEN, within=_WITHIN),
        *([_QUEUES] if queued else []),
    )


def llm_d_files(plan: Plan, *, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the manifests, the configuration of each group's endpoint picker, and the plan."""
    require_servable(plan)
    names = k8s.object_names(plan, _LONGEST_NAME)
    files = {}
    documents: list[tuple[list[str], dict[str, Any]]] = []
    for group in plan.groups:
        name = names[group.id]
        documents.append((k8s.header_of(plan, group), k8s.deployment(plan, group, name, settings)))
        documents.append(([], _pool(name, settings)))
        if group.queues is not None:
            documents += _objectives(group.queues, name, settings)
        comment = [f"Endpoint picker of group {group.id}: Service {_picker_of(name)}, port {_PICKER_PORT}."]
        files[f"endpoint-picker/{name}.yaml"] = k8s.yaml_documents([(comment, _picker_config(group))])
    documents += [([], route) for route in _routes(plan, names, settings)]
    top = [
        *k8s.top_comment(plan, llm_d_losses(plan)),
        f"The gateway must copy the model of a request into the header {_MODEL_HEADER} (body-based routing).",
    ]
    return {"llm-d.yaml": k8s.yaml_documents(documents, top), **files, PLAN: plan.to_json()}


def _picker_of(name: str) -> str:
    return f"{name}-epp"


def _pool(name: str, settings: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": f"{_POOL_GROUP}/v1",
        "kind": "InferencePool",
        "metadata": k8s.metadata(name, settings),
        "spec": {
            "selector": {"matchLabels": {k8s.GROUP_LABEL: name}},
            "targetPorts": [{"number": k8s.PORT}],
            "endpointPickerRef": {
                "name": _picker_of(name),
                "port": {"number": _PICKER_PORT},
                # As the chart's: without its picker, a group is served, by any of its pods.
                "failureMode": "FailOpen",
            },
        },
    }


def _priorities(queues: Queues) -> list[int]:
    """Return the priority of each queue: the smaller its requests, the higher; 0 for the largest."""
    return list(reversed(range(len(queues.classes))))


def _objectives(
    queues: Queues, name: str, settings: Mapping[str, str]
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield an InferenceObjective per queue, whose name a request carries in a header."""
    # The default of `group` differs between revisions of the CRD.
    pool = {"group": _POOL_GROUP, "kind": "InferencePool", "name": name}
    for number, (queue, priority) in enumerate(zip(queues.classes, _priorities(queues), strict=True), 1):
        below = "any size" if queue.upper_wrs is None else f"sizes below {queue.upper_wrs:g}"
        document = {
            "apiVersion": "llm-d.ai/v1alpha2",
            "kind": "InferenceObjective",
            "metadata": k8s.metadata(f"{name}-queue-{number}", settings),
            "spec": {"poolRef": pool, "priority": priority},
        }
        yield [f"Queue {number}: {below}."], document


def _picker_config(group: Group) -> dict[str, Any]:
    """Return the EndpointPickerConfig of a group: scorers with equal weights, and bands of its queues."""
    scorers = ["queue-scorer", "kv-cache-utilization-scorer"]
    scorers += ["lora-affinity-scorer"] if group.adapters else []
    picker = "max-score-picker"
    profile = [{"pluginRef": name, "weight": 1} for name in scorers]
    config: dict[str, Any] = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [{"type": name} for name in (*scorers, picker)],
        "schedulingProfiles": [{"name": "default", "plugins": [*profile, {"pluginRef": picker}]}],
    }
    if group.queues is not None:
        bands = [{"priority": priority} for priority in _priorities(group.queues)]
        config |= {"featureGates": ["flowControl"], "flowControl": {"priorityBands": bands}}
    return config


def _routes(plan: Plan, names: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield HTTPRoutes from models to the pools of their groups, with their shares as weights."""
    taken: set[str] = set()
    for split, models in k8s.splits_of(plan, _WHOLE).items():
        targets = [
            {"group": _POOL_GROUP, "kind": "InferencePool", "name": names[group], "weight": weight}
            for group, weight in split
        ]
        stem = names[split[0][0]] if len(split) == 1 else k8s.dns_label(models[0])
        for part in k8s.parts_of(models, _MOST_MATCHES):
            yield {
                "apiVersion": "gateway.networking.k8s.io/v1",
                "kind": "HTTPRoute",
                "metadata": k8s.metadata(unused_name(stem, taken, "-"), settings),
                "spec": {
                    "parentRefs": [{"name": settings[GATEWAY.name]}],
                    "rules": [{"matches": [_match(model) for model in part], "backendRefs": targets}],
                },
            }


def _match(model: str) -> dict[str, Any]:
    return {"headers": [{"type": "Exact", "name": _MODEL_HEADER, "value": model}]}


EXPORTER: Final = Exporter(
    llm_d_files,
    frozenset({"llm-d.yaml", "endpoint-picker", PLAN}),
    serves=True,
    settings=(*k8s.POD_SETTINGS, GATEWAY),
    losses=llm_d_losses,
    notes=k8s.folder_notes,
)
