"""Launch scripts: a script per server, beside the routing table for a front end, and the plan."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from capplan.deploy._servers import (
    file_stem,
    first_ports,
    in_comment,
    one_line,
    shares_of,
    source_kind,
    unused_name,
)
from capplan.deploy._target import PLAN
from capplan.spec import PLAN_ROUTER, Group, Plan, PlanAdapter

LAUNCH: Final = "launch"
ROUTING: Final = "routing.json"

TOP_NAMES: Final = frozenset({LAUNCH, ROUTING, PLAN})
"""Entries at the top of an exported directory."""

_ROOT: Final = '"$ADAPTER_ROOT"'
_REQUIRED_ROOT: Final = (
    ': "${ADAPTER_ROOT:?must name the directory that holds the adapters, one folder each}"'
)


@dataclass(frozen=True)
class Server:
    """One server."""

    group: Group
    replica: int
    """Number among the replicas of the group, from 1."""
    script: str
    """Path of the launch script within the exported directory."""
    port: int


def launch_files(plan: Plan, port: int, script_of: Callable[[Server, str], str]) -> dict[str, str]:
    """Return one script per server, the routing table, and the plan that their digest is of.

    Ports ascend from `port`, so that one host can run all; `script_of` makes the script of a server from the
    digest: ``launch/GROUP.sh``, or ``launch/GROUP-REPLICA.sh`` with replicas.
    """
    text = plan.to_json()
    digest = hashlib.sha256(text.encode()).hexdigest()
    servers = _servers_of(plan, port)
    scripts = {server.script: script_of(server, digest) for server in servers}
    return {**scripts, ROUTING: _routing(plan, servers, digest), PLAN: text}


def _servers_of(plan: Plan, first_port: int) -> tuple[Server, ...]:
    stems: set[str] = set()
    result = []
    for group, replica, port in first_ports(plan, first_port):
        stem = file_stem(group.id) + (f"-{replica}" if group.replicas > 1 else "")
        result.append(Server(group, replica, f"{LAUNCH}/{unused_name(stem, stems)}.sh", port))
    return tuple(result)


def shell_script(comment: Iterable[str], setup: Iterable[str], command: Iterable[str]) -> str:
    """Return a script: a comment, commands, and the words of the last one, a line each."""
    lines = ["#!/bin/sh", *(f"# {one_line(line)}" for line in comment), "set -eu", *setup]
    return "\n".join([*lines, " \\\n  ".join(command), ""])


def header_of(plan: Plan, server: Server, digest: str, program: str) -> Iterator[str]:
    """Yield the lines at the top of a script that starts a program."""
    group = server.group
    yield f"Server {server.replica} of {group.replicas} of group {in_comment(group.id)}."
    yield f"Base model {in_comment(plan.base_model)}, profile {in_comment(group.profile)}."
    yield f"Plan: sha256 {digest}, by {in_comment(plan.created_by)}."
    yield f"Needs {group.tp} GPU(s) of kind {in_comment(group.gpu)}; CUDA_VISIBLE_DEVICES says which."
    yield f"PORT overrides the port; further arguments go to {program}."


def download_lines(adapters: Iterable[PlanAdapter]) -> Iterator[str]:
    """Yield the lines of a comment on the adapters that must be downloaded before a script starts."""
    for adapter in _downloaded(adapters):
        yield f"Download {in_comment(adapter.path or '')} to {_folder_of(adapter)}."


def port_word(server: Server) -> str:
    """Return the port of a server as a word of the shell: the variable PORT, or the one of the plan."""
    return f'--port="${{PORT:-{server.port}}}"'


def root_check(adapters: Sequence[PlanAdapter], *further: str) -> tuple[str, ...]:
    """Return commands that check the folder of adapters if one of them is loaded from there."""
    return (_REQUIRED_ROOT, *further) if any(map(_is_below_root, adapters)) else ()


def adapter_word(adapter: PlanAdapter, module: Callable[[str, str], str]) -> str:
    """Return an adapter as a word of the shell; `module` joins the name and a path that needs no variable."""
    if adapter.path is None or _is_below_root(adapter):
        return f"{shlex.quote(f'{adapter.name}=')}{_folder_of(adapter)}"
    return shlex.quote(module(adapter.name, adapter.path))


def download_notes(plan: Plan) -> tuple[str, ...]:
    """Return a line on the adapters that must be downloaded before the scripts of a plan start."""
    found = _downloaded(plan.adapters.values())
    if not found:
        return ()
    first, target = shlex.quote(found[0].path or ""), _folder_of(found[0])
    how = f"download {first} to {target}"
    if (found[0].path or "").startswith("s3://"):
        how = f"run `aws s3 cp --recursive {first} {target}`"
    count = "1 adapter is at a URL" if len(found) == 1 else f"{len(found)} adapters are at URLs"
    return (f"note: {count}, from which servers do not load: before a script starts, {how}",)


def _is_below_root(adapter: PlanAdapter) -> bool:
    """Return whether the script loads an adapter from the folder of adapters; engines load from no URL."""
    return source_kind(adapter) in ("root", "s3", "url")


def _downloaded(adapters: Iterable[PlanAdapter]) -> list[PlanAdapter]:
    return [adapter for adapter in adapters if source_kind(adapter) in ("s3", "url")]


def _folder_of(adapter: PlanAdapter) -> str:
    """Return the folder of an adapter below the folder of adapters, as a word of the shell."""
    return f"{_ROOT}/{shlex.quote(adapter.name)}"


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
