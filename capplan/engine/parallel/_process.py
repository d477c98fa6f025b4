"""Process of a rank other than the first.

``python -m capplan.engine.parallel._process FD PARENT RANK`` runs the commands of the first rank from the
socket FD until its other end is closed. Steps and loads go on side by side, as on the first rank. The process
ends with the process PARENT; on Linux the kernel then kills it, in the midst of a collective.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final

import torch

from capplan.engine._messages import FrameReader, frame
from capplan.engine._settings import EngineOptions
from capplan.engine._worker import Worker
from capplan.engine.lora._loader import LoadJob
from capplan.engine.models import ModelConfig
from capplan.engine.models._shard import ModelShard
from capplan.engine.parallel._group import Answer, Command, DistributedCollectives, WorkerFailed
from capplan.engine.parallel._leader import COLLECTIVE_TIMEOUT_S
from capplan.errors import CapplanError
from capplan.processes import end_by_kernel_with

_RECEIVE_BYTES: Final = 2**18


class WorkerLoop:
    """Commands of the first rank, run one after the other."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._sending = Lock()
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._methods: Mapping[str, Callable[..., Any]] = {"start": self._start}
        self._worker: Worker

    def run(self) -> None:
        """Run commands until the first rank closes its end."""
        reader = FrameReader()
        while data := self._connection.recv(_RECEIVE_BYTES):
            for command in reader.feed(data):
                self._execute(command)

    def fail(self, error: BaseException) -> None:
        """Report an error."""
        self._send(WorkerFailed(f"{type(error).__name__}: {error}"))

    def _execute(self, command: Command) -> None:
        method = self._methods[command.method]
        if command.tag is None:
            method(*command.arguments)
            return
        if command.method == "load":
            self._loads.submit(self._load, command.tag, method(*command.arguments))
            return
        try:
            answer = Answer(command.tag, method(*command.arguments), None)
        except CapplanError as error:
            answer = Answer(command.tag, None, error)
        self._send(answer)

    def _load(self, tag: int, job: LoadJob) -> None:
        self._send(Answer(tag, job(), None))

    def _send(self, message: Any) -> None:
        with self._sending, suppress(OSError):  # the first rank has gone
            self._connection.sendall(frame(message))

    def _start(
        self,
        model: str | Path | ModelConfig,
        options: EngineOptions,
        capacity: int,
        devices: Sequence[str],
    ) -> None:
        """Load this rank's part of a model."""
        shard = ModelShard(self._rank, len(devices))
        worker = self._worker = Worker(model, options.replace(device=devices[self._rank]), capacity, shard)
        if worker.device.type == "cuda":
            torch.cuda.set_device(worker.device)  # pinned memory takes memory of the current GPU
        lora = worker.lora

        def connect(meeting: str) -> None:
            worker.collectives = DistributedCollectives(
                shard, worker.device, Path(meeting), COLLECTIVE_TIMEOUT_S
            )

        def run(step: Any) -> None:
            worker.runner.run(step)

        def logits(at: Any) -> None:
            worker.runner.logits(at)

        def evict(number: int) -> None:
            lora.evict(number)

        self._methods = {
            "connect": connect,
            "allocate": worker.allocate,
            "measure": worker.measure,
            "run": run,
            "logits": logits,
            "capture_graphs": lambda: worker.runner.capture_graphs(),
            **{name: getattr(lora, name) for name in ("register", "unregister", "read", "drop")},
            "evict": evict,
            "load": lora.new_load,
        }


def main() -> None:
    """Run the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the first rank closes the connection
    descriptor, parent, rank = map(int, sys.argv[1:])
    end_by_kernel_with(parent)
    torch.set_grad_enabled(False)
    loop = WorkerLoop(socket.socket(fileno=descriptor), rank)
    status = 1
    try:
        loop.run()
        status = 0
    except BaseException as error:  # noqa: BLE001 - the process ends
        traceback.print_exc()
        loop.fail(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of collectives may wait for ranks that have ended


if __name__ == "__main__":
    main()
