"""Launch scripts for ``vllm serve``.

The flags are those of `capplan.serving.RELEASES`, by the version of the plan's engine.
"""

from __future__ import annotations

import shlex
from functools import partial
from typing import Final

from capplan.deploy import _launch as launch
from capplan.deploy._servers import engine_flags, lora_module, notes_of, require_flags, require_servable
from capplan.deploy._target import Exporter
from capplan.spec import Plan

_CHECKED_ROOT: Final = (
    'case "$ADAPTER_ROOT" in *[=,]*) echo "ADAPTER_ROOT: must be without = and ,: vLLM splits there" >&2; '
    "exit 2 ;; esac"
)


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
    return launch.launch_files(plan, port, partial(_script, plan, runtime_updates))


def _script(plan: Plan, runtime_updates: bool, server: launch.Server, digest: str) -> str:
    group = server.group
    header = launch.header_of(plan, server, digest, "vllm")
    setup = list(launch.root_check(group.adapters, _CHECKED_ROOT))
    if runtime_updates and group.engine_args.max_loras:
        setup.append("export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True")
    command = [
        f"exec vllm serve {shlex.quote(plan.base_model)}",
        launch.port_word(server),
        *(" ".join(map(shlex.quote, flag.words)) for flag in engine_flags(plan, group)),
        '"$@"',  # before --lora-modules, which takes every word up to the next flag
    ]
    if group.adapters:
        require_flags(["--lora-modules"], group, plan.engine_of(group))
        command += ["--lora-modules", *(launch.adapter_word(each, lora_module) for each in group.adapters)]
    comment = [*header, *notes_of(plan, group), *launch.download_lines(group.adapters)]
    return launch.shell_script(comment, setup, command)


EXPORTER: Final = Exporter(
    vllm_files,
    launch.TOP_NAMES,
    serves=True,
    options=("port", "runtime_updates"),
    notes=launch.download_notes,
)
