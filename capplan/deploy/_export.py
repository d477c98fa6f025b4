"""Export of plans to deployment files, as text; nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final

from capplan.deploy import (
    _aibrix,
    _compose,
    _dynamo,
    _kserve,
    _kthena,
    _llm_d,
    _manifests,
    _production_stack,
    _ray,
    _sglang,
    _vllm,
)
from capplan.deploy._target import Exporter
from capplan.errors import InputError
from capplan.spec import Plan

DEFAULT_PORT: Final = 8000


EXPORTERS: Final[Mapping[str, Exporter]] = MappingProxyType(
    {
        "vllm": _vllm.EXPORTER,
        "sglang": _sglang.EXPORTER,
        "compose": _compose.EXPORTER,
        "kubernetes": _manifests.EXPORTER,
        "kthena": _kthena.EXPORTER,
        "kserve": _kserve.EXPORTER,
        "aibrix": _aibrix.EXPORTER,
        "production-stack": _production_stack.EXPORTER,
        "llm-d": _llm_d.EXPORTER,
        "dynamo": _dynamo.EXPORTER,
        "ray": _ray.EXPORTER,
    }
)
"""Exporters by target."""


def export(
    plan: Plan,
    target: str = "vllm",
    *,
    port: int = DEFAULT_PORT,
    runtime_updates: bool = False,
    settings: Mapping[str, str] | None = None,
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
    settings : mapping of str to str
        Values of the target's `Exporter.settings` that are not the default.

    Raises
    ------
    InputError
        If the target is unknown, cannot run the plan's engine or lacks an option, or a port is out of range.
    """
    exporter = find_exporter(target)
    options = {"port": port, "runtime_updates": runtime_updates}
    defaults = {"port": DEFAULT_PORT, "runtime_updates": False}
    for name, value in options.items():
        if name not in exporter.options and value != defaults[name]:
            raise InputError(f"does not go with target {target}", value, name)
    arguments: dict[str, object] = {name: options[name] for name in exporter.options}
    known = {each.name: each.default for each in exporter.settings}
    for key, text in (settings or {}).items():
        if key not in known:
            rule = f"must be one of {', '.join(known)}" if known else f"does not go with target {target}"
            raise InputError(rule, key, "set")
        if not text or not text.isprintable():
            raise InputError("must be printable text", text, f"set: {key}")
    if known:
        arguments["settings"] = known | dict(settings or {})
    files = exporter.files(plan, **arguments)
    for path in map(PurePosixPath, files):
        if path.parts[0] not in exporter.top_names or ".." in path.parts:
            raise TypeError(f"exporter {target}: {path} is not below one of its top_names")
    if not files or len({path.lower() for path in files}) < len(files):
        raise TypeError(f"exporter {target}: it must return files, and their paths must differ without case")
    return files


def find_exporter(target: str) -> Exporter:
    """Return the exporter of a target.

    Raises
    ------
    InputError
        If there is none; the message lists the targets.
    """
    if target not in EXPORTERS:
        raise InputError(f"must be one of {', '.join(EXPORTERS)}", target, "target")
    return EXPORTERS[target]
