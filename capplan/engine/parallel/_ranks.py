"""Ranks of an engine under tensor parallelism: the first one schedules, and sends every step to the others.

All ranks run the same commands in the same order, so they take part in the same collectives.

``python -m capplan.engine.parallel._ranks FD PARENT RANK`` is the process of another rank. It runs the
commands of the first rank from the socket FD until its other end is closed. Steps and loads go on side by
side, as on the first rank. The process ends with the process PARENT; on Linux the kernel then kills it, in
the midst of a collective.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from capplan.engine._input_batch import StepInputs
from capplan.engine._messages import Reply, frame, received
from capplan.engine._model_runner import Runner
from capplan.engine._settings import EngineOptions
from capplan.engine._worker import MeasuredMemory, Sizes, Worker
from capplan.engine.lora._adapter import AdapterLayout, AdapterSource
from capplan.engine.lora._loader import LoadJob, copy_stream
from capplan.engine.lora._manager import LoRAManager
from capplan.engine.models import ModelConfig, model_config
from capplan.engine.models._config import ModelShard, require_shardable
from capplan.engine.parallel._group import (
    Command,
    DistributedCollectives,
    WorkerFailed,
    WorkerGroup,
    results,
)
from capplan.errors import CapplanError, InputError
from capplan.processes import end_by_kernel_with
from capplan.spec import EngineArgs

COLLECTIVE_TIMEOUT_S: Final = 300.0
"""For all ranks to arrive at a collective: more than kernels take to compile on the first use."""


@contextmanager
def start_worker(model: str | Path | ModelConfig, options: EngineOptions, capacity: int) -> Iterator[Worker]:
    """Yield the first rank of an engine; the others, in processes of their own, end with it.

    Raises `InputError` if the model cannot be cut into so many parts, or there are fewer GPUs;
    `WorkerEndedError` if a process ends or does not start in time.
    """
    size = options.tensor_parallel_size
    if size == 1:
        yield Worker(model, options, capacity)
        return
    require_shardable(model if isinstance(model, ModelConfig) else model_config(model), size)
    devices = devices_of(options.device, size)
    threads = max(1, torch.get_num_threads() // size)
    environment = {"OMP_NUM_THREADS": str(threads)} if options.device == "cpu" else {}
    with (
        tempfile.TemporaryDirectory(prefix="capplan-ranks-") as folder,
        WorkerGroup(range(1, size), environment) as group,
    ):
        started = group.ask("start", model, options, capacity, devices)
        leader = LeadingWorker(group, model, options.replace(device=devices[0]), capacity)
        results(started)
        leader.connect(Path(folder) / "meeting")
        try:
            yield leader
        finally:
            leader.collectives.close()


def devices_of(device: str, size: int) -> tuple[str, ...]:
    """Return the device of each rank: one GPU each, from the given one on, if there are as many."""
    if device == "cpu":
        return (device,) * size
    first = torch.device(device).index or 0
    if first + size > torch.cuda.device_count():
        rule = f"needs {size} GPUs from {device} on, and this machine has {torch.cuda.device_count()}"
        raise InputError(rule, size, "tensor_parallel_size")
    return tuple(f"cuda:{first + rank}" for rank in range(size))


class LeadingWorker(Worker):
    """First rank of an engine."""

    def __init__(
        self,
        group: WorkerGroup,
        model: str | Path | ModelConfig,
        options: EngineOptions,
        capacity: int,
    ) -> None:
        self._group = group
        super().__init__(model, options, capacity, ModelShard(0, options.tensor_parallel_size))

    def connect(self, meeting: Path) -> None:
        """Connect all ranks, which meet by a file."""
        shard = ModelShard(0, self.options.tensor_parallel_size)
        connected = self._group.ask("connect", str(meeting))
        with self._group.watching():
            self.collectives = DistributedCollectives(shard, self.device, meeting, COLLECTIVE_TIMEOUT_S)
        results(connected)
        self._group.on_failure = self.collectives.close  # a collective without a rank waits for it

    def allocate(self, sizes: Sizes) -> None:
        """Allocate KV pages and adapter slots, and set up the kernels, on all ranks."""
        allocated = self._group.ask("allocate", sizes)
        super().allocate(sizes)
        results(allocated)

    def all_ranks(self) -> Runner:
        """Return the runner of steps on all ranks."""
        return _LeadingRunner(self._group, self.runner, self.device)

    def measure(self, args: EngineArgs) -> MeasuredMemory:
        """Run the largest step on all ranks and return the memory of the one with the least room."""
        others = self._group.ask("measure", args)
        with self._group.watching():
            own = super().measure(args)
        measured: list[MeasuredMemory] = [own, *results(others)]
        return min(measured, key=lambda each: each.room_bytes)

    def check(self) -> None:
        """Raise an error if another rank has ended: which one, and how."""
        self._group.check()

    def watched(self) -> Sequence[socket.socket]:
        """Return the sockets that are readable once another rank has ended."""
        return (self._group.ended,)

    def _new_lora(self, capacity: int, layout: AdapterLayout) -> LoRAManager:
        pin = self.device.type == "cuda"
        copies = copy_stream(self.device, self.options.copy_gb_per_s)
        return _LeadingLoRA(self._group, capacity, layout, self.dtype, pin, copies)


class _LeadingRunner:
    """Runner of the first rank."""

    def __init__(self, group: WorkerGroup, runner: Runner, device: torch.device) -> None:
        self._group = group
        self._runner = runner
        self._device = device

    def run(self, step: StepInputs) -> torch.Tensor:
        """Run a step on all ranks; return the logits of `step.sampled`, shape (requests, vocabulary)."""
        self._group.tell("run", step)
        with self._group.watching():
            logits = self._runner.run(step)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
        return logits

    def logits(self, at: NDArray[np.int64]) -> torch.Tensor:
        """Return the logits of some tokens of the last step, computed on all ranks."""
        self._group.tell("logits", at)
        with self._group.watching():
            return self._runner.logits(at)

    def capture_graphs(self) -> None:
        """Capture all graphs on all ranks."""
        captured = self._group.ask("capture_graphs")
        with self._group.watching():
            self._runner.capture_graphs()
        results(captured)


class _LeadingLoRA(LoRAManager):
    """Adapters of all ranks: each reads its part of the same files, into the same slot or pages."""

    def __init__(self, group: WorkerGroup, *arguments: Any) -> None:
        self._group = group
        super().__init__(*arguments)

    def register(self, number: int, source: AdapterSource, max_rank: int | None) -> None:
        """Register an adapter; only its shapes are read."""
        super().register(number, source, max_rank)
        self._group.call("register", number, source, max_rank)

    def unregister(self, number: int) -> None:
        """Remove an adapter and all its copies."""
        super().unregister(number)
        self._group.tell("unregister", number)

    def read(self, number: int) -> None:
        """Read an adapter into host memory."""
        answers = self._group.ask("read", number)
        super().read(number)
        results(answers)

    def evict(self, number: int) -> NDArray[np.int64]:
        """Remove an adapter from the devices and return its slot or pages, which are not free yet."""
        self._group.tell("evict", number)
        return super().evict(number)

    def drop(self, number: int) -> None:
        """Remove the copies of an adapter on the host."""
        self._group.tell("drop", number)
        super().drop(number)

    def new_load(self, number: int, at: NDArray[np.int64] | None = None, prompt_tokens: int = 1) -> LoadJob:
        """Place an adapter in free memory and return the job that copies it; workers begin at once."""
        load = super().new_load(number, at, prompt_tokens)
        answers = self._group.ask("load", number, self.memory.location(number))

        def load_all() -> str | None:
            errors = [load(), *results(answers)]
            return next((error for error in errors if error is not None), None)

        return load_all


class WorkerLoop:
    """Commands of the first rank, run one after the other."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._sending = Lock()
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="adapter-loader")
        self._methods: Mapping[str, Callable[..., Any]] = {"start": self._start}

    def run(self) -> None:
        """Run commands until the first rank closes its end."""
        for command in received(self._connection):
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
            answer = Reply(command.tag, method(*command.arguments), None)
        except CapplanError as error:
            answer = Reply(command.tag, None, error)
        self._send(answer)

    def _load(self, tag: int, job: LoadJob) -> None:
        self._send(Reply(tag, job(), None))

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
        worker = Worker(model, options.replace(device=devices[self._rank]), capacity, shard)
        if worker.device.type == "cuda":
            torch.cuda.set_device(worker.device)  # pinned memory takes memory of the current GPU
        lora = worker.lora

        def connect(meeting: str) -> None:
            place = Path(meeting)
            worker.collectives = DistributedCollectives(shard, worker.device, place, COLLECTIVE_TIMEOUT_S)

        self._methods = {
            "connect": connect,
            "allocate": worker.allocate,
            "measure": worker.measure,
            "run": lambda step: worker.runner.run(step),  # `allocate` sets another runner
            "logits": lambda at: worker.runner.logits(at),
            "capture_graphs": lambda: worker.runner.capture_graphs(),
            **{name: getattr(lora, name) for name in ("register", "unregister", "read", "drop", "evict")},
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
