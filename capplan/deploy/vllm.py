"""Launch scripts for ``vllm serve``, and a routing table for the front-end before the servers.

The flags are those of vLLM 0.8 to 0.32.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable
from typing import Any, Final

from capplan.deploy.instances import ROUTING, Instance, instances
from capplan.errors import InputError
from capplan.spec import EngineArgs, Group, Plan, PlanAdapter

_FIRST_WITH_RANK_1: Final = (0, 11, 1)
_ROOT: Final = '"$ADAPTER_ROOT"'


def vllm_files(plan: Plan, *, port: int = 8000, runtime_updates: bool = False) -> dict[str, str]:
    """Return one launch script per server and the routing table.

    Parameters
    ----------
    plan : Plan
        The plan.
    port : int
        Port of the first server; each next one gets the next port.
    runtime_updates : bool
        Whether the servers let clients load and unload adapters.

    Returns
    -------
    dict of str to str
        Text by path: ``launch/GROUP.sh`` (``launch/GROUP-REPLICA.sh`` with replicas) and ``routing.json``.

    Raises
    ------
    InputError
        When a port would leave 1..65535.
    """
    digest = hashlib.sha256(plan.to_json().encode()).hexdigest()
    servers = instances(plan, port)
    scripts = {server.script: _script(plan, server, digest, runtime_updates) for server in servers}
    return {**scripts, ROUTING: _routing(plan, servers, digest)}


def _script(plan: Plan, server: Instance, digest: str, runtime_updates: bool) -> str:
    group = server.group
    lines = ["#!/bin/sh", *(f"# {line}" for line in _header(plan, server, digest)), "set -eu"]
    if any(adapter.path is None for adapter in group.adapters):
        lines.append(': "${ADAPTER_ROOT:?must name the directory that holds the adapters, one folder each}"')
    if runtime_updates:
        lines.append("export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True")
    command = [
        f"exec vllm serve {shlex.quote(plan.base_model)}",
        f'--port "${{PORT:-{server.port}}}"',
        f"--tensor-parallel-size {group.tp}",
        *_engine_flags(group.engine_args, len(group.adapters), plan.engine.version),
        '"$@"',  # before --lora-modules, which takes every word up to the next flag
        "--lora-modules",
        *(_lora_module(adapter) for adapter in group.adapters),
    ]
    return "\n".join([*lines, " \\\n  ".join(command), ""])


def _header(plan: Plan, server: Instance, digest: str) -> Iterable[str]:
    group = server.group
    yield f"Server {server.replica} of {group.replicas} of group {_in_comment(group.id)}."
    yield f"Base model {_in_comment(plan.base_model)}, profile {_in_comment(group.profile)}."
    yield f"Plan: sha256 {digest}, by {_in_comment(plan.created_by)}."
    yield f"Needs {group.tp} GPU(s) of kind {_in_comment(group.gpu)}; CUDA_VISIBLE_DEVICES says which."
    yield "PORT overrides the port; further arguments go to vllm."
    if group.queues is not None or group.cache is not None:
        yield "The plan's own queues and cache policy are left out: vLLM has no flags for them."
    if not plan.engine.rules.startswith("vllm"):
        rules = _in_comment(plan.engine.rules)
        yield f"The plan was verified under the rules {rules}, which vLLM does not follow."


def _in_comment(text: str) -> str:
    """Return text on one line: a line break would end the comment."""
    return json.dumps(text)


def _engine_flags(args: EngineArgs, adapters: int, version: str) -> Iterable[str]:
    host_slots = max(args.max_loras, adapters) if args.max_cpu_loras is None else args.max_cpu_loras
    yield "--enable-lora"
    yield f"--max-loras {args.max_loras}"
    yield f"--max-lora-rank {_accepted_rank(args.max_lora_rank, version)}"
    yield f"--max-cpu-loras {max(args.max_loras, host_slots)}"  # vLLM refuses fewer than max-loras
    yield f"--max-num-seqs {args.max_num_seqs}"
    yield f"--max-num-batched-tokens {args.max_num_batched_tokens}"
    yield f"--gpu-memory-utilization {args.gpu_memory_utilization:g}"
    yield f"--max-model-len {args.max_model_len}"
    if args.enable_prefix_caching is not None:
        yield "--enable-prefix-caching" if args.enable_prefix_caching else "--no-enable-prefix-caching"


def _accepted_rank(rank: int, version: str) -> int:
    """Return the rank, or the least that the version takes: releases before 0.11.1 refuse 1."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return max(rank, 8) if numbers < _FIRST_WITH_RANK_1 else rank


def _lora_module(adapter: PlanAdapter) -> str:
    """Return the word ``name=path``, or JSON where vLLM would take the word apart or for a flag."""
    if adapter.path is None:
        if ".." in adapter.name.split("/") or adapter.name.startswith("/"):
            rule = "must have a path, or a name that stays in the adapters' folder"
            raise InputError(rule, adapter.name, "adapters: name")
        return f"{shlex.quote(f'{adapter.name}=')}{_ROOT}/{shlex.quote(adapter.name)}"
    if adapter.name.startswith(("-", "{")) or set("=,") & set(adapter.path):
        return shlex.quote(json.dumps({"name": adapter.name, "path": adapter.path}))
    return shlex.quote(f"{adapter.name}={adapter.path}")


def _routing(plan: Plan, servers: Iterable[Instance], digest: str) -> str:
    groups: dict[str, dict[str, Any]] = {
        group.id: {"pool": group.pool, "instances": []} for group in plan.groups
    }
    for server in servers:
        groups[server.group.id]["instances"].append({"script": server.script, "port": server.port})
    document = {
        "plan_sha256": digest,
        "base_model": plan.base_model,
        "groups": groups,
        "adapters": _shares(plan.groups),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _shares(groups: Iterable[Group]) -> dict[str, list[dict[str, Any]]]:
    """Return, for each adapter, the groups that serve it and the share of its requests that goes to each."""
    shares: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        for adapter in group.adapters:
            shares.setdefault(adapter.name, []).append({"group": group.id, "share": adapter.share})
    return shares
