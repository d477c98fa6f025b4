"""`capplan serve PLAN`: all instances of a plan, and the router in front of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from capplan.cli.console import counted
from capplan.cli.extras import require_extra
from capplan.cli.progress import announce_compilation
from capplan.cli.serve_flags import of_flag
from capplan.errors import InputError
from capplan.spec import Plan

if TYPE_CHECKING:
    from capplan.engine.cluster.launcher import Launcher

_ENGINE_FLAGS: Final = {
    "max_loras": "a_max",
    "max_lora_rank": "s_max",
    **{
        name: name
        for name in (
            "max_cpu_loras",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "dtype",
            "device",
            "rules",
            "memory",
            "block_size",
            "num_kv_blocks",
            "gpu_memory_utilization",
            "prefix_caching",
            "shared_prefix_tokens",
            "lora_kernel",
            "seed",
        )
    },
}
"""Flags that set the engine's settings; those that are given come before the plan's."""

_OF_ONE_INSTANCE: Final = ("lora_modules", "lora_root", "max_adapters", "records")


def is_plan(words: Sequence[str] | None) -> bool:
    """Tell whether the words of the command line are a plan and not adapters."""
    return words is not None and len(words) > 0 and ("=" not in words[0] or words[0].endswith(".json"))


def serve_plan(ctx: typer.Context) -> int:
    """Serve a plan until told to stop, and return the exit status.

    Parameters
    ----------
    ctx
        Of `capplan serve`, whose flags these are.

    Raises
    ------
    InputError
        When the plan is broken, or a flag does not go with one.
    """
    require_extra("engine", ("aiohttp",))
    from capplan.engine.cluster.devices import spread_over_gpus
    from capplan.engine.cluster.instances import Serving, instances_of, unused_parts
    from capplan.engine.cluster.process import Cluster, run_cluster
    from capplan.engine.server import ServerSettings

    flags = dict(ctx.params)
    given = {name for name in flags if _source(ctx, name) != "DEFAULT"}
    file, plan = _plan_of(flags["words"], given)
    engine = {field: flags[name] for name, field in _ENGINE_FLAGS.items() if name in given}
    if flags["max_queue"] < 0:
        raise InputError("must be >= 0", flags["max_queue"], "--max-queue")
    serving = Serving(
        model=_model_of(plan, flags["model"]),
        model_name=flags["served_model_name"] or plan.base_model,
        engine=engine,
        max_queue=flags["max_queue"],
        max_body_bytes=flags["max_body_bytes"],
    )
    try:
        specs = instances_of(plan, serving, flags["groups"] or ())
        if flags["ray_address"] is None:
            specs = spread_over_gpus(specs)
    except InputError as error:
        location = error.location if error.location.startswith("--") else f"{file}: {error.location}"
        raise InputError(error.rule, error.value, location) from None
    try:
        server = ServerSettings(
            model_name=serving.model_name,
            host=flags["host"],
            port=flags["port"],
            api_key=flags["api_key"],
            max_requests=sum(spec.max_requests for spec in specs),
            max_body_bytes=flags["max_body_bytes"],
            drain_timeout_s=flags["drain_timeout_s"],
        )
    except InputError as error:
        raise of_flag(error) from None
    for line in unused_parts(plan):
        _say(f"warning: {line}")
    announce_compilation()
    names = {name for spec in specs for name in spec.adapters}
    _say(f"starting {counted(len(specs), 'instance')} of {file}")

    def ready(url: str) -> None:
        facts = {
            "url": url,
            "model": server.model_name,
            "adapters": len(names),
            "instances": [spec.name for spec in specs],
        }
        line = f"serving {file}: {server.model_name} and {counted(len(names), 'adapter')} on {url}"
        typer.echo(json.dumps(facts) if flags["as_json"] else line)
        sys.stdout.flush()

    launcher = _launcher(flags["ray_address"], len(specs))
    return run_cluster(Cluster(specs, launcher, server, flags["max_queue"], say=_say), ready)


def _source(ctx: typer.Context, name: str) -> str:
    """Return where the value of a parameter comes from."""
    source = ctx.get_parameter_source(name)
    return "DEFAULT" if source is None else source.name


def _plan_of(words: Sequence[str], given: set[str]) -> tuple[str, Plan]:
    for name in _OF_ONE_INSTANCE:
        if name in given:
            raise InputError("does not go with a plan", location=f"--{name.replace('_', '-')}")
    if len(words) > 1:
        raise InputError("must be one plan, and no adapters beside it", words[1], "PLAN")
    return words[0], Plan.from_json(words[0])


def _model_of(plan: Plan, model: str | None) -> str:
    """Return what to load: what is given, or what the plan's base model names on this machine."""
    from capplan.engine.models import BUILTIN

    if model is not None:
        return model
    if Path(plan.base_model).is_dir():
        return plan.base_model
    known = " (built in: with random weights)" if plan.base_model in BUILTIN else ""
    raise InputError(f"is required: the plan names {plan.base_model}{known}", location="--model")


def _launcher(ray_address: str | None, instances: int) -> Launcher:
    if ray_address is None:
        from capplan.engine.cluster.launcher import LocalLauncher

        return LocalLauncher(instances)
    require_extra("ray", ("ray",))
    from capplan.engine.cluster.ray_launcher import RayLauncher

    return RayLauncher(ray_address)


def _say(line: str) -> None:
    typer.echo(line, err=True)
