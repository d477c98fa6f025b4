"""Launch scripts for ``vllm serve``, and a routing table for the front-end.

The flags are those of `capplan.serving.RELEASES`, by the version of the plan's engine.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from capplan import serving  # loads the rules, and numba, when a plan is exported
from capplan.datasets import known_arch
from capplan.errors import InputError
from capplan.spec import (
    FUSED_MODULES,
    PLAN_ROUTER,
    EngineArgs,
    Group,
    Plan,
    PlanAdapter,
    PlanEngine,
    path_kind,
    require_adapter,
)

LAUNCH: Final = "launch"
ROUTING: Final = "routing.json"
PLAN: Final = "plan.json"

TOP_NAMES: Final = frozenset({LAUNCH, ROUTING, PLAN})
"""Entries at the top of an exported directory."""

_LAST_PORT: Final = 65535
_LONGEST_STEM: Final = 200  # file systems allow names of 255 bytes


@dataclass(frozen=True)
class Server:
    """One server."""

    group: Group
    replica: int
    """Number among the replicas of the group, from 1."""
    script: str
    """Path of the launch script within the exported directory."""
    port: int


def servers_of(plan: Plan, first_port: int) -> tuple[Server, ...]:
    """Return the servers of a plan; ports ascend from ``first_port``, so that one host can run all.

    Raises
    ------
    InputError
        If a port exceeds 1..65535.
    """
    pairs = [(group, replica) for group in plan.groups for replica in range(1, group.replicas + 1)]
    last_first = _LAST_PORT - len(pairs) + 1
    if not 1 <= first_port <= last_first:
        raise InputError(f"must be from 1 to {last_first}, one port per server", first_port, "port")
    stems: set[str] = set()
    result = []
    for index, (group, replica) in enumerate(pairs):
        stem = _unused(_file_stem(group.id) + (f"-{replica}" if group.replicas > 1 else ""), stems)
        stems.add(stem.lower())
        result.append(Server(group, replica, f"{LAUNCH}/{stem}.sh", first_port + index))
    return tuple(result)


def _file_stem(group_id: str) -> str:
    """Return a file name for any group id, which may look like a path."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", group_id).lstrip(".-")[:_LONGEST_STEM] or "group"


def _unused(stem: str, taken: set[str]) -> str:
    """Return ``stem``, with a number if it is taken; some file systems ignore case."""
    number, unused = 1, stem
    while unused.lower() in taken:
        number += 1
        unused = f"{stem}_{number}"
    return unused


_FUSED: Final = {part: name for name, parts in FUSED_MODULES.items() for part in parts}
"""Layers that vLLM fuses, by PEFT's names of their parts."""

_QUANTIZED_ON_LOADING: Final = "fp8"
"""What vLLM makes of 16-bit weights: one scale per tensor."""

_CHECKED_ROOT: Final = (
    'case "$ADAPTER_ROOT" in *[=,]*) echo "ADAPTER_ROOT: must be without = and ,: vLLM splits there" >&2; '
    "exit 2 ;; esac"
)
_ROOT: Final = '"$ADAPTER_ROOT"'


def vllm_files(plan: Plan, *, port: int = 8000, runtime_updates: bool = False) -> dict[str, str]:
    """Return one launch script per server, the routing table, and the plan that their digest is of.

    Parameters are those of `capplan.deploy.export`.

    Returns
    -------
    dict of str to str
        Text by path: ``launch/GROUP.sh`` (``launch/GROUP-REPLICA.sh`` with replicas), ``routing.json`` and
        ``plan.json``.

    Raises
    ------
    InputError
        If a port exceeds 1..65535, the plan is for an engine without adapter slots, its version lacks a flag
        of the plan, `max_model_len` exceeds the positions of the base model, or an adapter's folder on this
        machine is of another adapter.
    """
    _require_slots(plan)
    _require_positions(plan)
    _require_adapters(plan)
    text = plan.to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()
    servers = servers_of(plan, port)
    scripts = {server.script: _script(plan, server, digest, runtime_updates) for server in servers}
    return {**scripts, ROUTING: _routing(plan, servers, digest), PLAN: text}


def _require_slots(plan: Plan) -> None:
    for engine in (plan.engine, *map(plan.engine_of, plan.groups)):
        if serving.serving_rules(engine.rules).engine == serving.SLORA_ENGINE:
            rule = "must be an engine with adapter slots, which vLLM has and S-LoRA's common pool does not"
            raise InputError(rule, f"{engine.name} {engine.version}, rules {engine.rules}", "plan: engine")


def _require_positions(plan: Plan) -> None:
    model = known_arch([plan.base_model])
    if model is not None:
        for group in plan.groups:
            model.require_positions(group.engine_args.max_model_len, f"plan: group {group.id}: max_model_len")


def _require_adapters(plan: Plan) -> None:
    for adapter in {each.name: each for group in plan.groups for each in group.adapters}.values():
        facts = (adapter.path, adapter.rank, adapter.target_modules)
        require_adapter(*facts, plan.base_model, f"plan: adapter {adapter.name}")


def _vllm_version(engine: PlanEngine) -> str | None:
    """Return the version of vLLM that serves; None, the newest, if the plan is for another engine."""
    return engine.version if engine.name == serving.VLLM_ENGINE else None


def _require_flags(command: Sequence[str], group: Group, engine: PlanEngine) -> None:
    """Check that the version of the plan has the flags of a command."""
    version = _vllm_version(engine)
    for words in command:
        flag = re.split(r"[ =]", words, maxsplit=1)[0]
        if flag.startswith("--") and flag not in serving.release_of(version).flags:
            rule = f"lacks {flag}: vLLM has it since {serving.flag_since(flag)}; plan with such a profile"
            if flag == "--lora-target-modules":
                rule = f"{rule}, or without target_modules, since slots of {version} hold all layers"
            raise InputError(rule, version, f"plan: group {group.id}: engine version")


def _script(plan: Plan, server: Server, digest: str, runtime_updates: bool) -> str:
    group, engine = server.group, plan.engine_of(server.group)
    lines = ["#!/bin/sh", *(f"# {line}" for line in _header(plan, server, digest)), "set -eu"]
    if any(_is_below_root(adapter) for adapter in group.adapters):
        lines.append(': "${ADAPTER_ROOT:?must name the directory that holds the adapters, one folder each}"')
        lines.append(_CHECKED_ROOT)
    if runtime_updates and group.engine_args.max_loras:
        lines.append("export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True")
    command = [
        f"exec vllm serve {shlex.quote(plan.base_model)}",
        f'--port="${{PORT:-{server.port}}}"',
        f"--tensor-parallel-size={group.tp}",
        *_engine_flags(group.engine_args, len(group.adapters), _vllm_version(engine)),
        *(_module_flags(engine) if group.engine_args.max_loras else ()),
        *_scheduling_flags(engine.rules),
        *_dtype_flags(engine, group),
        '"$@"',  # before --lora-modules, which takes every word up to the next flag
    ]
    if group.adapters:
        command += ["--lora-modules", *(_lora_module(adapter) for adapter in group.adapters)]
    _require_flags(command[1:], group, engine)
    return "\n".join([*lines, " \\\n  ".join(command), ""])


def _header(plan: Plan, server: Server, digest: str) -> Iterable[str]:
    group = server.group
    yield f"Server {server.replica} of {group.replicas} of group {_in_comment(group.id)}."
    yield f"Base model {_in_comment(plan.base_model)}, profile {_in_comment(group.profile)}."
    yield f"Plan: sha256 {digest}, by {_in_comment(plan.created_by)}."
    yield f"Needs {group.tp} GPU(s) of kind {_in_comment(group.gpu)}; CUDA_VISIBLE_DEVICES says which."
    yield "PORT overrides the port; further arguments go to vllm."
    if group.scheduling is not None:
        yield "The plan's own scheduler, queues and cache policy are left out: vLLM has no flags for them."
    engine = plan.engine_of(group)
    rank = group.engine_args.max_lora_rank
    if rank and (accepted := serving.vllm_rank(rank, _vllm_version(engine))) != rank:
        yield f"max_lora_rank {rank} is {accepted} here, which vLLM {_in_comment(engine.version)} requires."
    yield from (
        f"Download {_in_comment(a.path or '')} to {_folder_of(a)}." for a in _downloaded(group.adapters)
    )
    if engine != plan.engine:
        yield f"Engine {_in_comment(engine.name)} {_in_comment(engine.version)}, unlike other groups."
    if not engine.rules.startswith("vllm"):
        rules = _in_comment(engine.rules)
        yield f"The plan was verified under the rules {rules}, which vLLM does not follow."


def _in_comment(text: str) -> str:
    """Return text on one line, as JSON: a line break would end the comment."""
    return json.dumps(text)


def _engine_flags(args: EngineArgs, adapters: int, version: str | None) -> Iterable[str]:
    if args.max_loras == 0:  # an engine without LoRA
        return ["=".join(words) for words in args.flags()]
    host_slots = max(args.max_loras, adapters) if args.max_cpu_loras is None else args.max_cpu_loras
    accepted = args.replace(
        max_lora_rank=serving.vllm_rank(args.max_lora_rank, version),
        max_cpu_loras=max(args.max_loras, host_slots),  # vLLM refuses fewer than max-loras
    )
    return ["--enable-lora", *("=".join(words) for words in accepted.flags())]


def _module_flags(engine: PlanEngine) -> Iterable[str]:
    """Return the flags of the layers that slots hold space for, and of their shards."""
    if engine.fully_sharded_loras:
        yield "--fully-sharded-loras"
    if engine.target_modules is not None:
        fused = dict.fromkeys(_FUSED.get(name, name) for name in engine.target_modules)
        yield " ".join(("--lora-target-modules", *fused))


def _scheduling_flags(name: str) -> Iterable[str]:
    """Return the flag of the kind of scheduling, if it is not the default of the version."""
    rules = serving.serving_rules(name)
    if rules.releases is not None and not rules.is_default:
        yield "--async-scheduling" if rules.async_scheduling else "--no-async-scheduling"


def _dtype_flags(engine: PlanEngine, group: Group) -> Iterable[str]:
    """Return the flags of weights that are quantized on loading, and of the KV cache."""
    if engine.quantization is not None:
        if engine.quantization != _QUANTIZED_ON_LOADING:
            rule = (
                f"must be {_QUANTIZED_ON_LOADING} or absent: vLLM has no flag that makes such weights; plan "
                "with a profile of `capplan profile compose --model-config`, of a checkpoint that has them"
            )
            raise InputError(rule, engine.quantization, f"plan: group {group.id}: engine quantization")
        yield f"--quantization={engine.quantization}"
    if engine.kv_cache_dtype is not None:
        yield f"--kv-cache-dtype={engine.kv_cache_dtype}"


def _is_below_root(adapter: PlanAdapter) -> bool:
    """Return whether the script loads an adapter from the folder of adapters; vLLM loads from no URL."""
    return adapter.path is None or path_kind(adapter.path) == "url"


def _downloaded(adapters: Iterable[PlanAdapter]) -> list[PlanAdapter]:
    return [adapter for adapter in adapters if adapter.path is not None and _is_below_root(adapter)]


def _folder_of(adapter: PlanAdapter) -> str:
    """Return the folder of an adapter below the folder of adapters, as a word of the shell."""
    if ".." in adapter.name.split("/"):
        rule = "must have the path of a folder, or a name that stays in the adapters' folder"
        raise InputError(rule, adapter.name, "adapters: name")
    return f"{_ROOT}/{shlex.quote(adapter.name)}"


def download_notes(plan: Plan) -> tuple[str, ...]:
    """Return a line on the adapters that must be downloaded before the scripts of a plan start."""
    found = _downloaded({each.name: each for group in plan.groups for each in group.adapters}.values())
    if not found:
        return ()
    first, target = shlex.quote(found[0].path or ""), _folder_of(found[0])
    how = f"download {first} to {target}"
    if (found[0].path or "").startswith("s3://"):
        how = f"run `aws s3 cp --recursive {first} {target}`"
    count = "1 adapter is at a URL" if len(found) == 1 else f"{len(found)} adapters are at URLs"
    return (f"note: {count}, from which vLLM does not load: before a script starts, {how}",)


def _lora_module(adapter: PlanAdapter) -> str:
    """Return the argument ``name=path``, or JSON if vLLM would split it."""
    if adapter.path is None or _is_below_root(adapter):
        return f"{shlex.quote(f'{adapter.name}=')}{_folder_of(adapter)}"
    if path_kind(adapter.path) == "folder" and not adapter.path.startswith(("/", "~")):
        rule = "must be absolute, because scripts start anywhere; paths of a workload file are relative to it"
        raise InputError(rule, adapter.path, f"plan: adapter {adapter.name}: path")
    if set("=,") & set(adapter.path):
        return shlex.quote(json.dumps({"name": adapter.name, "path": adapter.path}))
    return shlex.quote(f"{adapter.name}={adapter.path}")


def _routing(plan: Plan, servers: Iterable[Server], digest: str) -> str:
    groups: dict[str, dict[str, Any]] = {
        group.id: {"pool": group.pool, "instances": []} for group in plan.groups
    }
    for server in servers:
        groups[server.group.id]["instances"].append({"script": server.script, "port": server.port})
    document: dict[str, Any] = {
        "plan_sha256": digest,
        "base_model": plan.base_model,
        "router": plan.router or PLAN_ROUTER,
        "groups": groups,
        "adapters": _shares(plan.groups),
    }
    if plan.router_options is not None:
        document["router_options"] = plan.router_options.model_dump(mode="json", exclude_none=True)
    if plan.rebalance is not None:  # for a router that re-balances as `capplan serve PLAN` does
        document["rebalance"] = plan.rebalance.model_dump(mode="json")
    base = [{"group": g.id, "share": g.base.share} for g in plan.groups if g.base is not None]
    if base:  # requests that name the base model; otherwise any server may take one
        document["base"] = base
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _shares(groups: Iterable[Group]) -> dict[str, list[dict[str, Any]]]:
    """Return the groups of each adapter, with the share of its requests."""
    shares: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        for adapter in group.adapters:
            shares.setdefault(adapter.name, []).append({"group": group.id, "share": adapter.share})
    return shares
