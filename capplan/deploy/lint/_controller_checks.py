"""Rules on objects of Kubernetes controllers, the production-stack's chart, Ray Serve, and on texts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from capplan.deploy._ray import STORAGES, model_ids
from capplan.deploy.lint._parts import (
    RUNTIME_UPDATES,
    BrokenFile,
    ChartModel,
    Document,
    RayModel,
    Server,
    TextFile,
    dig,
    mapping,
    mappings,
)
from capplan.deploy.lint._rule import Context, Hit
from capplan.deploy.lint._server_checks import adapters_on_host
from capplan.spec import format_key

_OLD_GROUP: Final = "inference.networking.x-k8s.io"
_MOVED: Final = ("InferenceObjective", "InferenceModelRewrite")
_RAY_ADAPTERS: Final = 16
"""Default of ``max_num_adapters_per_replica``."""

_SECRETS: Final = (
    ("a token of the Hugging Face Hub", re.compile(r"\bhf_[A-Za-z0-9]{30,}\b")),
    ("an AWS access key", re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    (
        "an AWS secret key",
        re.compile(r"(?i)aws_?secret_?access_?key[\"']?\s*[=:]\s*[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"),
    ),
)


def broken_file(part: BrokenFile, _: Context) -> Iterator[Hit]:
    """Yield the error with which a file is refused."""
    yield Hit(str(part.error))


def secrets(part: TextFile, _: Context) -> Iterator[Hit]:
    """Yield the lines with secrets, which are not shown."""
    for number, line in enumerate(part.text.splitlines(), 1):
        for name, pattern in _SECRETS:
            if pattern.search(line):
                yield Hit(f"the line holds {name}", number)


def not_valid(document: Document, context: Context) -> Iterator[Hit]:
    """Yield what of an object, or of the values of a chart, is not valid by its schema."""
    for key, message in context.schemas.errors(document) if context.schemas else ():
        where = format_key(key) or "the document"
        yield Hit(f"{document.kind or 'values'}: {where}: {message}", document.line_at(*key))


def without_schema(document: Document, context: Context) -> Iterator[Hit]:
    """Yield that a kind of custom resources has no schema among those given, at its first object."""
    if context.schemas is None or not _is_custom(document) or context.schemas.of(document) is not None:
        return
    kind, version = document.kind, document.data.get("apiVersion")
    same = (each for each in context.of(Document) if each.kind == kind)
    if next(same, document) is document:
        yield Hit(f"{kind} of {version} is not checked")


def _is_custom(document: Document) -> bool:
    """Tell whether an object is a custom resource: API groups of Kubernetes have no dot, or are of k8s.io."""
    group = document.api_group
    own = "." not in group or (group.endswith(".k8s.io") and not group.endswith(".networking.k8s.io"))
    return not own and bool(mapping(document.data.get("metadata")))


def kserve_without_maxima(document: Document, _: Context) -> Iterator[Hit]:
    """Yield the maxima that an LLMInferenceService with adapters lacks."""
    lora = mapping(dig(document.spec, "model", "lora"))
    adapters = mappings(lora.get("adapters"))
    if document.kind == "LLMInferenceService" and adapters:
        names = ("maxAdapters", "maxRank", "maxCpuAdapters")
        if missing := [name for name in names if lora.get(name) is None]:
            reason = f"{', '.join(missing)} unset beside {len(adapters)} adapters"
            yield Hit(reason, document.line_at("spec", "model", "lora"))


def aibrix_replicas(document: Document, _: Context) -> Iterator[Hit]:
    """Yield a number of replicas that AIBrix rejects."""
    replicas = document.spec.get("replicas")
    if document.kind == "ModelAdapter" and replicas not in (None, 1):
        yield Hit(f"replicas is {replicas}", document.line_at("spec", "replicas"))


def aibrix_without_updates(server: Server, _: Context) -> Iterator[Hit]:
    """Yield that AIBrix cannot load adapters into the pods that it selects."""
    enabled = server.labels.get("adapter.model.aibrix.ai/enabled", "").lower() == "true"
    if enabled and not server.updates_at_run_time:
        yield Hit(f"{RUNTIME_UPDATES} is {server.env.get(RUNTIME_UPDATES, 'unset')}")


def placed_twice(document: Document, context: Context) -> Iterator[Hit]:
    """Yield that another LoraAdapter before has the same adapter for other pods."""
    if document.kind != "LoraAdapter":
        return
    for other in context.of(Document):
        if other is document:
            return
        if other.kind == "LoraAdapter" and _adapter_name(other) == _adapter_name(document):
            models = [str(each.spec.get("baseModel")) for each in (other, document)]
            reason = f"adapter {_adapter_name(document)} is also on {models[0]}, beside {models[1]}"
            yield Hit(reason, document.line_at("spec", "adapterSource", "adapterName"))
            return


def _adapter_name(document: Document) -> object:
    return dig(document.spec, "adapterSource", "adapterName")


def chart_without_lora(model: ChartModel, context: Context) -> Iterator[Hit]:
    """Yield that a model with adapters is started without them."""
    flags = [flag for flag in model.flags if "lora" in flag]
    if "--enable-lora" not in model.flags and (flags or _is_base(model, context)):
        what = f"{flags[0]} is set" if flags else "a LoraAdapter names it"
        yield Hit(f"enableLoRA of {model.name} is not true, and {what}")


def chart_without_prefix_caching(model: ChartModel, _: Context) -> Iterator[Hit]:
    """Yield that prefix caching is off without a word."""
    flags = ("--enable-prefix-caching", "--no-enable-prefix-caching")
    if "enablePrefixCaching" not in model.config and not any(flag in model.flags for flag in flags):
        yield Hit(f"vllmConfig.enablePrefixCaching of {model.name} is unset")


def chart_without_updates(model: ChartModel, context: Context) -> Iterator[Hit]:
    """Yield that the controller cannot load adapters into a model."""
    alone = not any(each.kind == "LoraAdapter" for each in context.of(Document))
    expected = alone and model.has_controller and not model.adapters
    is_loaded = _is_base(model, context) or expected
    if "--enable-lora" in model.flags and is_loaded and not model.updates_at_run_time:
        yield Hit(f"{RUNTIME_UPDATES} of {model.name} is {model.env.get(RUNTIME_UPDATES, 'unset')}")


def _is_base(model: ChartModel, context: Context) -> bool:
    """Return whether a LoraAdapter is for the pods of a model."""
    objects = (each for each in context.of(Document) if each.kind == "LoraAdapter")
    return any(each.spec.get("baseModel") == model.name for each in objects)


def dynamo_loads_everywhere(server: Server, context: Context) -> Iterator[Hit]:
    """Yield that a worker holds fewer adapters than Dynamo loads into it."""
    adapters = [
        each
        for each in context.of(Document)
        if each.kind == "DynamoModel"
        and each.spec.get("modelType") in ("lora", "adapter")
        and each.spec.get("baseModelName") == server.model
    ]
    on_host = adapters_on_host(server)
    if server.program == "dynamo" and server.has_lora and on_host is not None and on_host < len(adapters):
        flag = "--max-cpu-loras" if "--max-cpu-loras" in server.flags else "--max-loras"
        reason = f"{len(adapters)} adapters of {server.model}, and {flag} is {on_host}"
        yield Hit(reason, server.line_of(flag))


def pool_without_group(document: Document, _: Context) -> Iterator[Hit]:
    """Yield that the API group of a pool is left to its default."""
    pool = document.spec.get("poolRef")
    if document.kind in _MOVED and "group" not in mapping(pool):
        name = mapping(pool).get("name")
        yield Hit(f"poolRef of pool {name} has no group", document.line_at("spec", "poolRef"))


def old_api_group(document: Document, _: Context) -> Iterator[Hit]:
    """Yield that an object is in the API group of earlier releases."""
    if document.kind in _MOVED and document.api_group == _OLD_GROUP:
        version = document.data.get("apiVersion")
        yield Hit(f"apiVersion of {document.kind} is {version}", document.line_at("apiVersion"))


def ray_storage(model: RayModel, _: Context) -> Iterator[Hit]:
    """Yield a folder from which Ray does not load adapters."""
    path = model.lora.get("dynamic_lora_loading_path")
    if path is not None and not str(path).startswith(STORAGES):
        line = model.line_of("dynamic_lora_loading_path")
        yield Hit(f"dynamic_lora_loading_path is {path}, not {', '.join(STORAGES)}", line)


def ray_forgets(model: RayModel, context: Context) -> Iterator[Hit]:
    """Yield that a replica holds fewer adapters than the plan places on it."""
    limit = model.lora.get("max_num_adapters_per_replica", _RAY_ADAPTERS)
    adapters = _ray_adapters(model, context)
    if model.lora and isinstance(limit, int) and limit < adapters:
        line = model.line_of("max_num_adapters_per_replica")
        yield Hit(f"max_num_adapters_per_replica is {limit}, and the plan has {adapters} adapters", line)


def _ray_adapters(model: RayModel, context: Context) -> int:
    """Return the number of adapters of a model by the plan; 0 if it is not in the plan."""
    if context.plan is None:
        return 0
    names = model_ids(context.plan)
    counts = {names[group.id]: len(group.adapters) for group in context.plan.groups}
    return counts.get(model.model_id, len(context.plan.adapters) if model.is_only else 0)
