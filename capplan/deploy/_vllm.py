"""Launch scripts for ``vllm serve``, and a routing table for the front-end.

The flags are those of `capplan.serving.RELEASES`, by the version of the plan's engine.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from capplan.deploy._servers import (
    adapters_of,
    engine_flags,
    file_stem,
    first_ports,
    in_comment,
    lora_module,
    notes_of,
    require_flags,
    require_servable,
    shares_of,
    source_kind,
    unused_name,
)
from capplan.spec import PLAN_ROUTER, Group, Plan, PlanAdapter

LAUNCH: Final = "launch"
ROUTING: Final = "routing.json"
PLAN: Final = "plan.json"

TOP_NAMES: Final = frozenset({LAUNCH, ROUTING, PLAN})
"""Entries at the top of an exported directory."""


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
    stems: set[str] = set()
    result = []
    for group, replica, port in first_ports(plan, first_port):
        stem = file_stem(group.id) + (f"-{replica}" if group.replicas > 1 else "")
        result.append(Server(group, replica, f"{LAUNCH}/{unused_name(stem, stems)}.sh", port))
    return tuple(result)


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
    require_servable(plan)
    text = plan.to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()
    servers = servers_of(plan, port)
    scripts = {server.script: _script(plan, server, digest, runtime_updates) for server in servers}
    return {**scripts, ROUTING: _routing(plan, servers, digest), PLAN: text}


def _script(plan: Plan, server: Server, digest: str, runtime_updates: bool) -> str:
    group = server.group
    lines = ["#!/bin/sh", *(f"# {line}" for line in _header(plan, server, digest)), "set -eu"]
    if any(_is_below_root(adapter) for adapter in group.adapters):
        lines.append(': "${ADAPTER_ROOT:?must name the directory that holds the adapters, one folder each}"')
        lines.append(_CHECKED_ROOT)
    if runtime_updates and group.engine_args.max_loras:
        lines.append("export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True")
    command = [
        f"exec vllm serve {shlex.quote(plan.base_model)}",
        f'--port="${{PORT:-{server.port}}}"',
        *(" ".join(map(shlex.quote, flag.words)) for flag in engine_flags(plan, group)),
        '"$@"',  # before --lora-modules, which takes every word up to the next flag
    ]
    if group.adapters:
        require_flags(["--lora-modules"], group, plan.engine_of(group))
        command += ["--lora-modules", *(_lora_module(adapter) for adapter in group.adapters)]
    return "\n".join([*lines, " \\\n  ".join(command), ""])


def _header(plan: Plan, server: Server, digest: str) -> Iterable[str]:
    group = server.group
    yield f"Server {server.replica} of {group.replicas} of group {in_comment(group.id)}."
    yield f"Base model {in_comment(plan.base_model)}, profile {in_comment(group.profile)}."
    yield f"Plan: sha256 {digest}, by {in_comment(plan.created_by)}."
    yield f"Needs {group.tp} GPU(s) of kind {in_comment(group.gpu)}; CUDA_VISIBLE_DEVICES says which."
    yield "PORT overrides the port; further arguments go to vllm."
    yield from notes_of(plan, group)
    yield from (
        f"Download {in_comment(a.path or '')} to {_folder_of(a)}." for a in _downloaded(group.adapters)
    )


def _is_below_root(adapter: PlanAdapter) -> bool:
    """Return whether the script loads an adapter from the folder of adapters; vLLM loads from no URL."""
    return source_kind(adapter) in ("root", "s3", "url")


def _downloaded(adapters: Iterable[PlanAdapter]) -> list[PlanAdapter]:
    return [adapter for adapter in adapters if source_kind(adapter) in ("s3", "url")]


def _folder_of(adapter: PlanAdapter) -> str:
    """Return the folder of an adapter below the folder of adapters, as a word of the shell."""
    return f"{_ROOT}/{shlex.quote(adapter.name)}"


def download_notes(plan: Plan) -> tuple[str, ...]:
    """Return a line on the adapters that must be downloaded before the scripts of a plan start."""
    found = _downloaded(adapters_of(plan).values())
    if not found:
        return ()
    first, target = shlex.quote(found[0].path or ""), _folder_of(found[0])
    how = f"download {first} to {target}"
    if (found[0].path or "").startswith("s3://"):
        how = f"run `aws s3 cp --recursive {first} {target}`"
    count = "1 adapter is at a URL" if len(found) == 1 else f"{len(found)} adapters are at URLs"
    return (f"note: {count}, from which vLLM does not load: before a script starts, {how}",)


def _lora_module(adapter: PlanAdapter) -> str:
    """Return a value of ``--lora-modules`` as a word of the shell."""
    if adapter.path is None or _is_below_root(adapter):
        return f"{shlex.quote(f'{adapter.name}=')}{_folder_of(adapter)}"
    return shlex.quote(lora_module(adapter.name, adapter.path))


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
        "adapters": shares_of(plan.groups),
    }
    if plan.router_options is not None:
        document["router_options"] = plan.router_options.model_dump(mode="json", exclude_none=True)
    if plan.rebalance is not None:  # for a router that re-balances as `capplan serve PLAN` does
        document["rebalance"] = plan.rebalance.model_dump(mode="json")
    base = [{"group": g.id, "share": g.base.share} for g in plan.groups if g.base is not None]
    if base:  # requests that name the base model; otherwise any server may take one
        document["base"] = base
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
