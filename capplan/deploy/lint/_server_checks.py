"""Rules on the command lines of servers, and on adapter folders and running servers beside a plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from capplan import serving  # loads the rules, and numba, when a server is checked
from capplan.deploy.lint._parts import AdapterFolder, RunningServer, Server
from capplan.deploy.lint._plan_checks import listed
from capplan.deploy.lint._rule import Context, Hit
from capplan.errors import InputError
from capplan.spec import (
    LORA_RANKS,
    FolderAdapter,
    Group,
    PeftFiles,
    Plan,
    PlanAdapter,
    local_folder,
    path_kind,
    require_described,
)

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
