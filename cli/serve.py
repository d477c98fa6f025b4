"""`capplan serve`: the reference engine behind an OpenAI-compatible server."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from capplan.cli.console import counted
from capplan.cli.extras import ENGINE, require_extra
from capplan.cli.output import require_writable_file
from capplan.cli.progress import announce_compilation
from capplan.cli.serve_flags import of_flag
from capplan.cli.serve_plan import is_plan, serve_plan
from capplan.errors import InputError

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
    from capplan.engine.server import Instance, ServerSettings, run_instance

    settings = ServerSettings(**server)
    path = None if records is None else Path(records)
    announce_compilation()
    if sys.stderr.isatty():
        typer.echo(f"loading {model}", err=True)
    instance = Instance(model=model, server=settings, adapters=adapters, engine=engine, records=path)

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
