"""Engine processes on a Ray cluster: each is started by an actor, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray
from ray.exceptions import RayError

from capplan.engine.router.instances import InstanceSpec
from capplan.engine.router.launcher import EngineProcess, InstanceHandle, LaunchError, url_in

_THREADS = 4
"""Calls of an actor at a time: one waits for the end of its process, another one brings it about."""


class _Host:
    """An actor: one engine process on its machine."""

    def start(self, spec: InstanceSpec, key: str) -> dict[str, Any]:
        """Start the process and return its first answer."""
        address = ray.util.get_node_ip_address()
        self._process = EngineProcess(spec.message(address, key), {})
        return self._process.answer()

    def wait(self) -> str:
        """Wait for the end of the process and return how it came."""
        return self._process.wait()

    def end(self, grace_s: float) -> None:
        """End the process."""
        self._process.end(grace_s)


class RayLauncher:
    """Starts instances on a Ray cluster, whose machines have capplan, the model and the adapters.

    Parameters
    ----------
    address
        Of the cluster; ``auto`` finds a running one, ``local`` starts one here.
    cpus
        Cores that an instance claims where it needs no GPU.
    """

    def __init__(self, address: str, cpus: float = 1.0) -> None:
        if not ray.is_initialized():
            ray.init(address=address, include_dashboard=False, log_to_driver=True, configure_logging=False)
        self._cpus = cpus

    async def launch(self, spec: InstanceSpec, key: str) -> InstanceHandle:
        """See `Launcher`."""
        on_gpu = str(spec.engine.get("device", "cpu")).startswith("cuda")
        claim = {"num_gpus": 1} if on_gpu else {"num_cpus": self._cpus}
        host = ray.remote(_Host).options(max_concurrency=_THREADS, **claim).remote()
        try:
            answer = await host.start.remote(spec, key)
            return RayHandle(host, url_in(answer, spec.name))
        except RayError as error:
            ray.kill(host)
            raise LaunchError(f"instance {spec.name}: {error}") from None
        except BaseException:
            ray.kill(host)
            raise


class RayHandle:
    """A process of `RayLauncher`."""

    def __init__(self, host: Any, url: str) -> None:
        self.url = url
        self._host = host
        self._ended = asyncio.ensure_future(self._wait())

    async def _wait(self) -> str:
        try:
            return str(await self._host.wait.remote())
        except RayError as error:
            return f"with its machine or actor: {type(error).__name__}"

    async def ended(self) -> str:
        """See `InstanceHandle`."""
        end = await asyncio.shield(self._ended)
        ray.kill(self._host)  # its claim is for the next one
        return end

    async def stop(self, grace_s: float) -> None:
        """See `InstanceHandle`."""
        with contextlib.suppress(RayError):
            await self._host.end.remote(grace_s)
        await self.ended()
