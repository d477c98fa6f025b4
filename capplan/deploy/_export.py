"""Export of plans to deployment files, as text; nothing is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final

from capplan.deploy._aibrix import AIBRIX_NAMES, AIBRIX_SETTINGS, aibrix_files, aibrix_losses
from capplan.deploy._compose import COMPOSE_NAMES, COMPOSE_SETTINGS, compose_files, compose_notes
from capplan.deploy._dynamo import DYNAMO_NAMES, DYNAMO_SETTINGS, dynamo_files, dynamo_losses
from capplan.deploy._gateway import gateway_losses
from capplan.deploy._kserve import KSERVE_NAMES, KSERVE_SETTINGS, kserve_files, kserve_losses
from capplan.deploy._kthena import KTHENA_NAMES, KTHENA_SETTINGS, kthena_files, kthena_losses
from capplan.deploy._kubernetes import claim_notes
from capplan.deploy._launch import TOP_NAMES, download_notes
from capplan.deploy._llm_d import LLM_D_NAMES, LLM_D_SETTINGS, llm_d_files, llm_d_losses
from capplan.deploy._manifests import MANIFEST_NAMES, MANIFEST_SETTINGS, manifest_files
from capplan.deploy._production_stack import (
    PRODUCTION_STACK_NAMES,
    PRODUCTION_STACK_SETTINGS,
    production_stack_files,
    production_stack_losses,
)
from capplan.deploy._ray import RAY_NAMES, RAY_SETTINGS, ray_files, ray_losses, ray_notes
from capplan.deploy._sglang import sglang_files, sglang_losses
from capplan.deploy._target import Exporter
from capplan.deploy._vllm import vllm_files
from capplan.errors import InputError
from capplan.spec import Plan

DEFAULT_PORT: Final = 8000


EXPORTERS: Final[Mapping[str, Exporter]] = MappingProxyType(
    {
        "vllm": Exporter(
            vllm_files, TOP_NAMES, serves=True, options=("port", "runtime_updates"), notes=download_notes
        ),
        "sglang": Exporter(
            sglang_files,
            TOP_NAMES,
            serves=True,
            options=("port",),
            losses=sglang_losses,
            notes=download_notes,
        ),
        "compose": Exporter(
            compose_files,
            COMPOSE_NAMES,
            serves=True,
            options=("port",),
            settings=COMPOSE_SETTINGS,
            losses=gateway_losses,
            notes=compose_notes,
        ),
        "kubernetes": Exporter(
            manifest_files,
            MANIFEST_NAMES,
            serves=True,
            options=("port",),
            settings=MANIFEST_SETTINGS,
            losses=gateway_losses,
            notes=claim_notes,
        ),
        "kthena": Exporter(
            kthena_files,
            KTHENA_NAMES,
            serves=True,
            settings=KTHENA_SETTINGS,
            losses=kthena_losses,
            notes=claim_notes,
        ),
        "kserve": Exporter(
            kserve_files,
            KSERVE_NAMES,
            serves=True,
            settings=KSERVE_SETTINGS,
            losses=kserve_losses,
            notes=claim_notes,
        ),
        "aibrix": Exporter(
            aibrix_files,
            AIBRIX_NAMES,
            serves=True,
            settings=AIBRIX_SETTINGS,
            losses=aibrix_losses,
            notes=claim_notes,
        ),
        "production-stack": Exporter(
            production_stack_files,
            PRODUCTION_STACK_NAMES,
            serves=True,
            settings=PRODUCTION_STACK_SETTINGS,
            losses=production_stack_losses,
            notes=claim_notes,
        ),
        "llm-d": Exporter(
            llm_d_files,
            LLM_D_NAMES,
            serves=True,
            settings=LLM_D_SETTINGS,
            losses=llm_d_losses,
            notes=claim_notes,
        ),
        "dynamo": Exporter(
            dynamo_files,
            DYNAMO_NAMES,
            serves=True,
            settings=DYNAMO_SETTINGS,
            losses=dynamo_losses,
            notes=claim_notes,
        ),
        "ray": Exporter(
            ray_files,
            RAY_NAMES,
            serves=True,
            settings=RAY_SETTINGS,
            losses=ray_losses,
            notes=ray_notes,
        ),
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
