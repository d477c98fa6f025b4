"""`capplan serve`: the reference engine behind an OpenAI-compatible server."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from capplan.cli.console import counted
from capplan.cli.options import ENGINE, require_extra
from capplan.cli.output import require_writable_file
from capplan.cli.progress import announce_compilation
from capplan.errors import InputError
from capplan.spec import Plan

if TYPE_CHECKING:
    from capplan.engine.router.launcher import Launcher

_OPEN_RANK: Final = 16  # vLLM's default

_OPEN_ADAPTERS: Final = 1000

"""Numbers for adapters where clients may load some; one costs some dozen bytes."""

_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def serve(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PLAN | NAME=ADAPTER ...]",
            help="Plan whose instances to serve; or further adapters, as after --lora-modules.",
        ),
    ] = None,
    groups: Annotated[
        list[str] | None,
        typer.Option("--group", metavar="ID", help="Of the plan, serve this group only. Repeatable."),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address", metavar="ADDRESS", help="Start the plan's instances on this Ray cluster."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Hugging Face folder; or, with random weights, a config.json or a built-in name.",
        ),
    ] = None,
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            "--lora-modules",
            metavar="NAME=ADAPTER",
            help="Adapter to serve: a folder that PEFT wrote, or the rank of a random one. Repeatable.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", metavar="NAME", help="Of the base model; default: as --model."),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="P", help="0 is any free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="CAPPLAN_API_KEY",
            show_envvar=True,
            help="What clients must bring; others see the command line, not the environment.",
        ),
    ] = None,
    max_loras: Annotated[int | None, typer.Option("--max-loras", metavar="N", help="Adapter slots.")] = None,
    max_lora_rank: Annotated[
        int | None, typer.Option("--max-lora-rank", metavar="R", help="Rank of a slot.")
    ] = None,
    max_cpu_loras: Annotated[
        int | None, typer.Option("--max-cpu-loras", metavar="N", help="Adapters kept on the host.")
    ] = None,
    max_adapters: Annotated[
        int | None,
        typer.Option("--max-adapters", metavar="N", help="Adapters known at a time, loaded ones included."),
    ] = None,
    lora_root: Annotated[
        str | None,
        typer.Option("--lora-root", metavar="DIR", help="Let clients load adapters from this folder."),
    ] = None,
    _enable_lora: Annotated[
        bool, typer.Option("--enable-lora", help="Accepted for vLLM's sake; adapters are always on.")
    ] = True,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", metavar="N")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option("--max-num-batched-tokens", metavar="N")] = 2048,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", metavar="N")] = None,
    max_queue: Annotated[
        int,
        typer.Option("--max-queue", metavar="N", help="Prompts taken beyond --max-num-seqs; then 429."),
    ] = 512,
    max_body_bytes: Annotated[int, typer.Option("--max-body-bytes", metavar="N")] = 8 * 2**20,
    drain_timeout_s: Annotated[
        float,
        typer.Option("--drain-timeout-s", metavar="S", help="For running requests, after SIGTERM."),
    ] = 30.0,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="NAME", help="auto, float32, float16 or bfloat16.")
    ] = "auto",
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1 ...")] = "cpu",
    rules: Annotated[str, typer.Option("--rules", metavar="NAME", help="Serving rules.")] = "capplan",
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="KIND", help="Of adapters: slots or unified.")
    ] = None,
    block_size: Annotated[int, typer.Option("--block-size", metavar="TOKENS")] = 16,
    num_kv_blocks: Annotated[int | None, typer.Option("--num-kv-blocks", metavar="N")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option("--gpu-memory-utilization", metavar="SHARE")] = 0.9,
    prefix_caching: Annotated[
        bool | None,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Default: as the rules."),
    ] = None,
    shared_prefix_tokens: Annotated[
        int,
        typer.Option("--shared-prefix-tokens", metavar="N", help="Length of prompt beginnings to cache."),
    ] = 0,
    lora_kernel: Annotated[str | None, typer.Option("--lora-kernel", metavar="NAME")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of random weights and sampling.")] = 0,
    records: Annotated[
        str | None,
        typer.Option("--records", metavar="FILE", help="Write what every step did as Parquet, at the end."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the line that tells where it listens as JSON.")
    ] = False,
) -> None:
    """Serve a model and its adapters over HTTP until SIGTERM or Ctrl-C, then finish what runs and exit 0.

    OpenAI's clients work unchanged; an adapter is chosen by its name as the model. With a PLAN all its
    instances are started, behind a router that follows the plan's shares; flags come before the plan.
    """
    require_extra("engine", ENGINE)
    if host not in _LOOPBACK and api_key is None:
        typer.echo("warning: everyone who reaches this host can use the server; see --api-key", err=True)
    if is_plan(words):
        raise typer.Exit(serve_plan(ctx))
    if groups or ray_address is not None:
        raise InputError("is for plans", location="--group" if groups else "--ray-address")
    if model is None:
        raise InputError("is required", location="--model")
    if records is not None:
        require_writable_file(records)
    adapters = _adapters([*(lora_modules or ()), *(words or ())])
    engine = {
        "a_max": max_loras,
        "s_max": _OPEN_RANK if max_lora_rank is None and lora_root and not adapters else max_lora_rank,
        "max_adapters": (
            max(_OPEN_ADAPTERS, len(adapters)) if max_adapters is None and lora_root else max_adapters
        ),
        "max_cpu_loras": max_cpu_loras,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "dtype": dtype,
        "device": device,
        "rules": rules,
        "memory": memory,
        "block_size": block_size,
        "num_kv_blocks": num_kv_blocks,
        "gpu_memory_utilization": gpu_memory_utilization,
        "prefix_caching": prefix_caching,
        "shared_prefix_tokens": shared_prefix_tokens,
        "lora_kernel": lora_kernel,
        "seed": seed,
    }
    if max_queue < 0:
        raise InputError("must be >= 0", max_queue, "--max-queue")
    server = {
        "model_name": model if served_model_name is None else served_model_name,
        "host": host,
        "port": port,
        "api_key": api_key,
        "lora_root": None if lora_root is None else Path(lora_root),
        "max_requests": max_num_seqs + max_queue,
        "max_body_bytes": max_body_bytes,
        "drain_timeout_s": drain_timeout_s,
    }
    try:
        status = _run(model, adapters, engine, server, records, as_json)
    except InputError as error:
        raise of_flag(error) from None
    raise typer.Exit(status)


def _run(
    model: str,
    adapters: dict[str, str | Path | int],
    engine: dict[str, Any],
    server: dict[str, Any],
    records: str | None,
    as_json: bool,
) -> int:
    """Start the instance and serve until it ends; return the exit status."""
    from capplan.engine.server import InstanceConfig, ServerSettings, run_instance

    settings = ServerSettings(**server)
    path = None if records is None else Path(records)
    announce_compilation()
    if sys.stderr.isatty():
        typer.echo(f"loading {model}", err=True)
    instance = InstanceConfig(model=model, server=settings, adapters=adapters, engine=engine, records=path)

    def ready(url: str) -> None:
        facts = {"url": url, "model": settings.model_name, "adapters": len(adapters)}
        line = f"serving {settings.model_name} and {counted(len(adapters), 'adapter')} on {url}"
        typer.echo(json.dumps(facts) if as_json else line)
        sys.stdout.flush()

    return run_instance(instance, ready)


def _adapters(modules: list[str]) -> dict[str, str | Path | int]:
    """Return adapters by name from ``NAME=FOLDER`` and ``NAME=RANK``."""
    adapters: dict[str, str | Path | int] = {}
    for module in modules:
        name, equals, source = module.partition("=")
        if not (name and equals and source):
            raise InputError("must be NAME=FOLDER or NAME=RANK", module, "--lora-modules")
        if name in adapters:
            raise InputError("must be unique", name, "--lora-modules")
        adapters[name] = int(source) if source.isdecimal() else Path(source)
    return adapters


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
    from capplan.engine.router.instances import ServingOptions, instances_of, spread_over_gpus, unused_parts
    from capplan.engine.router.process import RouterConfig, run_router
    from capplan.engine.server import ServerSettings

    flags = dict(ctx.params)
    given = {name for name in flags if _source(ctx, name) != "DEFAULT"}
    file, plan = _plan_of(flags["words"], given)
    engine = {field: flags[name] for name, field in _ENGINE_FLAGS.items() if name in given}
    if flags["max_queue"] < 0:
        raise InputError("must be >= 0", flags["max_queue"], "--max-queue")
    serving = ServingOptions(
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
    return run_router(RouterConfig(specs, launcher, server, flags["max_queue"], say=_say), ready)


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
        from capplan.engine.router.launcher import LocalLauncher

        return LocalLauncher(instances)
    require_extra("ray", ("ray",))
    from capplan.engine.router.ray_launcher import RayLauncher

    return RayLauncher(ray_address)


def _say(line: str) -> None:
    typer.echo(line, err=True)


_FLAGS: Final = {
    "a_max": "--max-loras",
    "s_max": "--max-lora-rank",
    "served_model_name": "--served-model-name",
    "adapters": "--lora-modules",
}

"""Flags that are not called as the settings that they set."""


def of_flag(error: InputError) -> InputError:
    """Name the flag instead of the setting that it sets."""
    flag = _FLAGS.get(error.location, f"--{error.location.replace('_', '-')}")
    is_setting = error.location.isidentifier()
    return InputError(error.rule, error.value, flag if is_setting else error.location)
