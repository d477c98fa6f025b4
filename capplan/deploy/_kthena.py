"""Manifests for kthena: a Deployment and a ModelServer per group, and ModelRoutes with the plan's shares.

Checked against volcano-sh/kthena 3cc0572.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from capplan.deploy import _kubernetes as k8s
from capplan.deploy._servers import require_servable, unused_name
from capplan.deploy._target import PLAN, Exporter, Loss
from capplan.errors import InputError
from capplan.spec import Plan

_API: Final = "networking.serving.volcano.sh/v1alpha1"
_WHOLE: Final = 100
"""Largest weight of a target."""
_MOST_ADAPTERS: Final = 10
"""Names in a ModelRoute."""
_MOST_TARGETS: Final = 16

_BETWEEN: Final = Loss(
    "the router draws the group of each request at random, by shares in whole percent", "plan-shares"
)
_WITHIN: Final = Loss("the router picks the replica of a group by its load", "least-loaded")

_losses: Final = partial(k8s.routing_losses, between=_BETWEEN, within=_WITHIN)


def kthena_files(plan: Plan, *, settings: Mapping[str, str]) -> dict[str, str]:
    """Return the manifests, and the plan."""
    require_servable(plan)
    names = k8s.object_names(plan)
    documents: list[tuple[list[str], dict[str, Any]]] = []
    for group in plan.groups:
        name = names[group.id]
        documents.append((k8s.header_of(plan, group), k8s.deployment(plan, group, name, settings)))
        documents.append(([], _model_server(name, settings)))
    documents += [([], route) for route in _routes(plan, names, settings)]
    top = k8s.top_comment(plan, _losses(plan))
    return {"kthena.yaml": k8s.yaml_documents(documents, top), PLAN: plan.to_json()}


def _model_server(name: str, settings: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": _API,
        "kind": "ModelServer",
        "metadata": k8s.metadata(name, settings),
        # Without `model`, which would replace the adapter's name in requests.
        "spec": {
            "inferenceEngine": "vLLM",
            "workloadSelector": {"matchLabels": {k8s.GROUP_LABEL: name}},
            "workloadPort": {"port": k8s.PORT},
        },
    }


def _routes(plan: Plan, names: Mapping[str, str], settings: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the ModelRoutes: models with the same shares go together."""
    taken: set[str] = set()
    for split, models in k8s.splits_of(plan, _WHOLE).items():
        if len(split) > _MOST_TARGETS:
            rule = f"must be on at most {_MOST_TARGETS} groups, the targets of a ModelRoute"
            raise InputError(rule, len(split), f"plan: adapter {models[0]}")
        targets = [{"modelServerName": names[group], "weight": weight} for group, weight in split]
        adapters = [name for name in models if name != plan.base_model]
        matches: list[dict[str, Any]] = [
            {"loraAdapters": part} for part in k8s.parts_of(adapters, _MOST_ADAPTERS)
        ]
        if plan.base_model in models:
            matches.append({"modelName": plan.base_model})
        stem = names[split[0][0]] if len(split) == 1 else k8s.dns_label(models[0])
        for match in matches:
            name = unused_name(stem, taken, "-")
            rule_name = "shares" if len(split) > 1 else "group"
            yield {
                "apiVersion": _API,
                "kind": "ModelRoute",
                "metadata": k8s.metadata(name, settings),
                "spec": {**match, "rules": [{"name": rule_name, "targetModels": targets}]},
            }


EXPORTER: Final = Exporter(
    kthena_files,
    frozenset({"kthena.yaml", PLAN}),
    serves=True,
    settings=k8s.POD_SETTINGS,
    losses=_losses,
    notes=k8s.folder_notes,
)
