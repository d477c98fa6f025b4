"""The servers of a plan: one per group and replica, each with a file name and a port of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from capplan.errors import InputError
from capplan.spec import Group, Plan

LAUNCH: Final = "launch"
ROUTING: Final = "routing.json"
TOP_NAMES: Final = frozenset({LAUNCH, ROUTING})
"""Everything at the top of an exported directory."""

_LAST_PORT: Final = 65535
_LONGEST_STEM: Final = 200  # file systems allow names of 255 bytes


@dataclass(frozen=True)
class Instance:
    """One server.

    Attributes
    ----------
    group : Group
        The group it belongs to.
    replica : int
        Which of the group's replicas it is, counted from 1.
    script : str
        Path of its launch script within the exported directory.
    port : int
        TCP port it listens on.
    """

    group: Group
    replica: int
    script: str
    port: int


def instances(plan: Plan, first_port: int) -> tuple[Instance, ...]:
    """Return the servers of a plan in its order; ports ascend from ``first_port``, so one host can hold all.

    Raises
    ------
    InputError
        When a port would leave 1..65535.
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
        result.append(Instance(group, replica, f"{LAUNCH}/{stem}.sh", first_port + index))
    return tuple(result)


def _file_stem(group_id: str) -> str:
    """Return a file name for any group id: a plan may come from elsewhere, and an id may look like a path."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", group_id).lstrip(".-")[:_LONGEST_STEM] or "group"


def _unused(stem: str, taken: set[str]) -> str:
    """Return ``stem``, with a number if it is taken; some file systems do not tell case apart."""
    number, unused = 1, stem
    while unused.lower() in taken:
        number += 1
        unused = f"{stem}_{number}"
    return unused
