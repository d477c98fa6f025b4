"""Export of plans to deployment files, as text; nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Protocol

from capplan.deploy._vllm import vllm_files
from capplan.errors import InputError
from capplan.spec import Plan


class Exporter(Protocol):
    """Turns a plan into files."""

    def __call__(self, plan: Plan, *, port: int, runtime_updates: bool) -> dict[str, str]:
        """Return the text of each file, by its path within the exported directory."""
        ...


EXPORTERS: Final[Mapping[str, Exporter]] = MappingProxyType({"vllm": vllm_files})
"""Exporters by target."""


def export(
    plan: Plan, target: str = "vllm", *, port: int = 8000, runtime_updates: bool = False
) -> dict[str, str]:
    """Return the files of a plan for a target, text by path.

    Parameters
    ----------
    plan : Plan
        The plan.
    target : str
        Name of an exporter, see `EXPORTERS`.
    port : int
        Port of the first server; each next one gets the next port.
    runtime_updates : bool
        Whether the servers let clients load and unload adapters.

    Raises
    ------
    InputError
        If the target is unknown or cannot run the plan's engine, or a port is out of range.
    """
    if target not in EXPORTERS:
        raise InputError(f"must be one of {', '.join(EXPORTERS)}", target, "target")
    return EXPORTERS[target](plan, port=port, runtime_updates=runtime_updates)
