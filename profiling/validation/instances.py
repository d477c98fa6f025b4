"""One instance of a group: what it is asked, how its engine is set, and how its server is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capplan.errors import InputError
from capplan.profiling.commands import flag_words
from capplan.profiling.engine.process import ServerCommand
from capplan.profiling.load.schedule import scaled
from capplan.profiling.load.settings import Target
from capplan.profiling.validation.options import Options
from capplan.spec import Group, Plan, Profile, Workload
from capplan.twin.simulate import Settings


def chosen_groups(plan: Plan, options: Options) -> tuple[Group, ...]:
    """Return the groups to validate, in the plan's order.

    Raises
    ------
    InputError
        For an unknown group.
    """
    for url in options.urls.values():
        Target(url)  # said before anything is simulated
    known = [group.id for group in plan.groups]
    for flag, names in (("--group", options.groups), ("--url", options.urls)):
        for name in names:
            if name not in known:
                raise InputError(f"must be a group of the plan: {', '.join(known[:12])}", name, flag)
    return tuple(group for group in plan.groups if not options.groups or group.id in options.groups)


def group_workload(group: Group, workload: Workload, rate_scale: float) -> Workload:
    """Return what one instance of a group is asked.

    Raises
    ------
    InputError
        When the plan serves adapters that the workload does not have.
    """
    known = {adapter.name for adapter in workload.adapters}
    for adapter in group.adapters:
        if adapter.name not in known:
            raise InputError("must be an adapter of the workload", adapter.name, f"group {group.id}")
    shares = {adapter.name: adapter.share / group.replicas for adapter in group.adapters}
    return scaled(workload.subset(shares, shares), rate_scale)


def twin_settings(group: Group, options: Options) -> Settings:
    """Return how the twin sets the engine of a group."""
    args = group.engine_args.model_dump() | dict(options.engine_args)
    return {
        "a_max": args["max_loras"],
        "s_max": args["max_lora_rank"],
        "max_cpu_loras": args["max_cpu_loras"],
        "max_num_seqs": args["max_num_seqs"],
        "max_num_batched_tokens": args["max_num_batched_tokens"],
        "max_model_len": args["max_model_len"],
        "gpu_memory_utilization": args["gpu_memory_utilization"],
        "prefix_caching": args["enable_prefix_caching"],
    }


def server_command(
    plan: Plan, group: Group, profile: Profile, kv_tokens: int, requests: int, options: Options
) -> ServerCommand:
    """Return the server of one instance.

    Parameters
    ----------
    plan, group, profile
        What it is for.
    kv_tokens
        What the profile says that it has; on a CPU it is told, since nobody's memory is full there.
    requests
        How many it will be asked at most; none of them is refused.
    options
        Model, device, threads and LoRA kernel.
    """
    settings = twin_settings(group, options)
    flags: dict[str, Any] = {
        "--max-loras": settings["a_max"],
        "--max-lora-rank": settings["s_max"],
        "--max-cpu-loras": settings["max_cpu_loras"],
        "--max-num-seqs": settings["max_num_seqs"],
        "--max-num-batched-tokens": settings["max_num_batched_tokens"],
        "--max-model-len": settings["max_model_len"],
        "--gpu-memory-utilization": settings["gpu_memory_utilization"],
        "--served-model-name": plan.base_model,
        "--rules": plan.engine.rules,
        "--block-size": profile.engine.block_size,
        "--dtype": options.dtype,
        "--device": options.device,
        "--lora-kernel": options.lora_kernel,
        "--max-queue": requests + 1,
        "--drain-timeout-s": 0,
    }
    if not options.device.startswith("cuda"):
        flags["--num-kv-blocks"] = kv_tokens // profile.engine.block_size
    words = flag_words({flag: value for flag, value in flags.items() if value is not None})
    if settings["prefix_caching"] is not None:
        words.append(f"--{'' if settings['prefix_caching'] else 'no-'}enable-prefix-caching")
    return ServerCommand(options.model or plan.base_model, _sources(group), tuple(words), options.threads)


def _sources(group: Group) -> Mapping[str, str | int]:
    """Return adapters' folders where they are at hand, and else random ones of their ranks."""
    return {
        adapter.name: adapter.path if adapter.path and Path(adapter.path).is_dir() else adapter.rank
        for adapter in group.adapters
    }
