"""Process of the engine core.

``python -m capplan.engine._core_process FD PARENT`` reads `CoreSettings` from the socket FD, builds the
engine, answers `CoreReady` or `CoreRefused`, and runs `CoreLoop` until the other end is closed. The end of
the process PARENT closes it, too; on Linux the kernel then also kills the core, in the midst of a step.

Loop of the engine core: take messages, run a step, send its results.

The loop has its process to itself, so the time of a step depends on the step alone. `Engine` runs the same
core without a loop.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from capplan.engine._affinity import allowed_cpus, bound_to, device_name, other_cpus
from capplan.engine._engine import Engine
from capplan.engine._engine_core import StepOutput
from capplan.engine._messages import (
    AbortRequests,
    AddRequests,
    Call,
    CoreFailed,
    CoreReady,
    CoreRefused,
    CoreSettings,
    Ended,
    FrameReader,
    Gauges,
    NewRequest,
    PoolGauges,
    QueueGauges,
    Refusals,
    Reply,
    StepTokens,
    frame,
    received,
)
from capplan.engine._request import FinishReason, Request, SamplingParams, TokenLogprobs
from capplan.engine._timing import SpeedProbe
from capplan.engine.parallel._group import WorkerEndedError
from capplan.errors import CapplanError, InputError
from capplan.processes import end_by_kernel_with, without_interrupts
from capplan.serving import NONE, State
from capplan.serving.pooled import compile_refresh
from capplan.serving.state import POOLED

_LOAD_WAIT_S: Final = 0.002
"""Maximum wait for an in-flight adapter load while idle; a message that arrives meanwhile waits as long."""
AWAKE_S: Final = 1.0
"""Time without work after which a core that has CPUs of its own sleeps.

A CPU that sleeps between requests slows down: on a virtual machine the steps after a pause of 20 ms took 1.6
times as long as the same steps under load.
"""
_RECEIVE_IN_LOOP_BYTES: Final = 2**18
_CALLS: Final = ("ping", "gauges", "state_report", "add_adapter", "remove_adapter", "replace_adapter")


class CoreLoop:
    """Loop around one engine, at the core's end of a pair of sockets.

    For `awake_s` after work an idle core looks for messages before it sleeps until one comes.
    """

    def __init__(self, engine: Engine, connection: socket.socket, awake_s: float = 0.0) -> None:
        self._awake_s = awake_s
        self._engine = engine
        self._connection = connection
        self._reader = FrameReader()
        self._requests: dict[int, Request] = {}
        self._ended: dict[int, Ended] = {}
        self._has_worked = False
        self._probe = SpeedProbe()

    def ready(self) -> CoreReady:
        """Return the facts of the engine."""
        engine = self._engine
        return CoreReady(
            config=engine.config,
            folder=engine.folder,
            dtype=engine.options.torch_dtype(engine.config),
            args=engine.args,
            clock_start_ns=engine.core.clock.start_ns,
            device=device_name(engine.options.device),
            cpus=allowed_cpus(),
            pid=os.getpid(),
            max_adapters=engine.max_adapters,
        )

    def run(self) -> None:
        """Serve until the server closes its end.

        What the engine raises is sent to the server as `CoreFailed` before. If a worker of the engine has
        ended, `SystemExit` follows.
        """
        try:
            while self._receive(wait=False):
                step = self._engine.step()
                if step is not None:
                    self._has_worked = True
                    self._send_step(step)
                elif not self._wait():
                    return
        except ConnectionError:  # the server has gone
            return
        except WorkerEndedError as error:
            with suppress(ConnectionError):
                self._send(CoreFailed(str(error)))
            raise SystemExit(1) from None
        except BaseException as error:
            with suppress(ConnectionError):
                self._send(CoreFailed(f"{type(error).__name__}: {error}"))
            raise

    def ping(self) -> None:
        """Answer between two steps."""

    def gauges(self) -> Gauges:
        """Return the state of the scheduler."""
        core = self._engine.core
        counters = core.state.counters
        running: set[str] = set()
        waiting: set[str] = set()
        for request in core.requests.values():
            if request.adapter_name is not None:
                (running if request.running else waiting).add(request.adapter_name)
        is_pool = core.limits.policy == POOLED
        idle_pages = counters.adapter_pages - core.state.pooled.counts.pinned_pages if is_pool else 0
        used = 1.0 - (counters.free_blocks + idle_pages) / max(1, counters.capacity)
        return Gauges(
            running=int(counters.n_running),
            waiting=int(counters.n_waiting),
            kv_used=float(used),
            running_adapters=sorted(running),
            waiting_adapters=sorted(waiting),
            pool=_pool_gauges(core.state) if is_pool else None,
        )

    def _receive(self, wait: bool) -> bool:
        """Take the messages that have arrived, or wait for one; return False at the end of the stream."""
        worker = self._engine.worker
        if wait and (watched := worker.watched()):
            select.select((self._connection, *watched), (), ())
            worker.check()
        flags = 0 if wait else socket.MSG_DONTWAIT
        while True:
            try:
                data = self._connection.recv(_RECEIVE_IN_LOOP_BYTES, flags)
            except BlockingIOError:
                return True
            if not data:
                return False
            for message in self._reader.feed(data):
                self._take(message)
            flags = socket.MSG_DONTWAIT

    def _take(self, message: Any) -> None:
        if isinstance(message, AddRequests):
            refused = [error for new in message.requests if (error := self._add(new)) is not None]
            if refused:
                self._send(Refusals(dict(refused)))
        elif isinstance(message, AbortRequests):
            for tag in message.tags:
                self._abort(tag, message.reason)
        elif isinstance(message, Call):
            self._send(self._answer(message))

    def _wait(self) -> bool:
        """Wait for an adapter load or a message; return False at the end of the stream."""
        self._flush()
        if not self._requests:
            return self._stay_awake() and (bool(self._requests) or self._receive(wait=True))
        if self._engine.core.loader.next_ns(timeout_s=_LOAD_WAIT_S) is None:
            raise RuntimeError("requests wait, but nothing can run")
        return True

    def _stay_awake(self) -> bool:
        """After work, look for prompts for a while without sleeping; return False at the end of the stream.

        Questions about the state, which routers repeat, are no work.
        """
        until_s = time.monotonic() + self._awake_s if self._has_worked else 0.0
        self._has_worked = False
        while not self._requests and time.monotonic() < until_s:
            if not self._receive(wait=False):
                return False
        return True

    def _add(self, new: NewRequest) -> tuple[int, InputError | None] | None:
        """Submit a prompt to the engine; return its tag and the error if it is refused."""
        engine = self._engine
        try:
            prompt = np.frombuffer(new.prompt, np.int32)
            request = engine.new_request(prompt, new.adapter, new.params, new.arrival_ns)
            if not engine.core.can_run(request):
                rule = "must fit beside its adapter into memory, and into one step"
                return new.tag, InputError(rule, prompt.size, "prompt tokens")
            if not engine.submit(request):
                return new.tag, None
        except InputError as error:
            return new.tag, error
        request.tag = new.tag
        self._requests[new.tag] = request
        return None

    def _abort(self, tag: int, reason: FinishReason) -> None:
        request = self._requests.get(tag)
        if request is not None:
            self._engine.abort(request, reason)
            self._end(request)

    def _answer(self, call: Call) -> Reply:
        if call.method not in _CALLS:
            return Reply(call.number, None, InputError("is no call", call.method))
        owner = self if hasattr(self, call.method) else self._engine
        try:
            return Reply(call.number, getattr(owner, call.method)(*call.arguments), None)
        except Exception as error:  # noqa: BLE001 - raised in the caller
            return Reply(call.number, None, error)

    def _end(self, request: Request) -> None:
        del self._requests[request.tag]
        self._ended[request.tag] = Ended(request.finish_reason or "abort", request.error, request.admitted_ns)

    def _send_step(self, step: StepOutput) -> None:
        """Send the results of a step in one message."""
        self._engine.records.clear()
        for request in step.finished:
            self._end(request)
        tags = array("q", [request.tag for request in step.emitted])
        tokens = array("i", [request.output[-1] for request in step.emitted])
        logprobs: dict[int, TokenLogprobs] = {
            request.tag: request.logprobs[-1] for request in step.emitted if request.logprobs
        }
        prompts = {
            request.tag: request.prompt_logprobs
            for request in step.emitted
            if request.prompt_logprobs and len(request.output) == 1
        }
        ended, self._ended = self._ended, {}
        record = step.record
        if record is not None and (probe_ms := self._probe.taken_ms()):
            record = record._replace(probe_ms=probe_ms)
        self._send(StepTokens(record, tags, tokens, logprobs, prompts, ended))

    def _flush(self) -> None:
        """Send the ends of prompts that no step has sent."""
        if self._ended:
            ended, self._ended = self._ended, {}
            self._send(StepTokens(None, array("q"), array("i"), {}, {}, ended))

    def _send(self, message: Any) -> None:
        # It blocks only if the server is megabytes behind; the server never blocks on the core.
        self._connection.sendall(frame(message))


def _pool_gauges(state: State) -> PoolGauges:
    adapters, queues, counts = state.adapters, state.pooled.queues, state.pooled.counts
    used = slice(int(counts.n_queues))
    columns = (each[used].tolist() for each in (queues.n, queues.quota, queues.outstanding))
    return PoolGauges(
        queues=[QueueGauges(*each) for each in zip(*columns, strict=True)],
        cached_adapters=int(np.count_nonzero((adapters.resident == 1) & (adapters.users == 0))),
        counts=dict(zip(counts.dtype.names or (), counts.tolist(), strict=True)),
    )


_COMMAND: Final = (sys.executable, "-m", "capplan.engine._core_process")
_STOP_TIMEOUT_S: Final = 5.0
"""For the current step; a core that is stopped or hangs is killed then."""


class CoreEndedError(CapplanError):
    """The engine core ended while it was starting."""


class CoreProcess:
    """Handle of the engine core's process.

    Parameters
    ----------
    cpus
        CPUs that the core is bound to, before it counts them to choose its threads; none: any.

    Attributes
    ----------
    connection
        The server's end of the pair of sockets; no message is pending.
    ready
        Facts of the engine.

    Raises
    ------
    CapplanError
        If the engine refuses its settings.
    CoreEndedError
        If it ends for another reason.
    """

    def __init__(self, settings: CoreSettings, cpus: Sequence[int] = ()) -> None:
        self.connection, inherited = socket.socketpair()
        with inherited, bound_to(cpus), without_interrupts():
            command = (*_COMMAND, str(inherited.fileno()), str(os.getpid()))
            self._process = subprocess.Popen(command, pass_fds=[inherited.fileno()])  # noqa: S603 - ourselves
        try:
            self.connection.sendall(frame(settings._replace(beside_cpus=other_cpus(cpus) if cpus else ())))
            self.ready: CoreReady = self._first_message()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def stop(self) -> None:
        """Wait for the process, which ends once its connection is closed; kill it after a time."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process, if it still runs, and wait for it."""
        self._process.kill()
        self._process.wait()
        self.connection.close()

    def describe_end(self) -> str:
        """Return how the process ended."""
        status = self._process.wait()
        return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"

    def _first_message(self) -> CoreReady:
        for message in received(self.connection):
            if isinstance(message, CoreRefused):
                raise message.error
            if isinstance(message, CoreReady):
                return message
        raise CoreEndedError(f"the engine core ended {self.describe_end()} while it was starting")


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal; False where the system does not tell."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return False
    return state == "T"


def warm_up(engine: Engine) -> None:
    """Capture graphs, run a few requests and compile the refresh, which would delay the first of each."""
    engine.core.runner.capture_graphs()
    params = SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, logprobs=1)
    for adapter in (None, *engine.adapters[:1]):
        # Requests without a time of arrival are in no window from which queues are designed.
        requests = [engine.new_request([0], adapter, params, arrival_ns=NONE) for _ in range(4)]
        for request in requests:
            engine.submit(request)
        engine.abort(requests[0])  # waiting
        while engine.step() is not None or engine.wait_for_adapter():
            engine.abort(requests[1])  # running
    if engine.core.scheduler is not None:
        compile_refresh(engine.core.state, engine.core.limits)
    engine.records.clear()


def run_core(connection: socket.socket) -> None:
    """Build the engine that the first message describes, and serve it until the connection is closed."""
    settings: CoreSettings | None = next(received(connection), None)
    if settings is None:
        return
    with contextlib.ExitStack() as stack:
        try:
            beside = settings.beside_cpus
            engine = stack.enter_context(
                Engine(settings.model, settings.adapters, beside_cpus=beside, **settings.options)
            )
            warm_up(engine)
        except CapplanError as error:
            connection.sendall(frame(CoreRefused(error)))
            return
        gc.collect()
        gc.freeze()  # shorter collections between steps
        if beside:
            engine.core.loader.bind(beside)
        loop = CoreLoop(engine, connection, AWAKE_S if beside else 0.0)
        connection.sendall(frame(loop.ready()))
        loop.run()


def main() -> int:
    """Run the process."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server drains, and then closes the connection
    end_by_kernel_with(int(sys.argv[2]))
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        run_core(connection)
    return 0


if __name__ == "__main__":
    sys.exit(main())
