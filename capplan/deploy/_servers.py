"""Servers of a plan: their flags of ``vllm serve``, and where their adapters come from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from capplan import serving  # loads the rules, and numba, when a plan is exported
from capplan.datasets import known_arch
from capplan.errors import InputError
from capplan.spec import (
    FUSED_MODULES,
    EngineArgs,
    Group,
    Plan,
    PlanAdapter,
    PlanEngine,
    path_kind,
    require_adapter,
)

LAST_PORT: Final = 65535
_LONGEST_STEM: Final = 200

_FUSED: Final = {part: name for name, parts in FUSED_MODULES.items() for part in parts}
"""Layers that vLLM fuses, by PEFT's names of their parts."""

_QUANTIZED_ON_LOADING: Final = "fp8"
"""What vLLM makes of 16-bit weights: one scale per tensor."""

_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--tensor-parallel-size": "GPUs of one server",
        "--enable-lora": "off by default",
        "--max-loras": "adapter slots in GPU memory, as verified; 1 by default",
        "--max-lora-rank": "rank that every slot is sized for; 16 by default",
        "--max-cpu-loras": "adapters in host memory; by default as many as slots, and others load from disk",
        "--max-num-seqs": "as verified; the default depends on the GPU",
        "--max-num-batched-tokens": "as verified; the default depends on the GPU",
        "--gpu-memory-utilization": "as verified; the default depends on the version",
        "--max-model-len": "as verified; by default all positions of the model, whose KV must fit",
        "--enable-prefix-caching": "as verified",
        "--no-enable-prefix-caching": "as verified; on by default",
        "--fully-sharded-loras": "the plan counts slots so; off by default",
        "--lora-target-modules": "slots hold space for these layers alone; for all by default",
        "--async-scheduling": "as verified; off by default in this version",
        "--no-async-scheduling": "as verified; on by default in this version",
        "--quantization": "weights of 16 bits become FP8 on loading, as the plan's profile has them",
        "--kv-cache-dtype": "as the plan's profile has it; that of the model by default",
    }
)


@dataclass(frozen=True)
class Flag:
    """A flag of ``vllm serve``."""

    name: str
    values: tuple[str, ...] = ()
    """Its value, or several words; empty: a switch."""

    @property
    def reason(self) -> str:
        """Why it is set, or differs from the default."""
        return _REASONS[self.name]

    @property
    def words(self) -> tuple[str, ...]:
        """The flag as arguments: ``--name=value``, or the name before several words."""
        if len(self.values) == 1 and self.name != "--lora-target-modules":
            return (f"{self.name}={self.values[0]}",)
        return (self.name, *self.values)


def require_servable(plan: Plan, server: str = "vLLM") -> None:
    """Check a plan before it is turned into servers of vLLM, or of another engine that is named.

    The plan must be for an engine with adapter slots, `max_model_len` must not exceed the positions of the
    base model, and the folder of an adapter on this machine must be of that adapter.
    """
    for engine in (plan.engine, *map(plan.engine_of, plan.groups)):
        if serving.serving_rules(engine.rules).engine == serving.SLORA_ENGINE:
            rule = f"must be an engine with adapter slots, which {server} has and S-LoRA does not"
            raise InputError(rule, f"{engine.name} {engine.version}, rules {engine.rules}", "plan: engine")
    model = known_arch([plan.base_model])
    if model is not None:
        for group in plan.groups:
            model.require_positions(group.engine_args.max_model_len, f"plan: group {group.id}: max_model_len")
    for adapter in plan.adapters.values():
        facts = (adapter.path, adapter.rank, adapter.target_modules)
        require_adapter(*facts, plan.base_model, f"plan: adapter {adapter.name}")


def vllm_version(engine: PlanEngine) -> str | None:
    """Return the version of vLLM that serves; None, the newest, if the plan is for another engine."""
    return engine.version if engine.name == serving.VLLM_ENGINE else None


def engine_flags(plan: Plan, group: Group) -> tuple[Flag, ...]:
    """Return the flags of a group's servers, all but the port and the adapters.

    A flag that the version of the plan lacks, and weights that no flag makes, are errors.
    """
    engine = plan.engine_of(group)
    flags = (
        Flag("--tensor-parallel-size", (str(group.tp),)),
        *_settings(group.engine_args, len(group.adapters), vllm_version(engine)),
        *(_modules(engine) if group.engine_args.max_loras else ()),
        *_scheduling(engine.rules),
        *_dtypes(engine, group),
    )
    require_flags((flag.name for flag in flags), group, engine)
    return flags


def require_flags(names: Iterable[str], group: Group, engine: PlanEngine) -> None:
    """Check that the version of the plan has flags."""
    version = vllm_version(engine)
    for name in names:
        if name not in serving.release_of(version).flags:
            rule = f"lacks {name}: vLLM has it since {serving.flag_since(name)}; plan with such a profile"
            if name == "--lora-target-modules":
                rule = f"{rule}, or without target_modules, since slots of {version} hold all layers"
            raise InputError(rule, version, f"plan: group {group.id}: engine version")


def _settings(args: EngineArgs, adapters: int, version: str | None) -> Iterator[Flag]:
    if args.max_loras:
        host_slots = max(args.max_loras, adapters) if args.max_cpu_loras is None else args.max_cpu_loras
        args = args.replace(
            max_lora_rank=serving.vllm_rank(args.max_lora_rank, version),
            max_cpu_loras=max(args.max_loras, host_slots),  # vLLM refuses fewer than max-loras
        )
        yield Flag("--enable-lora")
    for name, *values in args.flags():
        yield Flag(name, tuple(values))


def _modules(engine: PlanEngine) -> Iterator[Flag]:
    """Yield the flags of the layers that slots hold space for, and of their shards."""
    if engine.fully_sharded_loras:
        yield Flag("--fully-sharded-loras")
    if engine.target_modules is not None:
        fused = dict.fromkeys(_FUSED.get(name, name) for name in engine.target_modules)
        yield Flag("--lora-target-modules", tuple(fused))


def _scheduling(name: str) -> Iterator[Flag]:
    """Yield the flag of the kind of scheduling, if it is not the default of the version."""
    rules = serving.serving_rules(name)
    if rules.releases is not None and not rules.is_default:
        yield Flag("--async-scheduling" if rules.async_scheduling else "--no-async-scheduling")


def _dtypes(engine: PlanEngine, group: Group) -> Iterator[Flag]:
    """Yield the flags of weights that are quantized on loading, and of the KV cache."""
    if (quantization := quantization_of(engine, group)) is not None:
        yield Flag("--quantization", (quantization,))
    if engine.kv_cache_dtype is not None:
        yield Flag("--kv-cache-dtype", (engine.kv_cache_dtype,))


def quantization_of(engine: PlanEngine, group: Group) -> str | None:
    """Return the dtype into which the engine of a group quantizes weights on loading; None for none.

    Weights that no flag of an engine makes are an error.
    """
    if engine.quantization not in (None, _QUANTIZED_ON_LOADING):
        rule = (
            f"must be {_QUANTIZED_ON_LOADING} or absent: no flag of a server makes such weights; plan "
            "with a profile of `capplan profile compose --model-config`, of a checkpoint that has them"
        )
        raise InputError(rule, engine.quantization, f"plan: group {group.id}: engine quantization")
    return engine.quantization


def notes_of(plan: Plan, group: Group) -> Iterator[str]:
    """Yield what differs between a group of the plan and its servers, a line each."""
    engine = plan.engine_of(group)
    if group.scheduling is not None:
        yield "The plan's own scheduler, queues and cache policy are left out: vLLM has no flags for them."
    rank = group.engine_args.max_lora_rank
    if rank and (accepted := serving.vllm_rank(rank, vllm_version(engine))) != rank:
        yield f"max_lora_rank {rank} is {accepted} here, which vLLM {in_comment(engine.version)} requires."
    if engine != plan.engine:
        yield f"Engine {in_comment(engine.name)} {in_comment(engine.version)}, unlike other groups."
    if not engine.rules.startswith("vllm"):
        rules = in_comment(engine.rules)
        yield f"The plan was verified under the rules {rules}, which vLLM does not follow."


def in_comment(text: str) -> str:
    """Return text on one line, as JSON: a line break would end the comment."""
    return json.dumps(text)


def one_line(text: str) -> str:
    """Return text without line breaks and other control characters, which would end a comment."""
    return "".join(char if char.isprintable() else " " for char in text)


def first_ports(plan: Plan, first: int) -> Iterator[tuple[Group, int, int]]:
    """Yield (group, replica, port) of every server; ports ascend, so that one host can run all."""
    pairs = [(group, replica) for group in plan.groups for replica in range(1, group.replicas + 1)]
    last_first = LAST_PORT - len(pairs) + 1
    if not 1 <= first <= last_first:
        raise InputError(f"must be from 1 to {last_first}, one port per server", first, "port")
    for index, (group, replica) in enumerate(pairs):
        yield group, replica, first + index


SourceKind = Literal["hub", "folder", "s3", "url", "root"]


def source_kind(adapter: PlanAdapter) -> SourceKind:
    """Return where the weights of an adapter are.

    ``hub``: a Hugging Face id, which vLLM downloads. ``folder``: an absolute path of the machine that
    serves. ``s3`` and ``url``: addresses that vLLM does not load from. ``root``: not stated, so a folder of
    the adapter's name below the folder of adapters. A relative folder is an error, and so is a name that
    would leave the folder of adapters.
    """
    if adapter.path is None or path_kind(adapter.path) == "url":
        if ".." in adapter.name.split("/"):
            rule = "must have the path of a folder, or a name that stays in the adapters' folder"
            raise InputError(rule, adapter.name, "adapters: name")
        if adapter.path is None:
            return "root"
        return "s3" if adapter.path.startswith("s3://") else "url"
    if path_kind(adapter.path) == "hub":
        return "hub"
    if not adapter.path.startswith(("/", "~")):
        rule = "must be absolute, because servers start anywhere; paths of a workload file are relative to it"
        raise InputError(rule, adapter.path, f"plan: adapter {adapter.name}: path")
    return "folder"


def lora_module(name: str, path: str) -> str:
    """Return a value of ``--lora-modules``: ``name=path``, or JSON if vLLM would split the path."""
    if set("=,") & set(path):
        return json.dumps({"name": name, "path": path})
    return f"{name}={path}"


def unused_name(stem: str, taken: set[str], between: str = "_") -> str:
    """Return ``stem``, with a number if it is taken; some file systems ignore case. Adds it to `taken`."""
    number, unused = 1, stem
    while unused.lower() in taken:
        number += 1
        unused = f"{stem}{between}{number}"
    taken.add(unused.lower())
    return unused


def shares_of(groups: Sequence[Group]) -> dict[str, list[dict[str, Any]]]:
    """Return the groups of each adapter, with the share of its requests."""
    shares: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        for adapter in group.adapters:
            shares.setdefault(adapter.name, []).append({"group": group.id, "share": adapter.share})
    return shares


def file_stem(group_id: str) -> str:
    """Return a file name for any group id, which may look like a path; file systems allow 255 bytes."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", group_id).lstrip(".-")[:_LONGEST_STEM] or "group"
