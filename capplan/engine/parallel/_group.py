"""Worker processes of an engine, seen from its first rank.

Each is joined to the first rank by a pair of connected sockets, as the engine core is to its server. The
first rank sends commands, which a worker runs in their order; it answers those with a tag.

Sums and gathers over the ranks of a model: NCCL between GPUs, gloo between CPU processes.

The process groups are not registered with `torch.distributed`, whose default group would be one per process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import torch

from capplan.engine._messages import FrameReader, Reply, frame
from capplan.engine.models._config import ModelShard
from capplan.errors import CapplanError
from capplan.processes import without_interrupts

_LOOPBACK: Final = "127.0.0.1"
_C10D: Final[Any] = torch.distributed


class Collectives:
    """Collectives of a model on one rank, which have nothing to do."""

    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in place."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, from shape (tokens, columns) to (tokens, size * columns)."""
        return x

    def close(self) -> None:
        """End the connections."""


class DistributedCollectives(Collectives):
    """Collectives between processes of this machine.

    The processes find each other by `meeting`, a file that is still missing. `timeout_s` is for all ranks to
    arrive at a collective: every method raises `RuntimeError` if another rank ends or does not arrive.
    """

    def __init__(self, shard: ModelShard, device: torch.device, meeting: Path, timeout_s: float) -> None:
        self.size = shard.size
        store = _C10D.FileStore(str(meeting), shard.size)
        timeout = timedelta(seconds=timeout_s)
        new_backend = _nccl if device.type == "cuda" else _gloo
        kind, backend = new_backend(store, shard, timeout)
        self._group = _C10D.ProcessGroup(store, shard.rank, shard.size)
        self._group._set_default_backend(kind)
        backend._set_sequence_number_for_group()
        self._group._register_backend(device, kind, backend)
        self.all_reduce(torch.zeros(1, device=device))  # connects

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in place."""
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, from shape (tokens, columns) to (tokens, size * columns)."""
        tokens, columns = x.shape
        found = x.new_empty(self.size * tokens, columns)
        if tokens:
            self._group._allgather_base(found, x.contiguous()).wait()
        return found.view(self.size, tokens, columns).movedim(0, 1).reshape(tokens, self.size * columns)

    def close(self) -> None:
        """End the connections."""
        self._group.abort()


def _gloo(store: Any, shard: ModelShard, timeout: timedelta) -> tuple[Any, Any]:
    options = _C10D.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_C10D.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    gloo = _C10D.ProcessGroupGloo(store, shard.rank, shard.size, options)
    return _C10D.ProcessGroup.BackendType.GLOO, gloo


def _nccl(store: Any, shard: ModelShard, timeout: timedelta) -> tuple[Any, Any]:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    options = _C10D.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = _C10D.ProcessGroupNCCL(store, shard.rank, shard.size, options)
    return _C10D.ProcessGroup.BackendType.NCCL, nccl


START_TIMEOUT_S: Final = 600.0
"""For a worker to load its part of a model, as for an engine of vLLM; and for a command afterwards."""
_STOP_TIMEOUT_S: Final = 3.0
_NOTICE_S: Final = 5.0
"""For the end of a worker to be noticed after a collective has failed."""
_RECEIVE_BYTES: Final = 2**16
_COMMAND: Final = (sys.executable, "-m", "capplan.engine.parallel._ranks")


class Command(NamedTuple):
    """Call of a method of a worker by name."""

    tag: int | None
    """Of the `Reply`; None: there is none."""
    method: str
    arguments: tuple[Any, ...]


class WorkerFailed(NamedTuple):
    """A worker ends with an error; its traceback is on standard error."""

    error: str


class WorkerEndedError(CapplanError):
    """A worker process has ended, so that the engine cannot go on."""


class WorkerGroup:
    """Worker processes of an engine, of these ranks, with variables in addition to those of this process.

    Once a worker has ended, `failure` is set and raised by all methods that send commands or wait for
    results, `ended` is readable, and another thread calls `on_failure`.
    """

    def __init__(self, ranks: Sequence[int], environment: Mapping[str, str]) -> None:
        self.failure: WorkerEndedError | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.ended, self._notice = socket.socketpair()
        self._tags = itertools.count()
        self._pending: dict[tuple[int, int], Future[Any]] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: dict[int, socket.socket] = {}
        for rank in ranks:
            own, inherited = socket.socketpair()
            with inherited, without_interrupts():
                self._connections[rank] = own
                self._processes[rank] = subprocess.Popen(  # noqa: S603 - ourselves
                    (*_COMMAND, str(inherited.fileno()), str(os.getpid()), str(rank)),
                    pass_fds=[inherited.fileno()],
                    env={**os.environ, **environment},
                )
        self._reader = threading.Thread(target=self._read, name="worker-answers", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Numbers of the processes."""
        return tuple(process.pid for process in self._processes.values())

    def tell(self, method: str, *arguments: Any) -> None:
        """Let all workers run a method, without an answer."""
        self._send(Command(None, method, arguments))

    def ask(self, method: str, *arguments: Any) -> list[Future[Any]]:
        """Let all workers run a method and return their answers."""
        tag = next(self._tags)
        answers: list[Future[Any]] = [Future() for _ in self._connections]
        with self._lock:
            self.check()
            self._pending |= dict(zip(((rank, tag) for rank in self._connections), answers, strict=True))
        self._send(Command(tag, method, arguments))
        return answers

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Let all workers run a method and return their results."""
        return results(self.ask(method, *arguments))

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Raise the failure of a worker, if any, instead of the error of a collective that it causes."""
        try:
            yield
        except (RuntimeError, OSError):
            until_s = time.monotonic() + _NOTICE_S
            while self.failure is None and time.monotonic() < until_s:
                time.sleep(0.01)
            self.check()
            raise
        self.check()  # NCCL reports nothing when a rank has ended

    def close(self) -> None:
        """Let the processes end, and kill those that do not."""
        self._closing = True
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        until_s = time.monotonic() + _STOP_TIMEOUT_S
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until_s - time.monotonic()))
            process.kill()
            process.wait()
        self._reader.join()
        for connection in (*self._connections.values(), self.ended, self._notice):
            connection.close()

    def _send(self, command: Command) -> None:
        message = frame(command)
        self.check()
        with self.watching():
            for connection in self._connections.values():
                connection.sendall(message)

    def _read(self) -> None:
        """Receive answers until a worker ends."""
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, (rank, FrameReader()))
            while True:
                for key, _ in selector.select():
                    rank, reader = key.data
                    try:
                        data = self._connections[rank].recv(_RECEIVE_BYTES)
                    except OSError:
                        data = b""
                    for message in reader.feed(data):
                        if isinstance(message, WorkerFailed):
                            self._fail(rank, f"failed: {message.error}")
                            return
                        self._answer(rank, message)
                    if not data:
                        self._fail(rank, f"ended {self._describe_end(rank)}")
                        return

    def _answer(self, rank: int, answer: Reply) -> None:
        with self._lock:
            pending = self._pending.pop((rank, answer.number))
        if answer.error is None:
            pending.set_result(answer.result)
        else:
            pending.set_exception(answer.error)

    def _fail(self, rank: int, how: str) -> None:
        """Let everything fail that waits for a worker or will."""
        with self._lock:
            self.failure = WorkerEndedError(f"the worker of rank {rank} {how}")
            pending, self._pending = self._pending, {}
        for each in pending.values():
            each.set_exception(self.failure)
        if not self._closing:
            self._notice.send(b"\0")
            self.on_failure()

    def _describe_end(self, rank: int) -> str:
        if self._closing:
            return "with its engine"
        try:
            status = self._processes[rank].wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its connection"
        return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"


def results(answers: Sequence[Future[Any]]) -> list[Any]:
    """Return the results of a command; raise `WorkerEndedError` if one does not come, or not in time."""
    until_s = time.monotonic() + START_TIMEOUT_S
    try:
        return [answer.result(max(0.0, until_s - time.monotonic())) for answer in answers]
    except TimeoutError:
        raise WorkerEndedError(f"a worker has not answered for {START_TIMEOUT_S:g} s") from None
