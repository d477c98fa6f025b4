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
"""Concurrent calls of an actor: one waits for the end of its process, another stops it."""


class _Host:
    """Actor with one engine process on its machine."""

    def start(self, spec: InstanceSpec, key: str) -> dict[str, Any]:
        """Start the process and return its reply."""
        address = ray.util.get_node_ip_address()
        self._process = EngineProcess(spec.message(address, key), {})
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
        if not ray.is_initialized():
            ray.init(address=address, include_dashboard=False, log_to_driver=True, configure_logging=False)
        self._cpus = cpus

    async def launch(self, spec: InstanceSpec, key: str) -> InstanceHandle:
        """Start an instance in an actor."""
        on_gpu = str(spec.engine.get("device", "cpu")).startswith("cuda")
        claim = {"num_gpus": 1} if on_gpu else {"num_cpus": self._cpus}
        host = ray.remote(_Host).options(max_concurrency=_THREADS, **claim).remote()
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
        try:
            return str(await self._host.wait.remote())
        except RayError as error:
            return f"with its machine or actor: {type(error).__name__}"

    async def ended(self) -> str:
        """Wait for the end of the process, release the actor, and return a description."""
        end = await asyncio.shield(self._ended)
        ray.kill(self._host)
        return end

    async def stop(self, grace_s: float) -> None:
        """Stop the process within a time; 0: kill it."""
        with contextlib.suppress(RayError):
            await self._host.end.remote(grace_s)
        await self.ended()
