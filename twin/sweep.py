"""Many simulations at once, on all cores or on a Ray cluster; the answers do not depend on where they ran."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TypeVar

from capplan.compile import is_compiled
from capplan.errors import InfeasibleError, InputError
from capplan.spec import Profile, Workload
from capplan.twin.metrics import SimulationResult
from capplan.twin.simulate import DetailedResult, SimulateSettings, simulate, simulate_detailed

Item = TypeVar("Item")

Answer = TypeVar("Answer")

OnProgress = Callable[[int, int], None]
"""Called in the caller's thread with the number of answers so far and of all."""

_CHUNKS_PER_WORKER = 8


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
    """Simulate every job; one that does not fit in memory is answered by its error.

    Parameters
    ----------
    jobs
        Workload, profile and settings of each simulation, seed included.
    workers
        Processes; None: one per core. 1: none but this one.
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
    return list(in_parallel(_simulated, jobs, workers=workers, ray_address=ray_address, progress=progress))


def sweep_detailed(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    progress: OnProgress | None = None,
) -> list[DetailedResult | InfeasibleError]:
    """Simulate every job in detail; parameters and order as for `sweep`."""
    return list(
        in_parallel(_simulated_in_detail, jobs, workers=workers, ray_address=ray_address, progress=progress)
    )


def in_parallel(
    answer: Callable[[Item], Answer],
    items: Iterable[Item],
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    progress: OnProgress | None = None,
) -> Generator[Answer, None, None]:
    """Give the answers in the order of the items, each as soon as it and all before it are there.

    Parameters
    ----------
    answer
        A function of a module, or a partial one, that depends on its item alone.
    items
        What it is asked; items and answers travel between processes.
    workers, ray_address, progress
        As for `sweep`.
    """
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise InputError("must be a whole number >= 1", workers, "workers")
    if ray_address is not None:
        imported_ray()  # says that it is missing before any work is done
    asked = list(items)
    answers = _answers(answer, asked, min(workers or cores(), len(asked)), ray_address)
    with closing(answers):
        for done, each in enumerate(answers, start=1):
            if progress is not None:
                progress(done, len(asked))
            yield each


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _answers(
    answer: Callable[[Item], Answer], items: Sequence[Item], workers: int, ray_address: str | None
) -> Generator[Answer, None, None]:
    if workers <= 1 and ray_address is None:
        yield from map(answer, items)
        return
    if items and not is_compiled():
        yield answer(items[0])  # otherwise every worker would compile the twin for itself
        items = items[1:]
    if ray_address is None:
        yield from _in_processes(answer, items, workers)
    else:
        yield from over_ray(answer, items, ray_address)


def _in_processes(
    answer: Callable[[Item], Answer], items: Sequence[Item], workers: int
) -> Generator[Answer, None, None]:
    # Items of a chunk travel together, so a workload that they share travels once.
    chunk = max(1, len(items) // (_CHUNKS_PER_WORKER * workers))
    pool = ProcessPoolExecutor(workers)
    try:
        yield from pool.map(answer, items, chunksize=chunk)
    finally:
        pool.shutdown(cancel_futures=True)  # after an interrupt or an error, what has not begun never does


def _simulated(job: Job) -> SimulationResult | InfeasibleError:
    return _feasible(partial(simulate, job.workload, job.profile, **job.settings))


def _simulated_in_detail(job: Job) -> DetailedResult | InfeasibleError:
    return _feasible(partial(simulate_detailed, job.workload, job.profile, **job.settings))


def _feasible(simulation: Callable[[], Answer]) -> Answer | InfeasibleError:
    try:
        return simulation()
    except InfeasibleError as error:
        return error


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
        remote = ray.remote(_chunk_answers)
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


def _chunk_answers(answer: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    return [answer(item) for item in items]
