"""Parallel simulations on all cores or on a Ray cluster, with the same results anywhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Final, TypeVar

from capplan._jit import is_compiled
from capplan.errors import InfeasibleError, InputError
from capplan.processes import end_with_pool
from capplan.spec import Profile, Workload
from capplan.twin.instance._metrics import SimulationResult
from capplan.twin.instance._simulate import DetailedResult, SimulateSettings, simulate, simulate_detailed

Item = TypeVar("Item")

Result = TypeVar("Result")

OnProgress = Callable[[int, int], None]
"""Called in the caller's thread with (done, total)."""

_CHUNKS_PER_WORKER = 8

MAX_WORKERS: Final = 1024  # above the cores of any machine; each is a process with its own memory


@dataclass(frozen=True)
class Job:
    """One simulation of a sweep."""

    workload: Workload
    profile: Profile
    settings: SimulateSettings


def sweep(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    progress: OnProgress | None = None,
) -> list[SimulationResult | InfeasibleError]:
    """Simulate every job. The result of one that does not fit in memory is its error.

    Parameters
    ----------
    jobs
        Workload, profile and settings of each simulation, seed included.
    workers
        Processes; None: one per core; 1: this process.
    ray_address
        Address of a Ray cluster, whose machines have capplan installed; ``"auto"`` finds a running one,
        ``"local"`` starts one on this machine. Needs the extra ``ray``.
    progress
        Called with (done, total).

    Returns
    -------
    list
        In the order of the jobs, and the same wherever they ran, but for ``wall_s``.

    Raises
    ------
    InputError
        Of a job with a setting that breaks its rule, or when the cluster cannot be used.
    """
    simulated = partial(_simulated, simulate)
    return list(in_parallel(simulated, jobs, workers=workers, ray_address=ray_address, progress=progress))


def sweep_detailed(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    progress: OnProgress | None = None,
) -> list[DetailedResult | InfeasibleError]:
    """Simulate every job in detail; parameters and order as for `sweep`."""
    simulated = partial(_simulated, simulate_detailed)
    return list(in_parallel(simulated, jobs, workers=workers, ray_address=ray_address, progress=progress))


def in_parallel(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    progress: OnProgress | None = None,
    chunk: int | None = None,
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` of every item in order, as soon as it and all before it are computed.

    Parameters
    ----------
    function
        A pure function; it, items and results must be picklable.
    items
        The items.
    workers, ray_address, progress
        As for `sweep`.
    chunk
        Items that a worker process gets at once; None: an eighth of its share.
    """
    require_workers(workers)
    if ray_address is not None:
        imported_ray()  # raise before any work is done
    every = list(items)
    results = _results(function, every, min(workers or cores(), len(every)), ray_address, chunk)
    with closing(results):
        for done, result in enumerate(results, start=1):
            if progress is not None:
                progress(done, len(every))
            yield result


def require_workers(workers: int | None) -> None:
    """Check a number of processes; None stands for one per core."""
    if workers is not None and not (type(workers) is int and 1 <= workers <= MAX_WORKERS):
        raise InputError(f"must be a whole number from 1 to {MAX_WORKERS}", workers, "workers")


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _results(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int,
    ray_address: str | None,
    chunk: int | None,
) -> Generator[Result, None, None]:
    if workers <= 1 and ray_address is None:
        yield from map(function, items)
        return
    if items and not is_compiled():
        yield function(items[0])  # otherwise every worker would compile the twin for itself
        items = items[1:]
    if ray_address is not None:
        yield from over_ray(function, items, ray_address)
        return
    pool = ProcessPoolExecutor(workers, initializer=end_with_pool)
    try:
        # Items of a chunk travel together, so a workload that they share travels once.
        chunk = chunk or max(1, len(items) // (_CHUNKS_PER_WORKER * workers))
        yield from pool.map(function, items, chunksize=chunk)
    except BrokenProcessPool:
        rule = "a worker process was ended from outside, perhaps for lack of memory; fewer of them need less"
        raise InputError(rule, workers, "workers") from None
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt or an error


def _simulated(simulation: Callable[..., Result], job: Job) -> Result | InfeasibleError:
    try:
        return simulation(job.workload, job.profile, **job.settings)
    except InfeasibleError as error:
        return error


_ARGUMENT = "ray_address"
_PATIENCE_S = 10.0


def over_ray(
    function: Callable[[Item], Result], items: Sequence[Item], address: str
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` of every item in order, computed on a Ray cluster that can import it.

    The address ``"auto"`` is that of the running cluster; ``"local"`` starts one. An existing connection of
    the caller is used instead, and left open. Raise `InputError` if Ray is not installed or the cluster
    cannot be reached.
    """
    ray = imported_ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        _connect(ray, address)
    pending = []
    try:
        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        size = max(1, len(items) // (_CHUNKS_PER_WORKER * cores))
        remote = ray.remote(_chunk_results)
        pending = [remote.remote(function, items[at : at + size]) for at in range(0, len(items), size)]
        while pending:
            try:
                yield from ray.get(pending.pop(0))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
    finally:
        if is_ours:
            ray.shutdown()  # ends the tasks of this connection
        elif pending:
            # Ray aborts this process if a task ends while it is cancelled: only what has not ended is.
            for task in ray.wait(pending, num_returns=len(pending), timeout=0)[1]:
                ray.cancel(task)


def imported_ray() -> ModuleType:
    """Return the module `ray`, or raise an `InputError` if it is not installed."""
    try:
        import ray
    except ImportError:
        raise InputError("needs Ray: pip install '.[ray]', in the checkout", location=_ARGUMENT) from None
    module: ModuleType = ray
    return module


def _connect(ray: ModuleType, address: str) -> None:
    try:
        if address not in ("auto", "local"):
            # Ray itself retries an unreachable address for minutes.
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _PATIENCE_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"must be the address of a Ray cluster: {reason}", address, _ARGUMENT) from None


def _chunk_results(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    return [function(item) for item in items]
