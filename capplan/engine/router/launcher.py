"""Engine processes: launchers, and the process itself.

``python -m capplan.engine.router.launcher`` reads one line of JSON from standard input and keeps it open: it
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
from pathlib import Path
from typing import IO, Any, Final, Protocol, cast

from capplan.compile import is_compiled
from capplan.engine.router.instances import InstanceSpec
from capplan.errors import NO_VALUE, CapplanError, InputError, NoValue

_COMMAND: Final = (sys.executable, "-m", "capplan.engine.router.launcher")
_RAY_CALLS: Final = 4
"""Concurrent calls of an actor: one waits for the end of its process, another stops it."""


class LaunchError(CapplanError):
    """An engine process ended before it accepted requests."""


class InstanceHandle(Protocol):
    """Handle of a running engine process."""

    url: str

    async def ended(self) -> str:
        """Wait for the end of the process and return a description."""
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
    """An engine process on this machine; its methods are thread-safe.

    Parameters
    ----------
    message
        Configuration; see `InstanceSpec.message`.
    environment
        Variables beside those of this process.
    """

    def __init__(self, message: bytes, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl-C in a terminal reaches the router only
        )
        self._message = message

    def configure(self) -> dict[str, Any]:
        """Send the configuration and return the reply; empty if the process ends without one."""
        stdin, stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        with contextlib.suppress(BrokenPipeError):
            stdin.write(self._message)
            stdin.flush()
        line = stdout.readline()
        return dict(json.loads(line)) if line else {}

    def wait(self) -> str:
        """Wait for the end of the process and return a description."""
        status = self._process.wait()
        return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"

    def end(self, grace_s: float) -> None:
        """Terminate the process, and kill it after a time."""
        if grace_s > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        self._process.kill()
        self._process.wait()


def url_in(reply: dict[str, Any], name: str) -> str:
    """Return the URL of a process from its reply.

    Raises
    ------
    InputError, LaunchError
        If it has none.
    """
    if "url" in reply:
        return str(reply["url"])
    if "error" in reply:
        rule, value, location = reply["error"]
        raise InputError(rule, value[0] if value else NO_VALUE, f"instance {name}: {location}".rstrip(": "))
    raise LaunchError(f"instance {name} has ended before it took requests")


class LocalLauncher:
    """Starts instances on this machine, which share the cores of its CPU."""

    def __init__(self, instances: int) -> None:
        threads = max(1, (os.cpu_count() or 1) // max(1, instances))
        self._compiling = asyncio.Lock()
        self._environment = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}

    async def launch(self, spec: InstanceSpec, key: str) -> InstanceHandle:
        """Start an instance; the first one compiles for all."""
        async with self._compiling:
            if not is_compiled("scheduler.schedule"):
                return await self._launch(spec, key)
        return await self._launch(spec, key)

    async def _launch(self, spec: InstanceSpec, key: str) -> InstanceHandle:
        process = EngineProcess(spec.message("127.0.0.1", key), self._environment)
        try:
            reply = await in_thread(process.configure)
            return LocalHandle(process, url_in(reply, spec.name))
        except BaseException:  # including cancellation
            process.end(0)
            raise


class LocalHandle:
    """Handle of a process of `LocalLauncher`."""

    def __init__(self, process: EngineProcess, url: str) -> None:
        self.url = url
        self._process = process
        self._ended = in_thread(process.wait)

    async def ended(self) -> str:
        """Wait for the end of the process and return a description."""
        return await asyncio.shield(self._ended)

    async def stop(self, grace_s: float) -> None:
        """Stop the process within a time; 0: kill it."""
        await in_thread(self._process.end, grace_s)
        await self.ended()


class _RayHost:
    """Actor with one engine process on its machine; the process ends with it."""

    def start(self, spec: InstanceSpec, key: str) -> dict[str, Any]:
        """Start the process and return its reply."""
        import ray

        self._process = EngineProcess(spec.message(ray.util.get_node_ip_address(), key), {})
        return self._process.configure()

    def wait(self) -> str:
        """Wait for the end of the process and return a description."""
        return self._process.wait()

    def end(self, grace_s: float) -> None:
        """End the process."""
        self._process.end(grace_s)


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

        on_gpu = str(spec.engine.get("device", "cpu")).startswith("cuda")
        claim = {"num_gpus": 1} if on_gpu else {"num_cpus": self._cpus}
        host = ray.remote(_RayHost).options(max_concurrency=_RAY_CALLS, **claim).remote()
        try:
            reply = await host.start.remote(spec, key)
            return RayHandle(host, url_in(reply, spec.name))
        except RayError as error:
            ray.kill(host)
            raise LaunchError(f"instance {spec.name}: {error}") from None
        except BaseException:
            ray.kill(host)
            raise


class RayHandle:
    """Handle of a process of `RayLauncher`."""

    def __init__(self, host: Any, url: str) -> None:
        self.url = url
        self._host = host
        self._ended = asyncio.ensure_future(self._wait())

    async def _wait(self) -> str:
        from ray.exceptions import RayError

        try:
            return str(await self._host.wait.remote())
        except RayError as error:
            return f"with its machine or actor: {type(error).__name__}"

    async def ended(self) -> str:
        """Wait for the end of the process, release the actor, and return a description."""
        import ray

        end = await asyncio.shield(self._ended)
        ray.kill(self._host)
        return end

    async def stop(self, grace_s: float) -> None:
        """Stop the process within a time; 0: kill it."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):
            await self._host.end.remote(grace_s)
        await self.ended()


def in_thread(function: Any, *arguments: Any) -> asyncio.Future[Any]:
    """Run a blocking function in a new thread; thread pools are limited."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except Exception as caught:  # noqa: BLE001 - raised in the caller
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return future


def main() -> int:
    """Run the engine process: serve until stopped; see `capplan.engine.server.run_instance`."""
    replies = os.dup(1)
    os.dup2(2, 1)  # other output goes to standard error

    def reply(document: dict[str, Any]) -> None:
        os.write(replies, json.dumps(document).encode() + b"\n")

    fields = json.loads(_first_line())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    from capplan.engine.server import InstanceConfig, ServerSettings, run_instance

    try:
        adapters = {name: Path(at) if isinstance(at, str) else at for name, at in fields["adapters"].items()}
        instance = InstanceConfig(
            fields["model"], ServerSettings(**fields["server"]), adapters, fields["engine"]
        )
        return run_instance(instance, lambda url: reply({"url": url}))
    except InputError as error:
        value = [] if isinstance(error.value, NoValue) else [str(error.value)]
        reply({"error": [error.rule, value, error.location]})
        return error.exit_code


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 2**16)
        if not part:
            sys.exit(1)
        line += part
    return line


def _exit_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
