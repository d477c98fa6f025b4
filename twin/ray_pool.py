"""A sweep over a Ray cluster. Ray is imported only when an address is given (extra `ray`)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Sequence
from types import ModuleType
from typing import TypeVar

from capplan.errors import InputError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_CHUNKS_PER_CORE = 8
_ARGUMENT = "ray_address"
_PATIENCE_S = 10.0


def over_ray(
    answer: Callable[[Item], Answer], items: Sequence[Item], address: str
) -> Generator[Answer, None, None]:
    """Give the answers in the order of the items, computed by the tasks of a cluster.

    Parameters
    ----------
    answer
        A function that the machines of the cluster can import.
    items
        What it is asked.
    address
        Of the cluster; ``"auto"`` for the one that runs here, ``"local"`` to start one. A connection that the
        caller already has is used instead, and left open.

    Raises
    ------
    InputError
        When Ray is not installed or the cluster cannot be reached.
    """
    ray = imported_ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        _connect(ray, address)
    tasks = []
    try:
        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        # Items of a chunk travel together, so a workload that they share travels once.
        size = max(1, len(items) // (_CHUNKS_PER_CORE * cores))
        remote = ray.remote(_answers)
        tasks = [remote.remote(answer, items[at : at + size]) for at in range(0, len(items), size)]
        for task in tasks:
            try:
                yield from ray.get(task)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
    finally:
        for task in tasks:
            ray.cancel(task)
        if is_ours:
            ray.shutdown()


def imported_ray() -> ModuleType:
    """Return the module.

    Raises
    ------
    InputError
        When it is not installed.
    """
    try:
        import ray
    except ImportError:
        raise InputError("needs Ray: pip install 'capplan[ray]'", location=_ARGUMENT) from None
    module: ModuleType = ray
    return module


def _connect(ray: ModuleType, address: str) -> None:
    try:
        if address not in ("auto", "local"):
            # Ray itself would try for minutes to reach an address where nobody listens.
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _PATIENCE_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"must be the address of a Ray cluster: {reason}", address, _ARGUMENT) from None


def _answers(answer: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    return [answer(item) for item in items]
