"""Checks of the rules: on plans and workloads, on servers and adapter folders, on objects of controllers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from capplan import serving  # loads the rules, and numba, when a server is checked
from capplan.deploy._ray import STORAGES, model_ids
from capplan.deploy._servers import engine_flags
from capplan.deploy.lint._parts import (
    RUNTIME_UPDATES,
    AdapterFolder,
    BrokenFile,
    ChartModel,
    Document,
    PlanFile,
    RayModel,
    RunningServer,
    Server,
    TextFile,
    WorkloadFile,
    dig,
    mapping,
    mappings,
)
from capplan.deploy.lint._rule import Context, Hit
from capplan.errors import InputError
from capplan.spec import (
    LORA_RANKS,
    FolderAdapter,
    Group,
    PeftFiles,
    Plan,
    PlanAdapter,
    format_key,
    local_folder,
    path_kind,
    require_adapter,
    require_described,
)

_MOST_NAMES = 5


def not_verified(part: PlanFile, _: Context) -> Iterator[Hit]:
    """Yield that a plan has no verdict, or an undecided one."""
    if not _has_failed(part):
        yield from _broken_verification(part, "verification.ok")


def verification_failed(part: PlanFile, _: Context) -> Iterator[Hit]:
    """Yield that a bound failed."""
    if _has_failed(part):
        yield from _broken_verification(part, "verification.ok")


def changed_since(part: PlanFile, _: Context) -> Iterator[Hit]:
    """Yield that the verdict is on another plan."""
    yield from _broken_verification(part, "verification.digest")


def _has_failed(part: PlanFile) -> bool:
    check = part.plan.verification
    return bool(check.seeds) and (check.verdict == "failed" or any(not group.ok for group in check.groups))


def _broken_verification(part: PlanFile, key: str) -> Iterator[Hit]:
    try:
        part.plan.require_verified()
    except InputError as error:
        if error.location == key:
            yield Hit(str(error))


def contradicted_by_folder(part: PlanFile, _: Context) -> Iterator[Hit]:
    """Yield the adapters of a plan whose folders on this machine are of others."""
    for adapter in part.plan.adapters.values():
        facts = (adapter.path, adapter.rank, adapter.target_modules)
        try:
            require_adapter(*facts, part.plan.base_model, f"adapter {adapter.name}")
        except InputError as error:
            yield Hit(str(error))


def needs_missing_flag(part: PlanFile, _: Context) -> Iterator[Hit]:
    """Yield the groups of a plan that need a flag which their version of vLLM lacks."""
    for group in part.plan.groups:
        try:
            engine_flags(part.plan, group)
        except InputError as error:
            if error.location.endswith("engine version"):
                yield Hit(str(error))


def idle_adapters(part: WorkloadFile, _: Context) -> Iterator[Hit]:
    """Yield that adapters have no requests; those of a trace are in its requests."""
    idle = [each.name for each in part.workload.adapters if each.rate_rps == 0]
    if idle and part.workload.trace is None:
        total = len(part.workload.adapters)
        yield Hit(f"{len(idle)} of {total} adapters have rate_rps 0: {listed(idle)}")


def no_objectives(part: WorkloadFile, _: Context) -> Iterator[Hit]:
    """Yield that a workload states no service-level objective."""
    if not part.workload.slo.model_fields_set:
        yield Hit("slo is absent")


def guessed_trace(part: WorkloadFile, _: Context) -> Iterator[Hit]:
    """Yield what the reader of a trace guessed."""
    notes = () if part.workload.trace is None else part.workload.trace.notes
    for note in notes:
        if "trace.time_unit" in note:  # the others say what is left out
            yield Hit(note)


def listed(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


_SEVERAL_SERVERS: Final = ("--pipeline-parallel-size", "--data-parallel-size")
"""Flags with which a server may be on several machines."""

_SGLANG_BATCH: Final = 8
"""Default of ``--max-loras-per-batch``."""


def fewer_in_memory_than_slots(server: Server, _: Context) -> Iterator[Hit]:
    """Yield that vLLM refuses to start: fewer adapters in host memory than slots."""
    slots, on_host = server.number("--max-loras", 1), server.number("--max-cpu-loras")
    if _is_vllm(server) and slots is not None and on_host is not None and on_host < slots:
        line = server.line_of("--max-cpu-loras", "maxCpuAdapters", "max_cpu_loras")
        yield Hit(f"--max-cpu-loras {on_host} is below --max-loras {slots}", line)


def loads_from_disk(server: Server, context: Context) -> Iterator[Hit]:
    """Yield that adapters do not fit in host memory, unless the plan says so."""
    on_host = adapters_on_host(server)
    planned = context.plan.groups if context.plan is not None else ()
    if not _is_vllm(server) or on_host is None or len(server.adapters) <= on_host:
        return
    if all(group.engine_args.max_cpu_loras != on_host for group in planned):
        line = server.line_of("--max-cpu-loras", "maxCpuAdapters", "max_cpu_loras")
        yield Hit(f"{len(server.adapters)} adapters, and host memory holds {on_host}", line)


def adapters_on_host(server: Server) -> int | None:
    """Return how many adapters vLLM holds in host memory; None: not known, or more than slots fail."""
    slots = server.number("--max-loras", 1)
    on_host = server.number("--max-cpu-loras", slots)
    return None if slots is None or on_host is None or on_host < slots else on_host


def rank_not_allowed(server: Server, context: Context) -> Iterator[Hit]:
    """Yield a rank of slots that vLLM does not allow."""
    rank = server.number("--max-lora-rank")
    if not _is_vllm(server) or rank is None:
        return
    version = server.version or context.version
    least = serving.release_of(version).min_lora_rank
    allowed = [each for each in LORA_RANKS if each >= least]
    if rank not in allowed:
        of = f" {version}" if version else ""
        reason = f"--max-lora-rank {rank} is none of vLLM{of}: {', '.join(map(str, allowed))}"
        yield Hit(reason, server.line_of("--max-lora-rank", "maxRank", "max_lora_rank"))


def rank_too_small(server: Server, context: Context) -> Iterator[Hit]:
    """Yield the adapters whose rank, by the plan or their folder, exceeds that of slots."""
    limit = server.number("--max-lora-rank", 16 if _is_vllm(server) else None)
    if limit is None:
        return
    for adapter in server.adapters:
        planned = _planned(context.plan, adapter.name)
        found = _described(adapter.path) if planned is None else None
        rank = planned.rank if planned is not None else found.rank if found is not None else 0
        if rank > limit:
            reason = f"adapter {adapter.name} has rank {rank}, and --max-lora-rank is {limit}"
            yield Hit(reason, server.line_of("--max-lora-rank", "maxRank", "max_lora_rank"))


def missing_in_version(server: Server, context: Context) -> Iterator[Hit]:
    """Yield flags that the version of vLLM lacks."""
    version = server.version or context.version
    if not _is_vllm(server) or version is None:
        return
    lacking = serving.RELEASES[-1].flags - serving.release_of(version).flags
    for flag in sorted(lacking.intersection(server.flags)):
        reason = f"vLLM {version} lacks {flag}, which vLLM has since {serving.flag_since(flag)}"
        yield Hit(reason, server.line_of(flag, flag.strip("-").replace("-", "_")))


def loads_from_url(server: Server, _: Context) -> Iterator[Hit]:
    """Yield adapters at addresses from which engines do not load."""
    for adapter in server.adapters:
        if path_kind(adapter.path) == "url":
            reason = f"adapter {adapter.name} is at {adapter.path}, from which no engine loads"
            yield Hit(reason, server.line_of(adapter.path))


def other_gpus(server: Server, _: Context) -> Iterator[Hit]:
    """Yield that the resources of a server have another number of GPUs than it uses."""
    used = server.number("--tensor-parallel-size", 1)
    is_several = any(flag in server.flags for flag in _SEVERAL_SERVERS)
    if not is_several and None not in (server.gpus, used) and server.gpus != used:
        yield Hit(f"{server.gpus} GPUs in the resources, and --tensor-parallel-size is {used}")


def served_folder_differs(server: Server, context: Context) -> Iterator[Hit]:
    """Yield adapters whose folders on this machine are no plain LoRA, or others than in the plan."""
    base_model = context.plan.base_model if context.plan is not None else server.model
    for adapter in server.adapters:
        folder = _absolute_folder(adapter.path)
        if folder is not None:
            where = f"adapter {adapter.name}"
            yield from _differences(folder, _planned(context.plan, adapter.name), base_model, where)


def folder_differs(part: AdapterFolder, context: Context) -> Iterator[Hit]:
    """Yield what of an adapter folder is otherwise than in the plan."""
    if context.plan is not None:
        planned = _planned_at(context.plan, part.folder)
        yield from _differences(part.folder, planned, context.plan.base_model, f"adapter {part.folder.name}")


def sglang_without_paths(server: Server, _: Context) -> Iterator[Hit]:
    """Yield what SGLang cannot know without adapters."""
    needed = ("--max-lora-rank", "--lora-target-modules")
    missing = [flag for flag in needed if flag not in server.flags]
    if _is_sglang(server) and not server.adapters and missing:
        yield Hit(f"no adapters at the start, and {' and '.join(missing)} missing")


def sglang_fewer_loaded_than_paths(server: Server, _: Context) -> Iterator[Hit]:
    """Yield that SGLang refuses more adapters than may be loaded."""
    loaded = server.number("--max-loaded-loras")
    if _is_sglang(server) and loaded is not None and loaded < len(server.adapters):
        reason = f"--max-loaded-loras {loaded} is below the {len(server.adapters)} adapters at the start"
        yield Hit(reason, server.line_of("--max-loaded-loras"))


def sglang_fewer_loaded_than_batch(server: Server, _: Context) -> Iterator[Hit]:
    """Yield that SGLang refuses to start: fewer loaded adapters than those of a batch."""
    loaded = server.number("--max-loaded-loras")
    in_batch = server.number("--max-loras-per-batch", _SGLANG_BATCH)
    if _is_sglang(server) and loaded is not None and in_batch is not None and loaded < in_batch:
        reason = f"--max-loaded-loras {loaded} is below --max-loras-per-batch {in_batch}"
        yield Hit(reason, server.line_of("--max-loaded-loras"))


def lacks_adapters(server: RunningServer, context: Context) -> Iterator[Hit]:
    """Yield the adapters of the plan's group that a running server lacks."""
    if context.plan is not None:
        group = _served_group(server, context.plan)
        missing = [each.name for each in group.adapters if each.name not in server.served.models]
        if missing:
            yield Hit(f"{len(missing)} adapters of group {group.id} are not served: {listed(missing)}")


def other_slots(server: RunningServer, context: Context) -> Iterator[Hit]:
    """Yield that a running server has another number of slots than planned."""
    if context.plan is not None and server.served.max_loras is not None:
        group = _served_group(server, context.plan)
        planned = group.engine_args.max_loras
        if planned != server.served.max_loras:
            yield Hit(
                f"max_loras is {server.served.max_loras}, and {planned} in group {group.id} of the plan"
            )


def other_base_model(server: RunningServer, context: Context) -> Iterator[Hit]:
    """Yield that a running server has another base model; folders of models have their name."""
    if context.plan is not None and not server.served.serves_base(context.plan.base_model):
        served = listed(sorted(server.served.base_models)) or "no base model"
        yield Hit(f"it serves {served}, and the plan is for {context.plan.base_model}")


def _served_group(server: RunningServer, plan: Plan) -> Group:
    """Return the group with the most adapters of a server."""
    return max(
        plan.groups, key=lambda group: sum(adapter.name in server.served.models for adapter in group.adapters)
    )


def _is_vllm(server: Server) -> bool:
    return server.program != "sglang" and server.has_lora


def _is_sglang(server: Server) -> bool:
    return server.program == "sglang" and server.has_lora


def _planned(plan: Plan | None, name: str) -> PlanAdapter | None:
    """Return the adapter of a plan by its name."""
    return None if plan is None else plan.adapters.get(name)


def _planned_at(plan: Plan, folder: Path) -> PlanAdapter | None:
    """Return the adapter of a plan whose path is a folder, or that has its name."""
    at_path = (each for each in plan.adapters.values() if local_folder(each.path) == folder)
    return next(at_path, _planned(plan, folder.name))


def _absolute_folder(path: str) -> Path | None:
    """Return the folder on this machine that a path names from everywhere."""
    return local_folder(path) if path.startswith(("/", "~")) else None


def _described(path: str) -> FolderAdapter | None:
    """Return what an adapter is by its folder on this machine; None without a valid one."""
    folder = _absolute_folder(path)
    try:
        return None if folder is None else PeftFiles.of(folder).describe()
    except InputError:  # a rule of its own
        return None


def _differences(
    folder: Path, planned: PlanAdapter | None, base_model: str | None, where: str
) -> Iterator[Hit]:
    """Yield what of a folder is otherwise than planned; without a plan, its kind and base model alone."""
    try:
        found = PeftFiles.of(folder).describe()
        rank, modules = (found.rank, None) if planned is None else (planned.rank, planned.target_modules)
        base_model = base_model or found.base_model or ""
        require_described(found, rank, modules, base_model, lambda key: f"{where}: {key}")
    except InputError as error:
        yield Hit(str(error))


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
