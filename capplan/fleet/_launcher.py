"""Engine processes: launchers, and the process itself.

``python -m capplan.fleet._launcher`` reads one line of JSON from standard input and keeps it open: it
exits when its parent does. It writes one line of JSON, ``{"url": ...}`` once it accepts requests, or
``{"error": [rule, value, location]}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from capplan._jit import is_compiled
from capplan.engine import is_stopped
from capplan.errors import NO_VALUE, CapplanError, InputError, NoValue
from capplan.fleet._instances import InstanceSpec, gpus_of

if TYPE_CHECKING:
    from capplan.server import ServerSettings

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
    """An engine process on this machine.

    Attributes
    ----------
    url
        Set by `start`.
    """

    def __init__(self) -> None:
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, spec: InstanceSpec, key: str, host: str, environment: Mapping[str, str]) -> None:
        """Start the process and return once it accepts requests.

        Parameters
        ----------
        environment
            Variables in addition to those of this process.

        Raises
        ------
        InputError, LaunchError
            If it ends before.
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
        """Wait for the end of the process and return a description."""
        status = 0 if self._process is None else await self._process.wait()
        return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by a signal."""
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
            if not is_compiled("scheduler.schedule"):
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
        """Stop the process within a time; 0: kill it."""
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
    from capplan.server import InstanceConfig, run_instance

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
    from capplan.server import PoolSettings, ServerLimits, ServerSettings

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
