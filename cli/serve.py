"""`capplan serve`: the reference engine behind an OpenAI-compatible server, or the instances of a plan.

Parts of a served plan: profiles, model, router, launcher of the instances, folder of adapters, re-balancing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import typer

from capplan.cli import options
from capplan.cli.output import require_writable_files
from capplan.cli.progress import announce_engine_compilation
from capplan.errors import InputError
from capplan.reports import counted
from capplan.spec import (
    ENGINE_DEFAULTS,
    PLAN_ROUTER,
    STATE_PERIOD_S,
    Cache,
    EngineArgs,
    EngineConfig,
    Group,
    Plan,
    Profile,
    Queues,
    RebalanceSettings,
    Scheduler,
    stores_everywhere,
)

if TYPE_CHECKING:
    from capplan.fleet import InstanceSpec, Launcher, RebalancingConfig, RegistrySettings, RoutingSettings
    from capplan.registry import AdapterRegistry
    from capplan.server import PoolSettings, ServerLimits


_OPEN_RANK: Final = 16  # vLLM's default
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


_ENGINE_FLAGS: Final = (
    "dtype",
    "device",
    "tensor_parallel_size",
    "rules",
    "memory",
    "block_size",
    "num_kv_blocks",
    "enable_prefix_caching",
    "shared_prefix_tokens",
    "lora_kernel",
    "seed",
    "sgmv_from_tokens",
)
"""Engine settings by parameter of the command, beside those of a plan."""

_READERS: Final = MappingProxyType(
    {"scheduler": options.read_scheduler, "cache": options.read_cache, "queues": options.read_queues}
)
"""Readers of the engine settings that are documents, by parameter."""

_OF_ONE_INSTANCE: Final = ("lora_modules", "max_adapters", "steps_out", "cpu_affinity", "server_url")
_OF_PLANS: Final = ("groups", "ray_address", "announce_host", "router", "state_period_s", "rebalance")
_WITH_REBALANCE: Final = ("forecast", "rebalance_solver", "workload")
"""Options that go with ``--rebalance``."""
_FLAGS: Final = {
    "served_model_name": "--served-model-name",
    "adapters": "--lora-modules",
}
"""Flags whose names differ from their settings."""


@dataclass(frozen=True, kw_only=True)
class ServeArgs:
    """Options of `capplan serve`."""

    ctx: typer.Context
    words: list[str] | None = typer.Argument(
        None,
        metavar="[PLAN | NAME=ADAPTER ...]",
        help="Plan whose instances to serve; or further adapters, as after --lora-modules.",
    )
    groups: list[str] | None = typer.Option(
        None, "--group", metavar="ID", help="Group of the plan to serve; default: all. Repeatable."
    )
    ray_address: str | None = typer.Option(
        None, metavar="ADDRESS", help="Start the plan's instances on this Ray cluster."
    )
    registry: str | None = typer.Option(
        None,
        metavar="URL",
        help="Adapter registry: SQLite file, or URL of PostgreSQL. With --lora-root its adapters are fetched "
        "for their first request, and shared with other servers; without, it locates the adapters of a plan.",
    )
    server_name: str | None = typer.Option(
        None,
        metavar="NAME",
        help="Name in the registry; prefix of the names of a plan's instances; default: HOST:PORT.",
    )
    server_url: str | None = typer.Option(
        None, metavar="URL", help="Where other servers reach this one; default: where it listens."
    )
    announce_host: str | None = typer.Option(
        None,
        metavar="NAME",
        help="Host at which other machines reach the instances of a plan, which listen at --host then.",
    )
    allow_location: list[str] | None = typer.Option(
        None,
        metavar="URL",
        help="Host, such as https://10.0.0.9:9000, from which locations in the registry may be fetched; "
        "default: none, only folders. Repeatable.",
    )
    max_stored_gib: float | None = typer.Option(
        None,
        metavar="GIB",
        help="With --registry and --lora-root, of the adapters that an instance stores; default: 64.",
    )
    router: options.RouterOption = None
    state_period_s: float = typer.Option(
        STATE_PERIOD_S, metavar="S", help="Time between reports of an instance to the router of a plan."
    )
    rebalance: float | None = typer.Option(
        None,
        metavar="S",
        help="Re-balance the plan's adapters over its instances every S seconds; with --registry and "
        "--lora-root.",
    )
    forecast: options.ForecastName = None
    rebalance_solver: str | None = typer.Option(
        None, metavar="NAME", help="Placement by --rebalance: loraserve (default) or capplan."
    )
    workload: str | None = typer.Option(
        None,
        metavar="FILE",
        help="Workload of the plan: its profile, and the lengths of --rebalance; default: a shipped profile, "
        "and constant lengths.",
    )
    model: str | None = typer.Option(
        None,
        metavar="MODEL",
        help="Hugging Face folder; or, with random weights, a config.json or a built-in name.",
    )
    lora_modules: list[str] | None = typer.Option(
        None,
        metavar="NAME=ADAPTER",
        help="Adapter to serve: a folder that PEFT wrote, or the rank of a random one. Repeatable.",
    )
    served_model_name: str | None = typer.Option(
        None, metavar="NAME", help="Name of the base model; default: as --model."
    )
    host: str = typer.Option("127.0.0.1", metavar="HOST", help="Address to listen on.")
    port: int = typer.Option(8000, metavar="P", help="Port; 0: any free one.")
    api_key: str | None = typer.Option(
        None,
        metavar="KEY",
        envvar="CAPPLAN_API_KEY",
        show_envvar=True,
        help="Key that clients must send; command lines are visible to other users, the environment is not.",
    )
    admin_api_key: str | None = typer.Option(
        None,
        metavar="KEY",
        envvar="CAPPLAN_ADMIN_API_KEY",
        show_envvar=True,
        help="Key to load and unload adapters; required by --lora-root.",
    )
    engine: EngineConfig = options.engine_flags(**ENGINE_DEFAULTS)
    max_adapters: int | None = typer.Option(
        None, metavar="N", help="Adapters known at a time, loaded ones included."
    )
    lora_root: str | None = typer.Option(
        None, metavar="DIR", help="Let administrators load adapters from this folder."
    )
    enable_lora: bool = typer.Option(
        True, "--enable-lora", help="Accepted for compatibility with vLLM; adapters are always on."
    )
    max_queue: int = typer.Option(
        512,
        metavar="N",
        help="Largest number of prompts beyond --max-num-seqs; more are answered with 429. Least default of "
        "a plan: twice its longest queue.",
    )
    drain_timeout_s: float = typer.Option(30.0, metavar="S", help="Time for running requests after SIGTERM.")
    max_body_bytes: int | None = typer.Option(
        None,
        metavar="N",
        help="Largest body of a request; default: max(1 MiB, 16 bytes per token of --max-model-len).",
    )
    body_timeout_s: float = typer.Option(60.0, metavar="S", help="Time for a whole body.")
    max_buffered_bytes: int | None = typer.Option(
        None,
        metavar="N",
        help="Largest size of all requests not submitted yet; default: 64 bodies, at least 64 MiB.",
    )
    max_header_bytes: int = typer.Option(
        64 * 1024,
        "--max-header-bytes",
        "--h11-max-incomplete-event-size",
        metavar="N",
        help="Largest size of request line and headers.",
    )
    max_header_count: int = typer.Option(
        100,
        "--max-header-count",
        "--h11-max-header-count",
        metavar="N",
        help="Largest number of headers of a request.",
    )
    header_timeout_s: float = typer.Option(15.0, metavar="S", help="Time for complete headers.")
    client_buffer_bytes: int = typer.Option(
        512 * 1024, metavar="N", help="Largest part of a response that its client has not read yet."
    )
    send_timeout_s: float = typer.Option(
        30.0, metavar="S", help="Time until a client that does not read is disconnected."
    )
    max_connections: int | None = typer.Option(
        None,
        metavar="N",
        help="Largest number of connections; default: by the limit of open files, at most 8192.",
    )
    chat_template_timeout_s: float = typer.Option(
        2.0, metavar="S", help="Time for the model's chat template and one conversation."
    )
    lora_timeout_s: float = typer.Option(60.0, metavar="S", help="Time to load or unload an adapter.")
    dtype: str = typer.Option("auto", metavar="NAME", help="auto, float32, float16 or bfloat16.")
    device: str = typer.Option("cpu", metavar="NAME", help="cpu, cuda, cuda:1 ...")
    tensor_parallel_size: int = typer.Option(
        1,
        "--tensor-parallel-size",
        "-tp",
        metavar="N",
        min=1,
        help="GPUs that share the model, from --device on; on the CPU processes. Default of a plan: its own.",
    )
    rules: str = typer.Option("capplan", metavar="NAME", help="Serving rules.")
    scheduler: options.SchedulerName = None
    cache: options.CacheName = None
    queues: str | None = typer.Option(
        None,
        metavar="MAPPING",
        help="Queues by request size at the start, as groups[].queues of a plan; default: one.",
    )
    memory: str | None = typer.Option(None, metavar="KIND", help="Memory of adapters: slots or unified.")
    block_size: int = typer.Option(16, metavar="TOKENS", help="Tokens of one KV block.")
    num_kv_blocks: int | None = typer.Option(None, metavar="N", help="KV blocks; default: by memory.")
    enable_prefix_caching: bool | None = typer.Option(
        None, "--enable-prefix-caching/--no-enable-prefix-caching", help="Default: as the rules."
    )
    shared_prefix_tokens: int = typer.Option(0, metavar="N", help="Length of shared prefixes to cache.")
    lora_kernel: str | None = typer.Option(None, metavar="NAME", help="Default: by device.")
    sgmv_from_tokens: int | None = typer.Option(
        None,
        metavar="N",
        help="Mean tokens per adapter from which Triton's LoRA kernels work in tiles; default: as measured "
        "in the profile of a plan's group, or 2.",
    )
    seed: int = typer.Option(0, metavar="N", help="Seed of random weights and sampling.")
    steps_out: str | None = typer.Option(
        None, metavar="FILE", help="Write a record of every step as Parquet, at the end."
    )
    cpu_affinity: str = typer.Option(
        "auto", metavar="CPUS", help="CPUs of the engine core: auto, none, or a list such as 2,4-7."
    )
    unverified: options.Unverified = False
    as_json: bool = typer.Option(False, "--json", help="Print the line with the address as JSON.")


@options.command
def serve(args: ServeArgs) -> None:
    """Serve a model and its adapters over HTTP until SIGTERM or Ctrl-C, then drain and exit 0.

    OpenAI's clients work unchanged; an adapter is chosen by its name as the model. With a PLAN all its
    instances are started, behind the router that it names, by default smooth-shares.
    """
    options.require_extra("engine", options.ENGINE)
    if args.host not in _LOOPBACK and args.api_key is None:
        typer.echo("warning: everyone who reaches this host can use the server; see --api-key", err=True)
    if _is_given(args.ctx, "rules") and any(getattr(args, name) for name in _READERS):
        raise InputError("does not go with --scheduler, --cache and --queues", args.rules, "--rules")
    words = args.words or []
    is_plan = bool(words) and ("=" not in words[0] or words[0].endswith(".json"))
    raise typer.Exit(_serve_plan(args) if is_plan else _serve_instance(args))


def _serve_instance(args: ServeArgs) -> int:
    """Serve one instance until it ends; return the exit status."""
    names = {"groups": "group"}
    for name in (*_OF_PLANS, *_WITH_REBALANCE):
        if _is_given(args.ctx, name):
            raise InputError("is for plans", location=f"--{names.get(name, name).replace('_', '-')}")
    if args.model is None:
        raise InputError("is required", location="--model")
    require_writable_files(args.steps_out)
    adapters = options.read_lora_modules([*(args.lora_modules or ()), *(args.words or ())])
    _require_queue(args)
    from capplan.server import InstanceConfig, ServerLimits, ServerSettings, run_instance

    engine = _engine_settings(args, len(adapters))
    try:
        settings = options.fill(
            ServerSettings,
            args,
            model_name=args.model if args.served_model_name is None else args.served_model_name,
            lora_root=None if args.lora_root is None else Path(args.lora_root),
            pool=_pool(args),
            max_requests=engine["max_num_seqs"] + args.max_queue,
            limits=options.fill(ServerLimits, args),
        )
        announce_engine_compilation()
        if sys.stderr.isatty():
            _log(f"loading {args.model}")
        instance = InstanceConfig(
            model=args.model,
            server=settings,
            adapters=adapters,
            engine=engine,
            records=None if args.steps_out is None else Path(args.steps_out),
            cpu_affinity=args.cpu_affinity,
        )
        facts = {"model": settings.model_name, "adapters": len(adapters)}
        return run_instance(instance, _ready(settings.model_name, facts, as_json=args.as_json))
    except InputError as error:
        raise _by_flag(error) from None


def _pool(args: ServeArgs) -> PoolSettings | None:
    """Return the settings of the distributed pool; None without a registry."""
    from capplan.server import PoolSettings

    names = ("server_name", "server_url", "announce_host", "max_stored_gib", "allow_location")
    chosen = {name: getattr(args, name) for name in names}
    chosen = {name: value for name, value in chosen.items() if value not in (None, [])}
    for name in chosen:
        if None in (args.registry, args.lora_root):
            flag = f"--{name.replace('_', '-')}"
            raise InputError("goes with --registry and --lora-root", getattr(args, name), flag)
    if args.registry is None:
        return None
    options.require_extra("engine", ("aiohttp",))
    return PoolSettings(args.registry, **chosen)


def _engine_settings(args: ServeArgs, adapters: int) -> dict[str, Any]:
    from capplan.server import OPEN_ADAPTERS

    settings = _engine_flags(args) | _documents(args)
    if not _is_given(args.ctx, "rules"):
        del settings["rules"]
    settings["max_adapters"] = args.max_adapters
    if args.lora_root:  # clients may load adapters
        if args.engine.max_lora_rank is None and not adapters:
            settings["max_lora_rank"] = _OPEN_RANK
        if args.max_adapters is None:
            settings["max_adapters"] = max(OPEN_ADAPTERS, adapters)
    return settings


def _engine_flags(args: ServeArgs) -> dict[str, Any]:
    return dict(args.engine) | {name: getattr(args, name) for name in _ENGINE_FLAGS}


def _documents(args: ServeArgs) -> dict[str, Any]:
    """Return scheduler, cache and queues, as far as they are given."""
    found = {name: read(getattr(args, name)) for name, read in _READERS.items()}
    return {name: each.model_dump(mode="json") for name, each in found.items() if each is not None}


def _serve_plan(args: ServeArgs) -> int:
    """Serve the instances of a plan until stopped; return the exit status."""
    options.require_extra("engine", ("aiohttp",))
    from capplan.fleet import RouterConfig, run_router
    from capplan.registry import AdapterRegistry, with_locations
    from capplan.server import ServerLimits, ServerSettings

    given = {name for name in args.ctx.params if _is_given(args.ctx, name)}
    file, plan = _plan_of(args, given)
    settings = _rebalance_settings(args, plan.rebalance)
    if args.registry is not None and args.lora_root is None:
        with AdapterRegistry(args.registry, read_only=True) as registry:
            plan = with_locations(plan, registry)
    _require_queue(args)
    model_name = args.served_model_name or plan.base_model
    profiles = PlanProfiles.of(plan, args.workload)
    try:
        limits = options.fill(ServerLimits, args)
        specs = _instances(args, file, plan, given, limits, profiles)
        server = options.fill(
            ServerSettings,
            args,
            model_name=model_name,
            lora_root=None,
            max_requests=sum(spec.server.max_requests for spec in specs),
            limits=limits,
        )
    except InputError as error:
        raise _by_flag(error) from None
    require_listening(args.ray_address, args.host, args.announce_host)
    groups = running_groups(plan, specs)
    routing = _plan_routing(args, file, plan, groups, profiles)
    announce_engine_compilation()
    moving = None
    if settings is not None:
        moving = _rebalancing(args, settings, plan, groups, profiles.known)
    shared = None
    if args.registry is not None and args.lora_root is not None:
        shared = plan_registry(args.registry, plan, groups, model_name)
    for line in unverified_overrides(plan, args.router, settings, groups):
        _log(line)
    _log(f"starting {counted(len(specs), 'instance')} of {file}")
    facts = {
        "model": model_name,
        "adapters": len({name for spec in specs for name in spec.adapters}),
        "instances": [spec.name for spec in specs],
    }
    launcher = _instance_launcher(args, len(specs))
    config = RouterConfig(
        specs, launcher, server, log=_log, routing=routing, registry=shared, rebalancing=moving
    )
    return run_router(config, _ready(f"{file}: {model_name}", facts, as_json=args.as_json))


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Return whether a parameter comes from the command line or the environment."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _plan_of(args: ServeArgs, given: set[str]) -> tuple[str, Plan]:
    words = args.words or []
    for name in (*_OF_ONE_INSTANCE, *([] if args.registry is not None else ["lora_root"])):
        if name in given:
            raise InputError("does not go with a plan", location=f"--{name.replace('_', '-')}")
    if len(words) > 1:
        raise InputError("must be one plan, and no adapters beside it", words[1], "PLAN")
    return words[0], options.read_plan(words[0], unverified=args.unverified)


def _instances(
    args: ServeArgs, file: str, plan: Plan, given: set[str], limits: ServerLimits, profiles: PlanProfiles
) -> Sequence[InstanceSpec]:
    """Return the instances of a plan; engine flags on the command line take precedence over the plan.

    Instances to re-balance have equal settings.
    """
    from capplan.fleet import ServingOptions, instances_of, spread_over_gpus

    engine = {name: each for name, each in _engine_flags(args).items() if name in given} | _documents(args)
    if args.rebalance is not None or plan.rebalance is not None:
        engine = equal_settings(plan, args.groups or ()) | engine
    serving = ServingOptions(
        model=model_of(plan, args.model),
        model_name=args.served_model_name or plan.base_model,
        engine=engine,
        max_queue=args.max_queue if "max_queue" in given else None,
        profiles=profiles.known,
        limits=limits,
        pool=_pool(args),
        lora_root=pool_folder(args.lora_root, args.admin_api_key),
        admin_api_key=args.admin_api_key,
    )
    try:
        specs = instances_of(plan, serving, args.groups or ())
        return spread_over_gpus(specs) if args.ray_address is None else specs
    except InputError as error:
        location = error.location if error.location.startswith("--") else f"{file}: {error.location}"
        raise InputError(error.rule, error.value, location) from None


def _ready(served: str, facts: dict[str, Any], *, as_json: bool) -> Callable[[str], None]:
    """Return the callback that prints the line with the server's address."""

    def ready(url: str) -> None:
        line = f"serving {served} and {counted(facts['adapters'], 'adapter')} on {url}"
        typer.echo(json.dumps({"url": url, **facts}) if as_json else line)
        sys.stdout.flush()

    return ready


def _require_queue(args: ServeArgs) -> None:
    if args.max_queue < 0:
        raise InputError("must be >= 0", args.max_queue, "--max-queue")


def _by_flag(error: InputError) -> InputError:
    """Return the error with the flag as its location instead of the setting."""
    if not error.location.isidentifier():
        return error
    flag = _FLAGS.get(error.location, f"--{error.location.replace('_', '-')}")
    return InputError(error.rule, error.value, flag)


def _log(line: str) -> None:
    typer.echo(line, err=True)


def _rebalance_settings(args: ServeArgs, planned: RebalanceSettings | None) -> RebalanceSettings | None:
    """Return the re-balancing that the options of the command or the plan name; None without any."""
    given = options.RebalanceOptions(args.rebalance, args.forecast, args.rebalance_solver)
    settings = given.settings(planned)
    if settings is None:
        return None
    for flag, value in (("--registry", args.registry), ("--lora-root", args.lora_root)):
        if value is None:
            where = "plan: rebalance" if args.rebalance is None else "--rebalance"
            raise InputError(f"requires {flag}: instances share adapters", settings.every_s, where)
    return settings


def equal_settings(plan: Plan, groups: Sequence[str]) -> dict[str, Any]:
    """Return engine settings with which every instance can serve every adapter of groups of a plan."""
    from capplan.planner.verification import equal_engine_args

    chosen = [group for group in plan.groups if not groups or group.id in groups]
    return equal_engine_args(chosen).model_dump(exclude_none=True) if chosen else {}


def _rebalancing(
    args: ServeArgs,
    settings: RebalanceSettings,
    plan: Plan,
    groups: Sequence[Group],
    profiles: Mapping[str, Profile],
) -> RebalancingConfig:
    """Return the re-balancing of the instances of groups of a plan; `profiles`: those on this machine.

    The instances must be equal, and the registry must have adapters of the plan, which they can serve.
    """
    from capplan.fleet import RebalancingConfig
    from capplan.planner.verification import served_rebalancer
    from capplan.registry import AdapterRegistry
    from capplan.twin.cluster import workload_of
    from capplan.workload import load_workload

    with AdapterRegistry(str(args.registry), read_only=True) as registry:
        size_bytes = _sizes(registry, plan, groups)
    workload = None if args.workload is None else load_workload(args.workload)
    _log("measuring operating points in the twin")
    rebalancer = served_rebalancer(plan, groups, settings, size_bytes, profiles, workload)
    return RebalancingConfig(
        rebalancer,
        str(args.admin_api_key),  # required by --lora-root
        balances_base=any(group.base is not None for group in groups),
        prior_output_tokens=workload_of(plan, groups).output_tokens.mean_tokens,
    )


def _sizes(registry: AdapterRegistry, plan: Plan, groups: Sequence[Group]) -> dict[str, int]:
    """Return the sizes of the plan's adapters in the registry, as far as it has them.

    An adapter that has been removed from the registry is not served, as if it were removed later. One for
    another model, of a rank that the instances do not serve, or without a digest is an error.
    """
    sizes = {}
    largest = max(group.engine_args.max_lora_rank for group in groups)
    planned = {each.name: each.rank for group in groups for each in group.adapters}
    found = {name: adapter for name in planned if (adapter := registry.find(name)) is not None}
    if planned and not found:
        rule = "must have an adapter of the plan"
        raise InputError(rule, f"none of {len(planned)}", registry.location)
    for name, known in found.items():
        where = f"{registry.location}: adapter {name}"
        if known.base_model != plan.base_model:
            rule = f"must be that of the plan, {plan.base_model}"
            raise InputError(rule, known.base_model, f"{where}: base_model")
        if known.rank > largest:
            raise InputError(f"must be at most max_lora_rank, {largest}", known.rank, f"{where}: rank")
        if known.digest is None:
            raise InputError("is required: servers fetch adapters by it", location=f"{where}: digest")
        if known.rank != planned[name]:
            _log(f"the plan was not verified with rank {known.rank} of {name} instead of {planned[name]}")
        if known.size_bytes is not None:
            sizes[name] = known.size_bytes
    return sizes


@dataclass(frozen=True)
class PlanProfiles:
    """Profiles that a plan names: those on this machine, and the errors of the others, by name."""

    known: Mapping[str, Profile]
    errors: Mapping[str, InputError]

    @classmethod
    def of(cls, plan: Plan, workload: str | None = None) -> PlanProfiles:
        """Load the profiles of the groups of a plan: those of a workload file, else shipped ones."""
        from capplan.datasets import load_profile

        known, errors = _profiles_of(workload), {}
        for name in dict.fromkeys(group.profile for group in plan.groups):
            if name in known:
                continue
            try:
                known[name] = load_profile(name)
            except InputError as error:
                errors[name] = error
        return cls(known, errors)

    def require(self, names: Iterable[str]) -> dict[str, Profile]:
        """Return some of the profiles; the error of one that is not on this machine is raised."""
        found = {}
        for name in names:
            if name in self.errors:
                error = self.errors[name]
                rule = f"{error.rule}; --workload FILE reads the profile of the plan's workload"
                raise InputError(rule, error.value, error.location)
            found[name] = self.known[name]
        return found


def _profiles_of(file: str | None) -> dict[str, Profile]:
    """Return the profiles of a workload file by name; none without a file."""
    from capplan.datasets import load_profile
    from capplan.workload import load_workload

    if file is None:
        return {}
    workload = load_workload(file)
    names: list[str | None] = [pool.profile for pool in workload.pools]
    names += [workload.profile]
    loaded = [load_profile(name) for name in names if name is not None]
    return {profile.name: profile for profile in loaded}


def model_of(plan: Plan, model: str | None) -> str:
    """Return the model to load: ``model``, or the plan's base model if it is a folder on this machine."""
    from capplan.engine.models import builtin_models

    if model is not None:
        return model
    if Path(plan.base_model).is_dir():
        return plan.base_model
    known = " (built in: with random weights)" if plan.base_model in builtin_models() else ""
    raise InputError(f"is required: the plan names {plan.base_model}{known}", location="--model")


def _instance_launcher(args: ServeArgs, instances: int) -> Launcher:
    """Return the launcher of a plan's instances: on this machine, or on a Ray cluster.

    On this machine they listen at `host` if they announce one, and at the loopback address otherwise.
    """
    if args.ray_address is None:
        from capplan.fleet import LocalLauncher

        return LocalLauncher(instances) if args.announce_host is None else LocalLauncher(instances, args.host)
    options.require_extra("ray", ("ray",))
    from capplan.fleet import RayLauncher

    return RayLauncher(args.ray_address)


def require_listening(ray_address: str | None, host: str, announce_host: str | None) -> None:
    """Raise an `InputError` if instances would announce a host at which they do not listen."""
    from capplan.server import is_loopback

    if announce_host is None:
        return
    if ray_address is not None:
        rule = "does not go with --ray-address: instances announce the addresses of their machines"
        raise InputError(rule, announce_host, "--announce-host")
    if is_loopback(host) and not is_loopback(announce_host):
        rule = f"requires a --host that other machines reach: instances would listen at {host}"
        raise InputError(rule, announce_host, "--announce-host")


def running_groups(plan: Plan, specs: Sequence[InstanceSpec]) -> list[Group]:
    """Return the groups of a plan that run, with the settings of their instances.

    These are the plan's settings, equal ones for re-balancing, and those of the command line. They are not
    checked again.
    """
    engines = {spec.group: spec.engine for spec in specs}
    documents = (("scheduler", Scheduler), ("cache", Cache), ("queues", Queues))
    running = []
    for group in plan.groups:
        if group.id not in engines:
            continue
        engine = engines[group.id]
        args = {name: engine[name] for name in EngineArgs.model_fields if name in engine}
        policies = {
            name: kind.model_validate(engine[name]) if engine.get(name) is not None else None
            for name, kind in documents
        }
        update = {"engine_args": group.engine_args.model_copy(update=args), **policies}
        running.append(group.model_copy(update=update))
    return running


def unverified_overrides(
    plan: Plan, router: str | None, rebalance: RebalanceSettings | None, running: Sequence[Group]
) -> tuple[str, ...]:
    """Return a line for each setting of the command line with which the plan was not verified.

    `router` and `rebalance` are those of the command line, and `running` the groups as they run, see
    `running_groups`.
    """
    replaced = []
    planned = plan.router or PLAN_ROUTER
    if router not in (None, planned):
        replaced.append(f"router {router} instead of {planned}")
    if rebalance is not None and rebalance != plan.rebalance:
        was = "none" if plan.rebalance is None else f"that of every {plan.rebalance.every_s:g} s"
        replaced.append(f"re-balancing every {rebalance.every_s:g} s instead of {was}")
    hint = "`capplan simulate WORKLOAD --plan PLAN` with the same options simulates it"
    lines = [f"{each}; {hint}" for each in replaced]
    lines += [f"{each}; `engine` of the workload plans with it" for each in _engine_overrides(plan, running)]
    return tuple(f"the plan was not verified with {line}" for line in lines)


def _engine_overrides(plan: Plan, running: Sequence[Group]) -> list[str]:
    """Return the settings of running groups that are not those of the plan, with the groups."""
    planned = {group.id: group for group in plan.groups}
    changes: dict[str, list[str]] = {}
    for group in running:
        before, now = planned[group.id], group.engine_args.model_dump()
        for name, was in before.engine_args.model_dump().items():
            if now[name] != was:
                changes.setdefault(f"{name} {now[name]} instead of {was}", []).append(group.id)
        for name in ("scheduler", "cache", "queues"):
            if getattr(group, name) != getattr(before, name):
                changes.setdefault(f"another {name}", []).append(group.id)
    return [f"{change} (group {', '.join(groups)})" for change, groups in changes.items()]


def _plan_routing(
    args: ServeArgs, file: str, plan: Plan, groups: Sequence[Group], profiles: PlanProfiles
) -> RoutingSettings:
    """Return the router of groups of a plan: that of the command line, or else the plan's.

    Its models are fitted to the engine settings of the groups, which are those that run.
    """
    from capplan.fleet import RoutingSettings

    options.require_state_period(args.state_period_s)
    name = args.router or plan.router or PLAN_ROUTER
    if name == PLAN_ROUTER:
        return RoutingSettings()
    from capplan.twin.cluster import MODELLED, served_rule

    names = {group.profile for group in groups} if name in MODELLED else set()
    try:
        rule = served_rule(plan, groups, name, profiles.require(names))
    except InputError as error:
        raise InputError(error.rule, error.value, f"{file}: router {name}: {error.location}") from None
    ranks = {adapter.name: adapter.rank for group in groups for adapter in group.adapters}
    return RoutingSettings(rule, ranks, args.state_period_s)


def plan_registry(registry: str, plan: Plan, groups: Sequence[Group], model_name: str) -> RegistrySettings:
    """Return the registry whose adapters the router of groups of a plan serves.

    Adapters of the plan's other groups are served elsewhere.
    """
    from capplan.fleet import RegistrySettings

    every, own = ({each.name for group in some for each in group.adapters} for some in (plan.groups, groups))
    excluded = frozenset({*(every - own), plan.base_model, model_name})
    return RegistrySettings(registry, plan.base_model, excluded, stores_everywhere(plan.router_options))


def pool_folder(lora_root: str | None, admin_api_key: str | None) -> Path | None:
    """Return the folder of the adapters of a plan's instances; None without a pool."""
    if lora_root is None:
        return None
    if not Path(lora_root).is_dir():
        raise InputError("must be a folder", lora_root, "--lora-root")
    if admin_api_key is None:
        rule = "requires --admin-api-key: the key by which instances fetch adapters from each other"
        raise InputError(rule, location="--lora-root")
    return Path(lora_root).resolve()
