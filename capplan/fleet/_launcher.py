"""Engine processes of a plan: their configuration, launchers, and the process itself.

``python -m capplan.fleet._launcher`` reads one line of JSON from standard input and keeps it open: it
exits when its parent does. It writes one line of JSON, ``{"url": ...}`` once it accepts requests, or
``{"error": [rule, value, location]}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from capplan._jit import ENGINE_ENTRY, is_compiled
from capplan.engine import is_stopped
from capplan.engine.lora import LoadTimes
from capplan.engine.models import model_config, require_shardable
from capplan.errors import NO_VALUE, CapplanError, InputError, NoValue
from capplan.server import OPEN_ADAPTERS, InstanceConfig, PoolSettings, ServerLimits, ServerSettings
from capplan.spec import Group, Plan, PlanAdapter, Profile, local_folder, require_adapter

_DRAIN_TIMEOUT_S: Final = 1.0
"""For requests of an instance when the router, which drains first, stops it."""
_SEND_RESERVE: Final = 2
"""Send timeout of an instance relative to the router's, which disconnects a slow client first."""
DEFAULT_MAX_QUEUE: Final = 512
_QUEUE_RESERVE: Final = 2
"""Queue of an instance relative to the longest one of its verification, in which none is refused."""


@dataclass(frozen=True)
class ServingOptions:
    """Options of the instances of a plan that are not in the plan.

    Attributes
    ----------
    model
        Folder, ``config.json`` or built-in name.
    model_name
        Name of the base model for clients.
    engine
        Fields of `EngineArgs` and `EngineOptions` that override the plan. Rules override a group's scheduler,
        cache and queues, a scheduler its queues.
    max_queue
        Prompts that an instance accepts beyond its ``max_num_seqs``; None: `DEFAULT_MAX_QUEUE`, or more if
        the verification of the plan had longer queues.
    profiles
        Profiles of the plan by name, for what they have measured: times of adapter loads, which instances of
        other profiles measure themselves, and thresholds of kernels.
    limits
        Limits of requests, as those of the router.
    pool, lora_root, admin_api_key
        Registry of a distributed pool with the prefix of the instances' names in it, the folder whose
        subfolders hold the adapters of instances, and the key of all of them. None: every instance has all
        its adapters from the start.
    """

    model: str
    model_name: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    max_queue: int | None = None
    profiles: Mapping[str, Profile] = field(default_factory=dict)
    limits: ServerLimits = field(default_factory=ServerLimits)
    pool: PoolSettings | None = None
    lora_root: Path | None = None
    admin_api_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class InstanceSpec(InstanceConfig):
    """Configuration of one engine process of a plan, and its part of the traffic.

    Attributes
    ----------
    name, group
        ``g0-1`` is the first replica of group ``g0``.
    shares
        Share of each adapter's requests meant for this instance.
    base_share
        Share of the base model's requests meant for this instance; 0 for all: equal shares.
    """

    name: str
    group: str
    shares: Mapping[str, float]
    base_share: float = 0.0

    @property
    def server_name(self) -> str:
        """Name in the adapter registry."""
        own = self.server.pool and self.server.pool.server_name
        return own or self.name

    @property
    def max_lora_rank(self) -> int:
        """Largest rank of its adapters; 0: an engine without LoRA."""
        return int(self.engine["max_lora_rank"]) if self.engine["max_loras"] else 0

    def message(self, host: str, key: str) -> bytes:
        """Return the line of JSON that configures the engine process."""
        server = asdict(replace(self.server, host=host, port=0, api_key=key))
        server["lora_root"] = server["lora_root"] and str(server["lora_root"])
        # With a pool, each adapter is fetched for its first request.
        adapters = self.adapters if self.server.pool is None else {}
        fields = {"model": self.model, "adapters": adapters, "engine": self.engine, "server": server}
        return json.dumps(fields).encode() + b"\n"


def instances_of(plan: Plan, serving: ServingOptions, groups: Sequence[str] = ()) -> tuple[InstanceSpec, ...]:
    """Return the instances of a plan, or of some of its groups.

    Raises
    ------
    InputError
        If a group does not exist, or the engine does not support it.
    """
    known = [group.id for group in plan.groups]
    for name in groups:
        if name not in known:
            raise InputError(f"must be one of {', '.join(known)}", name, "--group")
    chosen = [group for group in plan.groups if not groups or group.id in groups]
    return tuple(spec for group in chosen for spec in _of_group(plan, group, serving))


def _of_group(plan: Plan, group: Group, serving: ServingOptions) -> list[InstanceSpec]:
    given = {name: value for name, value in serving.engine.items() if value is not None}
    engine = {
        **group.engine_args.model_dump(exclude_none=True),
        **({"tensor_parallel_size": group.tp} if group.tp > 1 else {}),
        **_scheduling(group, given),
        **_measured(group, serving.profiles.get(group.profile)),
        **given,
    }
    planned = plan.engine_of(group)
    for key in ("quantization", "kv_cache_dtype"):
        if (dtype := getattr(planned, key)) is not None:
            rule = (
                "must be absent: the reference engine has 16-bit weights and KV; `capplan export` is for vLLM"
            )
            raise InputError(rule, dtype, f"group {group.id}: engine {key}")
    if not {"scheduler", "cache", "queues"} & engine.keys():
        engine.setdefault("rules", planned.rules)
    try:
        require_shardable(model_config(serving.model), engine.get("tensor_parallel_size", 1))
    except InputError as error:
        if error.location != "tensor_parallel_size":
            raise
        raise InputError(error.rule, error.value, f"group {group.id}: tp") from None
    server = ServerSettings(
        model_name=serving.model_name,
        max_requests=engine["max_num_seqs"] + _max_queue(group, serving),
        drain_timeout_s=_DRAIN_TIMEOUT_S,
        limits=replace(
            serving.limits, max_connections=None, send_timeout_s=_SEND_RESERVE * serving.limits.send_timeout_s
        ),
    )
    adapters: dict[str, str | int]
    if serving.lora_root is None:
        adapters = {adapter.name: _source(adapter, plan, group) for adapter in group.adapters}
    else:
        adapters = {adapter.name: adapter.rank for adapter in group.adapters}
        engine.setdefault("max_adapters", max(OPEN_ADAPTERS, len(adapters)))
    if serving.model_name in adapters:
        raise InputError("must be another name than the base model's", serving.model_name, "adapters")
    shares = {adapter.name: adapter.share / group.replicas for adapter in group.adapters}
    return [
        InstanceSpec(
            name=f"{group.id}-{replica}",
            group=group.id,
            model=serving.model,
            adapters=adapters,
            engine=engine,
            server=_in_pool(server, plan, serving, f"{group.id}-{replica}"),
            shares=shares,
            base_share=0.0 if group.base is None else group.base.share / group.replicas,
        )
        for replica in range(1, group.replicas + 1)
    ]


def _in_pool(server: ServerSettings, plan: Plan, serving: ServingOptions, name: str) -> ServerSettings:
    """Return the settings of an instance, as a server of the pool if there is one."""
    pool, root = serving.pool, serving.lora_root
    if pool is None or root is None:
        return server
    folder = root / name
    folder.mkdir(exist_ok=True)
    full_name = name if pool.server_name is None else f"{pool.server_name}-{name}"
    own = replace(pool, server_name=full_name, base_model=plan.base_model)
    return replace(server, pool=own, lora_root=folder, admin_api_key=serving.admin_api_key)


def _scheduling(group: Group, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return scheduler, cache and queues of a group as settings of the engine; `given` ones override them."""
    if group.scheduling is None or "rules" in given:
        return {}
    queues = None if "scheduler" in given else group.queues
    parts = zip(("scheduler", "cache", "queues"), (*group.scheduling, queues), strict=True)
    return {name: part.model_dump(mode="json") for name, part in parts if part is not None}


def _measured(group: Group, profile: Profile | None) -> dict[str, Any]:
    """Return the settings that the group's profile has measured; none without one."""
    if profile is None:
        return {}
    found: dict[str, Any] = {}
    if group.scheduling is not None:
        found["load_times"] = LoadTimes.of_profile(profile.loading).model_dump(mode="json")
    if profile.engine.sgmv_from_tokens is not None:
        found["sgmv_from_tokens"] = profile.engine.sgmv_from_tokens
    return found


def _max_queue(group: Group, serving: ServingOptions) -> int:
    if serving.max_queue is not None:
        return serving.max_queue
    return max(DEFAULT_MAX_QUEUE, _QUEUE_RESERVE * (group.predicted.waiting_max or 0))


def _source(adapter: PlanAdapter, plan: Plan, group: Group) -> str | int:
    """Return the folder of an adapter, or the rank of a random one if the plan has no path."""
    if adapter.path is None:
        return adapter.rank
    where = f"group {group.id}: adapter {adapter.name}"
    folder = local_folder(adapter.path)
    if folder is None:
        rule = "must be a folder on this machine; --registry gives the folders of downloaded adapters"
        raise InputError(rule, adapter.path, f"{where}: path")
    require_adapter(adapter.path, adapter.rank, adapter.target_modules, plan.base_model, where)
    return str(folder)


def gpus_of(spec: InstanceSpec) -> int:
    """Return the number of GPUs of an instance."""
    on_gpu = str(spec.engine.get("device") or "cpu").startswith("cuda")
    return int(spec.engine.get("tensor_parallel_size") or 1) if on_gpu else 0


def spread_over_gpus(specs: Sequence[InstanceSpec]) -> tuple[InstanceSpec, ...]:
    """Assign GPUs of this machine to each instance whose device is ``cuda``.

    Raises
    ------
    InputError
        If there are fewer GPUs.
    """
    on_gpu = [spec for spec in specs if spec.engine.get("device") == "cuda"]
    ends = list(itertools.accumulate(map(gpus_of, on_gpu), initial=0))
    if ends[-1] > torch.cuda.device_count():
        rule = (
            f"needs {ends[-1]} GPUs for {len(on_gpu)} instances, and there are {torch.cuda.device_count()}; "
            "cuda:0 puts all on the first"
        )
        raise InputError(rule, "cuda", "--device")
    device = {spec.name: f"cuda:{first}" for spec, first in zip(on_gpu, ends, strict=False)}
    return tuple(
        replace(spec, engine={**spec.engine, "device": device[spec.name]}) if spec.name in device else spec
        for spec in specs
    )


_COMMAND: Final = (sys.executable, "-m", "capplan.fleet._launcher")


class LaunchError(CapplanError):
    """An engine process ended before it accepted requests."""


class InstanceHandle(Protocol):
    """Handle of a running engine process."""

    url: str

    async def ended(self) -> str:
        """Wait for the end of the process and return a description."""
        ...

    def is_stopped(self) -> bool:
        """Return whether the process is known to be stopped by a signal (SIGSTOP)."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Stop the process within a time; 0: kill it."""
        ...


class Launcher(Protocol):
    """Starts engine processes."""

    async def launch(self, spec: InstanceSpec, key: str) -> InstanceHandle:
        """Start an instance with an API key, and return once it accepts requests.

        Raises
        ------
        InputError
            If it refuses its settings.
        LaunchError
            If it ends for another reason.
        """
        ...


class EngineProcess:
    """An engine process on this machine; `start` sets its URL."""

    def __init__(self) -> None:
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, spec: InstanceSpec, key: str, host: str, environment: Mapping[str, str]) -> None:
        """Start the process and return once it accepts requests.

        `environment` has variables in addition to those of this process. If it ends before, raise
        `InputError` or `LaunchError`.
        """
        self._process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            spec.name,  # for lists of processes
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C in a terminal reaches the router only
        )
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the process has no pipes")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            stdin.write(spec.message(host, key))
            await stdin.drain()
        line = await stdout.readline()
        reply = json.loads(line) if line else {}
        if "error" in reply:
            rule, value, location = reply["error"]
            location = f"instance {spec.name}: {location}".rstrip(": ")
            raise InputError(rule, value[0] if value else NO_VALUE, location)
        if "url" not in reply:
            raise LaunchError(f"instance {spec.name} has ended before it took requests")
        self.url = reply["url"]

    async def ended(self) -> str:
        status = 0 if self._process is None else await self._process.wait()
        return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"

    def is_stopped(self) -> bool:
        return self._process is not None and is_stopped(self._process.pid)

    async def stop(self, grace_s: float) -> None:
        """Terminate the process, and kill it after a time; 0: kill it."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if grace_s > 0:
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), grace_s)
            process.kill()
        await process.wait()


class LocalLauncher:
    """Starts instances on this machine, which share the cores of its CPU; one is left for HTTP.

    Parameters
    ----------
    instances
        Number of instances.
    host
        Address at which they listen.
    """

    def __init__(self, instances: int, host: str = "127.0.0.1") -> None:
        self.host = host
        threads = max(1, ((os.cpu_count() or 1) - 1) // max(1, instances))
        self._compiling = asyncio.Lock()
        self._environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}

    async def launch(self, spec: InstanceSpec, key: str) -> InstanceHandle:
        """Start an instance; the first one compiles for all."""
        async with self._compiling:
            if not is_compiled(ENGINE_ENTRY):
                return await self._launch(spec, key)
        return await self._launch(spec, key)

    async def _launch(self, spec: InstanceSpec, key: str) -> InstanceHandle:
        process = EngineProcess()
        try:
            await process.start(spec, key, self.host, self._environment)
        except BaseException:  # including cancellation
            await process.stop(0)
            raise
        return process


class _RayProcess(EngineProcess):
    """Actor with one engine process on its machine; the process ends with it."""

    async def launch(self, spec: InstanceSpec, key: str) -> str | CapplanError:
        """Start the process and return its URL, or the reason for which it did not start."""
        import ray

        try:
            await self.start(spec, key, ray.util.get_node_ip_address(), {})
        except (InputError, LaunchError) as error:
            return error
        return self.url


class RayLauncher:
    """Starts instances on a Ray cluster; its machines need capplan, the model and the adapters.

    Parameters
    ----------
    address
        Of the cluster; ``auto`` finds a running one, ``local`` starts one here.
    cpus
        Cores of an instance that needs no GPU.
    """

    def __init__(self, address: str, cpus: float = 1.0) -> None:
        import ray

        if not ray.is_initialized():
            ray.init(address=address, include_dashboard=False, log_to_driver=True, configure_logging=False)
        self._cpus = cpus

    async def launch(self, spec: InstanceSpec, key: str) -> InstanceHandle:
        """Start an instance in an actor."""
        import ray
        from ray.exceptions import RayError

        gpus = gpus_of(spec)
        claim = {"num_gpus": gpus} if gpus else {"num_cpus": self._cpus}
        actor = ray.remote(_RayProcess).options(**claim).remote()
        try:
            url = await actor.launch.remote(spec, key)
            if isinstance(url, CapplanError):
                raise url
            return RayHandle(actor, url)
        except RayError as error:
            ray.kill(actor)
            raise LaunchError(f"instance {spec.name}: {error}") from None
        except BaseException:
            ray.kill(actor)
            raise


class RayHandle:
    """Handle of an engine process in an actor."""

    def __init__(self, actor: Any, url: str) -> None:
        self.url = url
        self._actor = actor
        self._ended = asyncio.ensure_future(self._wait())

    async def _wait(self) -> str:
        from ray.exceptions import RayError

        try:
            return str(await self._actor.ended.remote())
        except RayError as error:
            return f"with its machine or actor: {type(error).__name__}"

    async def ended(self) -> str:
        """Wait for the end of the process, release the actor, and return a description."""
        import ray

        end = await asyncio.shield(self._ended)
        ray.kill(self._actor)
        return end

    def is_stopped(self) -> bool:
        """Return False: the process is on another machine."""
        return False

    async def stop(self, grace_s: float) -> None:
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):
            await self._actor.stop.remote(grace_s)
        await self.ended()


def main() -> int:
    """Run the engine process: serve until stopped; see `capplan.server.run_instance`."""
    replies = os.dup(1)
    os.dup2(2, 1)  # other output goes to standard error

    def reply(document: dict[str, Any]) -> None:
        os.write(replies, json.dumps(document).encode() + b"\n")

    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 1
    fields = json.loads(line)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    from capplan.server import run_instance

    try:
        adapters = {name: Path(at) if isinstance(at, str) else at for name, at in fields["adapters"].items()}
        server = server_settings(fields["server"])
        instance = InstanceConfig(fields["model"], server, adapters, fields["engine"])
        return run_instance(instance, lambda url: reply({"url": url}))
    except InputError as error:
        value = [] if isinstance(error.value, NoValue) else [str(error.value)]
        reply({"error": [error.rule, value, error.location]})
        return error.exit_code


def server_settings(fields: dict[str, Any]) -> ServerSettings:
    """Return the settings of a server from a message; the folder of its adapters is made."""
    limits, root, pool = (fields.pop(name) for name in ("limits", "lora_root", "pool"))
    if pool is not None:
        pool["allow_location"] = tuple(pool["allow_location"])
    if root is not None:
        Path(root).mkdir(exist_ok=True)  # another machine than the router's
    return ServerSettings(
        **fields,
        limits=ServerLimits(**limits),
        lora_root=None if root is None else Path(root),
        pool=None if pool is None else PoolSettings(**pool),
    )


def _exit_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
