"""The rules, each above its check, in the order of their ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

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
from capplan.deploy.lint._rule import Check, Context, Hit, Level, P, Rule
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
_SEVERAL_SERVERS: Final = ("--pipeline-parallel-size", "--data-parallel-size")
"""Flags with which a server may be on several machines."""
_SGLANG_BATCH: Final = 8
"""Default of ``--max-loras-per-batch``."""
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


_registered: list[Rule[Any]] = []


def _rule(
    id: str, level: Level, on: type[P], *, title: str, fix: str, reason: str
) -> Callable[[Check[P]], Check[P]]:
    """Register the check below as a rule."""

    def register(check: Check[P]) -> Check[P]:
        _registered.append(Rule(id, level, on, check, title=title, fix=fix, reason=reason))
        return check

    return register


@_rule(
    "CAP000",
    "error",
    BrokenFile,
    title="a file cannot be loaded",
    fix="correct what the line names",
    reason="The line is the error with which `capplan plan` and `capplan export` refuse the file. An "
    "adapter of another kind than plain LoRA, such as DoRA, and a workload whose adapters are "
    "others than their folders say are among these errors.",
)
def _broken_file(part: BrokenFile, _: Context) -> Iterator[Hit]:
    yield Hit(str(part.error))


@_rule(
    "CAP001",
    "error",
    TextFile,
    title="a file holds a secret",
    fix="revoke it, and refer to a secret of the cluster or a variable of the environment",
    reason="Tokens of the Hugging Face Hub and keys of AWS are found by their form. They are not shown.",
)
def _secrets(part: TextFile, _: Context) -> Iterator[Hit]:
    for number, line in enumerate(part.text.splitlines(), 1):
        for name, pattern in _SECRETS:
            if pattern.search(line):
                yield Hit(f"the line holds {name}", number)


@_rule(
    "CAP101",
    "error",
    PlanFile,
    title="a plan is not verified",
    fix="plan again, with more time if the verdict is undecided",
    reason="`capplan serve` and `capplan export` refuse such a plan without `--unverified`.",
)
def _not_verified(part: PlanFile, _: Context) -> Iterator[Hit]:
    if not _has_failed(part):
        yield from _broken_verification(part, "verification.ok")


@_rule(
    "CAP102",
    "error",
    PlanFile,
    title="a plan was changed after its verification",
    fix="change the workload and plan again",
    reason="`verification.digest` is that of the plan as it was verified.",
)
def _changed_since(part: PlanFile, _: Context) -> Iterator[Hit]:
    yield from _broken_verification(part, "verification.digest")


@_rule(
    "CAP103",
    "error",
    PlanFile,
    title="the verification of a plan failed",
    fix="plan again, with more GPUs or wider bounds",
    reason="A bound failed in the twin on some seed.",
)
def _verification_failed(part: PlanFile, _: Context) -> Iterator[Hit]:
    if _has_failed(part):
        yield from _broken_verification(part, "verification.ok")


@_rule(
    "CAP104",
    "error",
    PlanFile,
    title="an adapter of a plan is another one than in its folder",
    fix="correct the adapter in the workload and plan again",
    reason="Rank, layers, kind and base model of `adapter_config.json` count. Folders that are not on "
    "this machine are not checked.",
)
def _contradicted_by_folder(part: PlanFile, _: Context) -> Iterator[Hit]:
    for adapter in part.plan.adapters.values():
        facts = (adapter.path, adapter.rank, adapter.target_modules)
        try:
            require_adapter(*facts, part.plan.base_model, f"adapter {adapter.name}")
        except InputError as error:
            yield Hit(str(error))


@_rule(
    "CAP105",
    "error",
    PlanFile,
    title="a plan needs a flag that its version of vLLM lacks",
    fix="plan with a profile of a later version",
    reason="[Deploy a plan](../guides/deploy.md) lists the flags by version.",
)
def _needs_missing_flag(part: PlanFile, _: Context) -> Iterator[Hit]:
    for group in part.plan.groups:
        try:
            engine_flags(part.plan, group)
        except InputError as error:
            if error.location.endswith("engine version"):
                yield Hit(str(error))


@_rule(
    "CAP201",
    "error",
    Server,
    title="vLLM: fewer adapters in host memory than slots",
    fix="raise it to the slots at least, or leave it out",
    reason="vLLM refuses to start with `--max-cpu-loras` below `--max-loras`.",
)
def _fewer_in_memory_than_slots(server: Server, _: Context) -> Iterator[Hit]:
    slots, on_host = server.number("--max-loras", 1), server.number("--max-cpu-loras")
    if _is_vllm(server) and slots is not None and on_host is not None and on_host < slots:
        line = server.line_of("--max-cpu-loras", "maxCpuAdapters", "max_cpu_loras")
        yield Hit(f"--max-cpu-loras {on_host} is below --max-loras {slots}", line)


@_rule(
    "CAP202",
    "warning",
    Server,
    title="vLLM: more adapters than fit in host memory",
    fix="set --max-cpu-loras to the number of adapters",
    reason="vLLM holds `--max-cpu-loras` adapters in host memory, by default as many as `--max-loras`, "
    "and reads the others from disk at each use. There is no warning if the plan has the same "
    "number.",
)
def _loads_from_disk(server: Server, context: Context) -> Iterator[Hit]:
    on_host = adapters_on_host(server)
    planned = context.plan.groups if context.plan is not None else ()
    if not _is_vllm(server) or on_host is None or len(server.adapters) <= on_host:
        return
    if all(group.engine_args.max_cpu_loras != on_host for group in planned):
        line = server.line_of("--max-cpu-loras", "maxCpuAdapters", "max_cpu_loras")
        yield Hit(f"{len(server.adapters)} adapters, and host memory holds {on_host}", line)


@_rule(
    "CAP203",
    "error",
    Server,
    title="vLLM: a rank of slots that is not allowed",
    fix="use the next larger one",
    reason="vLLM refuses to start with another `--max-lora-rank`. The version is that of the image or of "
    "the plan.",
)
def _rank_not_allowed(server: Server, context: Context) -> Iterator[Hit]:
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


@_rule(
    "CAP204",
    "error",
    Server,
    title="an adapter has a larger rank than the slots",
    fix="raise --max-lora-rank",
    reason="The engine refuses to load the adapter. Ranks are those of the plan, or of folders on this "
    "machine.",
)
def _rank_too_small(server: Server, context: Context) -> Iterator[Hit]:
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


@_rule(
    "CAP205",
    "error",
    Server,
    title="a flag that the version of vLLM lacks",
    fix="use a later image, or plan for this version",
    reason="vLLM refuses flags that it does not know. The version is that of the image or of the plan.",
)
def _missing_in_version(server: Server, context: Context) -> Iterator[Hit]:
    version = server.version or context.version
    if not _is_vllm(server) or version is None:
        return
    lacking = serving.RELEASES[-1].flags - serving.release_of(version).flags
    for flag in sorted(lacking.intersection(server.flags)):
        reason = f"vLLM {version} lacks {flag}, which vLLM has since {serving.flag_since(flag)}"
        yield Hit(reason, server.line_of(flag, flag.strip("-").replace("-", "_")))


@_rule(
    "CAP206",
    "error",
    Server,
    title="an adapter at a URL",
    fix="download it, and name its folder",
    reason="Engines load folders, and vLLM ids of the Hugging Face Hub; none loads from `s3://` or "
    "`http://`.",
)
def _loads_from_url(server: Server, _: Context) -> Iterator[Hit]:
    for adapter in server.adapters:
        if path_kind(adapter.path) == "url":
            reason = f"adapter {adapter.name} is at {adapter.path}, from which no engine loads"
            yield Hit(reason, server.line_of(adapter.path))


@_rule(
    "CAP207",
    "error",
    Server,
    title="another number of GPUs than the server uses",
    fix="make the two equal",
    reason="With fewer GPUs the server does not start, and with more the others are idle. Servers with "
    "pipeline or data parallelism, which may be on several machines, are not checked.",
)
def _other_gpus(server: Server, _: Context) -> Iterator[Hit]:
    used = server.number("--tensor-parallel-size", 1)
    is_several = any(flag in server.flags for flag in _SEVERAL_SERVERS)
    if not is_several and None not in (server.gpus, used) and server.gpus != used:
        yield Hit(f"{server.gpus} GPUs in the resources, and --tensor-parallel-size is {used}")


@_rule(
    "CAP208",
    "error",
    Server,
    title="an adapter of a server is another one than planned",
    fix="name the folder of the planned adapter, or plan again",
    reason="Kind and base model of folders on this machine count, and with a plan rank and layers.",
)
def _served_folder_differs(server: Server, context: Context) -> Iterator[Hit]:
    base_model = context.plan.base_model if context.plan is not None else server.model
    for adapter in server.adapters:
        folder = _absolute_folder(adapter.path)
        if folder is not None:
            where = f"adapter {adapter.name}"
            yield from _differences(folder, _planned(context.plan, adapter.name), base_model, where)


@_rule(
    "CAP301",
    "error",
    Server,
    title="SGLang without adapters lacks the shape of slots",
    fix="set both flags",
    reason="SGLang infers `--max-lora-rank` and `--lora-target-modules` from the adapters at its start, "
    "and refuses to start without either.",
)
def _sglang_without_paths(server: Server, _: Context) -> Iterator[Hit]:
    needed = ("--max-lora-rank", "--lora-target-modules")
    missing = [flag for flag in needed if flag not in server.flags]
    if _is_sglang(server) and not server.adapters and missing:
        yield Hit(f"no adapters at the start, and {' and '.join(missing)} missing")


@_rule(
    "CAP302",
    "error",
    Server,
    title="SGLang: fewer loaded adapters than it starts with",
    fix="raise it to the number of adapters at least, or leave it out",
    reason="SGLang refuses to start with `--max-loaded-loras` below the number of adapters.",
)
def _sglang_fewer_loaded_than_paths(server: Server, _: Context) -> Iterator[Hit]:
    loaded = server.number("--max-loaded-loras")
    if _is_sglang(server) and loaded is not None and loaded < len(server.adapters):
        reason = f"--max-loaded-loras {loaded} is below the {len(server.adapters)} adapters at the start"
        yield Hit(reason, server.line_of("--max-loaded-loras"))


@_rule(
    "CAP303",
    "error",
    Server,
    title="SGLang: fewer loaded adapters than those of a batch",
    fix="raise it to --max-loras-per-batch at least, which is 8 by default",
    reason="SGLang refuses to start with `--max-loaded-loras` below `--max-loras-per-batch`.",
)
def _sglang_fewer_loaded_than_batch(server: Server, _: Context) -> Iterator[Hit]:
    loaded = server.number("--max-loaded-loras")
    in_batch = server.number("--max-loras-per-batch", _SGLANG_BATCH)
    if _is_sglang(server) and loaded is not None and in_batch is not None and loaded < in_batch:
        reason = f"--max-loaded-loras {loaded} is below --max-loras-per-batch {in_batch}"
        yield Hit(reason, server.line_of("--max-loaded-loras"))


@_rule(
    "CAP401",
    "error",
    Document,
    title="KServe: maxima of adapters are unset",
    fix="set maxAdapters, maxRank and maxCpuAdapters",
    reason="KServe passes those alone that are set, and the defaults of vLLM are one slot, rank 16 and "
    "one adapter in host memory. Values that are too small break CAP201 to CAP204.",
)
def _kserve_without_maxima(document: Document, _: Context) -> Iterator[Hit]:
    lora = mapping(dig(document.spec, "model", "lora"))
    adapters = mappings(lora.get("adapters"))
    if document.kind == "LLMInferenceService" and adapters:
        names = ("maxAdapters", "maxRank", "maxCpuAdapters")
        if missing := [name for name in names if lora.get(name) is None]:
            reason = f"{', '.join(missing)} unset beside {len(adapters)} adapters"
            yield Hit(reason, document.line_at("spec", "model", "lora"))


@_rule(
    "CAP402",
    "error",
    Document,
    title="an object is not valid by its schema",
    fix="correct the field, or use the release of the controller that the export is for",
    reason="Schemas are those of `--schemas`. The API server refuses such an object, or drops a field "
    "that it does not know without a word.",
)
def _not_valid(document: Document, context: Context) -> Iterator[Hit]:
    for key, message in context.schemas.errors(document) if context.schemas else ():
        where = format_key(key) or "the document"
        yield Hit(f"{document.kind or 'values'}: {where}: {message}", document.line_at(*key))


@_rule(
    "CAP403",
    "warning",
    Document,
    title="no schema is given for a custom resource",
    fix="add its CustomResourceDefinition to --schemas",
    reason="The cluster may lack the controller of the target.",
)
def _without_schema(document: Document, context: Context) -> Iterator[Hit]:
    if context.schemas is None or not _is_custom(document) or context.schemas.of(document) is not None:
        return
    kind, version = document.kind, document.data.get("apiVersion")
    same = (each for each in context.of(Document) if each.kind == kind)
    if next(same, document) is document:
        yield Hit(f"{kind} of {version} is not checked")


@_rule(
    "CAP411",
    "error",
    Document,
    title="AIBrix: replicas of a ModelAdapter",
    fix="leave it out to load the adapter into all matching pods",
    reason="AIBrix rejects other values than 1.",
)
def _aibrix_replicas(document: Document, _: Context) -> Iterator[Hit]:
    replicas = document.spec.get("replicas")
    if document.kind == "ModelAdapter" and replicas not in (None, 1):
        yield Hit(f"replicas is {replicas}", document.line_at("spec", "replicas"))


@_rule(
    "CAP412",
    "error",
    Server,
    title="AIBrix: pods do not let adapters be loaded",
    fix="set VLLM_ALLOW_RUNTIME_LORA_UPDATING to True",
    reason="AIBrix loads adapters into running servers, which vLLM refuses by default.",
)
def _aibrix_without_updates(server: Server, _: Context) -> Iterator[Hit]:
    enabled = server.labels.get("adapter.model.aibrix.ai/enabled", "").lower() == "true"
    if enabled and not server.updates_at_run_time:
        yield Hit(f"{RUNTIME_UPDATES} is {server.env.get(RUNTIME_UPDATES, 'unset')}")


@_rule(
    "CAP421",
    "error",
    Document,
    title="production-stack: an adapter is placed twice",
    fix="give the adapter to the servers by --lora-modules instead",
    reason="The controller of a LoraAdapter unloads adapters of its name from all other pods.",
)
def _placed_twice(document: Document, context: Context) -> Iterator[Hit]:
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


@_rule(
    "CAP422",
    "error",
    ChartModel,
    title="production-stack: enableLoRA is missing",
    fix="set enableLoRA: true",
    reason="Without it the chart starts vLLM without `--enable-lora`.",
)
def _chart_without_lora(model: ChartModel, context: Context) -> Iterator[Hit]:
    flags = [flag for flag in model.flags if "lora" in flag]
    if "--enable-lora" not in model.flags and (flags or _is_base(model, context)):
        what = f"{flags[0]} is set" if flags else "a LoraAdapter names it"
        yield Hit(f"enableLoRA of {model.name} is not true, and {what}")


@_rule(
    "CAP423",
    "warning",
    ChartModel,
    title="production-stack: prefix caching is left to the chart",
    fix="set enablePrefixCaching: true",
    reason="vLLM caches prefixes by default; the chart turns that off unless the field is true.",
)
def _chart_without_prefix_caching(model: ChartModel, _: Context) -> Iterator[Hit]:
    flags = ("--enable-prefix-caching", "--no-enable-prefix-caching")
    if "enablePrefixCaching" not in model.config and not any(flag in model.flags for flag in flags):
        yield Hit(f"vllmConfig.enablePrefixCaching of {model.name} is unset")


@_rule(
    "CAP424",
    "error",
    ChartModel,
    title="production-stack: pods do not let adapters be loaded",
    fix="set VLLM_ALLOW_RUNTIME_LORA_UPDATING to True in env",
    reason="The controller loads adapters into running servers, which vLLM refuses by default.",
)
def _chart_without_updates(model: ChartModel, context: Context) -> Iterator[Hit]:
    alone = not any(each.kind == "LoraAdapter" for each in context.of(Document))
    expected = alone and model.has_controller and not model.adapters
    is_loaded = _is_base(model, context) or expected
    if "--enable-lora" in model.flags and is_loaded and not model.updates_at_run_time:
        yield Hit(f"{RUNTIME_UPDATES} of {model.name} is {model.env.get(RUNTIME_UPDATES, 'unset')}")


@_rule(
    "CAP431",
    "warning",
    Server,
    title="Dynamo: a worker holds fewer adapters than are loaded",
    fix="set --max-cpu-loras to the number of adapters",
    reason="Dynamo loads every adapter on all workers of its base model, wherever a plan has it.",
)
def _dynamo_loads_everywhere(server: Server, context: Context) -> Iterator[Hit]:
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


@_rule(
    "CAP441",
    "warning",
    Document,
    title="llm-d: a pool without an API group",
    fix="set poolRef.group: inference.networking.k8s.io",
    reason="The default differs between revisions of the CRD.",
)
def _pool_without_group(document: Document, _: Context) -> Iterator[Hit]:
    pool = document.spec.get("poolRef")
    if document.kind in _MOVED and "group" not in mapping(pool):
        name = mapping(pool).get("name")
        yield Hit(f"poolRef of pool {name} has no group", document.line_at("spec", "poolRef"))


@_rule(
    "CAP442",
    "error",
    Document,
    title="llm-d: an object in the API group of earlier releases",
    fix="use llm-d.ai/v1alpha2",
    reason="InferenceObjective and InferenceModelRewrite moved there.",
)
def _old_api_group(document: Document, _: Context) -> Iterator[Hit]:
    if document.kind in _MOVED and document.api_group == _OLD_GROUP:
        version = document.data.get("apiVersion")
        yield Hit(f"apiVersion of {document.kind} is {version}", document.line_at("apiVersion"))


@_rule(
    "CAP501",
    "error",
    RayModel,
    title="Ray: a folder of adapters that is in no cloud storage",
    fix="copy the adapters to one of them",
    reason="Ray loads adapters from `s3://`, `gs://`, `abfss://` and `azure://` alone.",
)
def _ray_storage(model: RayModel, _: Context) -> Iterator[Hit]:
    path = model.lora.get("dynamic_lora_loading_path")
    if path is not None and not str(path).startswith(STORAGES):
        line = model.line_of("dynamic_lora_loading_path")
        yield Hit(f"dynamic_lora_loading_path is {path}, not {', '.join(STORAGES)}", line)


@_rule(
    "CAP502",
    "warning",
    RayModel,
    title="Ray: a replica holds fewer adapters than planned",
    fix="set max_num_adapters_per_replica to the number of adapters",
    reason="A replica forgets the adapter that was not used for the longest time, 16 by default, and "
    "loads it again at its next request.",
)
def _ray_forgets(model: RayModel, context: Context) -> Iterator[Hit]:
    limit = model.lora.get("max_num_adapters_per_replica", _RAY_ADAPTERS)
    adapters = _ray_adapters(model, context)
    if model.lora and isinstance(limit, int) and limit < adapters:
        line = model.line_of("max_num_adapters_per_replica")
        yield Hit(f"max_num_adapters_per_replica is {limit}, and the plan has {adapters} adapters", line)


@_rule(
    "CAP601",
    "warning",
    WorkloadFile,
    title="adapters of a workload are idle",
    fix="give them a rate, or leave out those that are not deployed",
    reason="An adapter without requests is deployed and takes host memory, and its cold start is in no "
    "verification.",
)
def _idle_adapters(part: WorkloadFile, _: Context) -> Iterator[Hit]:
    idle = [each.name for each in part.workload.adapters if each.rate_rps == 0]
    if idle and part.workload.trace is None:
        total = len(part.workload.adapters)
        yield Hit(f"{len(idle)} of {total} adapters have rate_rps 0: {listed(idle)}")


@_rule(
    "CAP602",
    "warning",
    WorkloadFile,
    title="a workload states no objective",
    fix="add slo with a bound, such as ttft_p99_s",
    reason="The plan is then verified for the share of requests that are served, and stable queues, alone.",
)
def _no_objectives(part: WorkloadFile, _: Context) -> Iterator[Hit]:
    if not part.workload.slo.model_fields_set:
        yield Hit("slo is absent")


@_rule(
    "CAP603",
    "warning",
    WorkloadFile,
    title="the unit of times in a trace is guessed",
    fix="set trace.time_unit",
    reason="A wrong unit changes all rates by a factor of 1000.",
)
def _guessed_trace(part: WorkloadFile, _: Context) -> Iterator[Hit]:
    notes = () if part.workload.trace is None else part.workload.trace.notes
    for note in notes:
        if "trace.time_unit" in note:  # the others say what is left out
            yield Hit(note)


@_rule(
    "CAP701",
    "error",
    AdapterFolder,
    title="an adapter folder is another one than planned",
    fix="use the folder of the planned adapter, or plan again",
    reason="The adapter of the plan is that with the path of the folder, or its name. For others the "
    "base model alone counts.",
)
def _folder_differs(part: AdapterFolder, context: Context) -> Iterator[Hit]:
    if context.plan is not None:
        planned = _planned_at(context.plan, part.folder)
        yield from _differences(part.folder, planned, context.plan.base_model, f"adapter {part.folder.name}")


@_rule(
    "CAP801",
    "error",
    RunningServer,
    title="a running server lacks adapters of the plan",
    fix="load them, or start the server with them",
    reason="The group of the server is that with the most of its adapters.",
)
def _lacks_adapters(server: RunningServer, context: Context) -> Iterator[Hit]:
    if context.plan is not None:
        group = _served_group(server, context.plan)
        missing = [each.name for each in group.adapters if each.name not in server.served.models]
        if missing:
            yield Hit(f"{len(missing)} adapters of group {group.id} are not served: {listed(missing)}")


@_rule(
    "CAP802",
    "error",
    RunningServer,
    title="a running server has another number of slots than planned",
    fix="start it with the --max-loras of the plan",
    reason="The number is that of its metrics: `vllm:lora_requests_info` or `sglang:lora_pool_slots_total`.",
)
def _other_slots(server: RunningServer, context: Context) -> Iterator[Hit]:
    if context.plan is not None and server.served.max_loras is not None:
        group = _served_group(server, context.plan)
        planned = group.engine_args.max_loras
        if planned != server.served.max_loras:
            yield Hit(
                f"max_loras is {server.served.max_loras}, and {planned} in group {group.id} of the plan"
            )


@_rule(
    "CAP803",
    "error",
    RunningServer,
    title="a running server has another base model than the plan",
    fix="start it with the base model of the plan",
    reason="Names and paths of models count by their last part.",
)
def _other_base_model(server: RunningServer, context: Context) -> Iterator[Hit]:
    if context.plan is not None and not server.served.serves_base(context.plan.base_model):
        served = listed(sorted(server.served.base_models)) or "no base model"
        yield Hit(f"it serves {served}, and the plan is for {context.plan.base_model}")


def _has_failed(part: PlanFile) -> bool:
    check = part.plan.verification
    return bool(check.seeds) and (check.verdict == "failed" or any(not group.ok for group in check.groups))


def _broken_verification(part: PlanFile, key: str) -> Iterator[Hit]:
    try:
        part.plan.require_verified()
    except InputError as error:
        if error.location == key:
            yield Hit(str(error))


def listed(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def adapters_on_host(server: Server) -> int | None:
    """Return how many adapters vLLM holds in host memory; None: not known, or more than slots fail."""
    slots = server.number("--max-loras", 1)
    on_host = server.number("--max-cpu-loras", slots)
    return None if slots is None or on_host is None or on_host < slots else on_host


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


def _is_custom(document: Document) -> bool:
    """Tell whether an object is a custom resource: API groups of Kubernetes have no dot, or are of k8s.io."""
    group = document.api_group
    own = "." not in group or (group.endswith(".k8s.io") and not group.endswith(".networking.k8s.io"))
    return not own and bool(mapping(document.data.get("metadata")))


def _adapter_name(document: Document) -> object:
    return dig(document.spec, "adapterSource", "adapterName")


def _is_base(model: ChartModel, context: Context) -> bool:
    """Return whether a LoraAdapter is for the pods of a model."""
    objects = (each for each in context.of(Document) if each.kind == "LoraAdapter")
    return any(each.spec.get("baseModel") == model.name for each in objects)


def _ray_adapters(model: RayModel, context: Context) -> int:
    """Return the number of adapters of a model by the plan; 0 if it is not in the plan."""
    if context.plan is None:
        return 0
    names = model_ids(context.plan)
    counts = {names[group.id]: len(group.adapters) for group in context.plan.groups}
    return counts.get(model.model_id, len(context.plan.adapters) if model.is_only else 0)


RULES: Final = tuple(_registered)
"""All rules by id. The first digit is that of the kind: 0 any file, 1 plans, 2 servers of vLLM, 3 servers of
SGLang, 4 controllers, 5 Ray, 6 workloads, 7 adapter folders, 8 running servers."""
